"""Monitoring during a training: the event stream, the log level, and a profile of memory."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from annulus import monitor
from annulus.monitor._logging import log_as_it_is
from annulus.torch.ring._process_groups import group_size_and_rank
from annulus.torch.training._services import Services

# The watches that use the event stream or the log, the oldest first; and the state of both before the first one.
_watching: list[Watch] = []
_unwatched: tuple[bool, Callable[[], None]] = (False, lambda: None)


class Watch:
    """Starts what a training's services monitor, and restores the earlier state at its end.

    The event stream and the log belong to the process: trainings share them, and the last one to end restores them.
    """

    def __init__(self, services: Services, model: nn.Module, ring: dist.ProcessGroup | None):
        global _unwatched
        self._monitors, self._level = services.enable_monitoring, services.level
        self._ranks, _ = group_size_and_rank(ring)
        self._profile: monitor.profile_memory | None = None
        self.active = self._monitors or self._level is not None or services.profile_memory
        if services.profile_memory:
            device = next((p.device for p in model.parameters() if p.is_cuda), None)
            self._profile = monitor.profile_memory(device=device).start()
        if not self._monitors and self._level is None:
            return
        if not _watching:
            _unwatched = monitor.running(), log_as_it_is()
        _watching.append(self)
        if self._monitors:
            monitor.start()
        self._set_log_level()

    def _set_log_level(self) -> None:
        # All ranks of the ring: this process's rank changes when another one is lost.
        if self._level is not None:
            monitor.set_log_level(self._level, ranks=self._ranks)

    def go_on(self, ring: dist.ProcessGroup | None) -> None:
        """Continues with the ring of the ranks that are left."""
        self._ranks, _ = group_size_and_rank(ring)
        self._set_log_level()

    def memory_report(self) -> dict[str, float] | None:
        return None if self._profile is None else self._profile.report()

    def close(self) -> None:
        if self._profile is not None:
            self._profile.stop()
        if self not in _watching:
            return
        _watching.remove(self)
        was_running, restore_log = _unwatched
        if self._level is not None:  # first: restoring the level writes out what is buffered
            told = [watch for watch in _watching if watch._level is not None]
            told[-1]._set_log_level() if told else restore_log()
        if not _watching and not was_running:
            monitor.stop()
