"""Waits for long messages end when their connection ends. Their threads can be abandoned."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterator

import pytest
from support import comes_true

pytest.importorskip("torch", reason="PyTorch is not installed")

from annulus.torch.ring import _long_messages
from annulus.torch.ring._long_messages import Waiters

LIMIT = datetime.timedelta(seconds=120)


class Work:
    """Stands for an operation of Gloo, which ends or fails when the test allows it."""

    def __init__(self, seconds: float | None, error: str | None = None):
        """`seconds`: how long it takes; None: until `may_end` is set."""
        self._seconds, self._error = seconds, error
        self.may_end = threading.Event()

    def wait(self, limit: datetime.timedelta) -> None:
        self.may_end.wait(limit.total_seconds() if self._seconds is None else self._seconds)
        if self._error is not None:
            raise RuntimeError(self._error)


def alive(peer: int) -> bool:
    return False


def threads() -> int:
    return sum(thread.name == "annulus wait" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """The threads end a moment after they are told to. Those of earlier tests may still be running."""
    before = threads()
    yield
    assert comes_true(lambda: threads() <= before)


def test_waits_share_a_thread_and_give_their_errors() -> None:
    before = threads()
    waiters = Waiters()
    for _ in range(3):
        waiters.wait(Work(0.0), 1, LIMIT, alive)
        with pytest.raises(RuntimeError, match="^Connection reset$"):
            waiters.wait(Work(0.0, "Connection reset"), 1, LIMIT, alive)
    assert threads() <= before + 1
    waiters.close()


@pytest.mark.parametrize("told", ["before", "meanwhile", "twice"])
def test_a_message_that_is_complete_at_the_end_of_its_connection_is_received(
    told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_long_messages, "_GRACE", 120.0)
    waiters = Waiters()

    def ended(peer: int) -> bool:
        # Between the moment the wait is known and this question, somebody else has heard of it, too.
        if told == "twice":
            waiters.end(peer)
        return told != "meanwhile"

    if told == "meanwhile":
        threading.Timer(0.01, waiters.end, (1,)).start()
    waiters.wait(Work(0.05), 1, LIMIT, ended)
    waiters.close()


def test_a_wait_for_a_connection_that_has_ended_is_abandoned() -> None:
    waiters = Waiters()
    work = Work(None)
    with pytest.raises(RuntimeError, match="ended in the middle of a message"):
        waiters.wait(work, 1, LIMIT, lambda peer: peer == 1)
    waiters.wait(Work(0.0), 2, LIMIT, lambda peer: peer == 1)  # another thread does
    work.may_end.set()
    waiters.close()


def test_the_end_of_another_connection_does_not_end_a_wait() -> None:
    waiters = Waiters()
    threading.Timer(0.01, waiters.end, (2,)).start()
    waiters.wait(Work(0.2), 1, LIMIT, alive)
    work = Work(None)
    told = threading.Thread(target=lambda: comes_true(lambda: waiters._current) and waiters.end(None))
    told.start()  # that of all is
    with pytest.raises(RuntimeError, match="ended in the middle of a message"):
        waiters.wait(work, 1, LIMIT, alive)
    told.join()
    work.may_end.set()
    waiters.close()
