"""The stores at which the ranks of a group can meet again after a loss."""

from __future__ import annotations

import datetime
import socket

import torch.distributed as dist

from annulus.torch.ring._rendezvous import within
from annulus.torch.ring._standby import Meeting

# A rank that does not answer within this time is not the one to meet at. It may only be slow, so it is asked again: PyTorch
# looks up the name of every address it connects to or hears from, and waits 5 s where the reply is lost.
_ANSWER = 1.0  # seconds
_REPLY = datetime.timedelta(seconds=20)  # limit of operations of a store that has answered once
_REFUSAL = 0.2  # seconds: the kernel refuses, so this is fast


class Place:
    """A store at which the ranks of a group may meet again: one that a rank serves, or the group's own."""

    def __init__(self, address: str, own: dist.Store | None = None):
        self._address = address
        self._own = own

    def open(self) -> dist.Store | None:
        """The store, over a connection of its own; None: no answer."""
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
        """Whether to try it again."""
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
