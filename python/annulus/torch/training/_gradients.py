"""Losses and gradients of weights that every rank has, over tokens that each has others of.

Gradients are averaged by whoever wraps the model: DistributedDataParallel, FSDP2 or DeepSpeed, each in buckets of its
own while backward still runs. They all take the mean over *ranks*. That this is the mean over *tokens* is seen to where
a loss is made, not where gradients are reduced: a hook for DDP would do it for DDP alone, and shards of FSDP and ZeRO
never are where a hook of ours could weigh them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from annulus import ConfigError
from annulus.torch._options import bucket_complaint, flag_complaint
from annulus.torch.ring._process_groups import group_size_and_rank


def token_mean(
    losses: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The mean of a loss over the tokens of all ranks, however many each has: the same number on every rank.

    Its gradient on a rank is that of the rank's own tokens' part of it, times the number of ranks: averaged over the
    ranks, as DistributedDataParallel, FSDP and DeepSpeed do, it is the gradient of the mean. Collective; one small
    message.

    Args:
        losses: of this rank's tokens, any shape, floating point: ``cross_entropy(..., reduction="none")``.
        weights: how much each loss counts, like losses; None: 1. ``labels != -100``, where some are ignored.
        group: the ranks over whose gradients the mean is taken: the ring, or all, where there are several rings; None:
            this process alone.

    Returns:
        a scalar, float32 at least; NaN where nothing counts.
    """
    ranks, _ = group_size_and_rank(group)
    wrong = _losses_complaint(losses, weights)
    if wrong is not None:
        raise ConfigError(f"token_mean: {wrong}")
    # Sums in 16 bits have three digits, and in float16 they end at 65,504.
    wide = torch.promote_types(losses.dtype, torch.float32)
    if weights is None:
        own, count = losses.sum(dtype=wide), torch.tensor(losses.numel())
    else:
        # Not a product alone: what does not count may be infinite or NaN.
        counted = torch.where(weights == 0, 0, losses)
        own, count = (counted.to(wide) * weights).sum(), weights.sum(dtype=torch.float64)
    # In float64: float32 counts up to 16.8 million tokens.
    whole = torch.stack([own.detach().double(), count.to(own.device, torch.float64)])
    if ranks > 1:
        dist.all_reduce(whole, group=group)
    share = own * (ranks / whole[1]).to(own.dtype)
    # The value of one, the gradient of the other. The difference is 0 exactly: a sum of both that is rounded would be
    # another number on each rank.
    return (share - share.detach()) + (whole[0] / whole[1]).to(own.dtype)


def _losses_complaint(losses: object, weights: object) -> str | None:
    for name, x in (("losses", losses), ("weights", weights)):
        if not isinstance(x, torch.Tensor) and (x is not None or name == "losses"):
            return f"{name} is a {type(x).__name__}: a torch.Tensor was expected"
    if not losses.is_floating_point():
        return f"losses is {losses.dtype}: floating point was expected"
    if weights is None:
        return None
    if weights.requires_grad:
        return "weights requires a gradient, which it would not get: pass weights.detach()"
    if weights.is_complex():
        return f"weights is {weights.dtype}: real numbers or torch.bool were expected"
    if weights.shape != losses.shape:
        return f"weights is {list(weights.shape)}, losses is {list(losses.shape)}: equal shapes were expected"
    return None


def data_parallel(
    module: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    bucket_size: float = 25.0,
    overlap_comm: bool = True,
    **options: object,
) -> nn.Module:
    """``DistributedDataParallel`` for a model whose ranks hold parts of one sequence.

    Gradients go out in buckets as soon as they are there, while backward still computes, and have arrived when
    ``backward`` returns: before any step of an optimizer. Make the loss with :func:`token_mean`.

    Args:
        module: with the same parameters on every rank; those of rank 0 are sent to the others.
        group: the ranks; None: this process alone, and the module is returned as it is.
        bucket_size: of one message, in MB (2**20 bytes). What is ready first goes in a smaller one of 1 MB.
        overlap_comm: False: no bucket leaves before backward has come to its end, so that gradients and the rows of
            the ring's backward are not on the same links at the same time. The same gradients.
        options: of ``DistributedDataParallel``.
    """
    wrong = bucket_complaint(bucket_size) or flag_complaint("overlap_comm", overlap_comm)
    if wrong is not None:
        raise ConfigError(f"data_parallel: {wrong}")
    group_size_and_rank(group)  # refuses what is no group
    if group is None:
        return module
    # Gradients are views of the buckets: nothing is copied back.
    parallel = DistributedDataParallel(
        module,
        process_group=group,
        bucket_cap_mb=float(bucket_size),
        **{"gradient_as_bucket_view": True, **options},
    )
    if not overlap_comm:
        parallel.register_comm_hook(_Held(group), _send_when_all_are_full)
    return parallel


class _Held:
    """Buckets of a backward that is not done."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.buckets: list[tuple[torch.Tensor, torch.futures.Future]] = []


# Not annotated: DDP compares annotations with types, and here they are texts.
def _send_when_all_are_full(held, bucket):
    """A hook of DDP, which calls it in the order of the buckets: the last one is full when backward is done."""
    if bucket.index() == 0:  # of a backward that has failed there may be some left
        held.buckets.clear()
    buffer = bucket.buffer()
    arrived = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    held.buckets.append((buffer, arrived))
    if bucket.is_last():
        sent = [dist.all_reduce(b, group=held.group, async_op=True) for b, _ in held.buckets]
        for work, (b, future) in zip(sent, held.buckets):
            work.wait()
            future.set_result(b.div_(dist.get_world_size(held.group)))
        held.buckets.clear()
    return arrived
