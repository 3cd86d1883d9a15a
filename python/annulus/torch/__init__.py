"""Ring attention for PyTorch: a differentiable function, modules, and a ring over torch.distributed.

    from annulus.torch import ring_attention, shard, positions

    o = ring_attention(q, k, v, segment_lengths=[2048, 8192], dilation_rates=[1, 4], is_causal=True)

Tensors may be on the CPU or on a CUDA device. There, calls enqueue work on the current stream without waiting for it,
and workspaces come from PyTorch's allocator. With ``group=`` every rank passes its shard of the sequence; see
:func:`ring_attention`.

Attention is in this package itself. Its sub-packages are :mod:`annulus.torch.ring` (connections between ranks),
:mod:`annulus.torch.training`, :mod:`annulus.torch.checkpoints`, :mod:`annulus.torch.faults` and
:mod:`annulus.torch.variants` (names of published code). All public names can be imported from here.
"""

import sys as _sys

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "annulus.torch needs PyTorch (pip install torch)", name="torch"
    ) from error

from annulus.torch import _memory
from annulus.torch._functional import ring_attention
from annulus.torch._modules import RingDilatedAttention
from annulus.torch._multihead import RingMultiheadDilatedAttention
from annulus.torch._resharding import reshard
from annulus.torch._ring_cache import RingCache
from annulus.torch._rotary import rotary_table
from annulus.torch._sharding import positions, shard, unshard
from annulus.torch.checkpoints import CheckpointError, Checkpoints, Resumed
from annulus.torch.faults import survivors
from annulus.torch.ring import (
    ProcessGroupTransport,
    RingLink,
    RingReport,
    check_ring,
    cleanup,
    clear_cache,
    get_memory_info,
    ring_pass,
    ring_pass_kv,
)
from annulus.torch.training import (
    LongNet,
    LongNetLM,
    RingAdvancedDistributedDilatedAttention,
    Training,
    data_parallel,
    token_mean,
)
from annulus.torch.variants import (
    RingDilatedAttentionHilbertGPUOptimized,
    RingDilatedAttentionSDPA,
    RingDilatedAttentionTrue,
    RingDilatedAttentionV2Collective,
    RingDilatedAttentionV2DeepSpeed,
    RingDilatedAttentionV2FSDP,
    RingDilatedAttentionV2Robust,
    RingDistributedDilatedAttention,
    StandardRingAttention,
)

_memory.install()

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "LongNet",
    "LongNetLM",
    "ProcessGroupTransport",
    "Resumed",
    "RingAdvancedDistributedDilatedAttention",
    "RingCache",
    "RingDilatedAttention",
    "RingDilatedAttentionHilbertGPUOptimized",
    "RingDilatedAttentionSDPA",
    "RingDilatedAttentionTrue",
    "RingDilatedAttentionV2Collective",
    "RingDilatedAttentionV2DeepSpeed",
    "RingDilatedAttentionV2FSDP",
    "RingDilatedAttentionV2Robust",
    "RingDistributedDilatedAttention",
    "RingLink",
    "RingMultiheadDilatedAttention",
    "RingReport",
    "StandardRingAttention",
    "Training",
    "check_ring",
    "cleanup",
    "clear_cache",
    "data_parallel",
    "get_memory_info",
    "positions",
    "reshard",
    "ring_attention",
    "ring_pass",
    "ring_pass_kv",
    "rotary_table",
    "shard",
    "survivors",
    "token_mean",
    "unshard",
]

# Users see annulus.torch.X, not the private module that defines it: in tracebacks, and in what torch.save stores.
for _name in __all__:
    if not globals()[_name].__module__.endswith(".variants"):
        globals()[_name].__module__ = __name__
# Models that torch.save stored before there were sub-packages refer to the modules that defined their classes then.
for _old, _new in {
    "_advanced": "training._advanced",
    "_longnet": "training._longnet",
    "_services": "training._services",
}.items():
    _sys.modules[f"{__name__}.{_old}"] = _sys.modules[f"{__name__}.{_new}"]
_sys.modules[f"{__name__}._modules"].RingMultiheadDilatedAttention = RingMultiheadDilatedAttention
del _name, _old, _new
