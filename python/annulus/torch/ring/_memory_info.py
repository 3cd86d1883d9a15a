"""How much memory the rings of this process hold."""

from __future__ import annotations

import operator

import torch
import torch.distributed as dist

from annulus.torch.ring import _registry

_COMPLEXITY = {
    "ring": "O(n/P): fp32 accumulators of the own rows and two slots of travelling rows",
    "gather": "O(n/P + rows needed): fp32 accumulators of the own rows and every needed row of other ranks",
}
_COMPLEXITY["auto"] = " or ".join(_COMPLEXITY.values()) + ", as the first call decides"


def cached_calls_of(group: dist.ProcessGroup | None, schedule: str) -> tuple[str, int, int]:
    """For the ring of one group: how memory grows (a text), bytes per rank of the largest call, cached workspaces."""
    infos = [executor.memory_info for executor in _registry.executors_of(group)]
    if not infos:
        return _COMPLEXITY[schedule] + "; no call yet", 0, 0
    most = max(infos, key=operator.itemgetter("workspace_bytes"))
    size = most["workspace_bytes"]
    return f"{most['complexity']}; {size} bytes per rank", size, len(infos)


def _used_share(device: str) -> float:
    free, size = torch.cuda.mem_get_info(device)
    return 1.0 - free / size


def get_memory_info() -> dict[str, object]:
    """Bytes that the rings of this process hold.

    The keys are those of :attr:`annulus.RingAttention.memory_info` and always present; bytes are sums over
    all rings, except scratch_bytes, which they share. 'device' names all devices, if there are several.
    'device_utilization' is the share of memory that all processes use on the fullest of these GPUs; None if no
    ring is on a GPU. 'recovered_workspaces' counts those that were made after memory had run out (see
    ``recover``): they compute in pieces until :func:`clear_cache`.
    """
    executors = _registry.executors()
    total: dict[str, object] = {
        "device": "cpu",
        "complexity": "none yet",
        "workspace_bytes": 0,
        "communication_bytes": 0,
        "state_bytes": 0,
        "scratch_bytes": 0,
    }
    devices: set[str] = set()
    for executor in executors:
        info = executor.memory_info
        devices.add(info["device"])
        total["complexity"] = info["complexity"]
        total["scratch_bytes"] = info["scratch_bytes"]  # one pool for all
        for name in ("workspace_bytes", "communication_bytes", "state_bytes"):
            total[name] += info[name]
    total["device"] = ", ".join(sorted(devices)) or "cpu"
    total["device_utilization"] = max(map(_used_share, devices - {"cpu"}), default=None)
    total["cached_workspaces"] = len(executors)
    total["recovered_workspaces"] = sum(e.recovery != "" for e in executors)
    return total
