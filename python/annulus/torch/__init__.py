"""Ring attention for PyTorch: a differentiable function, modules, and a ring over torch.distributed.

    from annulus.torch import ring_attention, shard, positions

    o = ring_attention(q, k, v, segment_lengths=[2048, 8192], dilation_rates=[1, 4], is_causal=True)

Tensors may be on the CPU or on a CUDA device, whose current stream does the work: calls do not wait for it.
Workspaces there come from PyTorch's allocator. With ``group=`` every rank passes its shard of the sequence; see
:func:`ring_attention`.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "annulus.torch needs PyTorch (pip install torch)", name="torch"
    ) from error

from annulus.torch import _memory
from annulus.torch._advanced import RingAdvancedDistributedDilatedAttention
from annulus.torch._checkpoints import CheckpointError, Checkpoints, Resumed
from annulus.torch._functional import ring_attention
from annulus.torch._gradients import data_parallel, token_mean
from annulus.torch._longnet import LongNet, LongNetLM
from annulus.torch._modules import RingDilatedAttention, RingMultiheadDilatedAttention
from annulus.torch._primitives import ring_pass, ring_pass_kv
from annulus.torch._resharding import reshard
from annulus.torch._ring_report import RingLink, RingReport, check_ring
from annulus.torch._rings import cleanup, clear_cache, get_memory_info
from annulus.torch._rotary import rotary_table
from annulus.torch._sharding import positions, shard, unshard
from annulus.torch._survivors import survivors
from annulus.torch._training import Training
from annulus.torch._transport import ProcessGroupTransport
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
