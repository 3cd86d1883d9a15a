"""How the ranks of a ring find each other: over the store of their process group, within the deadline."""

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

_ANSWERED = b"answered"  # in the place of a word

class Missing(RuntimeError):
    """Ranks that did not come to make a ring."""

    def __init__(self, ranks: list[int]):
        super().__init__(ranks)
        self.ranks = ranks


def within(seconds: float, function: Callable[[], T], what: str) -> T:
    """function(), or a TimeoutError if it takes longer: a store's operations have no limit of their own when the
    process that serves it is stopped. Ctrl-C is heard."""
    outcome: list = []
    done = threading.Event()

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:  # noqa: BLE001: it is the caller's
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
        del error  # which would hold this frame, and be held by it


# Of groups that have none of their own.
_stores: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.Store] = weakref.WeakKeyDictionary()


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """A client of a group's store, for the caller alone.

    Clients of a TCPStore do one operation at a time, also where it waits for other ranks. Two threads that make rings
    of two groups by one client would wait for each other, if those of another rank come in another order.
    """
    store = dist.distributed_c10d._world.pg_map[group][1]
    base = _base(store)
    if type(base) is dist.Store:
        store = _stores.get(group) or _serve(group)
        base = store
    if not isinstance(base, dist.TCPStore) or not hasattr(store, "clone"):
        return store
    store.check(["alive"])  # an error at once where its process has ended: a new client would try for long
    return store.clone()


def _base(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _serve(group: dist.ProcessGroup) -> dist.Store:
    """A store for a group that has none: those of PyTorch's MPI backend have a placeholder without operations.

    The first rank serves it, and tells the others its address by a broadcast in the group, which all ranks join when
    they first need it. The broadcast has no deadline of its own: call this by :func:`within`.
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
    """What a key holds as soon as it does; None: not in time."""
    nap = 0.001
    while not store.check([key]):
        if time.monotonic() >= until:
            return None
        time.sleep(nap)
        nap = min(2 * nap, 0.02)
    return store.get(key)


def new_name(store: dist.Store, prefix: str, rank: int, size: int, seconds: float) -> str:
    """A name that no ring had before, the same on every rank. Collective; raises Missing.

    Over the store alone: neither do the ranks' other groups have to be the same ones, nor is a message of
    the caller's group left behind when a rank is missing. Every other rank asks rank 0 by a word of its
    own, so that what is left of an earlier attempt is never taken for an answer to this one.
    """
    store = dist.PrefixStore(prefix, store)
    until = time.monotonic() + seconds
    # Who is there, for those that wait in vain: nothing while a rank waits, then when it went, by a clock that all share. Who
    # gives up first is not taken for the one that never came, nor one that was there for an earlier attempt for one that came.
    began = store.add("clock", 1)
    store.set(f"present/{rank}", "")
    try:
        if rank == 0:
            return _give_name(store, size, until)
        return _ask_name(store, rank, size, until, began)
    finally:
        store.set(f"present/{rank}", str(store.add("clock", 1)))


def _came(store: dist.Store, rank: int, began: int) -> bool:
    """Whether a rank has been there since then."""
    if not store.check([f"present/{rank}"]):
        return False
    went = store.get(f"present/{rank}")
    return not went or int(went) > began


def _ask_name(store: dist.Store, rank: int, size: int, until: float, began: int) -> str:
    word = uuid.uuid4().hex
    store.set(f"request/{rank}", word)
    answer = value_of(store, f"answer/{word}", until)
    store.delete_key(f"answer/{word}")
    if answer is None:
        store.delete_key(f"request/{rank}")
        absent = [p for p in range(size) if p != rank and not _came(store, p, began)]
        raise Missing(absent or [0])
    if answer.startswith(b"!"):
        raise Missing([int(answer[1:])])
    return answer.decode()


def _give_name(store: dist.Store, size: int, until: float) -> str:
    words = {}
    for peer in range(1, size):
        word = _new_word(store, peer, until)
        if word is None:
            # Those that are there, too, need not wait until they have waited as long.
            for other in range(1, size):
                word = _new_word(store, other, 0)
                if word is not None:
                    _answer(store, other, word, f"!{peer}")
            raise Missing([peer])
        words[peer] = word
    name = uuid.uuid4().hex
    for peer, word in words.items():
        _answer(store, peer, word, name)
    return name


def _answer(store: dist.Store, peer: int, word: bytes, answer: str) -> None:
    # It may have given up, and ask by another word by now: that one stays.
    store.compare_set(f"request/{peer}", word.decode(), _ANSWERED.decode())
    store.set(f"answer/{word.decode()}", answer)


def _new_word(store: dist.Store, peer: int, until: float) -> bytes | None:
    """The word by which a rank asks, once it is one that was not answered."""
    word = value_of(store, f"request/{peer}", until)
    while word == _ANSWERED:
        if time.monotonic() >= until:
            return None
        time.sleep(0.005)
        word = value_of(store, f"request/{peer}", until)
    return word
