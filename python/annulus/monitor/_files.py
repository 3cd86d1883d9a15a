"""Events as files: JSON lines while a program runs, and a trace for chrome://tracing or ui.perfetto.dev."""

import json
import os
import tempfile
import time
from collections.abc import Sequence

from annulus import _core
from annulus.monitor import _events
from annulus.monitor._readers import Reader

# Process number in traces for events of no rank. Not -1, which Perfetto reads as 0.
_NOBODY = 999_999
_FIRST_TRACK = 1_000_000


class JsonLines(Reader):
    """Appends every event to a file, one JSON object a line, every `interval` seconds, at `close` and at exit.

    `time` is the begin in seconds since 1970. If events were overwritten before they were read, a line contains
    {"dropped": number}.
    """

    def __init__(self, path: str | os.PathLike, interval: float = 1.0):
        # Unbuffered, so that lines of several processes do not mix, and close() has nothing left to write.
        self._file = open(path, "ab", buffering=0)
        try:
            super().__init__(interval)
        except BaseException:
            self._file.close()
            raise

    def _write(self, events: list[_core.Event], dropped: int) -> None:
        lines = [json.dumps({"dropped": dropped})] if dropped else []
        since_1970 = time.time_ns() - time.monotonic_ns()
        for event in events:
            line = {
                "time": (event.begin_ns + since_1970) / 1e9,
                "seconds": event.seconds,
                "kind": event.kind,
                "name": event.name,
                "rank": event.rank,
            }
            # Left out if there is none: most events have no peer.
            line |= {
                key: value
                for key in ("step", "peer")
                if (value := getattr(event, key)) >= 0
            }
            if event.bytes:
                line["bytes"] = event.bytes
            if event.failed:
                line["failed"] = True
            lines.append(json.dumps(line))
        rest = memoryview("".join(line + "\n" for line in lines).encode())
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._file.close()


def _process(rank: int) -> int:
    return rank if rank >= 0 else _NOBODY


def write_chrome_trace(path: str | os.PathLike, events: Sequence[_core.Event] | None = None) -> None:
    """Writes events, by default all of the stream, for chrome://tracing and ui.perfetto.dev.

    There is a process for each rank, one for events of no rank, and a track for each kind. Steps are drawn within their
    passes. Messages that overlap get separate tracks. The file appears complete or not at all.
    """
    path = os.fsdecode(path)
    if not path:
        raise _core.ConfigError("write_chrome_trace: path is empty, expected the name of a file")
    dropped = 0
    if events is None:
        events, _, dropped = _events.read()
    events = list(events)
    origin = min((event.begin_ns for event in events), default=0)
    places = []  # rank, kind and lane of each event
    for event, lane in zip(events, _core.event_lanes(events)):
        kind = "pass" if event.kind == "step" else event.kind
        places.append((event.rank, _events.KINDS.index(kind), lane))
    # Numbered over all processes, because Perfetto identifies threads by their tid alone.
    tracks = {place: _FIRST_TRACK + i for i, place in enumerate(sorted(set(places)))}
    rows = []
    for event, place in zip(events, places):
        details = {key: value for key in ("step", "peer") if (value := getattr(event, key)) >= 0}
        if event.bytes:
            details["bytes"] = event.bytes
        if event.failed:
            details["failed"] = True
        rows.append(
            {
                "ph": "X",
                "name": f"step {event.step}" if event.kind == "step" else event.name,
                "cat": event.kind,
                "pid": _process(event.rank),
                "tid": tracks[place],
                "ts": (event.begin_ns - origin) / 1e3,
                "dur": (event.end_ns - event.begin_ns) / 1e3,
                "args": details,
            }
        )

    def about(what: str, rank: int, track: int, **value) -> dict:
        return {"ph": "M", "name": what, "pid": _process(rank), "tid": track, "args": value}

    names = []
    for rank in sorted({rank for rank, _, _ in tracks}):
        own = _process(rank)
        names.append(about("process_name", rank, own, name=f"rank {rank}" if rank >= 0 else "process"))
        names.append(about("process_sort_index", rank, own, sort_index=rank))
    for (rank, number, lane), track in tracks.items():
        kind = _events.KINDS[number]
        names.append(about("thread_name", rank, track, name=kind if lane == 0 else f"{kind} {lane + 1}"))
        names.append(about("thread_sort_index", rank, track, sort_index=track))
    trace = {
        "traceEvents": names + rows,
        "displayTimeUnit": "ms",
        "otherData": {"dropped_events": dropped},
    }
    _write_whole(path, json.dumps(trace) + "\n")


def _write_whole(path: str, text: str) -> None:
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe or a device, which a rename would replace
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return
    path = os.path.realpath(path)
    mode = os.stat(path).st_mode & 0o7777 if os.path.exists(path) else None
    descriptor, temporary = tempfile.mkstemp(prefix=".annulus-", dir=os.path.dirname(path))
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            if mode is None:  # mkstemp makes files that only the owner can read
                mask = os.umask(0)
                os.umask(mask)
                mode = 0o666 & ~mask
            os.fchmod(file.fileno(), mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
