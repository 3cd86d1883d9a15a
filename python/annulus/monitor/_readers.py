"""Common parts of exporters: a thread that reads the stream periodically, and imports of optional packages."""

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
    """Imports a module, or raises an ImportError that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{who} needs the package {package}: pip install {package}", name=module
        ) from error


_open: "weakref.WeakSet[Reader]" = weakref.WeakSet()


class Reader:
    """Calls `_write(events, dropped)` with new events every `interval` seconds, at close, and at the end of the
    program.

    Starts the stream. An error on the thread is logged once by the logger annulus and ends the reading; the program
    continues. A forked child has no such thread and writes nothing.
    """

    def __init__(self, interval: float):
        interval = _events.check_seconds(type(self).__name__, interval)
        _events.start()
        self._process = os.getpid()
        self._place = _core.events_next()
        self._lock = threading.Lock()  # guards _place and the target of _write
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
        """Writes all events so far."""
        if os.getpid() != self._process:
            return  # a thread of the parent may hold the lock
        with self._lock:
            if self._stop.is_set():
                return
            events, self._place, dropped = _core.events_read(self._place)
            if events or dropped:
                self._write(events, dropped)

    def close(self) -> None:
        """Writes the remaining events and ends the thread. Monitoring stays on, because there may be other readers."""
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
        except Exception as error:  # noqa: BLE001 (monitoring must not end the program)
            stop.set()
            logging.getLogger("annulus").warning(
                "%s stops: %s", type(living).__name__, error, exc_info=error
            )
        del living


@atexit.register
def _close_all() -> None:
    """Closes the reader of set_log_level, and those that the program has not closed."""
    for reader in list(_open):
        try:
            reader.close()
        except Exception as error:  # noqa: BLE001 (the other readers must still write)
            logging.getLogger("annulus").warning("%s: %s", type(reader).__name__, error)
