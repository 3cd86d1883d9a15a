"""The stores at which the ranks of a group can meet again after a loss."""

from __future__ import annotations

import datetime
import socket

import torch.distributed as dist

from annulus.torch.ring._rendezvous import within
from annulus.torch.ring._standby import Meeting

# The ranks do not meet at a rank that does not answer within this time. It may only be slow, so it is asked again:
# PyTorch looks up the name of every address that it connects to or hears from, and waits 5 s where the reply is lost.
_ANSWER = 1.0  # seconds
_REPLY = datetime.timedelta(seconds=20)  # limit of operations of a store that has answered once
_REFUSAL = 0.2  # seconds; the kernel refuses the connection, so this is fast


class Place:
    """A store at which the ranks of a group may meet again: one that a rank serves, or the group's own."""

    def __init__(self, address: str, own: dist.Store | None = None):
        self._address = address
        self._own = own

    def open(self) -> dist.Store | None:
        """The store, over a new connection; None: no answer."""
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
        except (OSError, RuntimeError):  # including timeouts
            return None

    def is_gone(self) -> bool:
        """Whether the process that serves the store has ended, so that its machine refuses connections. A process that
        is stopped or cannot be reached does not refuse them."""
        try:
            if self._address:
                self._connect(_REFUSAL)
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False

    def may_answer(self) -> bool:
        """Whether another attempt makes sense."""
        return self._own is None and not self.is_gone()

    def _connect(self, seconds: float) -> tuple[str, int]:
        # PyTorch's client would retry. A plain connection to an ended process is refused at once.
        host, port = self._address.split()
        socket.create_connection((host, int(port)), seconds).close()
        return host, int(port)


def places(whole: dist.ProcessGroup, meeting: Meeting) -> dict[int, Place]:
    """Where the ranks of a group may meet, by the rank that serves the store. The lowest rank that answers comes first.
    Key -1 is the group's own store; it is used if no rank serves one, as before the first ring."""
    served = {rank: Place(address) for rank, address in enumerate(meeting.addresses) if address}
    return served or {-1: Place("", dist.distributed_c10d._world.pg_map[whole][1])}
