"""Trains a small causal model over a ring of processes that may be killed.

    torchrun --max-restarts 3 --nproc-per-node 4 examples/python/train_resilient.py \\
      --steps 40 --checkpoint-interval 5 --checkpoints runs/resilient

Kill any process at any step (``kill -9``): torchrun starts all of them again, they go on after the newest whole
checkpoint, and the last line, ``loss <number>``, is that of a run in which nothing happened, to the last bit. So it is if
one is stopped (``kill -STOP``): after two minutes the others give up waiting, and torchrun starts all of them again. Started
again on another number of processes, or with plain ``python``, it goes on, too; its loss is then the same to rounding.

What makes that so: the batch of a step depends on the step alone; the loss is the mean over all tokens, of which a rank
has its share (61 tokens on 4 ranks: 15 or 16 each); gradients are summed in one tensor, so in the same order every time.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from annulus.torch import Checkpoints, RingMultiheadDilatedAttention, cleanup, positions, shard
from torch import nn

TOKENS, VOCABULARY, WIDTH, HEADS, BATCH = 61, 16, 32, 2, 8
PLACEMENT = "zigzag"
TIMEOUT = datetime.timedelta(minutes=2)  # a step takes milliseconds; PyTorch's own is half an hour


class Block(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = RingMultiheadDilatedAttention(
            *(WIDTH, HEADS),
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
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(Block(group), Block(group))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
        self.positions = positions(TOKENS, placement=PLACEMENT, group=group)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(tokens) + self.places(self.positions)))


class Progress:
    """What is to come back beside model and optimizer."""

    def __init__(self) -> None:
        self.loss = float("nan")

    def state_dict(self) -> dict:
        return {"loss": self.loss}

    def load_state_dict(self, state: dict) -> None:
        self.loss = state["loss"]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Counting in steps of 1 to 3, from anywhere: tokens, and what comes after each of them."""
    generator = torch.Generator().manual_seed(step)
    start, by = (
        torch.randint(*bounds, (BATCH, 1), generator=generator) for bounds in ((0, 16), (1, 4))
    )
    counted = (start + by * torch.arange(TOKENS + 1)) % VOCABULARY
    return counted[:, :-1], counted[:, 1:]


def sum_over_ranks(model: nn.Module, loss: torch.Tensor) -> float:
    """Gives every rank the whole gradient, and returns the whole loss."""
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([loss.detach().reshape(1), *(g.flatten() for g in grads)])
    dist.all_reduce(flat)
    for grad, whole in zip(grads, flat[1:].split([g.numel() for g in grads]), strict=True):
        grad.copy_(whole.view_as(grad))
    return flat[0].item()


def train(steps: int, interval: int, folder: str, group: dist.ProcessGroup | None) -> float:
    torch.manual_seed(0)
    model = Model(group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)
    progress = Progress()
    state = {"model": model, "optimizer": optimizer, "progress": progress}
    rank = 0 if group is None else dist.get_rank(group)
    with Checkpoints(folder, interval, group=group) as checkpoints:
        for step in range(checkpoints.resume(state).step + 1, steps + 1):
            tokens, following = (
                shard(x, placement=PLACEMENT, group=group) for x in batch(step)
            )  # shifted first, then sharded
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")
            loss = loss / (BATCH * TOKENS)
            optimizer.zero_grad()
            loss.backward()
            progress.loss = loss.item() if group is None else sum_over_ranks(model, loss)
            optimizer.step()
            checkpoints.step(step, state)
            if rank == 0:
                print(f"step {step} loss {progress.loss:.6f}", flush=True)
    return progress.loss


def join() -> dist.ProcessGroup:
    """torch.distributed.init_process_group, also for those who are started again.

    torchrun keeps one store for all attempts, in which those who come later find the addresses of the dead
    (pytorch/pytorch#135712): each attempt gets a part of its own. Attempts are counted per machine: across machines, have
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and ``--rdzv-backend c10d`` make a new store instead.
    """
    store = None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        store = dist.PrefixStore(f"attempt{attempt}", dist.TCPStore(*address, is_master=False))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    return dist.group.WORLD


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoint-interval", type=int, default=5)
    parser.add_argument("--checkpoints", required=True, metavar="DIR")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("torch").setLevel(logging.WARNING)
    group = None
    if "RANK" in os.environ:  # torchrun
        group = join()
    loss = train(arguments.steps, arguments.checkpoint_interval, arguments.checkpoints, group)
    if os.environ.get("RANK", "0") == "0":
        print(f"loss {loss!r}", flush=True)
    if group is not None:
        cleanup()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
