"""Rows over a torch.distributed process group."""

from __future__ import annotations

import datetime
import os
import platform
import threading
import time
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist

from annulus import Transport, TransportError
from annulus.torch.ring import _standby
from annulus.torch.ring._control_messages import (
    ANY_RANK,
    CLOSES,
    GOES_ON,
    LEAVES,
    WAITS,
    ControlMessages,
)
from annulus.torch.ring._patience import LongMessage, Waiters
from annulus.torch.ring._rendezvous import Missing, new_name, store_of, value_of, within

# PyTorch has no read-only tensors and says so once per process when one is made over read-only
# memory. Ours are only sent.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)

# Gloo's own timeouts end all connections before a rank can tell the others why. So a thread of the transport keeps the
# deadline, and Gloo's timeout is this much later. Seconds.
_GLOO_LATER = 2.0
_LONGEST_NAP = 1.0  # seconds
_OVERSLEPT = 0.2


class _DeviceMemory:
    """Bytes of a CUDA device at an address, as PyTorch takes them."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class _DeviceTransfer:
    """A batch that NCCL has enqueued."""

    def __init__(self, transport: ProcessGroupTransport, stream: torch.cuda.Stream, works: list):
        self._transport = transport
        self._stream = stream
        self._works = works

    def wait(self) -> None:
        """Makes the stream wait, not the host."""
        try:
            with torch.cuda.stream(self._stream):
                for work in self._works:
                    work.wait()
        except RuntimeError as error:
            raise self._transport._failure(self._transport.rank(), "messages by NCCL with", error) from error


def sendable(text: str) -> str:
    """The text with what UTF-8 does not have escaped: parts of names that Python could not decode."""
    return text.encode("utf-8", "backslashreplace").decode()


def _host() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return platform.node()


class ProcessGroupTransport(Transport):
    """Carries a ring over the ranks of a torch.distributed process group.

    It has connections of its own (Gloo, over the same ranks, whatever the group's own backend is), so that its
    messages do not mix with those of others and a failed call does not break the caller's group. The ranks meet at the group's
    store; groups of the MPI backend have none, and get one that their first rank serves. They carry host memory. Rows of
    CUDA tensors go from device to device between processes of one host, which share memory; between hosts NCCL carries them, in
    a group of its own, if the group's backend for CUDA is NCCL; else the executor copies them to host memory and
    back. Construction is collective over the group.
    :func:`ring_attention` makes its own; this class is for :class:`annulus.RingAttention`.

    Args:
        group: the ranks of the ring, in this order; None: all of them.
        timeout: seconds that one operation may take, construction included; None: the group's own timeout.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float | None = None):
        self._make(group, timeout, None)

    @classmethod
    def _instead_of(
        cls, loss: TransportError | None, group: dist.ProcessGroup, timeout: float | None
    ) -> ProcessGroupTransport:
        """A transport that replaces one which has lost a rank. Its error names that rank if it is still missing."""
        transport = cls.__new__(cls)
        transport._make(group, timeout, loss)
        return transport

    def _make(
        self,
        group: dist.ProcessGroup | None,
        timeout: float | None,
        loss: TransportError | None,
    ) -> None:
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
        self._awake = threading.Event()
        self.set_deadline(timeout_of(parent) if timeout is None else timeout)
        self._failed: str | None = None
        self._failed_rank = -1
        self._lock = threading.Lock()
        self._gloo: dist.ProcessGroupGloo | None = None
        self._store: dist.Store | None = None
        self._control: ControlMessages | None = None  # None: a rank alone needs no control messages
        self._waiters = Waiters()
        self._heard: set[int] = set()  # ranks whose connections are watched
        self._ended: set[int] = set()  # ranks whose connections have ended
        self._nccl: dist.ProcessGroup | None = None
        if len(ranks) > 1:
            self._connect(parent, loss)
            if _backend_of(parent, "cuda") == "nccl" and self._wants_nccl():
                self._connect_nccl()

    def _connect(self, group: dist.ProcessGroup, loss: TransportError | None) -> None:
        prefix = "annulus/" + group.group_name
        rank, size, seconds = self.rank(), self.size(), self.deadline
        until = time.monotonic() + seconds

        def connect() -> tuple[dist.Store, dist.ProcessGroupGloo]:
            # The group's own: that of a group of survivors is not the one that the first processes came by.
            base = store_of(group)
            name = new_name(base, prefix, rank, size, seconds)
            store = dist.PrefixStore(f"{prefix}/{name}", base)
            store.set(f"standby/{rank}", _standby.card(group, base))
            left = datetime.timedelta(seconds=max(1.0, until - time.monotonic()))
            gloo = dist.ProcessGroupGloo(store, rank, size, left)
            _standby.remember(group, name, [store.get(f"standby/{peer}") for peer in range(size)])
            return store, gloo

        try:
            # One second more than the deadline, by which it is known which ranks are missing.
            self._store, self._gloo = within(seconds + 1, connect, "connecting")
        except (RuntimeError, TimeoutError) as error:
            text = str(error).strip()
            if isinstance(error, Missing):
                # If several ranks are missing, report the lost one.
                known = loss is not None and loss.rank in error.ranks
                self._failed_rank = loss.rank if known else error.ranks[0]
                text = (
                    f"rank {self._failed_rank} (process {self._global_ranks[self._failed_rank]}) did not come "
                    f"within {self.deadline:g} s: is it still running and making the same calls?"
                )
            elif loss is not None:
                self._failed_rank = loss.rank
            if loss is not None:
                text += f" The ring before this one ended so: {loss}"
            self._failed = f"{self._here()}: connecting failed: {text}"
            raise self._error() from error
        self._control = ControlMessages(self._gloo, rank, size)
        threading.Thread(
            target=_watch, args=(weakref.ref(self), self._awake), name="annulus deadline", daemon=True
        ).start()

    def _here(self) -> str:
        return f"[rank {self.rank()}/{self.size()}] {self.name()}"

    def _wants_nccl(self) -> bool:
        """Whether NCCL is to carry device memory: the same answer on every rank. Processes of one host share it, which
        takes no multiprocessor's time."""
        wanted = os.environ.get("ANNULUS_DEVICE_MESSAGES", "")
        self._store.set(f"host/{self.rank()}", f"{wanted} {_host()}")
        told = []
        until = time.monotonic() + self.deadline
        for peer in range(self.size()):
            value = value_of(self._store, f"host/{peer}", until)
            if value is None:
                raise self._failure(peer, "hear of", RuntimeError("Timed out"))
            told.append(value.decode().split(" ", 1))
        if any(way for way, _ in told):  # who wants what is the executor's to compare
            return all(way == "group" for way, _ in told)
        return len({host for _, host in told}) > 1

    def _connect_nccl(self) -> None:
        try:
            self._nccl = dist.new_group(
                self._global_ranks,
                timeout=datetime.timedelta(seconds=self.deadline),
                backend="nccl",
                use_local_synchronization=True,
            )
            # All ranks take part in the first operation, which makes the connections. Later ones involve two ranks.
            dist.all_reduce(torch.zeros(1, device="cuda"), group=self._nccl)
        except RuntimeError as error:
            raise self._failure(self.rank(), "connect by NCCL", error) from error

    @property
    def in_order(self) -> bool:
        """NCCL carries batches out in the order in which they were posted."""
        return self._nccl is not None

    def reaches(self, device: str) -> bool:
        """Whether messages may lie in the memory of a device."""
        return device == "cpu" or self._nccl is not None

    def post_device(
        self, messages: list[tuple[str, int, int, int, int]], device: str, stream: int
    ) -> _DeviceTransfer:
        """Starts a batch of messages in device memory, as one operation of NCCL."""
        if self._failed is not None:
            raise self._error()
        on = torch.cuda.ExternalStream(stream, device)
        operations = [
            dist.P2POp(
                dist.isend if way == "send" else dist.irecv,
                torch.as_tensor(_DeviceMemory(address, size), device=device),
                self._global_ranks[peer],
                self._nccl,
                tag,
            )
            for way, peer, tag, address, size in messages
            if size > 0
        ]
        try:
            with torch.cuda.stream(on):
                works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise self._failure(self.rank(), "messages by NCCL with", error) from error
        return _DeviceTransfer(self, on, works)

    def prepare(self, way: str, peer: int, tag: int, buffer: memoryview) -> tuple:
        """How to begin a message: the C++ library calls Gloo directly, without this object."""
        with self._lock:
            if self._failed is not None:
                raise self._error()
            begin = self._gloo.send if way == "send" else self._gloo.recv
        message = [torch.frombuffer(buffer, dtype=torch.uint8)], peer, tag
        if len(buffer) <= self.short_message:
            return begin, message
        self._listen_to(peer)
        return self._begin_long, (begin, *message)

    def _begin_long(self, begin: Any, *message: Any) -> LongMessage:
        return LongMessage(self._waiters, begin(*message), message[1], self._ended.__contains__)

    def _listen_to(self, peer: int) -> None:
        """Watches the connection to a rank for its end."""
        if peer not in self._heard:
            self._heard.add(peer)
            threading.Thread(
                target=_hear,
                args=(self._control, self._ended, self._waiters, peer),
                name=f"annulus end {peer}",
                daemon=True,
            ).start()

    def explain(self, peer: int, way: str, error: Exception) -> Exception:
        """What an error of a message means; the transport is dead from here on."""
        if not isinstance(error, RuntimeError):
            return error
        return self._failure(peer, "send to" if way == "send" else "receive from", error)

    def set_deadline(self, seconds: float) -> None:
        """How long one operation may take; one that takes longer raises a TransportError."""
        before = self.deadline
        super().set_deadline(seconds)
        self.wait_limit = datetime.timedelta(seconds=seconds + _GLOO_LATER)
        if seconds < before:
            self._awake.set()

    def _failure(self, peer: int, verb: str, error: Exception) -> TransportError:
        with self._lock:
            if self._failed is None:
                # A rank that leaves because of another sends LEAVES before its connections end. Otherwise it is lost.
                last = self._control.of(peer) if peer != self.rank() else self._control.leaver()
                if last is not None and last.kind in (LEAVES, CLOSES):
                    rank, reason = last.rank, last.text
                    why = f"rank {rank}: {reason}"
                else:
                    rank, why = peer, str(error).strip()
                    reason = f"lost by rank {self.rank()}: {why}"
                self._end(rank, reason, f"{verb} {self._name_of(peer)} failed: {why}")
        return self._error()

    def _expire(self, seconds: float, peer: int) -> None:
        """A wait has taken longer than the deadline."""
        with self._lock:
            if self._failed is not None:
                return
            rank = self._control.awaited(self.rank(), peer)
            reason = f"lost by rank {self.rank()}: timed out after {seconds:.3g} s"
            last = self._control.leaver()
            if last is not None:
                rank, reason = last.rank, last.text
            why = f"rank {rank}: {reason}"
            if rank != peer:
                why += f". Rank {peer} waits for others, in the end for rank {rank}"
            self._end(rank, reason, f"waiting for {self._name_of(peer)} failed: {why}")

    def say_waiting_elsewhere(self, waiting: bool) -> None:
        """Tells the others that this rank waits for one of them outside of the ring, or that this wait is over. Such a rank
        is not the one that keeps them waiting."""
        if self._control is not None and self._failed is None:
            self._control.tell(WAITS if waiting else GOES_ON, ANY_RANK if waiting else self.rank())

    def _name_of(self, rank: int) -> str:
        return f"rank {rank} (process {self._global_ranks[rank]})"

    def _end(self, rank: int, reason: str, text: str, kind: int = LEAVES) -> None:
        """Ends the ring because of a rank, and lets the others know. With the lock."""
        self._failed = f"{self._here()}: {text}"
        self._failed_rank = rank
        if self._control is not None:
            self._control.leave(kind, rank, reason)
        self._waiters.close()
        self._awake.set()
        self._gloo = None
        self.forget_prepared()

    def _error(self) -> TransportError:
        error = TransportError(self._failed)
        error.rank = self._failed_rank
        return error

    def abort(self, reason: str) -> None:
        """Makes every pending and future operation of every rank fail; the others learn the reason."""
        with self._lock:
            if self._failed is None:
                self._end(self.rank(), f"gave up: {reason}", f"aborted: {reason}")
        self._abort_nccl()

    def health(self) -> dict[str, Any]:
        """Whether the ring holds together, also where no operation of this rank has failed yet: 'alive',
        'lost_rank' (-1: none or not known) and 'reason'. From any thread."""
        with self._lock:
            reason, rank = self._failed, self._failed_rank
        if reason is None and self._control is not None:
            last = self._control.leaver()
            if last is not None:
                rank, reason = last.rank, f"rank {last.rank}: {last.text}"
        return {"alive": reason is None, "lost_rank": rank, "reason": reason or ""}

    @property
    def failed(self) -> bool:
        """Whether it is of no further use: an operation failed, or it was aborted or closed."""
        return self._failed is not None

    @property
    def loss(self) -> TransportError | None:
        """The error by which another rank was lost, if one was."""
        return self._error() if self._failed_rank not in (-1, self.rank()) else None

    def close(self) -> None:
        """Closes the connections: ranks that still wait for this one get an error at once."""
        with self._lock:
            if self._failed is None:
                self._end(self.rank(), "closed its ring", "closed", CLOSES)
                self._failed_rank = -1  # no rank has failed
        self._abort_nccl()

    def _abort_nccl(self) -> None:
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            nccl.abort()  # also what its streams wait for


def _hear(control: ControlMessages, ended: set[int], waiters: Waiters, peer: int) -> None:
    """Waits for the end of the connection to a rank, and reports it."""
    control.wait_for_the_last(peer)
    ended.add(peer)
    waiters.end(peer)


def _watch(transport: weakref.ref[ProcessGroupTransport], awake: threading.Event) -> None:
    """Keeps the deadline of a transport's waits until it ends, and tells the other ranks of long waits."""
    told = 0  # number of the wait that the others have been told of
    nap = 0.0
    while True:
        awake.wait(nap)
        awake.clear()
        alive = transport()
        if alive is None or alive.failed:
            return
        waiting = alive.waiting
        limit = alive.deadline
        nap = min(_LONGEST_NAP, limit / 4)
        alive._control.leaver()  # receives what has arrived, so that there is room for the next message
        if told != 0 and (waiting is None or waiting[0] != told):
            alive._control.tell(GOES_ON, alive.rank())
            told = 0
        if waiting is not None and waiting[2] >= 0:
            number, seconds, peer = waiting
            if seconds >= limit:
                if seconds >= limit + _OVERSLEPT:  # this process was stopped: messages of the others may not have been read
                    time.sleep(_OVERSLEPT)
                alive._expire(seconds, peer)
                return
            # At half the deadline: a rank that has waited for less may be the late one.
            if seconds >= limit / 2 and told == 0:
                alive._control.tell(WAITS, peer)
                told = number
            nap = min(nap, limit - seconds)
        del alive


def _backend_of(group: dist.ProcessGroup, device: str) -> str:
    """The name of a group's backend for a kind of device; empty: it has none."""
    try:
        return group._get_backend(torch.device(device)).name().lower()
    except (RuntimeError, AttributeError):
        return ""


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds that an operation of a group may take."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout.total_seconds()
        except (RuntimeError, AttributeError):
            continue
    return dist.distributed_c10d.default_pg_timeout.total_seconds()
