"""Trains a two-layer causal model to copy; each sequence is spread over the processes of a ring.

    python examples/python/train_copy_task.py                                     # one process
    torchrun --nproc-per-node=4 examples/python/train_copy_task.py                # four: the same losses

Each sequence is 31 random tokens, then the same 31 again; the model learns to predict the second half. The four ranks
hold 15, 15, 16 and 16 of the 62 tokens, in zigzag order, so that their causal work is about equal.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from annulus.torch import RingMultiheadDilatedAttention, positions, shard
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HALF, VOCABULARY, WIDTH, HEADS, BATCH = 31, 16, 64, 4, 32
TOKENS = 2 * HALF
PLACEMENT = "zigzag"


class Block(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = RingMultiheadDilatedAttention(
            WIDTH,
            HEADS,
            batch_first=True,
            segment_lengths=[16, 64],
            dilation_rates=[1, 2],
            is_causal=True,
            placement=PLACEMENT,
            group=group,
        )
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False, n_global=TOKENS)[0]
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(Block(group), Block(group))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
        # Position embeddings use positions in the whole sequence, not in the shard. This is no buffer, because
        # DistributedDataParallel would overwrite it with that of rank 0.
        self.positions = positions(TOKENS, placement=PLACEMENT, group=group)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(tokens) + self.places(self.positions)))


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the token after each of them; -100 where it cannot be predicted."""
    half = torch.randint(VOCABULARY, (BATCH, HALF), generator=generator)
    tokens = torch.cat([half, half], 1)
    following = torch.full_like(tokens, -100)
    following[:, HALF:-1] = tokens[:, HALF + 1 :]
    return tokens, following


def train(steps: int, group: dist.ProcessGroup | None) -> float:
    """Returns the loss of the last step over the whole sequence."""
    torch.manual_seed(0)
    model: nn.Module = Model(group)
    ranks = 1
    if group is not None:
        model = DistributedDataParallel(model, process_group=group)
        ranks = dist.get_world_size(group)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros(())
    for step in range(1, steps + 1):
        # Every rank makes the same batch and keeps its shard. Targets are shifted before they are sharded.
        tokens, following = (shard(x, placement=PLACEMENT, group=group) for x in batch(generator))
        logits = model(tokens)
        # This rank's share of the mean over the whole sequence.
        wanted = BATCH * (HALF - 1)
        loss = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum") / wanted
        optimizer.zero_grad()
        (loss * ranks).backward()  # DDP divides by the number of ranks
        optimizer.step()

        loss = loss.detach()
        if group is not None:
            dist.all_reduce(loss, group=group)
        if step % 10 == 0 and (group is None or dist.get_rank(group) == 0):
            print(f"step {step:4d}  loss {loss.item():.6f}", flush=True)
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    if "RANK" not in os.environ:  # not under torchrun
        train(arguments.steps, None)
        return
    dist.init_process_group("gloo")
    train(arguments.steps, dist.group.WORLD)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
