"""Events, and messages of ranks, in Python's logging, with the rank in front."""

import logging
import threading
from collections.abc import Callable

from annulus import _core
from annulus.monitor._readers import Reader

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 10,
}

_EVENT_LEVELS = {"recovery": logging.WARNING, "pass": logging.INFO, "cache": logging.INFO}

_current: "LogExporter | None" = None
_lock = threading.Lock()


class _RankLogger(logging.LoggerAdapter):
    def process(self, msg, kwargs):
        return f"{self.extra['tag']} {msg}", kwargs


def _tag(rank: int, ranks: int | None) -> str:
    return f"[rank {rank}]" if ranks is None else f"[rank {rank}/{ranks}]"


def logger(rank: int, ranks: int | None = None) -> logging.LoggerAdapter:
    """The logger annulus, with "[rank 1/4]" in front of every line."""
    return _RankLogger(logging.getLogger("annulus"), {"tag": _tag(rank, ranks)})


def event_text(event: _core.Event) -> str:
    """An event as text: "send rows, step 2 to rank 3: 0.41 ms, 1048576 bytes"."""
    text = "" if event.kind == "pass" else event.kind + " "
    if event.kind == "step":
        text += str(event.step)
    else:
        text += event.name + (f", step {event.step}" if event.step >= 0 else "")
    if event.peer >= 0:
        text += f" {'from' if event.kind == 'receive' else 'to'} rank {event.peer}"
    text += f": {event.seconds * 1e3:.2f} ms"
    if event.bytes:
        text += f", {event.bytes} bytes" + (" sent" if event.kind == "pass" else "")
    return text + (", failed" if event.failed else "")


class LogExporter(Reader):
    """Logs events to the logger annulus: recoveries as warnings, passes and caches as infos, all others as debug
    messages.

    `rank`: only events of this rank. `ranks`: the number of ranks, for the tag. Most programs use `set_log_level`
    instead.
    """

    def __init__(self, rank: int | None = None, ranks: int | None = None, interval: float = 0.5):
        self._rank = rank
        self._ranks = ranks
        self._logger = logging.getLogger("annulus")
        super().__init__(interval)

    def _write(self, events: list[_core.Event], dropped: int) -> None:
        if dropped:
            self._logger.info("%d events were overwritten before they could be logged", dropped)
        for event in events:
            level = _EVENT_LEVELS.get(event.kind, logging.DEBUG)
            if not self._logger.isEnabledFor(level) or self._rank not in (None, event.rank):
                continue
            tag = _tag(event.rank, self._ranks) + " " if event.rank >= 0 else ""
            self._logger.log(level, "%s%s", tag, event_text(event))


def set_log_level(level: str, *, rank: int | None = None, ranks: int | None = None) -> None:
    """Chooses the events that the logger annulus logs: "debug" (all), "info" (passes, caches), "warning" (recoveries),
    "error", "off".

    `rank`: only events of this rank. `ranks`: the number of ranks, for the tag "[rank 1/4]". Turns monitoring on,
    except for "error" and "off". Lines go to the handlers of the program, or to standard error if there are none.
    """
    global _current
    if not isinstance(level, str) or level not in LEVELS:
        raise _core.ConfigError(
            f"annulus.monitor.set_log_level: level is {level!r}, expected one of {', '.join(LEVELS)}"
        )
    target = logging.getLogger("annulus")
    with _lock:
        if _current is not None:
            _current.close()  # writes earlier events with the earlier level
            _current = None
        target.setLevel(LEVELS[level])
        if level in ("error", "off"):
            return
        if not target.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            target.addHandler(handler)
        _current = LogExporter(rank, ranks)


def log_as_it_is() -> Callable[[], None]:
    """A function that restores the present state of the log."""
    target = logging.getLogger("annulus")
    level, exporter = target.level, _current

    def restore() -> None:
        global _current
        with _lock:
            if _current is exporter and target.level == level:
                return
            if _current is not None:
                _current.close()
            target.setLevel(level)
            _current = None if exporter is None else LogExporter(exporter._rank, exporter._ranks)

    return restore


def flush_log() -> None:
    """Logs everything that was recorded so far."""
    with _lock:
        if _current is not None:
            _current.flush()
