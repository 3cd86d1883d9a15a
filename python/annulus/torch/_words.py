"""What the ranks of a ring tell each other beside their rows: for whom they wait, and why they leave."""

from __future__ import annotations

import collections
import datetime
import struct
import threading
import zlib
from typing import NamedTuple

import torch
import torch.distributed as dist

# Kinds. A rank that waits says so when it has waited for long, and says when it goes on; LEAVES is its last word.
# Of CLOSES, too, but for nobody's fault.
WAITS, GOES_ON, LEAVES, CLOSES = 1, 2, 3, 4

# An executor's tags are small. The last word has a receive of its own: nobody has to have listened to the ones before.
_TAG, _LAST_TAG = 2**30, 2**30 + 1
_NEVER = 2**30 + 2  # nobody sends with this one
_HEAD = struct.Struct("<Iiii")  # checksum of the rest, kind, rank, bytes of the text
_BYTES = 512
_TEXT = _BYTES - _HEAD.size
_FOREVER = datetime.timedelta(days=365)
_MOMENT = datetime.timedelta(milliseconds=1)
_GRACE = datetime.timedelta(milliseconds=200)  # a word is written at once, unless a socket is full


# For whom a rank waits that does not wait in the ring, but for a checkpoint: for one of the others, it cannot know which.
SOMEBODY = -1


class Word(NamedTuple):
    kind: int
    rank: int  # for whom it waits, or because of whom it leaves
    text: str


class Words:
    """Words over a ring's own connections: they arrive in the order of the bytes, before the end of a connection.

    So a connection that ends tells a rank that died from one that left because of another: the latter has said so.
    Needs neither a store, which may have died with the process that served it, nor patience.
    Receives are posted from the beginning; whether a word is there shows in the memory, because Gloo
    cannot be asked without waiting, and a wait that takes too long ends all connections.
    """

    def __init__(self, gloo: dist.ProcessGroupGloo, rank: int, size: int):
        self._gloo: dist.ProcessGroupGloo | None = gloo  # None: it is over
        self._peers = [peer for peer in range(size) if peer != rank]
        self._lock = threading.Lock()
        self._inbox = torch.zeros(2, size, _BYTES, dtype=torch.uint8)
        self._memory = self._inbox.numpy()
        self._words: dict[int, Word] = {}
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
        """Whether there was another word of a rank."""
        row = self._memory[last, peer]
        check = int.from_bytes(row[:4].tobytes(), "little")
        if check == 0 or zlib.crc32(row[4:]) != check:
            return False
        data = row.tobytes()
        _, kind, rank, length = _HEAD.unpack_from(data)
        text = data[_HEAD.size : _HEAD.size + length].decode(errors="replace")
        self._words[peer] = Word(kind, rank, text)
        if last:
            return False  # it stays
        self._works.pop((last, peer), None)
        row[:] = 0
        self._listen(last, peer)
        return True

    def of(self, peer: int) -> Word | None:
        """The last word of a rank, if it has said any: all of them, if its connection is known to have ended."""
        with self._lock:
            while self._take(0, peer):
                pass
            self._take(1, peer)
            return self._words.get(peer)

    def wait_for_the_last(self, peer: int) -> None:
        """Until a rank has said its last word or its connection has ended, which always wakes who waits here: a word
        is too short to be half through."""
        work = self._works.get((1, peer))
        try:
            if work is not None:
                work.wait(_FOREVER)
        except RuntimeError:
            pass

    def leaver(self) -> Word | None:
        """The last word of a rank that has left, if one has."""
        words = (self.of(peer) for peer in self._peers)
        return next((word for word in words if word is not None and word.kind == LEAVES), None)

    def awaited(self, rank: int, peer: int) -> int:
        """Who keeps `rank` waiting, which waits for `peer`: a rank that waits for another is not the one."""
        seen = {rank}
        while peer not in seen:
            seen.add(peer)
            word = self.of(peer)
            if word is None or word.kind != WAITS or word.rank in seen:
                break
            if word.rank == SOMEBODY:
                return next((p for p in self._peers if not self._says_it_waits(p)), peer)
            peer = word.rank
        return peer

    def _says_it_waits(self, peer: int) -> bool:
        word = self.of(peer)
        return word is not None and word.kind == WAITS

    def tell(self, kind: int, rank: int, text: str = "") -> list[tuple[int, object]]:
        data = text.encode("utf-8", "backslashreplace")[:_TEXT]
        rest = _HEAD.pack(0, kind, rank, len(data))[4:] + data.ljust(_TEXT, b"\0")
        word = torch.frombuffer(
            bytearray(zlib.crc32(rest).to_bytes(4, "little") + rest), dtype=torch.uint8
        )
        sent = []
        gloo = self._gloo
        tag = _LAST_TAG if kind in (LEAVES, CLOSES) else _TAG
        for peer in self._peers if gloo is not None else ():
            try:
                sent.append((peer, gloo.send([word], peer, tag)))
            except RuntimeError:  # its connection has ended
                pass
        self._sent.extend((work, word) for _, work in sent)
        return sent

    def leave(self, kind: int, rank: int, text: str) -> None:
        """Says why, and ends all connections: whoever waits in this process or for it gets an error at once."""
        for peer, work in self.tell(kind, rank, text):
            if peer == rank:
                continue  # it may be stopped, with a full socket
            try:
                work.wait(_GRACE)
            except RuntimeError:
                pass
        # A wait that takes too long is what ends connections in Gloo: its abort() leaves them as they are.
        gloo, self._gloo = self._gloo, None
        for peer in self._peers if gloo is not None else ():
            try:
                gloo.recv([torch.zeros(1, dtype=torch.uint8)], peer, _NEVER).wait(_MOMENT)
            except RuntimeError:
                pass
        # They hold the connections, which are to end now and not when garbage is collected.
        self._works.clear()
        self._sent.clear()
