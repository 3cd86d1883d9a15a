"""The stream of events: start and stop, reading, and events of the program."""

import contextlib
import math
import operator
import time

from annulus import _core

# Waits outside of passes: while an executor is made, and when a program synchronizes with the device.
_OUTSIDE = ("construction", "synchronize")

_MOST_EVENTS = 2**24  # 1.2 GB

KINDS = ("pass", "step", "compute", "send", "receive", "wait", "cache", "recovery")


def start(capacity: int | None = None) -> None:
    """Turns monitoring on if it is off.

    `capacity`: how many events are kept, 72 bytes each (default 65,536, at most 16,777,216). Events that are not read
    in time are overwritten, the oldest first; `read` returns how many. Changing the capacity keeps the latest events.
    """
    if capacity is None:
        capacity = _core.events_capacity() or 65536
    _core.events_start(check_whole("start", "capacity", capacity, 1, _MOST_EVENTS))


def stop() -> None:
    """Turns monitoring off. Recorded events can still be read."""
    _core.events_stop()


def running() -> bool:
    """Whether events are recorded."""
    return _core.events_on()


def capacity() -> int:
    """How many events the stream keeps; 0 before the first `start`."""
    return _core.events_capacity()


_clears = 0


def clears() -> int:
    """How often `clear` was called. Totals from before and after a clear cannot be compared."""
    return _clears


def clear() -> None:
    """Deletes all events and totals. The places of readers stay valid."""
    global _clears
    _core.events_clear()
    _clears += 1


def read(place: int = 0) -> tuple[list[_core.Event], int, int]:
    """(events, next place, dropped): events since `place`, where to continue, and how many were overwritten."""
    return _core.events_read(place)


def totals() -> list[_core.EventTotal]:
    """Sums per kind, name, rank and, for messages, peer since `clear`. They include dropped events."""
    return _core.events_totals()


def check_whole(where: str, name: str, value: object, least: int, most: int) -> int:
    """The value as a number. Raises ConfigError unless it is a whole number from `least` to `most`."""
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or not least <= found <= most:
        raise _core.ConfigError(
            f"annulus.monitor.{where}: {name} is {value!r}, expected a whole number from {least} to {most}"
        )
    return found


def check_seconds(where: str, value: object) -> float:
    """The interval in seconds. Raises ConfigError unless it is a number above 0."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if isinstance(value, str) or not found > 0:
        raise _core.ConfigError(
            f"annulus.monitor.{where}: interval is {value!r}, expected seconds above 0"
        )
    return found


def _check(where: str, kind: str, bytes: int) -> None:
    if kind not in KINDS:
        raise _core.ConfigError(
            f"annulus.monitor.{where}: kind is {kind!r}, expected one of {', '.join(KINDS)}"
        )
    if bytes < 0:  # totals are counters, which never decrease
        raise _core.ConfigError(f"annulus.monitor.{where}: bytes is {bytes}, expected at least 0")


def record(
    kind: str,
    name: str,
    *,
    rank: int = -1,
    step: int = -1,
    peer: int = -1,
    bytes: int = 0,
    begin_ns: int | None = None,
    end_ns: int | None = None,
    failed: bool = False,
) -> None:
    """Adds an event of the program. Does nothing while monitoring is off.

    Times are those of `time.monotonic_ns()`. Without them, the event happens now and has no duration.
    """
    _check("record", kind, bytes)
    if not _core.events_on():
        return
    end_ns = time.monotonic_ns() if end_ns is None else end_ns
    begin_ns = end_ns if begin_ns is None else begin_ns
    if not 0 <= begin_ns <= end_ns:
        raise _core.ConfigError(
            f"annulus.monitor.record: begin_ns is {begin_ns}, expected at least 0 and at most end_ns, {end_ns}"
        )
    _core.events_record(kind, name, rank, step, peer, bytes, begin_ns, end_ns, failed)


@contextlib.contextmanager
def span(kind: str, name: str, *, rank: int = -1, step: int = -1, bytes: int = 0):
    """Records an event that lasts as long as the block. It is failed if an exception ends the block."""
    _check("span", kind, bytes)  # before the block: an error after it would hide an error of the block
    begin = time.monotonic_ns()
    failed = True
    try:
        yield
        failed = False
    finally:
        record(kind, name, rank=rank, step=step, bytes=bytes, begin_ns=begin, failed=failed)


def waited(row: dict[str, float]) -> float:
    """The share of the passes' time that was spent waiting."""
    return row["wait_seconds"] / row["pass_seconds"] if row["pass_seconds"] > 0 else 0.0


def summary() -> dict[int, dict[str, float]]:
    """Per rank of this process: passes, their seconds, seconds of computing and waiting in them, the share waited, and
    bytes."""
    ranks: dict[int, dict[str, float]] = {}
    for total in totals():
        if total.rank < 0:
            continue
        row = ranks.setdefault(
            total.rank,
            {
                "passes": 0,
                "failed_passes": 0,
                "pass_seconds": 0.0,
                "compute_seconds": 0.0,
                "wait_seconds": 0.0,
                "bytes_sent": 0,
                "bytes_received": 0,
                "recoveries": 0,
            },
        )
        if total.kind == "pass":
            row["passes"] += total.count
            row["failed_passes"] += total.failures
            row["pass_seconds"] += total.seconds
        elif total.kind == "compute" or (total.kind == "wait" and total.name not in _OUTSIDE):
            row[f"{total.kind}_seconds"] += total.seconds
        elif total.kind == "send":
            row["bytes_sent"] += total.bytes
        elif total.kind == "receive":
            row["bytes_received"] += total.bytes
        elif total.kind == "recovery":
            row["recoveries"] += total.count
    for row in ranks.values():
        row["waited"] = waited(row)
    return dict(sorted(ranks.items()))
