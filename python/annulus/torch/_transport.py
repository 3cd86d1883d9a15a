"""Rows over a torch.distributed process group."""

from __future__ import annotations

import datetime
import os
import platform
import threading
import time
import uuid
import warnings
from typing import Any

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

    def cancel(self) -> None:
        # Gloo drops an operation with its last reference: the buffer is not touched afterwards.
        self._work = None
        self._tensor = None


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


# What a store's `request/<rank>` held when rank 0 last answered it, by store prefix and rank.
_answered: dict[tuple[str, int], bytes] = {}


def _value_of(store: dist.Store, key: str, until: float) -> bytes | None:
    """What a key holds as soon as it does; None: not in time. Short naps, so that Ctrl-C is heard."""
    nap = 0.001
    while not store.check([key]):
        if time.monotonic() >= until:
            return None
        time.sleep(nap)
        nap = min(2 * nap, 0.02)
    return store.get(key)


class _Missing(RuntimeError):
    """Ranks that did not come to make a ring."""

    def __init__(self, ranks: list[int]):
        super().__init__(ranks)
        self.ranks = ranks


def _new_name(prefix: str, rank: int, size: int, seconds: float) -> str:
    """A name that no ring had before, the same on every rank. Collective; raises _Missing.

    Over the store alone: neither do the ranks' other groups have to be the same ones, nor is a message of
    the caller's group left behind when a rank is missing. Every other rank asks rank 0 by a word of its
    own, so that what is left of an earlier attempt is never taken for an answer to this one.
    """
    store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
    until = time.monotonic() + seconds
    # Who is there, for those that wait in vain. It stays after a failure, so that who gives up first is not
    # taken for the one that never came.
    store.set(f"present/{rank}", "")
    name = (_give_name if rank == 0 else _ask_name)(store, prefix, rank, size, until)
    store.delete_key(f"present/{rank}")
    return name


def _ask_name(store: dist.Store, prefix: str, rank: int, size: int, until: float) -> str:
    word = uuid.uuid4().hex
    store.set(f"request/{rank}", word)
    answer = _value_of(store, f"answer/{word}", until)
    if answer is None:
        store.delete_key(f"request/{rank}")
        absent = [p for p in range(size) if p != rank and not store.check([f"present/{p}"])]
        raise _Missing(absent or [0])
    if answer.startswith(b"!"):
        raise _Missing([int(answer[1:])])
    return answer.decode()


def _give_name(store: dist.Store, prefix: str, rank: int, size: int, until: float) -> str:
    words = {}
    for peer in range(1, size):
        word = _new_word(store, prefix, peer, until)
        if word is None:
            # Those that are there, too, need not wait until they have waited as long.
            for other in range(1, size):
                word = _new_word(store, prefix, other, 0)
                if word is not None:
                    store.set(f"answer/{word.decode()}", f"!{peer}")
                    _answered[prefix, other] = word
            raise _Missing([peer])
        words[peer] = word
    name = uuid.uuid4().hex
    for peer, word in words.items():
        _answered[prefix, peer] = word
        store.set(f"answer/{word.decode()}", name)
    return name


def _new_word(store: dist.Store, prefix: str, peer: int, until: float) -> bytes | None:
    """The word by which a rank asks, once it is another than the one that was answered last."""
    word = _value_of(store, f"request/{peer}", until)
    while word is not None and _answered.get((prefix, peer)) == word:
        if time.monotonic() >= until:
            return None
        time.sleep(0.005)
        word = _value_of(store, f"request/{peer}", until)
    return word


