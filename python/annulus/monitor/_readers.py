"""What exporters share: a thread that reads the stream from time to time, and packages that may be missing."""

import importlib
import logging
import threading
import types
import weakref

from annulus import _core
from annulus.monitor import _events


def optional(module: str, package: str, who: str) -> types.ModuleType:
    """The module, or an ImportError that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{who} needs the package {package}: pip install {package}", name=module
        ) from error


class Reader:
    """Gives `_write(events, dropped)` what was recorded, every `interval` seconds and at the end.

    Starts the stream. What fails on the thread is told once by the logger annulus, and ends the reading: training goes on.
    """

    def __init__(self, interval: float):
        if not interval > 0:
            raise _core.ConfigError(
                f"{type(self).__name__}: interval is {interval}, expected seconds above 0"
            )
        _events.start()
        self._place = _core.events_next()
        self._lock = threading.Lock()  # of _place and of what _write writes to
        self._stop = threading.Event()
        # The thread must not keep its exporter alive.
        self._thread = threading.Thread(
            target=_read_until_stopped,
            args=(weakref.ref(self), self._stop, interval),
            name=f"annulus {type(self).__name__}",
            daemon=True,
        )
        self._thread.start()

    def _write(self, events: list[_core.Event], dropped: int) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        """Writes what was recorded so far."""
        with self._lock:
            if self._stop.is_set():
                return
            events, self._place, dropped = _core.events_read(self._place)
            if events or dropped:
                self._write(events, dropped)

    def close(self) -> None:
        """Writes the rest and ends the thread. Monitoring stays on: others may read."""
        if self._stop.is_set():
            return
        try:
            self.flush()
        finally:
            self._stop.set()
            self._thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _read_until_stopped(reader: weakref.ref, stop: threading.Event, interval: float) -> None:
    while not stop.wait(interval):
        living = reader()
        if living is None:
            return
        try:
            living.flush()
        except Exception as error:  # noqa: BLE001: monitoring must not end what it monitors
            stop.set()
            logging.getLogger("annulus").warning(
                "%s stops: %s", type(living).__name__, error, exc_info=error
            )
        del living
