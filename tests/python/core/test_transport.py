"""Transports from Python: the built-in one, and one written in Python."""

from __future__ import annotations

import gc
import re
import weakref

import annulus
import numpy as np
import pytest
from annulus import Pattern, Placement, RingAttention, Transport, make_in_process_ring
from support import on_ranks
from support.queue_transport import (
    Mesh,
    PostingTransport,
    PreparingTransport,
    QueueTransport,
    Receive,
    queue_ring,
)
from support.transport_contract import passes

PATTERN = Pattern.longnet(4, [16, 64], [1, 2], causal=True)


def test_counters_are_kept_by_the_base_class() -> None:
    transports = queue_ring(2)
    on_ranks(transports, passes)
    counted = [transport.counters() for transport in transports]
    assert counted[0]["bytes_sent"] == counted[1]["bytes_received"] > 0
    assert counted[0]["messages_received"] == counted[1]["messages_sent"] > 0


class Broken(QueueTransport):
    """Rank 1 fails in its tenth message."""

    error: BaseException = OSError("the cable is cut")
    messages = 0

    def send(self, peer: int, tag: int, buffer: memoryview) -> None:
        self.messages += 1
        if self.rank() == 1 and self.messages == 10:
            raise self.error
        return super().send(peer, tag, buffer)


def test_exceptions_surface_with_their_cause() -> None:
    transports = queue_ring(3, Broken)
    errors = on_ranks(transports, passes)
    assert all(isinstance(error, annulus.TransportError) for error in errors), errors
    assert "OSError: the cable is cut" in str(
        errors[1]
    ) and "[rank 1/3] queues transport: send" in str(errors[1])
    assert errors[1].__cause__ is Broken.error
    for other in (errors[0], errors[2]):  # heard of it, as the transport told them
        assert "rank 1 aborted" in str(other) and other.__cause__ is None
    assert transports[0].mesh.cancelled > 0  # type: ignore[attr-defined]


def test_our_own_exceptions_and_keyboard_interrupts_come_out_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = annulus.TransportError("rank 2 is gone")
    mine.rank = 2
    monkeypatch.setattr(Broken, "error", mine)
    assert on_ranks(queue_ring(3, Broken), passes)[1] is mine

    class Impatient(QueueTransport):
        def receive(self, peer: int, tag: int, buffer: memoryview) -> Receive:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RingAttention(
            PATTERN, Placement.contiguous(9, 2), transport=Impatient(0, 2, Mesh()), head_dim=16
        )


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    "error, words",
    [
        (OSError("no file \udcff"), "OSError: no file \\\\udcff"),  # a name that Python could not decode
        (Speechless(), "Speechless"),
    ],
)
def test_exceptions_whose_words_are_no_text_surface_all_the_same(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Broken, "error", error)
    errors = on_ranks(queue_ring(3, Broken), passes)
    assert all(isinstance(e, annulus.TransportError) for e in errors), errors
    assert errors[1].__cause__ is error
    for e in errors:
        assert re.search(words, str(e)), e


def test_messages_are_prepared_once_and_do_not_keep_their_transport() -> None:
    """What prepare() says leads back to the transport, which keeps it."""
    transports = queue_ring(2, PreparingTransport)
    placement = Placement.contiguous(64, 2)
    made = on_ranks(
        transports, lambda t: RingAttention(PATTERN, placement, transport=t, head_dim=16)
    )
    q = np.ones((1, 32, 4, 16), np.float32)

    def forward(transport: Transport) -> int:
        made[transport.rank()].forward(q, q, q)
        return transport.prepared  # type: ignore[attr-defined]

    # Short sends have two copies, and records of agreements lie in a few places on the stacks of threads.
    counts = [on_ranks(transports, forward) for _ in range(20)]
    assert max(counts[-1]) < 20, counts  # of 80
    watched = [weakref.ref(transport) for transport in transports]
    del transports, made
    gc.collect()
    assert [watch() for watch in watched] == [None, None]


class InOrder(PostingTransport):
    """One after the other: a batch is over when it has been posted."""

    in_order = True

    def post(self, messages: list[tuple[str, int, int, memoryview]]) -> None:
        super().post(messages).wait()


