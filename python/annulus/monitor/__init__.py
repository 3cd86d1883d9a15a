"""Monitoring of the ranks of this process: a bounded stream of events, and exporters.

Monitoring is off until `start()`. Then every pass, step, computation, message, wait, cached executor and recovery adds
an `Event` to a stream, which keeps the latest 65,536 events and sums over all of them. Programs use `read` and
`totals`. Exporters write the events elsewhere:

- `JsonLines` appends every event to a file,
- `write_chrome_trace` writes a file for chrome://tracing or ui.perfetto.dev,
- `PrometheusExporter` answers scrapes (package prometheus-client),
- `WandbExporter` logs to Weights & Biases, also offline (package wandb),
- `LogExporter` and `set_log_level` write to Python's logging, with the rank in front.

`profile_memory` samples the memory of the process.
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
