"""Trains a LongNet language model on the bytes of text files, each sequence spread over the processes of a ring.

    python examples/python/train_longnet_lm.py                                        # one process
    torchrun --nproc-per-node=4 examples/python/train_longnet_lm.py                   # four: the same losses
    torchrun --nproc-per-node=4 examples/python/train_longnet_lm.py --checkpoints runs/lm --steps 400   # continues

Without --text it learns the documents of this repository. The defaults are a model of 0.4 million parameters that gets
from 5.6 to 2.3 nats per byte in half a minute of one core; --base is the published model, 12 layers of width 768.

Losses do not depend on the number of processes: a batch depends on its step alone, every rank takes its part of it,
and token_mean is the mean over the tokens of all ranks. A training that was stopped continues from its last checkpoint,
on any number of processes.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import resource
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from annulus.torch import Checkpoints, LongNetLM, cleanup, data_parallel, shard, token_mean

ROOT = pathlib.Path(__file__).resolve().parents[2]


def text_of(files: list[str]) -> torch.Tensor:
    paths = [pathlib.Path(file) for file in files] or [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    data = b"".join(path.read_bytes() for path in sorted(paths))
    return torch.from_numpy(np.frombuffer(data, np.uint8).astype(np.int64))


def batch_of(text: torch.Tensor, step: int, batch: int, tokens: int) -> torch.Tensor:
    """[batch, tokens + 1] bytes from random places. They depend on the step alone, so a checkpoint need not hold
    them."""
    starts = torch.randint(
        len(text) - tokens, (batch, 1), generator=torch.Generator().manual_seed(step)
    )
    return text[starts + torch.arange(tokens + 1)]


def learning_rate(step: int, steps: int, most: float) -> float:
    """Rises linearly over the first tenth of the steps, then falls by half a cosine to a tenth of the maximum."""
    rise = max(1, steps // 10)
    if step < rise:
        return most * step / rise
    return most * (0.55 + 0.45 * math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def memory(device: torch.device) -> str:
    """The peak memory of this process so far."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 1e6:,.0f} MB"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6:,.0f} MB"


def show_bar(step: int, steps: int, loss: float) -> None:
    """A progress bar, if standard error is a terminal."""
    if sys.stderr.isatty():
        done = 40 * step // steps
        bar = "#" * done + "." * (40 - done)
        print(f"\r[{bar}] {step}/{steps}  loss {loss:.3f} ", end="", file=sys.stderr, flush=True)


def train(a: argparse.Namespace, group: dist.ProcessGroup | None, device: torch.device) -> None:
    rank = 0 if group is None else dist.get_rank(group)
    ring = {"placement": a.placement, "group": group}
    text = text_of(a.text)
    if len(text) <= a.tokens:
        raise SystemExit(f"the text has {len(text)} bytes, expected more than --tokens {a.tokens}")
    torch.manual_seed(0)
    if a.base:
        model = LongNetLM.base(device=device, use_gradient_checkpointing=True, **ring)
    else:
        sizes = (a.layers, a.width, a.heads)
        branches = {"segment_lengths": a.segments, "dilation_rates": a.dilations}
        model = LongNetLM(256, *sizes, device=device, **branches, **ring)
    parameters = sum(p.numel() for p in model.parameters())
    model = data_parallel(model, group, bucket_size=a.bucket_size)
    # A larger eps than usual: with tiny gradients, Adam's steps would otherwise consist of rounding errors.
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.learning_rate, eps=1e-6)

    def run_step(step: int) -> float:
        whole = batch_of(text, step, a.batch, a.tokens).to(device)
        # Targets are shifted before they are sharded: the next token may be on another rank.
        tokens, following = shard(whole[:, :-1], **ring), shard(whole[:, 1:], **ring)
        logits = model(tokens, n_global=a.tokens)
        losses = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none")
        loss = token_mean(losses, group=group)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in optimizer.param_groups:
            part["lr"] = learning_rate(step, a.steps, a.learning_rate)
        optimizer.step()
        return loss.item()

    checkpoints, first = None, 1
    state = {"model": model, "optimizer": optimizer}
    if a.checkpoints is not None:
        checkpoints = Checkpoints(a.checkpoints, a.checkpoint_interval, group=group)
        first = checkpoints.resume(state).step + 1
    if rank == 0:
        ranks = 1 if group is None else dist.get_world_size(group)
        print(f"{parameters:,} parameters, {len(text):,} bytes, {ranks} ranks, from step {first}")
    then, steps_then = time.perf_counter(), first - 1
    for step in range(first, min(a.steps, a.stop_after or a.steps) + 1):
        loss = run_step(step)
        if checkpoints is not None:
            checkpoints.step(step, state)
        if rank != 0:
            continue
        show_bar(step, a.steps, loss)
        if step == 1 or step % a.log_interval == 0 or step == a.steps:
            now = time.perf_counter()
            rate = (step - steps_then) * a.batch * a.tokens / (now - then)
            then, steps_then = now, step
            start = "\r\033[K" if sys.stdout.isatty() and sys.stderr.isatty() else ""  # erases the bar
            print(
                f"{start}step {step:5d}  loss {loss:.6f}  {rate:9,.0f} tokens/s  {memory(device)}",
                flush=True,
            )
    if checkpoints is not None:
        checkpoints.close()


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}, expected at least 1")
    return number


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", nargs="+", default=[], metavar="FILE")
    parser.add_argument("--steps", type=positive, default=200)
    parser.add_argument("--stop-after", type=positive, metavar="STEP", help="stop here; a later run continues")
    parser.add_argument("--batch", type=positive, default=8)
    parser.add_argument("--tokens", type=positive, default=255, help="tokens of a sequence")
    parser.add_argument("--layers", type=positive, default=2)
    parser.add_argument("--width", type=positive, default=128)
    parser.add_argument("--heads", type=positive, default=4)
    parser.add_argument("--segments", type=numbers, default=[64, 256], metavar="N,N")
    parser.add_argument("--dilations", type=numbers, default=[1, 2], metavar="N,N")
    parser.add_argument("--base", action="store_true", help="the published base model instead")
    parser.add_argument("--placement", default="zigzag")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--bucket-size", type=float, default=25, metavar="MB")
    parser.add_argument("--log-interval", type=positive, default=10, metavar="STEPS")
    parser.add_argument("--checkpoints", metavar="DIR")
    parser.add_argument("--checkpoint-interval", type=positive, default=50, metavar="STEPS")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    group = None
    if arguments.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        group = dist.group.WORLD
    train(arguments, group, device)
    if group is not None:
        cleanup()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
