"""Standby stores: every process serves one, so that the others can meet again after the loss of the process that served
the store of their group."""

from __future__ import annotations

import os
import socket
import weakref
from typing import NamedTuple

import torch.distributed as dist


class Meeting(NamedTuple):
    """Where the ranks of a group can meet, which they tell each other when they make a ring."""

    name: str  # of the first ring: unique, and the same on all ranks
    addresses: list[str]  # the addresses of the ranks' stores; an empty one: the rank serves none


_NOWHERE = Meeting("", [])
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, Meeting] = weakref.WeakKeyDictionary()


def card(group: dist.ProcessGroup, near: dist.Store) -> str:
    """The text that a rank sends the others when a ring is made: the name of its first ring over this group, and the
    address of its store."""
    return f"{meeting_of(group).name} {address(near)}"


def remember(group: dist.ProcessGroup, name: str, cards: list[bytes]) -> None:
    """Stores the ranks' cards when a ring has been made.

    All ranks end with the name of the group's first ring. If that ring was made on some ranks only, these ranks tell
    its name to the others when the next ring is made.
    """
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
    """The address of the store that this process serves, which is made on first use. Empty: ANNULUS_STANDBY_STORE is 0.

    `near` is a store that the others reach. The address is on the same network.
    """
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


def forget_after_fork() -> None:
    """A forked child must not use its parent's store. The object is kept: its destructor waits for a thread that the
    child does not have."""
    global _served
    _inherited.append(_served)
    _served = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_after_fork)
