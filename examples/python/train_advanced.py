"""Trains a small causal model of RingAdvancedDistributedDilatedAttention with its training services.

    python examples/python/train_advanced.py                                          # one process
    torchrun --nproc-per-node 4 examples/python/train_advanced.py                     # four: the same losses
    torchrun --nproc-per-node 4 examples/python/train_advanced.py --checkpoints runs/advanced
    torchrun --nproc-per-node 4 examples/python/train_advanced.py --zero-stage 3 --cpu-offload   # pip install deepspeed

With --checkpoints, a training that was stopped continues from its newest checkpoint, and a training that loses a process
continues without it. torchrun itself ends all processes when one is lost. To see the recovery, start the processes
without torchrun, as the tests do, and ``kill -9`` one of them.

The task is counting: each sequence counts up by 1 to 3 from a random start, and the model learns to predict the next
token.
"""

from __future__ import annotations

import argparse
import logging
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from annulus.torch import RingAdvancedDistributedDilatedAttention, Training, shard, token_mean
from torch import nn

TOKENS, VOCABULARY, WIDTH, HEADS, BATCH = 61, 16, 32, 2, 8
PLACEMENT = "zigzag"


class Model(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None, **services: object):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.ModuleList(
            RingAdvancedDistributedDilatedAttention(
                *(WIDTH, HEADS),
                batch_first=True,
                segment_lengths=[16, 64],
                dilation_rates=[1, 2],
                is_causal=True,
                placement=PLACEMENT,
                group=group,
                **services,
            )
            for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for norm, attention in zip(self.norms, self.attention):
            h = norm(x)
            x = x + attention(h, h, h, need_weights=False, n_global=TOKENS)[0]
        return self.head(self.norms[-1](x))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the token after each of them. They depend on the step alone, so a checkpoint need not hold them."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, 16, (BATCH, 1), generator=generator)
    by = torch.randint(1, 4, (BATCH, 1), generator=generator)
    counted = (start + by * torch.arange(TOKENS + 1)) % VOCABULARY
    return counted[:, :-1], counted[:, 1:]


def loss_of(training: Training, step: int) -> torch.Tensor:
    """The mean loss over the tokens of all ranks."""
    # training.model and training.group change when a rank is lost.
    ring = {"placement": PLACEMENT, "group": training.group}
    tokens, following = (shard(x, **ring) for x in batch(step))
    logits = training.model(tokens)
    losses = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none")
    return token_mean(losses, group=training.group)


def train(steps: int, group: dist.ProcessGroup | None, services: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = Model(group, **services)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)
    training = model.attention[0].prepare(model, optimizer)

    def report(step: int, loss: float) -> None:
        if training.group is None or dist.get_rank(training.group) == 0:
            print(f"step {step} loss {loss:.6f}", flush=True)

    training.run(steps, lambda step: loss_of(training, step), report)
    info = model.attention[0].get_memory_info()
    report_bytes = {name: info[name] for name in ("parameter_bytes", "workspace_bytes")}
    if training.group is None or dist.get_rank(training.group) == 0:
        print(f"first layer, this rank: {report_bytes}")
    model.attention[0].cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoints", metavar="DIR")
    parser.add_argument("--checkpoint-interval", type=int, metavar="STEPS")
    parser.add_argument("--zero-stage", type=int, choices=[1, 2, 3], help="train under DeepSpeed")
    parser.add_argument("--cpu-offload", action="store_true")
    parser.add_argument("--bucket-size", type=float, default=25, metavar="MB")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    a = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    group = None
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    services: dict[str, object] = {
        "use_gradient_checkpointing": a.gradient_checkpointing,
        "bucket_size": a.bucket_size,
        "use_deepspeed": a.zero_stage is not None,
        "zero_stage": a.zero_stage,
        "cpu_offload": a.cpu_offload,
        "enable_fault_tolerance": a.checkpoints is not None,
        "checkpoint_folder": a.checkpoints,
        "checkpoint_interval": a.checkpoint_interval,
    }
    train(a.steps, group, services)
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
