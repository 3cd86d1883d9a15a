"""The ranks that write and read a checkpoint together, and how they agree."""

from __future__ import annotations

import datetime
import uuid

import torch.distributed as dist

from annulus import ConfigError, Error, TransportError
from annulus.torch.ring._transport import timeout_of


class CheckpointError(Error):
    """A checkpoint could not be written or read. Earlier checkpoints are unchanged."""


class Ranks:
    """The ranks that write together. They use separate connections, because the training's collectives use its own."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: float | None):
        self.group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        self._given_up = False
        if not dist.is_available() or not dist.is_initialized():
            if group is not None:
                raise ConfigError("Checkpoints: torch.distributed is not initialised")
            return
        parent = dist.group.WORLD if group is None else group
        if parent is dist.GroupMember.NON_GROUP_MEMBER:
            raise ConfigError("Checkpoints: this process is not in the group")
        self.rank, self.size = dist.get_rank(parent), dist.get_world_size(parent)
        if self.size > 1:
            try:
                limit = timeout_of(parent) if timeout is None else timeout
                self.group = self._connect(parent, datetime.timedelta(seconds=limit))
            except RuntimeError as error:
                raise TransportError(f"Checkpoints: the ranks cannot connect: {error}") from error

    def _connect(self, parent: dist.ProcessGroup, timeout: datetime.timedelta) -> dist.ProcessGroup:
        # Not dist.new_group, which needs all processes of the job, or else gives a second group of the same ranks the
        # name of the first, under which the store has old addresses.
        name = [f"annulus_{uuid.uuid4().hex}"]
        ranks = dist.get_process_group_ranks(parent)
        dist.broadcast_object_list(name, src=ranks[0], group=parent)
        c10d = dist.distributed_c10d
        group, _ = c10d._new_process_group_helper(
            *(self.size, self.rank, ranks, "gloo", c10d._world.pg_map[parent][1], name[0]),
            timeout=timeout,
        )
        c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
        return group

    def give_up(self, waiting: bool = False) -> None:
        """Stops using the connections, because a rank is lost. `waiting`: a thread still waits in one."""
        self._given_up = self.size > 1
        if waiting:
            self.group = None  # destroying it would wait for that thread

    def check(self) -> None:
        if self._given_up:
            raise TransportError("Checkpoints: the ranks have lost each other before: make a new Checkpoints object")

    def gather(self, mine: object) -> list:
        """The values of all ranks, by rank."""
        self.check()
        if self.group is None:
            return [mine]
        values: list = [None] * self.size
        try:
            dist.all_gather_object(values, mine, group=self.group)
        except RuntimeError as error:
            self.give_up()
            raise TransportError(f"Checkpoints: a rank is lost: {error}") from error
        return values

    def agree(self, error: Exception | None) -> None:
        """Raises an error of one rank on all ranks, with the same type."""
        kinds = {ConfigError: "config", CheckpointError: "checkpoint"}
        told = self.gather(None if error is None else (kinds.get(type(error), ""), str(error)))
        if error is not None:
            raise error
        for rank, text in enumerate(told):
            if text is not None:
                kind = ConfigError if text[0] == "config" else CheckpointError
                raise kind(f"[rank {self.rank}/{self.size}] rank {rank}: {text[1]}")

    def close(self) -> None:
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
