"""Waits for long messages that end when a connection ends.

Gloo ends the wait for a message when its connection ends, unless a part of the message has been transferred. Long
messages are in that state most of the time. So a thread waits for each of them, which can be abandoned when the
transport reports the end of the connection.
"""

from __future__ import annotations

import datetime
import queue
import threading
import time
from collections.abc import Callable

_ENDED = object()
# Seconds after the end of a connection within which Gloo reports a message that is complete.
_GRACE = 0.05


class Waiters:
    """Threads that wait for messages: one for the current wait, idle ones, and abandoned ones."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue] = []
        self._current: tuple[int, queue.SimpleQueue] | None = None

    def wait(self, work: object, peer: int, limit: datetime.timedelta, ended: Callable[[int], bool]) -> None:
        """Does work.wait(limit). Raises a RuntimeError if the connection to `peer` ends before or during the wait:
        `ended` tells of the former, a call of `end` of the latter."""
        answers: queue.SimpleQueue = queue.SimpleQueue()
        jobs = self._idle.pop() if self._idle else self._new()
        self._current = peer, answers
        if ended(peer):
            answers.put(_ENDED)
        jobs.put((work, limit, answers))
        try:
            answer = answers.get()
            until = time.monotonic() + _GRACE
            while answer is _ENDED:  # there may be two: from `ended`, and from `end` at the same moment
                answer = answers.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            jobs.put(None)  # the thread is abandoned, and ends at its limit
            raise RuntimeError("the connection ended in the middle of a message") from None
        except BaseException:  # Ctrl-C
            jobs.put(None)
            raise
        finally:
            self._current = None
        self._idle.append(jobs)
        if answer is not None:
            raise RuntimeError(answer)

    def end(self, peer: int | None) -> None:
        """Reports that the connection to a rank has ended; None: all connections. May be called from any thread."""
        current = self._current
        if current is not None and peer in (None, current[0]):
            current[1].put(_ENDED)

    def close(self) -> None:
        self.end(None)
        while self._idle:
            self._idle.pop().put(None)

    def _new(self) -> queue.SimpleQueue:
        jobs: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=_work, args=(jobs,), name="annulus wait", daemon=True).start()
        return jobs


def _work(jobs: queue.SimpleQueue) -> None:
    while True:
        job = jobs.get()
        if job is None:
            return
        work, limit, answers = job
        try:
            work.wait(limit)
            answers.put(None)
        except RuntimeError as error:
            # The text only: an exception refers to frames, which would keep the ring alive until garbage collection.
            answers.put(str(error))
        del job, work, answers  # they refer to the executor's memory


class LongMessage:
    """A long message that is being transferred."""

    def __init__(self, waiters: Waiters, work: object, peer: int, ended: Callable[[int], bool]):
        self._waiters = waiters
        self._work = work
        self._peer = peer
        self._ended = ended

    def wait(self, limit: datetime.timedelta) -> None:
        work, self._work = self._work, None
        if work is not None:
            self._waiters.wait(work, self._peer, limit, self._ended)

    def cancel(self) -> None:
        # Gloo cancels an operation when its last reference goes. It does not use the buffer afterwards.
        self._work = None
