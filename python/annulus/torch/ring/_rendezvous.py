"""Rendezvous of the ranks of a ring: over the store of their process group, within the deadline."""

from __future__ import annotations

import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")

_ANSWERED = b"answered"  # replaces the ID of a request


class Missing(RuntimeError):
    """Ranks that did not take part in making a ring."""

    def __init__(self, ranks: list[int]):
        super().__init__(ranks)
        self.ranks = ranks


def within(seconds: float, function: Callable[[], T], what: str) -> T:
    """Returns function(), or raises a TimeoutError if it takes longer. Ctrl-C interrupts it.

    Operations of a store have no timeout when the process that serves the store is stopped.
    """
    outcome: list = []
    done = threading.Event()

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:  # noqa: BLE001 (raised in the caller's thread)
            outcome.append((None, error))
        done.set()

    threading.Thread(target=run, name=f"annulus {what}", daemon=True).start()
    until = time.monotonic() + seconds
    while not done.wait(min(0.1, max(0.0, until - time.monotonic()))):
        if time.monotonic() >= until:
            raise TimeoutError(f"{what} took longer than {seconds:g} s")
    result, error = outcome.pop()
    try:
        if error is not None:
            raise error
        return result
    finally:
        del error  # breaks a reference cycle: the error refers to this frame


# The stores of groups for which PyTorch has none.
_stores: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.Store] = weakref.WeakKeyDictionary()


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """A client of a group's store that only the caller uses.

    A client of a TCPStore does one operation at a time, also one that waits for other ranks. Two threads that make
    rings of two groups with one client could deadlock if another rank makes the rings in the other order.
    """
    store = dist.distributed_c10d._world.pg_map[group][1]
    base = _base(store)
    if type(base) is dist.Store:
        store = _stores.get(group) or _serve(group)
        base = store
    if not isinstance(base, dist.TCPStore) or not hasattr(store, "clone"):
        return store
    store.check(["alive"])  # fails immediately if the serving process has ended: a new client would retry for long
    return store.clone()


def _base(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _serve(group: dist.ProcessGroup) -> dist.Store:
    """A store for a group without one: groups of PyTorch's MPI backend have a placeholder without operations.

    The first rank serves the store and broadcasts its address in the group; all ranks join the broadcast when they
    first need the store. The broadcast has no deadline: call this by :func:`within`.
    """
    address: list = [None]
    if dist.get_rank(group) == 0:
        host = socket.gethostname()
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        address = [(host, store.port)]
    dist.broadcast_object_list(address, group=group, group_src=0)
    if dist.get_rank(group) != 0:
        store = dist.TCPStore(*address[0], is_master=False, wait_for_workers=False)
    _stores[group] = store
    return store


def value_of(store: dist.Store, key: str, until: float) -> bytes | None:
    """Waits for a key and returns its value; None: the key did not exist in time."""
    nap = 0.001
    while not store.check([key]):
        if time.monotonic() >= until:
            return None
        time.sleep(nap)
        nap = min(2 * nap, 0.02)
    return store.get(key)


def new_name(store: dist.Store, prefix: str, rank: int, size: int, seconds: float) -> str:
    """A name that no ring had before, the same on every rank. Collective; raises Missing.

    Uses only the store: the ranks need not have the same other groups, and no message of the caller's group is left
    over when a rank is missing. Every other rank sends rank 0 a request with a unique ID, so that keys of an earlier
    attempt are never taken for an answer to this one.
    """
    store = dist.PrefixStore(prefix, store)
    until = time.monotonic() + seconds
    # present/<rank> is empty while a rank waits, and afterwards has the time at which the rank left. The clock is a
    # counter that all ranks share. Ranks that wait in vain read from these keys which ranks are missing: not a rank
    # that gave up earlier, but also a rank that was present for an earlier attempt only.
    began = store.add("clock", 1)
    store.set(f"present/{rank}", "")
    try:
        if rank == 0:
            return _give_name(store, size, until)
        return _ask_name(store, rank, size, until, began)
    finally:
        store.set(f"present/{rank}", str(store.add("clock", 1)))


def _was_present(store: dist.Store, rank: int, began: int) -> bool:
    """Whether a rank has been present at or after the time `began`."""
    if not store.check([f"present/{rank}"]):
        return False
    left = store.get(f"present/{rank}")
    return not left or int(left) > began


def _ask_name(store: dist.Store, rank: int, size: int, until: float, began: int) -> str:
    request = uuid.uuid4().hex
    store.set(f"request/{rank}", request)
    answer = value_of(store, f"answer/{request}", until)
    store.delete_key(f"answer/{request}")
    if answer is None:
        store.delete_key(f"request/{rank}")
        absent = [p for p in range(size) if p != rank and not _was_present(store, p, began)]
        raise Missing(absent or [0])
    if answer.startswith(b"!"):
        raise Missing([int(answer[1:])])
    return answer.decode()


def _give_name(store: dist.Store, size: int, until: float) -> str:
    requests = {}
    for peer in range(1, size):
        request = _new_request(store, peer, until)
        if request is None:
            # The ranks that are present get an answer now, and need not wait for their own deadlines.
            for other in range(1, size):
                request = _new_request(store, other, 0)
                if request is not None:
                    _answer(store, other, request, f"!{peer}")
            raise Missing([peer])
        requests[peer] = request
    name = uuid.uuid4().hex
    for peer, request in requests.items():
        _answer(store, peer, request, name)
    return name


def _answer(store: dist.Store, peer: int, request: bytes, answer: str) -> None:
    # The rank may have given up and sent a newer request, which stays.
    store.compare_set(f"request/{peer}", request.decode(), _ANSWERED.decode())
    store.set(f"answer/{request.decode()}", answer)


def _new_request(store: dist.Store, peer: int, until: float) -> bytes | None:
    """Waits for a request of a rank that has not been answered, and returns its ID; None: there was none in time."""
    request = value_of(store, f"request/{peer}", until)
    while request == _ANSWERED:
        if time.monotonic() >= until:
            return None
        time.sleep(0.005)
        request = value_of(store, f"request/{peer}", until)
    return request
