"""Transports written in Python for the tests: messages are bytes in queues between threads."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import Any

import annulus
from annulus import Transport


class Mesh:
    """State that the ranks share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.channels: dict[tuple[int, int, int], queue.Queue[bytes]] = {}
        self.aborted: annulus.TransportError | None = None
        self.cancelled = 0

    def channel(self, source: int, target: int, tag: int) -> queue.Queue[bytes]:
        with self.lock:
            return self.channels.setdefault((source, target, tag), queue.Queue())

    def abort(self, rank: int, reason: str) -> None:
        with self.lock:
            if self.aborted is None:
                self.aborted = annulus.TransportError(f"rank {rank} aborted: {reason}")
                self.aborted.rank = rank


class Receive:
    def __init__(self, transport: MeshTransport, peer: int, tag: int, buffer: memoryview) -> None:
        self.transport, self.source, self.buffer = transport, (peer, transport.rank(), tag), buffer
        self.until = time.monotonic() + transport.deadline
        self.cancelled = False

    def wait(self) -> None:
        # Polls, so that an abort is noticed.
        while True:
            self.transport.check()
            try:
                data = self.transport.mesh.channel(*self.source).get(timeout=0.01)
                break
            except queue.Empty:
                if time.monotonic() > self.until:
                    raise self.lost("no message in time") from None
        if len(data) != len(self.buffer):
            raise self.lost(f"{len(data)} bytes for a receive of {len(self.buffer)} bytes")
        self.buffer[:] = data

    def lost(self, why: str) -> annulus.TransportError:
        error = annulus.TransportError(f"receive from rank {self.source[0]}: {why}")
        error.rank = self.source[0]
        self.transport.mesh.abort(self.transport.rank(), str(error))
        return error

    def cancel(self) -> None:
        self.cancelled = True
        with contextlib.suppress(AttributeError):  # of garbage that is cleared bit by bit
            self.transport.mesh.cancelled += 1


class MeshTransport(Transport):
    """Common base of the two kinds below."""

    def __init__(self, rank: int, size: int, mesh: Mesh) -> None:
        super().__init__(rank, size, "queues")
        self.mesh = mesh

    def check(self) -> None:
        if self.mesh.aborted is not None:
            raise self.mesh.aborted

    def put(self, peer: int, tag: int, buffer: memoryview) -> None:
        assert buffer.readonly
        self.check()
        self.mesh.channel(self.rank(), peer, tag).put(bytes(buffer))

    def take(self, peer: int, tag: int, buffer: memoryview) -> Receive:
        assert not buffer.readonly
        self.check()
        return Receive(self, peer, tag, buffer)

    def abort(self, reason: str) -> None:
        self.mesh.abort(self.rank(), reason)

    def health(self) -> dict[str, Any]:
        error = self.mesh.aborted
        if error is None:
            return super().health()
        return {"alive": False, "lost_rank": error.rank, "reason": str(error)}


class QueueTransport(MeshTransport):
    """Message by message."""

    def send(self, peer: int, tag: int, buffer: memoryview) -> None:
        self.put(peer, tag, buffer)

    def receive(self, peer: int, tag: int, buffer: memoryview) -> Receive:
        return self.take(peer, tag, buffer)


class PostingTransport(MeshTransport):
    """Batch by batch."""

    def post(self, messages: list[tuple[str, int, int, memoryview]]) -> Receives:
        receives = []
        for way, peer, tag, buffer in messages:
            if way == "send":
                self.put(peer, tag, buffer)
            else:
                receives.append(self.take(peer, tag, buffer))
        return Receives(receives)


class PreparingTransport(MeshTransport):
    """Says how messages are begun, once for each; nothing of it is called for others of the same memory."""

    def __init__(self, rank: int, size: int, mesh: Mesh) -> None:
        super().__init__(rank, size, mesh)
        self.prepared = 0

    def prepare(self, way: str, peer: int, tag: int, buffer: memoryview) -> tuple:
        self.check()
        self.prepared += 1
        return self.put if way == "send" else self.take, (peer, tag, buffer)

    def explain(self, peer: int, way: str, error: Exception) -> Exception:
        return error


class Receives:
    """The messages of one batch."""

    def __init__(self, receives: list[Receive]) -> None:
        self.receives = receives

    def wait(self) -> None:
        for receive in self.receives:
            receive.wait()

    def cancel(self) -> None:
        for receive in self.receives:
            receive.cancel()


def queue_ring(ranks: int, kind: type[MeshTransport] = QueueTransport) -> list[MeshTransport]:
    mesh = Mesh()
    return [kind(rank, ranks, mesh) for rank in range(ranks)]
