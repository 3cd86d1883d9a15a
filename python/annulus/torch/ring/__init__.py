"""The ring over a process group: connections between ranks, agreement on calls, and messages around the ring.

This package has everything that several ranks do together: rendezvous, the transport over torch.distributed, control
messages, deadlines, errors that are raised on all ranks, the cached rings and executors of this process, and the
primitives that send tensors from rank to rank. Attention, models and training are built on it. Nothing here imports
them.
"""

from annulus.torch.ring._memory_info import get_memory_info
from annulus.torch.ring._primitives import ring_pass, ring_pass_kv
from annulus.torch.ring._registry import cleanup, clear_cache
from annulus.torch.ring._report import RingLink, RingReport, check_ring
from annulus.torch.ring._transport import ProcessGroupTransport

__all__ = [
    "ProcessGroupTransport",
    "RingLink",
    "RingReport",
    "check_ring",
    "cleanup",
    "clear_cache",
    "get_memory_info",
    "ring_pass",
    "ring_pass_kv",
]
