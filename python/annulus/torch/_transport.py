"""Rows over a torch.distributed process group."""

from __future__ import annotations

import datetime
import threading
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from annulus import Transport, TransportError

# PyTorch has no read-only tensors and says so once per process when one is made over read-only
# memory. Ours are only sent.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


class _Transfer:
    """One send or receive of a process group."""

    def __init__(
        self,
        transport: ProcessGroupTransport,
        peer: int,
        verb: str,
        work: object,
        tensor: torch.Tensor,
    ):
        self._transport = transport
        self._peer = peer
        self._verb = verb
        self._work = work
        self._tensor = tensor  # the group reads or writes it until the work is done

    def wait(self) -> None:
        if self._work is None:
            return
        try:
            self._work.wait(self._transport._deadline())
        except RuntimeError as error:
            raise self._transport._failure(self._peer, self._verb, error) from error
        finally:
            self.cancel()

    def done(self) -> bool:
        # A process group does not say before wait(): what has arrived shows there.
        return self._work is None or self._work.is_completed()

    def cancel(self) -> None:
        # Gloo drops an operation with its last reference: the buffer is not touched afterwards.
        self._work = None
        self._tensor = None


class ProcessGroupTransport(Transport):
    """Carries a ring over the ranks of a torch.distributed process group.

    It makes a process group of its own (Gloo, over the same ranks), so that its messages meet nobody
    else's and a failed pass takes nothing of the caller's down. Construction is collective over the
    group. :func:`ring_attention` makes its own; this class is for :class:`annulus.RingAttention`.

    Args:
        group: the ranks of the ring, in this order; None: all of them.
        timeout: seconds that one operation may take; None: the group's own timeout.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float | None = None):
        if not dist.is_available() or not dist.is_initialized():
            raise TransportError(
                "ProcessGroupTransport: torch.distributed is not initialised: call "
                "torch.distributed.init_process_group first (torchrun sets what it needs)"
            )
        parent = dist.group.WORLD if group is None else group
        if parent is dist.GroupMember.NON_GROUP_MEMBER:
            raise TransportError("ProcessGroupTransport: this process is not in the group")
        ranks = dist.get_process_group_ranks(parent)
        super().__init__(dist.get_rank(parent), len(ranks), "torch.distributed")
        self._global_ranks = ranks
        if timeout is None:
            self.set_deadline(_timeout_of(parent).total_seconds())
        else:
            self.set_deadline(timeout)
        # Only its members make it: with data parallelism beside the ring, other rings do the same
        # at other times.
        self._group = dist.new_group(
            ranks, timeout=self._deadline(), backend="gloo", use_local_synchronization=True
        )
        self._store = dist.PrefixStore(
            "annulus/" + self._group.group_name, dist.distributed_c10d._get_default_store()
        )
        self._failed: str | None = None
        self._failed_rank = -1
        self._lock = threading.Lock()

    @property
    def group(self) -> dist.ProcessGroup:
        """The private process group."""
        return self._group

    def send(self, peer: int, tag: int, buffer: memoryview) -> _Transfer:
        """Begins to send a buffer's bytes; they must not change until wait() of the returned transfer."""
        return self._start(peer, tag, buffer, "send to", dist.isend, "group_dst")

    def receive(self, peer: int, tag: int, buffer: memoryview) -> _Transfer:
        """Begins to receive into a buffer of exactly the size that is sent."""
        return self._start(peer, tag, buffer, "receive from", dist.irecv, "group_src")

    def _start(
        self,
        peer: int,
        tag: int,
        buffer: memoryview,
        verb: str,
        start: Callable,
        peer_argument: str,
    ) -> _Transfer:
        if self._failed is not None:
            raise self._error()
        if len(buffer) == 0:
            return _Transfer(self, peer, verb, None, None)
        tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        try:
            work = start(tensor, group=self._group, tag=tag, **{peer_argument: peer})
        except RuntimeError as error:
            raise self._failure(peer, verb, error) from error
        return _Transfer(self, peer, verb, work, tensor)

    def _failure(self, peer: int, verb: str, error: Exception) -> TransportError:
        """What an operation's error means; the transport is dead from here on."""
        with self._lock:
            if self._failed is None:
                told = self._told()
                self._failed_rank, why = told if told else (peer, str(error).strip())
                self._failed = (
                    f"[rank {self.rank()}/{self.size()}] {self.name()}: {verb} rank {peer} "
                    f"(process {self._global_ranks[peer]}) failed: "
                    + (f"rank {self._failed_rank} gave up: {why}" if told else why)
                )
        return self._error()

    def _error(self) -> TransportError:
        error = TransportError(self._failed)
        error.rank = self._failed_rank
        return error

    def _told(self) -> tuple[int, str] | None:
        """The rank that gave up first and its reason, if it still could say so."""
        try:
            if not self._store.check(["abort"]):
                return None
            rank, reason = self._store.get("abort").decode().split(" ", 1)
            return int(rank), reason
        except (RuntimeError, ValueError):  # the store may be gone with the process that served it
            return None

    def abort(self, reason: str) -> None:
        """Makes every pending and future operation of every rank fail; the others learn the reason
        where the group's store can still be reached."""
        with self._lock:
            first = self._failed is None
            if first:
                self._failed = (
                    f"[rank {self.rank()}/{self.size()}] {self.name()}: aborted: {reason}"
                )
                self._failed_rank = self.rank()
        try:
            if first and not self._store.check(["abort"]):
                self._store.set("abort", f"{self.rank()} {reason}")
        except RuntimeError:
            pass  # the others then learn of it from the closed connections alone
        self.close()

    @property
    def failed(self) -> bool:
        """Whether it is of no further use: an operation failed, or it was aborted or closed."""
        return self._failed is not None

    def close(self) -> None:
        """Closes the connections: whoever still waits for this rank gets an error at once."""
        group, self._group = self._group, None
        if self._failed is None:
            self._failed = f"[rank {self.rank()}/{self.size()}] {self.name()}: closed"
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _deadline(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self.deadline)


def _timeout_of(group: dist.ProcessGroup) -> datetime.timedelta:
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return dist.distributed_c10d.default_pg_timeout
