"""What the ranks of this process are doing, as a bounded stream of events, and where to send it.

Off until `start()`. From then on every pass, step, computation, message, wait, cached executor and recovery leaves an
`Event` in a stream that keeps the latest 65,536 and sums over all of them. `read` and `totals` are for programs; the
rest writes what is read somewhere else:

- `JsonLines` appends every event to a file,
- `write_chrome_trace` makes a file for chrome://tracing or ui.perfetto.dev,
- `PrometheusExporter` answers scrapes (package prometheus-client),
- `WandbExporter` logs to Weights & Biases, offline, too (package wandb),
- `LogExporter` and `set_log_level` say it to Python's logging, with the rank in front.

`profile_memory` samples what the process holds.
"""

from annulus._core import Event, EventTotal
from annulus.monitor._events import (
    KINDS,
    capacity,
    clear,
    read,
    record,
    running,
    span,
    start,
    stop,
    summary,
    totals,
)
from annulus.monitor._files import JsonLines, write_chrome_trace
from annulus.monitor._logging import LogExporter, flush_log, logger, set_log_level
from annulus.monitor._memory import MemorySample, profile_memory
from annulus.monitor._prometheus import PrometheusExporter
from annulus.monitor._wandb import WandbExporter

__all__ = [
    "KINDS",
    "Event",
    "EventTotal",
    "JsonLines",
    "LogExporter",
    "MemorySample",
    "PrometheusExporter",
    "WandbExporter",
    "capacity",
    "clear",
    "flush_log",
    "logger",
    "profile_memory",
    "read",
    "record",
    "running",
    "set_log_level",
    "span",
    "start",
    "stop",
    "summary",
    "totals",
    "write_chrome_trace",
]

for _name in ("Event", "EventTotal"):
    globals()[_name].__module__ = __name__
del _name
