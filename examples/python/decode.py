"""Decodes tokens of a toy language model on a ring: torchrun --nproc-per-node 2 examples/python/decode.py

Every rank runs the model on the new token; the keys and values of all layers are spread over the ranks. Started without
torchrun, it runs in one process and prints the same tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from annulus.torch import RingCache
from torch import nn

HEADS, KV_HEADS, DIM = 4, 2, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = HEADS * DIM
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, (HEADS + 2 * KV_HEADS) * DIM)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, cache: RingCache) -> torch.Tensor:
        """The new tokens [batch, new, width]; their keys and values go into the cache."""
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, DIM))
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
        return x + self.out(cache.step(q, k, v).flatten(2))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()
    group = None
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        group = dist.group.WORLD

    torch.manual_seed(0)  # the same model on every rank
    prompt = torch.randint(256, (1, 100))
    embedding = nn.Embedding(256, HEADS * DIM)
    layers = [Layer() for _ in range(arguments.layers)]
    shape = {"capacity": prompt.shape[1] + arguments.tokens, "heads": HEADS, "kv_heads": KV_HEADS}
    tokens, new = [], prompt
    with contextlib.ExitStack() as stack:  # closes the caches
        caches = [
            stack.enter_context(RingCache(group, head_dim=DIM, block=16, **shape)) for _ in layers
        ]
        for _ in range(arguments.tokens):
            x = embedding(new)
            for layer, cache in zip(layers, caches, strict=True):
                x = layer(x, cache)
            # Every rank has the same bits, and so chooses the same token.
            new = (x[:, -1:] @ embedding.weight.T).argmax(-1)
            tokens.append(new.item())
        if group is None or dist.get_rank() == 0:
            print("tokens:", *tokens)
            print(f"{caches[0].lengths[0]} tokens, {caches[0].core.cache_bytes} bytes of keys and values here")
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
