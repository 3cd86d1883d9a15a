"""The random numbers of dropout (src/kernels/dropout.h) as tensors, for attention with a matrix of scores."""

from __future__ import annotations

import torch

_WORD = 2**32 - 1


def _signed(x: int) -> int:
    """A number of 64 bits as an int64. Products of int64 keep the low 64 bits, as those of unsigned numbers do."""
    return x - 2**64 if x >= 2**63 else x


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits without copies of the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _mixed_word(x: torch.Tensor) -> torch.Tensor:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def _drawn(stream: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return _mixed(stream + (n + 1) * _signed(0x9E3779B97F4A7C15))


def kept_pairs(
    seed: torch.Tensor, p: float, batch: int, heads: int, token: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """Whether a pair keeps its weight, [batch, heads, queries, keys]: as in the kernels, for one process.

    `token` and `key` are the tokens of the queries and of the keys, int64.
    """
    device = token.device
    entry, head = (torch.arange(n, dtype=torch.int64, device=device) for n in (batch, heads))
    rows = _drawn(_drawn(_mixed(seed.to(device)), entry)[:, None], head)
    words = _drawn(rows[..., None], token)
    flip, factor = words & _WORD, _shifted(words, 32) | 1
    of_key = _mixed_word(key ^ (_mixed(rows) & _WORD)[..., None])
    x = ((of_key[:, :, None] ^ flip[..., None]) * factor[..., None]) & _WORD
    x = ((x ^ (x >> 16)) * 0x9E3779B1) & _WORD
    number = torch.where(x >= 2**31, x - 2**32, x)
    return number >= min(round(p * 2**32), _WORD) - 2**31
