"""ProcessGroupTransport: a ring over the ranks of a torch.distributed process group."""

from __future__ import annotations

import atexit
import datetime
import os
import platform
import threading
import time
import warnings
import weakref
from collections.abc import Callable
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
from annulus.torch.ring._long_messages import LongMessage, Waiters
from annulus.torch.ring._rendezvous import Missing, new_name, store_of, value_of, within

# PyTorch warns once per process when a tensor is made over read-only memory. The tensors of the transport over such
# memory are only sent. This call uses up the warning.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)

# Gloo's timeouts end all connections before a rank can send the others the reason. So a thread of the transport watches
# the deadline, and Gloo's timeout is later by this many seconds.
_GLOO_LATER = 2.0
_LONGEST_SLEEP = 1.0  # seconds
# A thread that wakes up later than its deadline by this many seconds was stopped with its process.
_STOPPED = 0.2
# Seconds that closing waits for the threads of a transport. They end at once with the connections.
_LAST_THREADS = 10.0

# How long a transport that is dropped without close() waits for the other ranks to receive its last messages. It may be
# dropped by the garbage collector, in any line of a program.
_LAST_SENDS = datetime.timedelta(seconds=5)

# Transports with threads that wait for connections. Python ends threads that come back from such a wait while it exits
# itself, and PyTorch's C++ code does not survive that: these transports are closed before.
_open: weakref.WeakSet[ProcessGroupTransport] = weakref.WeakSet()


class _DeviceMemory:
    """Memory of a CUDA device in the form that torch.as_tensor accepts."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class _DeviceTransfer:
    """A batch of messages that NCCL has enqueued."""

    def __init__(self, transport: ProcessGroupTransport, stream: torch.cuda.Stream, works: list):
        self._transport = transport
        self._stream = stream
        self._works = works

    def wait(self) -> None:
        """Makes the stream wait. The host does not wait."""
        try:
            with torch.cuda.stream(self._stream):
                for work in self._works:
                    work.wait()
        except RuntimeError as error:
            raise self._transport._failure(self._transport.rank(), "messages by NCCL with", error) from error


def sendable(text: str) -> str:
    """The text with escapes for characters that UTF-8 cannot encode: parts of names that Python could not decode."""
    return text.encode("utf-8", "backslashreplace").decode()


def _host() -> str:
    """An ID of this host."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return platform.node()


