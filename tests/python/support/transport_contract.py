"""What every transport must do, as seen from Python: one list of checks.

Every rank runs a check at the same time, each on a ring of its own making: on threads of one process or
in several processes. `test_transport_contract.py` and `torch_worker.py` bring the transports.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import annulus
import numpy as np
from annulus import Pattern, Placement, RingAttention, Transport, make_in_process_ring

from support import comes_true, normal, on_ranks

Check = Callable[[Transport], None]
CHECKS: dict[str, Check] = {}
# What not every transport can: 'itself' (messages to oneself), 'sizes' (notices that they differ),
# 'goes_on' (the next message is right after a receive was called off; executors end the ring then).
NEEDS: dict[str, str] = {}


def check(needs: str = "") -> Callable[[Check], Check]:
    def add(function: Check) -> Check:
        CHECKS[function.__name__] = function
        NEEDS[function.__name__] = needs
        return function

    return add


class Batch:
    """Messages under way, however the transport wants them posted."""

    def __init__(self, transport: Transport, messages: list[tuple[str, int, int, Any]]) -> None:
        views = [
            (way, peer, tag, memoryview(data).cast("B").toreadonly() if way == "send" else memoryview(data).cast("B"))  # fmt: skip
            for way, peer, tag, data in messages
        ]
        if hasattr(transport, "post"):
            transfers = [transport.post(views)]
        else:
            transfers = [getattr(transport, way)(*rest) for way, *rest in views]
        self.transfers = [transfer for transfer in transfers if transfer is not None]

    def wait(self) -> None:
        for transfer in self.transfers:
            transfer.wait()

    def cancel(self) -> None:
        for transfer in self.transfers:
            transfer.cancel()


def send(transport: Transport, peer: int, tag: int, data: Any) -> Batch:
    return Batch(transport, [("send", peer, tag, data)])


def receive(transport: Transport, peer: int, tag: int, data: Any) -> Batch:
    return Batch(transport, [("receive", peer, tag, data)])


def block(size: int, seed: int) -> bytearray:
    return bytearray((seed * 131 + i * 7) % 256 for i in range(size))


def neighbours(transport: Transport) -> tuple[int, int]:
    rank, size = transport.rank(), transport.size()
    return (rank + 1) % size, (rank - 1) % size


@contextlib.contextmanager
def transport_error() -> Iterator[list[annulus.TransportError]]:
    caught: list[annulus.TransportError] = []
    try:
        yield caught
    except annulus.TransportError as error:
        caught.append(error)
    assert caught, "no TransportError was raised"


# ---- bytes arrive


@check()
def messages_of_one_tag_keep_their_order(transport: Transport) -> None:
    following, previous = neighbours(transport)
    out = [bytearray([transport.rank(), i]) for i in range(50)]
    found = [bytearray(2) for _ in out]
    batches = [send(transport, following, 1, data) for data in out]
    batches += [receive(transport, previous, 1, data) for data in found]
    for batch in batches:
        batch.wait()
    assert found == [bytearray([previous, i]) for i in range(50)]


@check()
def tags_are_independent(transport: Transport) -> None:
    following, previous = neighbours(transport)
    tags = list(range(100))
    mixed = random.Random(transport.rank()).sample(tags, len(tags))
    out = {tag: bytearray([tag]) for tag in tags}
    found = {tag: bytearray(1) for tag in tags}
    batches = [receive(transport, previous, tag, found[tag]) for tag in mixed]
    batches += [send(transport, following, tag, out[tag]) for tag in reversed(mixed)]
    for batch in batches:
        batch.wait()
    assert found == out


@check()
def batches_mix_sends_and_receives(transport: Transport) -> None:
    rank, peers = transport.rank(), [p for p in range(transport.size()) if p != transport.rank()]
    found = {peer: bytearray(100 + peer) for peer in peers}
    messages: list[tuple[str, int, int, Any]] = []
    for peer in peers:
        messages.append(("receive", peer, 9, found[peer]))
        messages.append(("send", peer, 9, block(100 + rank, 10 * rank + peer)))
    Batch(transport, messages).wait()
    assert found == {peer: block(100 + peer, 10 * peer + rank) for peer in peers}


@check()
def batches_progress_independently(transport: Transport) -> None:
    """Rank 1 answers what rank 0 awaits first only after it has what rank 0 posted second."""
    if transport.rank() == 0:
        found = bytearray(1000)
        early = receive(transport, 1, 7, found)
        send(transport, 1, 8, block(1000, 2)).wait()
        early.wait()
        assert found == block(1000, 1)
    elif transport.rank() == 1:
        heard = bytearray(1000)
        receive(transport, 0, 8, heard).wait()
        assert heard == block(1000, 2)
        send(transport, 0, 7, block(1000, 1)).wait()


@check()
def messages_may_be_empty(transport: Transport) -> None:
    following, previous = neighbours(transport)
    nothing = [("send", following, 1, bytearray()), ("receive", previous, 1, bytearray())]
    Batch(transport, nothing).wait()
    found = bytearray(3)
    behind = [("send", following, 1, b"abc"), ("receive", previous, 1, found)]
    Batch(transport, behind).wait()
    assert found == b"abc"


@check(needs="itself")
def rank_sends_to_itself(transport: Transport) -> None:
    found = bytearray(100)
    rank = transport.rank()
    Batch(transport, [("receive", rank, 0, found), ("send", rank, 0, block(100, rank))]).wait()
    assert found == block(100, rank)


@check()
def thousand_messages_deliver_every_byte(transport: Transport) -> None:
    """As an executor does: both directions, one step ahead, sizes that change."""
    following, previous = neighbours(transport)

    def post(step: int) -> tuple[Batch, bytearray, bytearray]:
        size = step * 37 % 256
        mine, ahead, behind = block(size, transport.rank() + step), bytearray(size), bytearray(size)
        messages = [
            ("receive", previous, step % 5, ahead),
            ("send", following, step % 5, mine),
            ("receive", following, step % 5 + 100, behind),
            ("send", previous, step % 5 + 100, mine),
        ]
        return Batch(transport, messages), ahead, behind

    under_way = post(0)
    for step in range(500):
        batch, ahead, behind = under_way
        if step < 499:
            under_way = post(step + 1)
        batch.wait()
        assert ahead == block(len(ahead), previous + step)
        assert behind == block(len(behind), following + step)


@check(needs="goes_on")
def cancelled_receive_is_never_written(transport: Transport) -> None:
    following, previous = neighbours(transport)
    abandoned, found = bytearray(64), bytearray(64)
    receive(transport, previous, 3, abandoned).cancel()
    # Everybody has given up before anybody sends.
    annulus.gather_records(transport, b"given up")
    sending = send(transport, following, 3, block(64, transport.rank()))
    receive(transport, previous, 3, found).wait()
    sending.wait()
    assert found == block(64, previous) and abandoned == bytearray(64)


# ---- through the library


@check()
def counters_are_those_of_the_messages(transport: Transport) -> None:
    before = transport.counters()
    records = [bytes([rank]) * (3 * rank) for rank in range(transport.size())]
    for _ in range(3):
        assert annulus.gather_records(transport, records[transport.rank()]) == records
    moved = {key: value - before[key] for key, value in transport.counters().items()}
    rounds = (transport.size() - 1).bit_length()
    assert moved["messages_sent"] == moved["messages_received"] == 3 * 2 * rounds
    assert moved["bytes_sent"] == moved["bytes_received"] > 0


def passes(transport: Transport) -> list[np.ndarray]:
    pattern = Pattern.longnet(4, [16, 64], [1, 2], causal=True)
    placement = Placement.zigzag(90, transport.size())
    mine = placement.positions(transport.rank())
    q, k, v, do = (np.ascontiguousarray(normal(1, 90, 4, 16, seed=s)[:, mine]) for s in range(4))
    results: list[np.ndarray] = []
    for schedule in ("ring", "gather"):
        ring = RingAttention(pattern, placement, transport=transport, head_dim=16, schedule=schedule)
        before = transport.counters()["bytes_sent"]
        o, lse = ring.forward(q, k, v)
        assert transport.counters()["bytes_sent"] - before == ring.predicted_forward_bytes
        results += [o, lse, *ring.backward(q, k, v, o, lse, do)]
    return results


@check()
def passes_give_the_bits_of_the_built_in_transport(transport: Transport) -> None:
    found = passes(transport)
    built_in = on_ranks(make_in_process_ring(transport.size()), passes)[transport.rank()]
    assert not isinstance(built_in, Exception), built_in
    assert all(np.array_equal(a, b) for a, b in zip(found, built_in))


@check()
def second_user_is_refused_and_ends_the_ring(transport: Transport) -> None:
    if transport.rank() != 0:
        assert comes_true(lambda: not transport.health()["alive"])  # when rank 0 has had two users
        with transport_error() as caught:
            annulus.gather_records(transport, b"")
        assert caught[0].rank == 0 and "one call at a time" in str(caught[0]), caught
        return
    ended: list[BaseException] = []

    def use() -> None:
        try:
            annulus.gather_records(transport, b"of one of two")
        except annulus.Error as error:
            ended.append(error)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kinds = {type(error) for error in ended}
    assert kinds == {annulus.ConfigError, annulus.TransportError}, ended
    assert all("one call at a time" in str(error) for error in ended), ended


# ---- errors reach those who wait


@check()
def dead_peer_raises_within_the_deadline(transport: Transport) -> None:
    annulus.gather_records(transport, b"everybody is here")
    transport.set_deadline(0.3)
    if transport.rank() != 0:
        time.sleep(3)  # there, and silent
        return
    start = time.monotonic()
    with transport_error() as caught:
        receive(transport, 1, 7, bytearray(4096)).wait()
    assert time.monotonic() - start > 0.25
    assert caught[0].rank == 1 and "rank 1" in str(caught[0]), caught


@check()
def abort_from_any_thread_wakes_everybody(transport: Transport) -> None:
    annulus.gather_records(transport, b"everybody is here")
    assert transport.health() == {"alive": True, "lost_rank": -1, "reason": ""}
    if transport.rank() == 1:
        time.sleep(0.2)
        thread = threading.Thread(target=transport.abort, args=("disk on fire",))
        thread.start()
        thread.join()
    else:
        with transport_error() as caught:
            receive(transport, 1, 4, bytearray(16)).wait()
        assert caught[0].rank == 1 and "disk on fire" in str(caught[0]), caught
    with transport_error() as caught:  # and it stays so
        annulus.gather_records(transport, b"")
    assert caught[0].rank == 1 and "disk on fire" in str(caught[0]), caught
    health = transport.health()
    assert not health["alive"] and health["lost_rank"] == 1, health
    assert "disk on fire" in health["reason"], health


@check()
def health_tells_of_an_abort_elsewhere(transport: Transport) -> None:
    annulus.gather_records(transport, b"everybody is here")
    if transport.rank() == 0:
        time.sleep(0.2)  # the others are back from it
        transport.abort("enough")
    assert comes_true(lambda: not transport.health()["alive"])
    health = transport.health()
    assert not health["alive"] and health["lost_rank"] == 0, health
    time.sleep(1)  # the others ask, too, before this rank leaves


@check()
def health_can_be_asked_while_messages_pass(transport: Transport) -> None:
    ending = threading.Event()
    sick: list[Any] = []

    def ask() -> None:
        while not ending.is_set():
            health = transport.health()
            if not health["alive"]:
                sick.append(health)
            time.sleep(0.001)

    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(30):
        annulus.gather_records(transport, b"round and round")
    ending.set()
    thread.join()
    annulus.gather_records(transport, b"nobody asks any more")
    assert not sick, sick


@check(needs="sizes")
def sizes_that_differ_are_an_error(transport: Transport) -> None:
    transport.set_deadline(60)
    if transport.rank() > 1:
        return
    found = bytearray(100)
    with transport_error() as caught:
        if transport.rank() == 0:
            send(transport, 1, 7, bytearray(b"x" * 200)).wait()
            receive(transport, 1, 8, bytearray(1)).wait()  # at the latest
        else:
            receive(transport, 0, 7, found).wait()
    assert found == bytearray(100)
    assert "200 bytes" in str(caught[0]) and "100 bytes" in str(caught[0]), caught
