"""Control messages between ranks. Ranks are threads here, connected by Gloo."""

from __future__ import annotations

import concurrent.futures
import datetime
import time
import zlib
from collections.abc import Callable, Iterator

import pytest
from support import comes_true

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no Gloo", allow_module_level=True)

import torch.distributed as dist
from annulus.torch.ring import _control_messages
from annulus.torch.ring._control_messages import CLOSES, GOES_ON, LEAVES, WAITS, ControlMessage, ControlMessages

SIZE = 4


@pytest.fixture
def ring() -> Iterator[list[ControlMessages]]:
    store = dist.HashStore()
    limit = datetime.timedelta(seconds=60)
    with concurrent.futures.ThreadPoolExecutor(SIZE) as pool:
        gloos = list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, SIZE, limit), range(SIZE)))
    words = [ControlMessages(gloo, rank, SIZE) for rank, gloo in enumerate(gloos)]
    yield words
    for each in words:
        each.leave(CLOSES, -1, "")


def soon(question: Callable[[], object], wanted: object) -> bool:
    return comes_true(lambda: question() == wanted)


def test_the_awaited_rank_is_at_the_end_of_the_chain_of_waits(ring: list[ControlMessages]) -> None:
    assert ring[0].awaited(0, 1) == 1, "nobody has said anything"
    ring[1].tell(WAITS, 2)
    ring[2].tell(WAITS, 3)
    assert soon(lambda: ring[0].awaited(0, 1), 3)
    assert ring[0].awaited(0, 2) == 3 and ring[0].awaited(0, 3) == 3
    ring[2].tell(GOES_ON, 2)
    assert soon(lambda: ring[0].awaited(0, 1), 2)
    # In a circle nobody is the last; who waits for this rank is not made to look elsewhere.
    ring[2].tell(WAITS, 1)
    assert soon(lambda: ring[0].of(2), ControlMessage(WAITS, 1, ""))
    assert ring[0].awaited(0, 1) == 2
    ring[3].tell(WAITS, 0)
    assert soon(lambda: ring[0].of(3), ControlMessage(WAITS, 0, ""))
    assert ring[0].awaited(0, 3) == 3


def test_any_number_of_messages_arrive_in_order(ring: list[ControlMessages]) -> None:
    for number in range(50):
        ring[1].tell(WAITS, number % SIZE, f"word {number}")
        assert soon(lambda: ring[0].of(1), ControlMessage(WAITS, number % SIZE, f"word {number}"))


def test_half_a_message_is_ignored(ring: list[ControlMessages]) -> None:
    ring[1].tell(WAITS, 2, "x" * 400)
    row = ring[0]._memory[0, 1]
    assert comes_true(lambda: zlib.crc32(row[4:]).to_bytes(4, "little") == row[:4].tobytes())
    whole = row.copy()
    row[300:] = 0
    assert ring[0].of(1) is None
    row[:] = whole
    assert ring[0].of(1) == ControlMessage(WAITS, 2, "x" * 400)


def test_leaving_after_a_failure_differs_from_closing(ring: list[ControlMessages]) -> None:
    ring[2].tell(WAITS, 1)  # which nobody has listened to yet
    ring[2].leave(CLOSES, 2, "closed its ring")
    assert soon(lambda: ring[0].of(2), ControlMessage(CLOSES, 2, "closed its ring"))
    assert ring[0].leaver() is None
    ring[3].tell(WAITS, 1)
    ring[3].leave(LEAVES, 1, "lost by rank 3: timed out")
    assert soon(ring[0].leaver, ControlMessage(LEAVES, 1, "lost by rank 3: timed out"))
    assert ring[0].of(3).kind == LEAVES, "the last word is the last"
    assert ring[0].awaited(0, 3) == 3, "it waits no more"


def test_the_last_message_ends_the_wait_for_it(ring: list[ControlMessages]) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        heard = pool.submit(ring[0].wait_for_the_last, 1)
        time.sleep(0.05)
        ring[1].tell(WAITS, 2)
        time.sleep(0.05)
        assert not heard.done(), "that was not the last"
        ring[1].leave(LEAVES, 2, "why")
        heard.result(timeout=120)
    assert ring[0].of(1) == ControlMessage(LEAVES, 2, "why")


def test_leaving_ends_the_waits_of_others(ring: list[ControlMessages]) -> None:
    row = torch.zeros(1, dtype=torch.uint8)
    waits = [(peer, ring[peer]._gloo.recv([row.clone()], 1, 5)) for peer in (0, 2)]
    ring[1].leave(LEAVES, 3, "why")
    for peer, work in waits:
        with pytest.raises(RuntimeError) as ended:
            work.wait(datetime.timedelta(seconds=120))
        assert "Timed out" not in str(ended.value)
        assert ring[peer].of(1) == ControlMessage(LEAVES, 3, "why"), "its last word came too late"
    ring[1].tell(WAITS, 2)  # nobody hears it, and nothing happens
    assert ring[0].of(1).kind == LEAVES


def test_long_texts_are_cut_and_invalid_characters_escaped(ring: list[ControlMessages]) -> None:
    ring[1].leave(LEAVES, 3, "ä" * 600)
    assert soon(lambda: ring[0].of(1) is not None, True)
    text = ring[0].of(1).text
    assert text.startswith("ä" * (_control_messages._TEXT // 2)) and len(text) <= _control_messages._TEXT // 2 + 1
    ring[2].leave(LEAVES, 3, "name \udcff")
    assert soon(lambda: ring[0].of(2), ControlMessage(LEAVES, 3, "name \\udcff"))
