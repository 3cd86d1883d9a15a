"""What exporters share: a thread that reads the stream from time to time, and packages that may be missing."""

import atexit
import importlib
import logging
import os
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


_open: "weakref.WeakSet[Reader]" = weakref.WeakSet()


class Reader:
    """Gives `_write(events, dropped)` what was recorded, every `interval` seconds and at the end, also that of the program.

    Starts the stream. What fails on the thread is told once by the logger annulus, and ends the reading: training goes on.
    A forked child has no such thread, and does not write what its parent writes.
    """

    def __init__(self, interval: float):
        interval = _events.check_seconds(type(self).__name__, interval)
        _events.start()
        self._process = os.getpid()
        self._place = _core.events_next()
        self._lock = threading.Lock()  # of _place and of what _write writes to
        self._stop = threading.Event()
        # The thread must not keep its exporter alive.
        self._thread = threading.Thread(
            target=_read_until_stopped,
            args=(weakref.ref(self), self._stop, min(interval, threading.TIMEOUT_MAX)),
            name=f"annulus {type(self).__name__}",
            daemon=True,
        )
        self._thread.start()
        _open.add(self)

    def _write(self, events: list[_core.Event], dropped: int) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        """Writes what was recorded so far."""
        if os.getpid() != self._process:
            return  # the lock may be held by a thread that was not inherited
        with self._lock:
            if self._stop.is_set():
                return
            events, self._place, dropped = _core.events_read(self._place)
            if events or dropped:
                self._write(events, dropped)

    def close(self) -> None:
        """Writes the rest and ends the thread. Monitoring stays on: others may read."""
        if self._stop.is_set() or os.getpid() != self._process:
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


@atexit.register
def _close_all() -> None:
    """Nobody closes what set_log_level has made, and programs forget the rest."""
    for reader in list(_open):
        try:
            reader.close()
        except Exception as error:  # noqa: BLE001: the other ones have something to write, too
            logging.getLogger("annulus").warning("%s: %s", type(reader).__name__, error)
