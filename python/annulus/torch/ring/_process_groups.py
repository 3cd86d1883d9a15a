"""Process groups as arguments: their check, their names, and this process's rank."""

from __future__ import annotations

import torch.distributed as dist

from annulus import ConfigError


def group_size_and_rank(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The number of ranks of a group and this process's rank in it; without a group, 1 and 0."""
    if group is None:
        return 1, 0
    if not isinstance(group, dist.ProcessGroup) and group is not dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            f"group is a {type(group).__name__}: a torch.distributed.ProcessGroup was expected (of a DeviceMesh: "
            "mesh.get_group(...))"
        )
    if not dist.is_initialized() or group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError("group is not a process group that this process is in")
    return dist.get_world_size(group), dist.get_rank(group)


def rank_in(name: str | None) -> int:
    """This process's rank in a ring, given the name of its group; without a group, 0."""
    return 0 if name is None else dist.get_rank(dist.distributed_c10d._resolve_process_group(name))


def group_name(group: dist.ProcessGroup | None) -> str | None:
    """The name of a group, which PyTorch can resolve; None without a group. ConfigError if it is not a group."""
    if group is None:
        return None
    group_size_and_rank(group)
    return group.group_name
