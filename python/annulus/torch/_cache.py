"""Executors between calls."""

from __future__ import annotations

import collections
import threading

from annulus import RingAttention


class ExecutorCache:
    """Executors by what they are for. One is taken out while it runs, so that a caller on another thread makes
    its own instead of waiting. At most `capacity` are kept; the least recently used one is dropped first.
    """

    def __init__(self, capacity: int = 20) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._size = 0
        # Least recently used first.
        self._free: collections.OrderedDict[tuple, list[RingAttention]] = collections.OrderedDict()

    def take(self, key: tuple) -> RingAttention | None:
        with self._lock:
            free = self._free.get(key)
            if not free:
                return None
            self._size -= 1
            return free.pop()

    def make_room(self) -> None:
        """Drops what another one would drop, so that its memory is free before that one asks for its own."""
        with self._lock:
            self._drop(self._capacity - 1)

    def give_back(self, key: tuple, executor: RingAttention) -> None:
        with self._lock:
            self._free.setdefault(key, []).append(executor)
            self._free.move_to_end(key)
            self._size += 1
            self._drop(self._capacity)

    def _drop(self, capacity: int) -> None:
        while self._size > capacity:
            oldest = next(iter(self._free))
            if self._free[oldest]:
                self._free[oldest].pop()
                self._size -= 1
            if not self._free[oldest]:  # of the last one, or because all are taken
                del self._free[oldest]

    def clear(self) -> None:
        with self._lock:
            self._free.clear()
            self._size = 0

    def executors(self) -> list[RingAttention]:
        """Those that are not taken."""
        with self._lock:
            return [executor for free in self._free.values() for executor in free]
