"""Waits that end when a connection ends.

Gloo ends the wait for a message when its connection ends, except if the message has been transferred in part. Long messages
are in that state most of the time. So threads wait for them that can be abandoned, and the transport reports the end of a
connection.
"""

from __future__ import annotations

import datetime
import queue
import threading
import time
from collections.abc import Callable

_ENDED = object()
# A message that was complete before the end of its connection is reported within this time. Seconds.
_GRACE = 0.05


class Waiters:
    """Threads that wait: one for each wait at a time (there is one), and abandoned ones."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue] = []
        self._current: tuple[int, queue.SimpleQueue] | None = None

    def wait(self, work: object, peer: int, limit: datetime.timedelta, ended: Callable[[int], bool]) -> None:
        """work.wait(limit), or a RuntimeError when the connection to `peer` has ended, as `end` is told or `ended`
        says."""
        answers: queue.SimpleQueue = queue.SimpleQueue()
        jobs = self._idle.pop() if self._idle else self._new()
        self._current = peer, answers
        if ended(peer):
            answers.put(_ENDED)
        jobs.put((work, limit, answers))
        try:
            answer = answers.get()
            until = time.monotonic() + _GRACE
            while answer is _ENDED:  # it may come twice: from `ended`, and from `end` at the same moment
                answer = answers.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            jobs.put(None)  # abandoned: it ends at its limit
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
        """From any thread: the connection to a rank has ended; None: all have."""
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
            # Its text: an exception that a frame holds holds the frame, and all of the ring, until garbage is collected.
            answers.put(str(error))
        del job, work, answers  # its memory is the executor's


class LongMessage:
    """A message under way that is waited for with patience."""

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
        # Gloo drops an operation with its last reference: the buffer is not touched afterwards.
        self._work = None
