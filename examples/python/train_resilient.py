"""Trains a small causal model over a ring of processes, any of which may be killed.

    torchrun --max-restarts 3 --nproc-per-node 4 examples/python/train_resilient.py \\
      --steps 40 --checkpoint-interval 5 --checkpoints runs/resilient

Kill any process at any step (``kill -9``). torchrun then starts all of them again, and they continue from the newest
complete checkpoint. The last line, ``loss <number>``, has the same bits as in a run without a failure. The same holds for
a process that is stopped (``kill -STOP``): after two minutes the others report it as lost, and torchrun restarts all of
them. A run can also continue on another number of processes, or with plain ``python``; its loss is then the same up to
rounding.

Three things make the result reproducible: the batch of a step depends on the step alone; the loss is the mean over all
tokens, to which each rank adds its share (61 tokens on 4 ranks: 15 or 16 each); and all gradients are summed in one
tensor, so always in the same order.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from annulus.torch import Checkpoints, LongNetLM, cleanup, shard
from torch import nn

TOKENS, VOCABULARY, WIDTH, HEADS, BATCH = 61, 16, 32, 2, 8
TIMEOUT = datetime.timedelta(minutes=2)  # a step takes milliseconds; PyTorch's default is half an hour


class Progress:
    """State that a checkpoint holds in addition to model and optimizer."""

    def __init__(self) -> None:
        self.loss = float("nan")

    def state_dict(self) -> dict:
        return {"loss": self.loss}

    def load_state_dict(self, state: dict) -> None:
        self.loss = state["loss"]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences that count up by 1 to 3 from a random start: tokens, and the token after each of them."""
    generator = torch.Generator().manual_seed(step)
    start, by = (torch.randint(*bounds, (BATCH, 1), generator=generator) for bounds in ((0, 16), (1, 4)))
    counted = (start + by * torch.arange(TOKENS + 1)) % VOCABULARY
    return counted[:, :-1], counted[:, 1:]


def sum_over_ranks(model: nn.Module, loss: torch.Tensor) -> float:
    """Sums gradients and loss over all ranks, and returns the loss."""
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([loss.detach().reshape(1), *(g.flatten() for g in grads)])
    dist.all_reduce(flat)
    for grad, whole in zip(grads, flat[1:].split([g.numel() for g in grads]), strict=True):
        grad.copy_(whole.view_as(grad))
    return flat[0].item()


def train(steps: int, interval: int, folder: str, group: dist.ProcessGroup | None) -> float:
    torch.manual_seed(0)
    ring = {"placement": "zigzag", "group": group}
    model = LongNetLM(VOCABULARY, 2, WIDTH, HEADS, segment_lengths=[16, 64], dilation_rates=[1, 2], **ring)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)
    progress = Progress()
    state = {"model": model, "optimizer": optimizer, "progress": progress}
    rank = 0 if group is None else dist.get_rank(group)
    with Checkpoints(folder, interval, group=group) as checkpoints:
        for step in range(checkpoints.resume(state).step + 1, steps + 1):
            # Targets are shifted before they are sharded: the next token may be on another rank.
            tokens, following = (shard(x, **ring) for x in batch(step))
            logits = model(tokens, n_global=TOKENS)
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
    """torch.distributed.init_process_group, which also works after a restart by torchrun.

    torchrun keeps one store for all attempts. A restarted process would find the addresses of ended processes in it
    (pytorch/pytorch#135712), so each attempt uses its own prefix. Attempts are counted per machine. Across machines, set
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and ``--rdzv-backend c10d`` to get a new store instead.
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
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
