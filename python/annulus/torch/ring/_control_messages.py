"""Control messages between the ranks of a ring: which rank a rank waits for, and why a rank leaves."""

from __future__ import annotations

import collections
import datetime
import struct
import threading
import zlib
from typing import NamedTuple

import torch
import torch.distributed as dist

# Kinds of messages. During a long wait a rank sends WAITS, and GOES_ON after it. Its last message is LEAVES after a
# failure, or CLOSES if it closes the ring and no rank has failed.
WAITS, GOES_ON, LEAVES, CLOSES = 1, 2, 3, 4

# Executors use smaller tags. The last message has its own tag, so that it can be received before earlier messages.
_TAG, _LAST_TAG = 2**30, 2**30 + 1
_NEVER = 2**30 + 2  # no rank sends with this tag
_HEAD = struct.Struct("<Iiii")  # checksum of the rest, kind, rank, bytes of the text
_BYTES = 512
_TEXT = _BYTES - _HEAD.size
_FOREVER = datetime.timedelta(days=365)
_MOMENT = datetime.timedelta(milliseconds=1)
_GRACE = datetime.timedelta(milliseconds=200)  # a message is written immediately, unless a socket is full


# The awaited rank in WAITS, if a rank waits outside of the ring (for example for a checkpoint) and does not know for
# which rank.
ANY_RANK = -1


class ControlMessage(NamedTuple):
    kind: int
    rank: int  # the rank that the sender waits for, or because of which it leaves
    text: str


class ControlMessages:
    """Sends and receives control messages over the connections of a ring.

    A rank that died and a rank that left because of another rank can be told apart: the latter has sent LEAVES before
    its connections ended. This needs no timeout and no store; the process that serves the store may have died, too.

    Receives are posted at the beginning. To find out whether a message has arrived, the receive buffer is read: Gloo
    has no test without a wait, and a wait that times out ends all connections.
    """

    def __init__(self, gloo: dist.ProcessGroupGloo, rank: int, size: int):
        self._gloo: dist.ProcessGroupGloo | None = gloo  # None: the ring has ended
        self._peers = [peer for peer in range(size) if peer != rank]
        self._lock = threading.Lock()
        self._inbox = torch.zeros(2, size, _BYTES, dtype=torch.uint8)
        self._memory = self._inbox.numpy()
        self._latest: dict[int, ControlMessage] = {}
        self._sent: collections.deque = collections.deque(maxlen=8 * size)
        self._works: dict[tuple[int, int], object] = {}
        for peer in self._peers:
            self._listen(0, peer)
            self._listen(1, peer)

    def _listen(self, last: int, peer: int) -> None:
        gloo = self._gloo
        try:
            if gloo is not None:
                work = gloo.recv([self._inbox[last, peer]], peer, _LAST_TAG if last else _TAG)
                self._works[last, peer] = work
        except RuntimeError:
            pass  # the connection has ended

    def _take(self, last: int, peer: int) -> bool:
        """Reads the next message of a rank into `_latest`. Returns whether there may be another one."""
        row = self._memory[last, peer]
        check = int.from_bytes(row[:4].tobytes(), "little")
        if check == 0 or zlib.crc32(row[4:]) != check:
            return False
        data = row.tobytes()
        _, kind, rank, length = _HEAD.unpack_from(data)
        text = data[_HEAD.size : _HEAD.size + length].decode(errors="replace")
        self._latest[peer] = ControlMessage(kind, rank, text)
        if last:
            return False  # no message follows
        self._works.pop((last, peer), None)
        row[:] = 0
        self._listen(last, peer)
        return True

    def of(self, peer: int) -> ControlMessage | None:
        """The latest message of a rank, if there is one. If its connection has ended, that is its last message."""
        with self._lock:
            while self._take(0, peer):
                pass
            self._take(1, peer)
            return self._latest.get(peer)

    def wait_for_the_last(self, peer: int) -> None:
        """Waits until a rank has sent its last message or its connection has ended.

        Gloo does not end the wait for a message that has arrived in part. Control messages are too short for that.
        """
        work = self._works.get((1, peer))
        try:
            if work is not None:
                work.wait(_FOREVER)
        except RuntimeError:
            pass

    def leaver(self) -> ControlMessage | None:
        """The LEAVES message of a rank that has left after a failure; None: no rank has."""
        latest = (self.of(peer) for peer in self._peers)
        return next((each for each in latest if each is not None and each.kind == LEAVES), None)

    def awaited(self, rank: int, peer: int) -> int:
        """The rank that causes the wait of `rank` for `peer`: peer, or the rank that peer waits for, and so on."""
        seen = {rank}
        while peer not in seen:
            seen.add(peer)
            message = self.of(peer)
            if message is None or message.kind != WAITS or message.rank in seen:
                break
            if message.rank == ANY_RANK:
                return next((p for p in self._peers if not self._is_waiting(p)), peer)
            peer = message.rank
        return peer

    def _is_waiting(self, peer: int) -> bool:
        message = self.of(peer)
        return message is not None and message.kind == WAITS

    def tell(self, kind: int, rank: int, text: str = "") -> list[tuple[int, object]]:
        """Sends a message to all other ranks. Returns pairs of a rank and the send operation."""
        data = text.encode("utf-8", "backslashreplace")[:_TEXT]
        rest = _HEAD.pack(0, kind, rank, len(data))[4:] + data.ljust(_TEXT, b"\0")
        message = torch.frombuffer(
            bytearray(zlib.crc32(rest).to_bytes(4, "little") + rest), dtype=torch.uint8
        )
        sent = []
        gloo = self._gloo
        tag = _LAST_TAG if kind in (LEAVES, CLOSES) else _TAG
        for peer in self._peers if gloo is not None else ():
            try:
                sent.append((peer, gloo.send([message], peer, tag)))
            except RuntimeError:  # its connection has ended
                pass
        self._sent.extend((work, message) for _, work in sent)
        return sent

    def leave(self, kind: int, rank: int, text: str) -> None:
        """Sends the reason and ends all connections. All waits in this process, or for it, then fail immediately."""
        for peer, work in self.tell(kind, rank, text):
            if peer == rank:
                continue  # this rank may be stopped with a full socket
            try:
                work.wait(_GRACE)
            except RuntimeError:
                pass
        # A wait that times out ends Gloo's connections. Its abort() does not.
        gloo, self._gloo = self._gloo, None
        for peer in self._peers if gloo is not None else ():
            try:
                gloo.recv([torch.zeros(1, dtype=torch.uint8)], peer, _NEVER).wait(_MOMENT)
            except RuntimeError:
                pass
        # These objects keep the connections alive until the next garbage collection.
        self._works.clear()
        self._sent.clear()