def test_transports_say_what_they_reach_and_in_which_order() -> None:
    for transport in (make_in_process_ring(1)[0], queue_ring(1)[0]):
        assert transport.reaches("cpu") and not transport.in_order
    assert make_in_process_ring(1)[0].reaches("cuda:0") and not queue_ring(1)[0].reaches("cuda:0")
    ring = queue_ring(3, InOrder)
    assert all(transport.in_order for transport in ring)
    x = np.random.default_rng(1).standard_normal((1, 90, 4, 16), np.float32)
    placement = Placement.contiguous(90, 3)

    def rank_of(transport: Transport) -> list[np.ndarray]:
        options = {"schedule": "gather", "backward_travel": "keys", "head_dim": 16}
        executor = RingAttention(PATTERN, placement, transport=transport, **options)
        mine = x[:, 30 * transport.rank() : 30 * (transport.rank() + 1)]
        o, lse = executor.forward(mine, mine, mine)
        return [o, *executor.backward(mine, mine, mine, o, lse, mine)]

    for found, expected in zip(on_ranks(ring, rank_of), on_ranks(queue_ring(3), rank_of)):
        assert all(np.array_equal(a, b) for a, b in zip(found, expected))


def test_missing_methods_are_named() -> None:
    class Empty(Transport):
        pass

    with pytest.raises(
        annulus.TransportError, match="receive must be defined by the subclass"
    ) as caught:
        RingAttention(PATTERN, Placement.contiguous(9, 2), transport=Empty(0, 2), head_dim=16)
    assert isinstance(caught.value.__cause__, NotImplementedError)
    with pytest.raises(annulus.ConfigError, match="rank is 2 of size 2"):
        Empty(2, 2)
    assert (Empty(1, 2).rank(), Empty(1, 2).size(), Empty(1, 2).name()) == (1, 2, "python")


def test_deadline_of_a_python_transport() -> None:
    transport = queue_ring(1)[0]
    assert transport.deadline == 60
    transport.set_deadline(2.5)
    assert transport.deadline == 2.5 and make_in_process_ring(1)[0].deadline is None
    with pytest.raises(annulus.ConfigError, match="deadline is 0"):
        transport.set_deadline(0)


def test_views_are_the_executors_memory_and_end_with_the_transfer() -> None:
    kept: list[memoryview] = []

    class Keeps(QueueTransport):
        def receive(self, peer: int, tag: int, buffer: memoryview) -> Receive:
            kept.append(buffer)
            return super().receive(peer, tag, buffer)

    results = on_ranks(queue_ring(2, Keeps), passes)
    assert not any(isinstance(result, Exception) for result in results), results
    assert kept
    for view in kept:
        with pytest.raises(ValueError, match="released memoryview"):
            bytes(view)


def test_cycles_through_a_transport_are_collected() -> None:
    transport = queue_ring(1)[0]
    transport.ring = RingAttention(PATTERN, Placement.contiguous(9, 1), transport=transport, head_dim=16)  # type: ignore[attr-defined]
    alive = weakref.ref(transport.mesh)  # type: ignore[attr-defined]
    del transport
    gc.collect()
    assert alive() is None


def test_built_in_transport_moves_bytes() -> None:
    a, b = make_in_process_ring(2)
    assert (a.rank(), b.rank(), a.size(), a.name()) == (0, 1, 2, "in_process")
    data, found = np.arange(10), np.zeros(10, int)
    receive = b.receive(0, 7, found)
    a.send(1, 7, data).wait()
    receive.wait()
    receive.wait()
    assert np.array_equal(found, data)
    assert a.counters() == {
        "bytes_sent": 80,
        "messages_sent": 1,
        "bytes_received": 0,
        "messages_received": 0,
    }
    with pytest.raises((BufferError, ValueError)):
        b.receive(0, 7, b"cannot be written")
    with pytest.raises(annulus.ConfigError, match="peer is 5"):
        a.send(5, 0, data)
    cancelled = b.receive(0, 8, found)
    cancelled.cancel()
    a.set_deadline(0.05)
    with pytest.raises(annulus.TransportError, match="timed out after 50 ms") as caught:
        a.receive(1, 9, found).wait()
    assert caught.value.rank == 1


def test_abort_reaches_the_others() -> None:
    a, b = make_in_process_ring(2)
    receive = b.receive(0, 1, bytearray(4))
    a.abort("enough")
    with pytest.raises(annulus.TransportError, match="enough") as caught:
        receive.wait()
    assert caught.value.rank == 0
    with pytest.raises(annulus.ConfigError, match="0 ranks"):
        make_in_process_ring(0)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_records_of_all_ranks_are_gathered(ranks: int) -> None:
    expected = [bytes([rank]) * (3 * rank) for rank in range(ranks)]
    rings = on_ranks(
        make_in_process_ring(ranks),
        lambda transport: annulus.gather_records(transport, expected[transport.rank()]),
    )
    assert rings == [expected] * ranks
