"""Stores that processes serve, so that they can meet again when the one that served theirs is lost."""

from __future__ import annotations

import datetime
import os
import socket
import weakref
from typing import NamedTuple

import torch.distributed as dist

from annulus.torch._rendezvous import within

# How long a rank may take to answer before it is not the one to meet at. One that is stopped never does; others have another
# try: PyTorch looks up the name of every address it connects to or hears from, and waits 5 s where the reply is lost.
_ANSWER = 1.0  # seconds
_REPLY = datetime.timedelta(seconds=20)  # to what is asked of a store that has answered once
_REFUSAL = 0.2  # seconds: it comes from the machine, not from the process


class Meeting(NamedTuple):
    """What the ranks of a group know of each other since they first had a ring."""

    name: str  # of that ring: another than all others, and the same on all
    addresses: list[str]  # of the stores that they serve, by rank; empty: it serves none


_NOWHERE = Meeting("", [])
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, Meeting] = weakref.WeakKeyDictionary()


def card(group: dist.ProcessGroup, near: dist.Store) -> str:
    """What a rank tells the others of a ring: the name by which it would meet them already, and its address."""
    return f"{meeting_of(group).name} {address(near)}"


def remember(group: dist.ProcessGroup, name: str, cards: list[bytes]) -> None:
    """Of a ring that this rank has now, and the others may have or not. Who was in an earlier one has its name, and
    whoever is in a later one has read that: so all have that of the first."""
    names, addresses = zip(*(each.decode().split(" ", 1) for each in cards), strict=True)
    first = next((earlier for earlier in names if earlier), name)
    meet(group, Meeting(first, list(addresses)))


def meet(group: dist.ProcessGroup, meeting: Meeting) -> None:
    _meetings.setdefault(group, meeting)


def meeting_of(group: dist.ProcessGroup) -> Meeting:
    return _meetings.get(group, _NOWHERE)


_served: dist.TCPStore | None = None
_inherited: list[dist.TCPStore | None] = []


def address(near: dist.Store) -> str:
    """Where this process serves a store for meetings after a loss; made on first use. Empty: it does not, because
    ANNULUS_STANDBY_STORE is 0. `near` is a store that the others reach: they reach this one by the same network."""
    global _served
    if os.environ.get("ANNULUS_STANDBY_STORE", "1") == "0":
        return ""
    host = _own_host(near)
    if _served is None:
        _served = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return f"{host} {_served.port}"


def _own_host(near: dist.Store) -> str:
    while isinstance(near, dist.PrefixStore):
        near = near.underlying_store
    host = getattr(near, "host", None)
    if host is None:
        return socket.gethostname()
    family, kind, _, _, peer = socket.getaddrinfo(host, near.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as towards:  # sends nothing
        towards.connect(peer)
        return towards.getsockname()[0]


class Place:
    """A store at which the ranks of a group may meet again: one that a rank serves, or the group's own."""

    def __init__(self, address: str, own: dist.Store | None = None):
        self._address = address
        self._own = own

    def open(self) -> dist.Store | None:
        """The store, over a connection of its own; None: nobody answers."""
        if self._own is not None:
            return self._own
        try:
            host, port = self._connect(_ANSWER)
            limit = datetime.timedelta(seconds=_ANSWER)
            store = within(
                _ANSWER + 0.5, lambda: dist.TCPStore(host, port, timeout=limit), "connecting"
            )
            store.set_timeout(_REPLY)
            return store
        except (OSError, RuntimeError):  # also what took too long
            return None

    def is_gone(self) -> bool:
        """Whether the process that serves it has ended: its machine refuses. One that is stopped does not, nor does one
        that cannot be reached."""
        try:
            if self._address:
                self._connect(_REFUSAL)
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False

    def may_answer(self) -> bool:
        """Whether it is worth another try."""
        return self._own is None and not self.is_gone()

    def _connect(self, seconds: float) -> tuple[str, int]:
        # PyTorch's client would try again and again; a process that has ended refuses at once.
        host, port = self._address.split()
        socket.create_connection((host, int(port)), seconds).close()
        return host, int(port)


def places(whole: dist.ProcessGroup, meeting: Meeting) -> dict[int, Place]:
    """Where the ranks of a group may meet, by the rank that serves the store; the lowest that answers is the first to
    go to. -1: the group's own store, if there never was a ring, or nobody serves one."""
    served = {rank: Place(address) for rank, address in enumerate(meeting.addresses) if address}
    return served or {-1: Place("", dist.distributed_c10d._world.pg_map[whole][1])}


def forget_after_fork() -> None:
    """The store that this process serves is its parent's. Kept: to drop it is to wait for a thread that is not here."""
    global _served
    _inherited.append(_served)
    _served = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_after_fork)
