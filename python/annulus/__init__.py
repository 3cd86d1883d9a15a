"""Exact attention over sequences that may be spread over the ranks of a ring.

`attention` computes on whole arrays in one process; `RingAttention` is one rank's part of a ring over a
`Transport`. A `Pattern` says who attends to whom (dense, LongNet, head groups), a `Placement` which rank
holds which tokens, and a `Plan` shows what moves where. Arrays of NumPy, PyTorch and anything else with DLPack
are used in place, on the CPU or a CUDA device.
"""

import os

from annulus._core import (
    Branch,
    BranchState,
    ConfigError,
    DeviceError,
    Error,
    Interrupted,
    OutOfMemory,
    Pattern,
    Placement,
    Plan,
    RingAttention,
    RingAttentionCache,
    RingCache,
    Transfer,
    Transport,
    TransportError,
    attention,
    attention_backward,
    cache_info,
    clear_cache,
    cuda_built,
    cuda_complaint,
    cuda_devices,
    gather_records,
    isa,
    make_in_process_ring,
    moves,
    reference_backward,
    reference_forward,
    threads,
)
from annulus._core import version as __version__

__all__ = [
    "Branch",
    "BranchState",
    "ConfigError",
    "DeviceError",
    "Error",
    "Interrupted",
    "OutOfMemory",
    "Pattern",
    "Placement",
    "Plan",
    "RingAttention",
    "RingAttentionCache",
    "RingCache",
    "Transfer",
    "Transport",
    "TransportError",
    "__version__",
    "attention",
    "attention_backward",
    "cache_info",
    "clear_cache",
    "cuda_built",
    "cuda_complaint",
    "cuda_devices",
    "gather_records",
    "isa",
    "make_in_process_ring",
    "moves",
    "reference_backward",
    "reference_forward",
    "threads",
]

# Users see annulus.ConfigError, not where it is compiled: in tracebacks, and in what is pickled.
for _name in __all__:
    if isinstance(globals()[_name], type):
        globals()[_name].__module__ = __name__
del _name

# Executors kept between calls use threads that a forked child does not have.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=clear_cache)
del os