class ProcessGroupTransport(Transport):
    """Carries a ring over the ranks of a torch.distributed process group.

    It has connections of its own (Gloo, over the same ranks, whatever the group's own backend is), so that its
    messages meet nobody else's and a failed pass takes nothing of the caller's down. They carry host memory. Rows of
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
        """One that replaces a ring which ended by the loss of a rank, and says so if that is still missing."""
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
        self.set_deadline(timeout_of(parent) if timeout is None else timeout)
        self._failed: str | None = None
        self._failed_rank = -1
        self._lock = threading.Lock()
        self._gloo: dist.ProcessGroupGloo | None = None
        self._store: dist.Store | None = None  # a rank alone needs neither
        self._nccl: dist.ProcessGroup | None = None
        if len(ranks) > 1:
            self._connect("annulus/" + parent.group_name, loss)
            if _backend_of(parent, "cuda") == "nccl" and self._wants_nccl():
                self._connect_nccl()

    def _connect(self, prefix: str, loss: TransportError | None) -> None:
        try:
            name = _new_name(prefix, self.rank(), self.size(), self.deadline)
            self._store = dist.PrefixStore(
                f"{prefix}/{name}", dist.distributed_c10d._get_default_store()
            )
            self._gloo = dist.ProcessGroupGloo(
                self._store, self.rank(), self.size(), self._deadline()
            )
        except RuntimeError as error:
            text = str(error).strip()
            if isinstance(error, _Missing):
                # If several are missing, the one that was lost is why.
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
            self._failed = (
                f"[rank {self.rank()}/{self.size()}] {self.name()}: connecting failed: {text}"
            )
            raise self._error() from error

    def _wants_nccl(self) -> bool:
        """Whether NCCL is to carry device memory: the same answer on every rank. Processes of one host share it, which
        takes no multiprocessor's time."""
        wanted = os.environ.get("ANNULUS_DEVICE_MESSAGES", "")
        self._store.set(f"host/{self.rank()}", f"{wanted} {_host()}")
        told = []
        until = time.monotonic() + self.deadline
        for peer in range(self.size()):
            value = _value_of(self._store, f"host/{peer}", until)
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
                timeout=self._deadline(),
                backend="nccl",
                use_local_synchronization=True,
            )
            # All ranks have to take part in what makes the connections; later each meets its own peers alone.
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

    def send(self, peer: int, tag: int, buffer: memoryview) -> _Transfer:
        """Starts sending a buffer of bytes to a rank."""
        return self._start("send", peer, tag, buffer)

    def receive(self, peer: int, tag: int, buffer: memoryview) -> _Transfer:
        """Starts receiving a buffer of bytes from a rank."""
        return self._start("recv", peer, tag, buffer)

    def _start(self, way: str, peer: int, tag: int, buffer: memoryview) -> _Transfer:
        verb = "send to" if way == "send" else "receive from"
        if self._failed is not None:
            raise self._error()
        if len(buffer) == 0:
            return _Transfer(self, peer, verb, None, None)
        tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        try:
            work = getattr(self._gloo, way)([tensor], peer, tag)
        except RuntimeError as error:
            raise self._failure(peer, verb, error) from error
        return _Transfer(self, peer, verb, work, tensor)

    def _failure(self, peer: int, verb: str, error: Exception) -> TransportError:
        """What an operation's error means; the transport is dead from here on."""
        with self._lock:
            if self._failed is None:
                why = str(error).strip()
                told = self._told()
                if told is None:
                    # The others, whose connections end with this rank's, are to know whose fault it is.
                    self._failed_rank = self._culprit(peer) if "imed out" in why else peer
                    self._tell(self._failed_rank, f"lost by rank {self.rank()}: {why}")
                    if self._failed_rank != peer:
                        why += f" Rank {peer} waits for others, in the end for rank {self._failed_rank}."
                else:
                    self._failed_rank, reason = told
                    why = f"rank {self._failed_rank}: {reason}"
                self._failed = (
                    f"[rank {self.rank()}/{self.size()}] {self.name()}: {verb} rank {peer} "
                    f"(process {self._global_ranks[peer]}) failed: {why}"
                )
        return self._error()

    def _culprit(self, peer: int) -> int:
        """Who keeps everybody waiting: a rank that waits itself and is waited for says for whom."""
        try:
            self._store.set(f"waits/{self.rank()}", str(peer))
            seen = {self.rank()}
            while peer not in seen:
                seen.add(peer)
                # The others' time is up at about the same moment.
                value = _value_of(self._store, f"waits/{peer}", time.monotonic() + 0.2)
                if value is None:
                    break
                peer = int(value)
        except RuntimeError:  # the store may be gone with the process that served it
            pass
        return peer

    def _tell(self, rank: int, reason: str) -> None:
        """Tells the others why this ring ended, unless somebody has."""
        try:
            if self._store is not None and not self._store.check(["abort"]):
                self._store.set("abort", sendable(f"{rank} {reason}"))
        except RuntimeError:
            pass  # the others then learn of it from the closed connections alone

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
        if first:
            self._tell(self.rank(), f"gave up: {reason}")
        self.close()

    def health(self) -> dict[str, Any]:
        """Whether the ring holds together, also where no operation of this rank has failed yet: 'alive',
        'lost_rank' (-1: none or not known) and 'reason'. From any thread."""
        with self._lock:
            reason, rank = self._failed, self._failed_rank
        if reason is None and self._store is not None:
            told = self._told()
            if told is not None:
                rank, reason = told[0], f"rank {told[0]}: {told[1]}"
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
        """Closes the connections: whoever still waits for this rank gets an error at once."""
        if self._failed is None:
            self._failed = f"[rank {self.rank()}/{self.size()}] {self.name()}: closed"
        gloo, self._gloo = self._gloo, None
        if gloo is not None:
            gloo.abort()
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            nccl.abort()  # also what its streams wait for

    def _deadline(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self.deadline)


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
