"""Losses and gradients when every rank has the same weights and different tokens.

The wrapper of the model averages gradients: DistributedDataParallel, FSDP2 or DeepSpeed, each in its own buckets while
backward still runs. They all take the mean over *ranks*. :func:`token_mean` scales the loss so that this becomes the
mean over *tokens*. Scaling gradients instead would need a hook in each wrapper, and FSDP and ZeRO have none that could
do it.
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
    """The mean of a loss over the tokens of all ranks, however many each rank has. All ranks get the same number.

    The gradient on a rank is that of the rank's own tokens, times the number of ranks. Its average over the ranks,
    which DistributedDataParallel, FSDP and DeepSpeed compute, is the gradient of the mean. Collective; one small
    message.

    Args:
        losses: losses of this rank's tokens, any shape, floating point: ``cross_entropy(..., reduction="none")``.
        weights: the weight of each loss, shaped like losses; None: 1. Pass ``labels != -100`` to ignore some tokens.
        group: the ranks over which gradients are averaged: the ring, or all ranks if there are several rings; None:
            this process alone.

    Returns:
        a scalar, at least float32; NaN if all weights are 0.
    """
    ranks, _ = group_size_and_rank(group)
    wrong = _losses_complaint(losses, weights)
    if wrong is not None:
        raise ConfigError(f"token_mean: {wrong}")
    # Sums in 16 bits have about three digits, and float16 ends at 65,504.
    wide = torch.promote_types(losses.dtype, torch.float32)
    if weights is None:
        own, count = losses.sum(dtype=wide), torch.tensor(losses.numel())
    else:
        # Not a product alone: losses of weight 0 may be infinite or NaN.
        counted = torch.where(weights == 0, 0, losses)
        own, count = (counted.to(wide) * weights).sum(), weights.sum(dtype=torch.float64)
    # In float64, because float32 counts only up to 16.8 million tokens.
    whole = torch.stack([own.detach().double(), count.to(own.device, torch.float64)])
    if ranks > 1:
        dist.all_reduce(whole, group=group)
    share = own * (ranks / whole[1]).to(own.dtype)
    # The value of the second term with the gradient of the first. The difference is exactly 0, so that the value has
    # the same bits on every rank.
    return (share - share.detach()) + (whole[0] / whole[1]).to(own.dtype)


def _losses_complaint(losses: object, weights: object) -> str | None:
    for name, x in (("losses", losses), ("weights", weights)):
        if not isinstance(x, torch.Tensor) and (x is not None or name == "losses"):
            return f"{name} is a {type(x).__name__}, expected a torch.Tensor"
    if not losses.is_floating_point():
        return f"losses is {losses.dtype}, expected floating point"
    if weights is None:
        return None
    if weights.requires_grad:
        return "weights requires a gradient, which it would not get: pass weights.detach()"
    if weights.is_complex():
        return f"weights is {weights.dtype}, expected real numbers or torch.bool"
    if weights.shape != losses.shape:
        return f"weights is {list(weights.shape)}, losses is {list(losses.shape)}, expected equal shapes"
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

    Gradients are sent in buckets while backward still computes, and are complete when ``backward`` returns. Make the
    loss with :func:`token_mean`.

    Args:
        module: has the same parameters on every rank; those of rank 0 are sent to the others.
        group: the ranks; None: this process alone, and the module is returned unchanged.
        bucket_size: size of a message in MB (2**20 bytes). The first message has 1 MB.
        overlap_comm: False: all buckets are sent at the end of backward, so that gradients and the rows of the ring's
            backward do not share links. Gradients are the same.
        options: further options of ``DistributedDataParallel``.
    """
    wrong = bucket_complaint(bucket_size) or flag_complaint("overlap_comm", overlap_comm)
    if wrong is not None:
        raise ConfigError(f"data_parallel: {wrong}")
    group_size_and_rank(group)  # raises if it is no group
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
    """Full buckets of a backward that is still running."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.buckets: list[tuple[torch.Tensor, torch.futures.Future]] = []


# Not annotated: DDP compares annotations with types, and here they are strings.
def _send_when_all_are_full(held, bucket):
    """A hook of DDP, which calls it in the order of the buckets. The last bucket is full when backward is done."""
    if bucket.index() == 0:  # a backward that has failed may have left some
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