class ProcessGroupTransport(Transport):
    """A ring over the ranks of a torch.distributed process group.

    It has its own Gloo connections between the ranks, whatever the group's backend is. So its messages do not mix with
    others, and a failed call does not break the caller's group. The ranks meet at the group's store; groups of the MPI
    backend have none, and get one that their first rank serves. Construction is collective over the group.

    Gloo carries host memory. Rows of CUDA tensors go from device to device between processes of one host, which share
    memory. Between hosts NCCL carries them, in its own group, if the group's backend for CUDA is NCCL. Otherwise the
    executor copies them to host memory and back.

    :func:`ring_attention` makes its own transport; this class is for :class:`annulus.RingAttention`.

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
        """A transport that replaces one that has lost a rank. If that rank is still missing, the error names it."""
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
        self._control: ControlMessages | None = None  # None: a single rank needs no control messages
        self._process = -1  # of the connections: a forked child must not close those of its parent
        self._threads: list[threading.Thread] = []
        self._waiters = Waiters()
        self._watched: set[int] = set()  # ranks for whose connections there is a thread of _report_end
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
            # The store of this group: a group of survivors has another one than the first group.
            base = store_of(group)
            name = new_name(base, prefix, rank, size, seconds)
            store = dist.PrefixStore(f"{prefix}/{name}", base)
            store.set(f"standby/{rank}", _standby.card(group, base))
            left = datetime.timedelta(seconds=max(1.0, until - time.monotonic()))
            gloo = dist.ProcessGroupGloo(store, rank, size, left)
            _standby.remember(group, name, [store.get(f"standby/{peer}") for peer in range(size)])
            return store, gloo

        try:
            # One second more than the deadline: new_name reports which ranks are missing when the deadline expires.
            self._store, self._gloo = within(seconds + 1, connect, "connecting")
        except (RuntimeError, TimeoutError) as error:
            text = str(error).strip()
            if isinstance(error, Missing):
                # If several ranks are missing, report the lost one.
                known = loss is not None and loss.rank in error.ranks
                self._failed_rank = loss.rank if known else error.ranks[0]
                text = (
                    f"rank {self._failed_rank} (process {self._global_ranks[self._failed_rank]}) did not come "
                    f"within {self.deadline:g} s: check that it is running and makes the same calls"
                )
            elif loss is not None:
                self._failed_rank = loss.rank
            if loss is not None:
                text += f" The ring before this one failed: {loss}"
            self._failed = f"{self._here()}: connecting failed: {text}"
            raise self._error() from error
        self._control = ControlMessages(self._gloo, rank, size)
        self._process = os.getpid()
        _open.add(self)
        self._start("annulus deadline", _watch, weakref.ref(self), self._awake)

    def _start(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _here(self) -> str:
        return f"[rank {self.rank()}/{self.size()}] {self.name()}"

    def _wants_nccl(self) -> bool:
        """Whether NCCL is to carry device memory; the same on every rank. Processes of one host share device memory
        instead, which occupies no multiprocessor."""
        wanted = os.environ.get("ANNULUS_DEVICE_MESSAGES", "")
        self._store.set(f"host/{self.rank()}", f"{wanted} {_host()}")
        wishes = []  # of each rank: how device memory is to travel, and its host
        until = time.monotonic() + self.deadline
        for peer in range(self.size()):
            value = value_of(self._store, f"host/{peer}", until)
            if value is None:
                raise self._failure(peer, "hear from", RuntimeError("Timed out"))
            wishes.append(value.decode().split(" ", 1))
        if any(way for way, _ in wishes):  # if ranks differ, the agreement of the executor reports it
            return all(way == "group" for way, _ in wishes)
        return len({host for _, host in wishes}) > 1

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
        """Whether batches are transferred in the order in which they were posted, as by NCCL."""
        return self._nccl is not None

    def reaches(self, device: str) -> bool:
        """Whether messages may be in the memory of a device."""
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
        """The function and the arguments that begin a message. The C++ library calls them itself."""
        with self._lock:
            if self._failed is not None:
                raise self._error()
            begin = self._gloo.send if way == "send" else self._gloo.recv
        message = [torch.frombuffer(buffer, dtype=torch.uint8)], peer, tag
        if len(buffer) <= self.short_message:
            return begin, message
        self._watch_connection(peer)
        return _begin_long, (self._waiters, self._ended, begin, *message)

    def _watch_connection(self, peer: int) -> None:
        """Starts a thread that reports the end of the connection to a rank."""
        if peer not in self._watched:
            self._watched.add(peer)
            name = f"annulus end {peer}"
            self._start(name, _report_end, self._control, self._ended, self._waiters, peer)

    def explain(self, peer: int, way: str, error: Exception) -> Exception:
        """The error to raise for an error of a message. The transport fails with it."""
        if not isinstance(error, RuntimeError):
            return error
        return self._failure(peer, "send to" if way == "send" else "receive from", error)

    def set_deadline(self, seconds: float) -> None:
        """Sets how long one operation may take. An operation that takes longer raises a TransportError."""
        before = self.deadline
        super().set_deadline(seconds)
        self.wait_limit = datetime.timedelta(seconds=seconds + _GLOO_LATER)
        if seconds < before:
            self._awake.set()

    def _failure(self, peer: int, verb: str, error: Exception) -> TransportError:
        with self._lock:
            if self._failed is None:
                # A rank that leaves because of another one sends LEAVES before its connections end. If there is no such
                # message, the rank itself is lost.
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
                why += f". Rank {peer} waits, directly or through other ranks, for rank {rank}"
            self._end(rank, reason, f"waiting for {self._name_of(peer)} failed: {why}")

    def say_waiting_elsewhere(self, waiting: bool) -> None:
        """Tells the other ranks that this rank waits for one of them outside of the ring, or that this wait is over.
        They do not report a waiting rank as lost."""
        if self._control is not None and self._failed is None:
            self._control.tell(WAITS if waiting else GOES_ON, ANY_RANK if waiting else self.rank())

    def _name_of(self, rank: int) -> str:
        return f"rank {rank} (process {self._global_ranks[rank]})"

    def _end(self, rank: int, reason: str, text: str, kind: int = LEAVES) -> None:
        """Ends the ring because of a rank, and sends the others the reason. The caller holds the lock."""
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
        """Makes every pending and future operation of every rank fail. The other ranks get the reason."""
        with self._lock:
            if self._failed is None:
                self._end(self.rank(), f"gave up: {reason}", f"aborted: {reason}")
        self._abort_nccl()

    def health(self) -> dict[str, Any]:
        """Whether the ring works, as far as this rank knows: 'alive', 'lost_rank' (-1: none or not known) and 'reason'.

        A failure of other ranks is reported even before an operation of this rank fails. May be called from any thread.
        """
        with self._lock:
            reason, rank = self._failed, self._failed_rank
        if reason is None and self._control is not None:
            last = self._control.leaver()
            if last is not None:
                rank, reason = last.rank, f"rank {last.rank}: {last.text}"
        return {"alive": reason is None, "lost_rank": rank, "reason": reason or ""}

    @property
    def failed(self) -> bool:
        """Whether the transport cannot be used any more: an operation failed, or it was aborted or closed."""
        return self._failed is not None

    @property
    def loss(self) -> TransportError | None:
        """The error with which another rank was lost; None: no rank was lost."""
        return self._error() if self._failed_rank not in (-1, self.rank()) else None

    def close(self) -> None:
        """Closes the connections, after the other ranks have received what this one has sent them. Ranks that wait for
        this one get an error immediately. If a rank lives on and never receives, this takes the deadline."""
        # The last call may be over on this rank alone: its short messages are not waited for. A rank that did not get
        # one would raise another error than this rank, or one that no other rank has.
        if self._failed is None and self.waiting is None:
            self.finish_sends()
        with self._lock:
            if self._failed is None:
                self._end(self.rank(), "closed its ring", "closed", CLOSES)
                self._failed_rank = -1  # no rank has failed
        self._abort_nccl()
        until = time.monotonic() + _LAST_THREADS
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def __del__(self) -> None:
        if getattr(self, "_process", -1) == os.getpid():
            self.wait_limit = min(self.wait_limit, _LAST_SENDS)
            self.close()

    def _abort_nccl(self) -> None:
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            nccl.abort()  # also ends the waits of its streams


# No method: the library keeps what prepare() returns, so that a transport would keep itself alive.
def _begin_long(waiters: Waiters, ended: set[int], begin: Any, *message: Any) -> LongMessage:
    return LongMessage(waiters, begin(*message), message[1], ended.__contains__)


@atexit.register
def _close_all() -> None:
    for transport in list(_open):
        if transport._process == os.getpid():
            transport.close()


def _report_end(control: ControlMessages, ended: set[int], waiters: Waiters, peer: int) -> None:
    """Waits for the end of the connection to a rank, and reports it."""
    control.wait_for_the_last(peer)
    ended.add(peer)
    waiters.end(peer)


def _watch(transport: weakref.ref[ProcessGroupTransport], awake: threading.Event) -> None:
    """Watches the deadline of a transport's waits until it ends, and tells the other ranks of long waits."""
    announced = 0  # the number of the wait that the others have been told of
    pause = 0.0
    while True:
        awake.wait(pause)
        awake.clear()
        alive = transport()
        if alive is None or alive.failed:
            return
        waiting = alive.waiting
        limit = alive.deadline
        pause = min(_LONGEST_SLEEP, limit / 4)
        alive._control.leaver()  # reads the messages that have arrived, so that the next ones can be received
        if announced != 0 and (waiting is None or waiting[0] != announced):
            alive._control.tell(GOES_ON, alive.rank())
            announced = 0
        if waiting is not None and waiting[2] >= 0:
            number, seconds, peer = waiting
            if seconds >= limit:
                if seconds >= limit + _STOPPED:  # then messages of the others may not have been received yet
                    time.sleep(_STOPPED)
                alive._expire(seconds, peer)
                return
            # Not before half the deadline: a rank that has waited for less may itself be late.
            if seconds >= limit / 2 and announced == 0:
                alive._control.tell(WAITS, peer)
                announced = number
            pause = min(pause, limit - seconds)
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
