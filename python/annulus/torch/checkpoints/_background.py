"""Threads that write checkpoints while a training goes on."""

from __future__ import annotations

import atexit
import concurrent.futures
import threading
from collections.abc import Callable

from annulus.torch.ring._registry import has_lost

GRACE = 10.0  # seconds for the last checkpoint of a training that ends with an error or has lost a rank
# Checkpoints that this process is writing. The end of the process waits for them.
_unfinished: dict[concurrent.futures.Future, threading.Thread] = {}


@atexit.register
def _finish_all() -> None:
    done = concurrent.futures.wait(_unfinished, GRACE if has_lost() else None).done
    # Python may end a daemon thread while it frees tensors, which would crash the process.
    for future in done:
        _unfinished[future].join()


def in_background(function: Callable, *arguments: object) -> concurrent.futures.Future:
    """Runs the function on a daemon thread, because a thread that waits for a lost rank must not keep the process
    alive."""
    future: concurrent.futures.Future = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 (result() raises it)
            future.set_exception(error)

    for old in [old for old, thread in _unfinished.items() if not thread.is_alive()]:
        del _unfinished[old]
    thread = threading.Thread(target=run, name="annulus checkpoint", daemon=True)
    thread.start()
    _unfinished[future] = thread
    return future


def abandon(future: concurrent.futures.Future) -> None:
    """Makes the end of the process not wait for this one."""
    _unfinished.pop(future, None)
