"""key_padding_mask: its check, and masks that leave holes, computed with additional columns of q and k."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from annulus.torch import _fast_path
from annulus.torch._options import MOST_HEAD_DIM

_COLUMNS = 3
MOST_MASKED_HEAD_DIM = MOST_HEAD_DIM - _COLUMNS  # with a mask
# A score minus the square of this number times the scale is far below all other scores. float16 can represent it.
_LARGE = 60000.0
# The part of a bias that exceeds the range of float16 is in another column, divided by this.
_REST = 256.0


def key_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bias that is added to each key's scores, in float32 or wider; -inf: the key is ignored."""
    wide = dtype if dtype == torch.float64 else torch.float32
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=wide).masked_fill_(mask, -torch.inf)
    return mask.to(wide)


def mask_complaint(mask: object, q: torch.Tensor, k: torch.Tensor) -> str | None:
    """What is wrong with a key_padding_mask for these tensors; None: nothing."""
    if not isinstance(mask, torch.Tensor):
        return f"key_padding_mask is a {type(mask).__name__}: a torch.Tensor was expected"
    if mask.is_nested or mask.layout != torch.strided:
        return "key_padding_mask is nested or sparse: a dense tensor was expected"
    if mask.shape != k.shape[:2]:
        return f"key_padding_mask is {list(mask.shape)}: {list(k.shape[:2])} was expected, [batch, local keys]"
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return (
            f"key_padding_mask is {mask.dtype}: torch.bool (True: the key is ignored) or floating point (added to the "
            "scores) was expected. A tokenizer's attention_mask has 1 for a token: pass attention_mask == 0"
        )
    if mask.device != q.device:
        return f"key_padding_mask is on {mask.device}, but q is on {q.device}: one device was expected"
    return None


def head_dim_complaint(q: torch.Tensor) -> str | None:
    """What is wrong with the head dim for additional columns; None: nothing."""
    if q.dtype != torch.float64 and q.shape[3] > MOST_MASKED_HEAD_DIM:
        return (
            f"head_dim is {q.shape[3]}: at most {MOST_MASKED_HEAD_DIM} was expected with a key_padding_mask that does "
            "not leave one range of keys in each batch entry"
        )
    return None


class _WithoutIgnored(torch.autograd.Function):
    """Keys or values with 0 in ignored rows. Saves nothing for backward: ranks may give up an attempt at a call and begin
    anew, and activation checkpointing compares what forward and recomputation have saved."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, ignored: torch.Tensor) -> torch.Tensor:
        ctx.ignored = ignored
        return x.masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.masked_fill(ctx.ignored, 0), None


def widened(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v with additional columns that add a bias to the scores of each key.

    Column 0: q has 1, k the bias divided by the scale. Column 1: q has a large number, and k its negative if the key is
    ignored (a bias of -inf), else 0. Column 2: the part of column 0 that exceeds the range of float16; with a scale of
    1/16, this happens from a bias of -10,000 on. The other columns are 0: kernels are faster with a multiple of 8.
    """
    bias = key_bias(mask, q.dtype)
    head_dim = q.shape[3]
    out = bias == -torch.inf
    most = torch.finfo(q.dtype).max
    # At most a tenth of the bias of an ignored key.
    whole = (bias.masked_fill(out, 0) / scale).clamp(min=-0.1 * _LARGE * _LARGE)
    part = whole.clamp(-most, most)
    # detach(): the gradient of this column could overflow although that of column 0 does not.
    rest = ((whole - part).detach() / _REST).clamp(-most, most)
    columns = torch.stack([part.to(q.dtype), out.to(q.dtype) * -_LARGE, rest.to(q.dtype)], -1)
    # Filled on the device: a copy from the host would wait, and a CUDA graph cannot capture it.
    ones = torch.cat([q.new_ones(1), q.new_full((1,), _LARGE), q.new_full((1,), _REST)])
    more = (head_dim + _COLUMNS + 7) // 8 * 8 - head_dim
    zeros = (0, more - _COLUMNS)
    wide_q = torch.cat([q, F.pad(ones, zeros).expand(*q.shape[:3], more)], -1)
    columns = F.pad(columns, zeros)[:, :, None]
    # Ignored keys and values may be anything, also NaN or as large as the columns.
    if _fast_path.is_eager((q, k, v, mask)):
        k, v = (_WithoutIgnored.apply(x, out[..., None, None]) for x in (k, v))
    else:
        k, v = (x.masked_fill(out[..., None, None], 0) for x in (k, v))
    wide_k = torch.cat([k, columns.expand(*k.shape[:3], more)], -1)
    return wide_q, wide_k, F.pad(v, (0, more))


def narrowed(
    o: torch.Tensor, lse: torch.Tensor, head_dim: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of widened tensors as those of a call with a mask."""
    # Rows that attend to no key, or only to ignored keys.
    empty = lse < -0.5 * _LARGE * _LARGE * scale
    return o[..., :head_dim].masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf)
