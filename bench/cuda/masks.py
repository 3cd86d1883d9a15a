"""Windows and packed documents beside PyTorch's FlexAttention, varlen_attn and one SDPA call per document."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import annulus
import torch
import torch._functorch.config
import torch.nn.functional as F
from ours import HEADS, Ours, Report, longnet_pattern
from peers import Function, medians

TOKENS = 65536

# FlexAttention's backward runs many times over one forward.
torch._functorch.config.donated_buffer = False


def gradients(o: torch.Tensor, leaves: list[torch.Tensor], do: torch.Tensor) -> Function:
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


def masked(report: Report, label: str, pattern: annulus.Pattern, mask_mod: Callable[..., Any], pairs: float, dim: int,
           others: Callable[..., dict[str, tuple[Function, Function]]] = lambda *_: {}) -> None:
    """Ours beside FlexAttention with mask_mod, and `others`: forward and backward by name, given q, k, v and do.

    Results are compared before anything is timed.
    """
    names = [f"{label}_{p}_d{dim}" for p in ("forward", "backward", "backward_deterministic")]
    if not report.wants(*names):
        return
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    own, same = Ours(pattern, 1, TOKENS, dim), Ours(pattern, 1, TOKENS, dim, deterministic=True)
    part = own.parts[0]
    for n in ("q", "k", "v", "do"):
        same.parts[0][n].copy_(part[n])
    leaves = [part[n].transpose(1, 2).contiguous().requires_grad_() for n in ("q", "k", "v")]
    do = part["do"].transpose(1, 2).contiguous()
    mask = create_block_mask(mask_mod, None, None, TOKENS, TOKENS, device="cuda", _compile=True)
    compiled = torch.compile(flex_attention)

    def flex_forward() -> torch.Tensor:
        with torch.no_grad():
            return compiled(*leaves, block_mask=mask)

    o = compiled(*leaves, block_mask=mask)
    expected = (o, *gradients(o, leaves, do)())
    for each in (own, same):
        each.run("forward")()
        each.run("backward")()
        for n, e in zip(("o", "dq", "dk", "dv"), expected, strict=True):
            found, wanted = each.parts[0][n].transpose(1, 2).float(), e.detach().float()
            error = float((found - wanted).norm() / wanted.norm())
            print(f"{label} d{dim}: {n} differs from FlexAttention's by {error:.1e}", flush=True)
            assert error < 2e-2, (n, error)
    rivals = {"FlexAttention": (flex_forward, gradients(o, leaves, do)), **others(*(part[n] for n in ("q", "k", "v", "do")))}
    flops = 4.0 * dim * HEADS * pairs
    for i, name in enumerate(names[:2]):
        functions = {"own": own.run(("forward", "backward")[i])}
        if i == 1:
            functions["same"] = same.run("backward")
        times = medians({**functions, **{peer: both[i] for peer, both in rivals.items()}}, report.rounds)
        for peer in rivals:
            suffix = "" if peer == "FlexAttention" else "_" + peer.split()[0].lower()
            report.add(name + suffix, times["own"], peer, times[peer], flops * (2.5 if i else 1))
        if i == 1:
            report.add(names[2], times["same"], "FlexAttention", times["FlexAttention"], 2.5 * flops)


def window(report: Report, dim: int) -> None:
    """A causal window of 1,024 tokens."""
    keys = 1024
    masked(report, "window_64k_causal_1k", annulus.Pattern.dense(HEADS, True, window=(keys - 1, 0)),
           lambda _b, _h, i, j: (j <= i) & (i - j < keys), TOKENS * keys - keys * (keys - 1) / 2, dim)


def dilated_window(report: Report, keys: int) -> None:
    """A causal window with dilation 16, in which each token sees `keys` others: FlexAttention computes 16 times as many pairs."""
    pattern = annulus.Pattern.longnet(HEADS, [TOKENS], [16], causal=True, offsets="all", window=((keys - 1) * 16, 0))
    masked(report, f"dilated_window_64k_causal_{keys}", pattern,
           lambda _b, _h, i, j: (j <= i) & (i - j < 16 * keys) & ((i - j) % 16 == 0), pattern.allowed_pairs(TOKENS) / HEADS, 128)


def boundaries(count: int) -> list[int]:
    cuts = random.Random(1).sample(range(1, TOKENS), count - 1)
    return [0, *sorted(cuts), TOKENS]


def by_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, cuts: list[int]) -> tuple[Function, Function]:
    from torch.nn.attention.varlen import varlen_attn

    leaves = [x[0].detach().requires_grad_() for x in (q, k, v)]
    starts = torch.tensor(cuts, dtype=torch.int32, device="cuda")
    longest = max(b - a for a, b in zip(cuts, cuts[1:]))
    causal = {"is_causal": True} if "is_causal" in inspect.signature(varlen_attn).parameters else {"window_size": (-1, 0)}

    def run() -> torch.Tensor:
        return varlen_attn(*leaves, starts, starts, longest, longest, **causal)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return run()

    return forward, gradients(run(), leaves, do[0])


def by_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, cuts: list[int]) -> tuple[Function, Function]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def run() -> torch.Tensor:
        parts = [F.scaled_dot_product_attention(*(x[:, a:b].transpose(1, 2) for x in leaves), is_causal=True)
                 for a, b in zip(cuts, cuts[1:])]
        return torch.cat(parts, 2)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return run()

    return forward, gradients(run(), leaves, do.transpose(1, 2))


def documents(report: Report) -> None:
    """32 random documents, causal."""
    cuts = boundaries(32)
    number = torch.repeat_interleave(torch.arange(32, device="cuda"), torch.tensor(cuts, device="cuda").diff())
    pairs = sum(n * (n + 1) / 2 for n in (b - a for a, b in zip(cuts, cuts[1:])))

    def others(*tensors: torch.Tensor) -> dict[str, tuple[Function, Function]]:
        return {"varlen_attn": by_varlen(*tensors, cuts), "SDPA per document": by_sdpa(*tensors, cuts)}

    masked(report, "documents_64k_32_causal", annulus.Pattern.dense(HEADS, True).with_documents(cuts),
           lambda _b, _h, i, j: (j <= i) & (number[i] == number[j]), pairs, 128, others)


def beside(report: Report, name: str, ours: annulus.Pattern, other: annulus.Pattern, peer: str, *, per_pair: bool = False) -> None:
    """Our time for one pattern beside our time for another; per_pair: for as many pairs."""
    if not report.wants(name):
        return
    rings = [Ours(pattern, 1, TOKENS, 128) for pattern in (ours, other)]
    for ring in rings:
        ring.run("forward")()
    factor = ours.allowed_pairs(TOKENS) / other.allowed_pairs(TOKENS) if per_pair else 1.0
    for what in ("forward", "backward"):
        times = medians({"ours": rings[0].run(what), "other": rings[1].run(what)}, report.rounds)
        report.add(f"{name}_{what}", times["ours"], peer, times["other"] * factor)


def longnet_documents(report: Report) -> None:
    for causal in (False, True):
        plain = longnet_pattern(causal)
        beside(report, f"documents_longnet_d128_64k_{'causal' if causal else 'full'}", plain.with_documents(boundaries(32)), plain,
               "without, equal pairs", per_pair=True)


def nothing(report: Report) -> None:
    """Masks that hide nothing beside no mask."""
    for causal in (False, True):
        plain = annulus.Pattern.dense(HEADS, causal)
        wide = annulus.Pattern.dense(HEADS, causal, window=(TOKENS, 0 if causal else TOKENS))
        mask = "causal" if causal else "full"
        beside(report, f"documents_one_d128_64k_{mask}", plain.with_documents([0, TOKENS]), plain, "no documents")
        beside(report, f"window_whole_d128_64k_{mask}", wide, plain, "no window")
