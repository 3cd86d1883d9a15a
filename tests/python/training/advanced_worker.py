"""One rank of test_advanced.py: advanced_worker.py <case>... Under torchrun, or alone in one process.

The model is that of examples/python/train_advanced.py. ``advanced_worker.py survive:<place>`` forks its ranks itself,
one of which dies at that place.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import pathlib
import re
import signal
import sys
import tempfile
from collections.abc import Callable

import annulus
import annulus.torch as at
import pytest
import torch
import torch.distributed as dist
from annulus import ConfigError, monitor
from support import ROOT, process_ring
from support.rank_cases import run_cases
from torch import nn
from training_worker import assert_same, avoid_compiling, gradients

sys.path.insert(0, str(ROOT / "examples" / "python"))
import train_advanced
from train_advanced import WIDTH, loss_of

WORLD = None
STEPS = 20
# Makes DeepSpeed use several buckets, and shard every parameter.
SMALL = 0.02


def make_training(group: dist.ProcessGroup | None, **services: object) -> at.Training:
    torch.manual_seed(0)
    model = train_advanced.Model(group, **services)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6, weight_decay=0.01)
    return model.attention[0].prepare(model, optimizer)


def print_loss(step: int, loss: float) -> None:
    if WORLD is None or dist.get_rank() == 0:
        print(f"step {step} loss {loss:.9f}", flush=True)


def services_of(how: str) -> dict[str, object]:
    name, *more = how.split("+")
    services: dict[str, object] = {}
    if name.startswith("zero"):
        services |= {"use_deepspeed": True, "zero_stage": int(name[4:]), "bucket_size": SMALL}
    if "cpu" in more:
        services["cpu_offload"] = True
    if "nvme" in more:
        services |= {"nvme_offload": True, "nvme_path": os.environ["NVME_PATH"]}
    if "after" in more:
        services["overlap_comm"] = False
    if "checkpointing" in more:
        services["use_gradient_checkpointing"] = True
    return services


def trains(how: str, steps: str = str(STEPS), folder: str = "") -> None:
    """Trains and prints losses."""
    services = services_of(how)
    if services.get("use_deepspeed"):
        avoid_compiling()
    if folder:
        services |= {"enable_fault_tolerance": True, "checkpoint_interval": 2}
        services["checkpoint_folder"] = folder
    training = make_training(WORLD, **services)
    if services.get("use_deepspeed"):
        engine, stage = training.model, services["zero_stage"]
        assert engine.zero_optimization_stage() == stage
        assert engine.zero_reduce_bucket_size() == int(SMALL * 2**20 / 4)
        assert engine.zero_overlap_comm() == services.get("overlap_comm", True)
        wanted = {"nvme_offload": "nvme", "cpu_offload": "cpu"}
        device = next((d for name, d in wanted.items() if services.get(name)), "none")
        config = engine.config["zero_optimization"]
        assert config.get("offload_optimizer", {"device": "none"})["device"] == device
    training.run(int(steps), lambda step: loss_of(training, step), print_loss)
    training.close()


def cannot_go_on(how: str, folder: str, words: str) -> None:
    """A checkpoint that another configuration wrote, which DeepSpeed cannot load."""
    with pytest.raises(at.CheckpointError, match=f"was made with {words}, and DeepSpeed cannot load it"):
        trains(how, folder=folder)


def nvme() -> None:
    """Trains with the optimizer's state on disk, and parameters where DeepSpeed can; otherwise prints the reason."""
    avoid_compiling()
    usual = services_of("zero3+nvme")
    # Parameters in float32 would come back as bfloat16.
    with pytest.raises(ConfigError, match="libaio|in bfloat16 only") as refused:
        make_training(WORLD, **usual)
    print(f"refused: {refused.value}", flush=True)
    if "libaio" in str(refused.value):
        return
    trains("zero3+nvme+cpu")
    # A larger module: DeepSpeed keeps less than a MB per rank in memory.
    for number, (more, parts) in enumerate(
        (
            ({"cpu_offload": True}, ["optimizer"]),
            ({"dtype": torch.bfloat16}, ["optimizer", "params"]),
        )
    ):
        folder = pathlib.Path(os.environ["NVME_PATH"]) / f"{dist.get_rank()}_{number}"
        folder.mkdir()
        large = at.RingAdvancedDistributedDilatedAttention(
            1024, 8, batch_first=True, **usual | more | {"nvme_path": folder}
        )
        dtype = large.in_proj_weight.dtype
        training = large.prepare()
        x = torch.randn(1, 3, 1024, generator=torch.Generator().manual_seed(1)).to(dtype)
        losses = []
        for _ in range(3):
            loss = (training.model(x, x, x, need_weights=False)[0] - x).square().mean()
            training.step(loss)
            losses.append(loss.item())
        assert losses[2] < losses[0], losses
        for part in parts:
            kept = sum(p.stat().st_size for p in folder.rglob("*.swp") if part in str(p))
            assert kept > 2**20, (part, kept, sorted(folder.rglob("*"))[:20])


def ranks_that_disagree_are_told() -> None:
    for name, usual, other in (("bucket_size", 25, 10), ("overlap_comm", True, False)):
        said = other if dist.get_rank() == 1 else usual
        with pytest.raises(ConfigError, match=f"(?s){name}.*{other}"):
            make_training(WORLD, **{name: said})
    for what, other in (
        ("the model's parameters", {"dtype": torch.bfloat16}),  # Gloo would abort
        ("the model's parameters", {"bias": False}),
        ("use_gradient_checkpointing", {"use_gradient_checkpointing": True}),
        ("the optimizer", {"optimizer": torch.optim.SGD}),
        ("the names in state", {"state": {"more": nn.Linear(1, 1)}}),
    ):
        others = other if dist.get_rank() == 1 else {}
        prepare = {name: others.pop(name) for name in ("optimizer", "state") if name in others}
        layer = at.RingAdvancedDistributedDilatedAttention(WIDTH, 2, group=WORLD, **others)
        if "optimizer" in prepare:
            prepare["optimizer"] = prepare["optimizer"](layer.parameters())
        with pytest.raises(ConfigError, match=re.escape(f"disagree about {what} (rank")):
            layer.prepare(**prepare)
    training = make_training(WORLD)
    with pytest.raises(ConfigError, match="Training.run: steps is 0.5"):
        training.run(0.5 if dist.get_rank() == 1 else 2, lambda step: loss_of(training, step))
    layer = at.RingAdvancedDistributedDilatedAttention(WIDTH, 2, group=WORLD)
    with pytest.raises(ConfigError, match="no part of the model"):  # wrong on one rank only
        layer.prepare(nn.Linear(1, 1) if dist.get_rank() == 2 else None)
    services = {"enable_fault_tolerance": True, "checkpoint_folder": "never made"}
    with pytest.raises(ConfigError, match="train apart"):  # four trainings would write one checkpoint
        make_training(None, **services)


def fsdp_is_refused_and_held_bytes_are_the_shards() -> None:
    from torch.distributed.fsdp import fully_shard

    layer = at.RingAdvancedDistributedDilatedAttention(WIDTH, 2, batch_first=True, group=WORLD)
    whole = layer.get_memory_info()["parameter_bytes"]
    fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    assert layer.get_memory_info()["parameter_bytes"] == whole // dist.get_world_size()
    with pytest.raises(ConfigError, match="FSDP"):  # gradients would be averaged twice
        layer.prepare()


def rings_of_some_ranks_are_logged() -> None:
    """Where a training has several rings, the rank in the log is the rank in the ring."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("annulus").addHandler(handler)
    pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    layer = at.RingAdvancedDistributedDilatedAttention(
        WIDTH, 2, batch_first=True, group=pairs[dist.get_rank() // 2], log_level="info"
    )
    training = layer.prepare(group=WORLD)
    x = torch.randn(1, 50, WIDTH)
    training.step(training.model(x, x, x, need_weights=False)[0].square().mean())
    training.close()
    logging.getLogger("annulus").removeHandler(handler)
    tag = f"[rank {dist.get_rank() % 2}/2] "
    passes = [line for line in lines if line.startswith((tag + "forward", tag + "backward"))]
    assert len(passes) == 2, lines
    at.cleanup()


def ddp_is_refused() -> None:
    layer = at.RingAdvancedDistributedDilatedAttention(WIDTH, 2, group=WORLD)
    with pytest.raises(ConfigError, match="DistributedDataParallel already"):  # likewise
        layer.prepare(at.data_parallel(layer, WORLD))


def a_package_that_one_rank_misses_is_an_error_on_all_ranks() -> None:
    tolerant = {"enable_fault_tolerance": True, "checkpoint_folder": "never made"}
    for package, services in (
        ("deepspeed", {"use_deepspeed": True, "zero_stage": 1}),
        ("safetensors", tolerant),
    ):
        found, missed = importlib.util.find_spec, dist.get_rank() == 1
        importlib.util.find_spec = lambda name: found("torch")
        layer = at.RingAdvancedDistributedDilatedAttention(WIDTH, 2, group=WORLD, **services)
        importlib.util.find_spec = lambda name: None if missed else found("torch")
        with pytest.raises(ConfigError, match=f"pip install {package}"):
            layer.prepare()
        importlib.util.find_spec = found


def deepspeed_takes_one_dtype() -> None:
    """It would cast parameters of other dtypes."""
    found = importlib.util.find_spec
    importlib.util.find_spec = lambda name: found("torch")  # DeepSpeed counts as installed, and is not called
    layer = at.RingAdvancedDistributedDilatedAttention(
        WIDTH, 2, group=WORLD, use_deepspeed=True, dtype=torch.bfloat16
    )
    with pytest.raises(ConfigError, match="torch.bfloat16 and torch.float32"):
        layer.prepare(nn.ModuleList([layer, nn.Linear(1, 1)]))
    importlib.util.find_spec = found


def buckets_leave_when_they_are_told_to() -> None:
    """bucket_size and overlap_comm decide how many messages are sent and when. Gradients stay the same."""
    expected = None
    for bucket_size, overlap_comm in ((25, True), (0.004, True), (25, False), (0.004, False)):
        training = make_training(WORLD, bucket_size=bucket_size, overlap_comm=overlap_comm)
        loss_of(training, 1).backward()  # after the first backward, DDP sorts its buckets
        events: list[str] = []
        usual = dist.all_reduce

        def send(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
            events.append("sent")
            return usual(tensor, *args, **kwargs)

        def hook(state, bucket):
            sent = send(bucket.buffer(), async_op=True).get_future()
            return sent.then(lambda done: done.value()[0] / dist.get_world_size())

        if overlap_comm:
            training.model.register_comm_hook(None, hook)  # what DDP does without a hook
        for parameter in training.model.parameters():
            parameter.register_hook(lambda grad: events.append("gradient"))
        training.model.zero_grad()
        loss = loss_of(training, 1)
        if not overlap_comm:
            dist.all_reduce = send
        loss.backward()
        dist.all_reduce = usual
        messages, last = events.count("sent"), len(events) - events[::-1].index("gradient")
        assert messages == 1 if bucket_size == 25 else messages > 3, (bucket_size, events)
        before = events[:last].count("sent")
        assert before == 0 or overlap_comm, events
        assert before > 0 or not overlap_comm or bucket_size == 25, events
        expected = expected or gradients(training.model)
        assert_same(gradients(training.model), expected, bucket_size, overlap_comm)


def caches_of_a_ring_are_its_own() -> None:
    layer = at.RingAdvancedDistributedDilatedAttention(WIDTH, 2, batch_first=True, group=WORLD)
    x = torch.randn(1, 50, WIDTH)
    layer(x, x, x, need_weights=False)
    q = x.unflatten(-1, (2, -1))
    at.ring_attention(q, q, q)  # in this process alone
    info = layer.get_memory_info()
    assert info["ring_size"] == dist.get_world_size() and info["communication_bytes"] > 0
    assert info["cached_workspaces"] >= 2
    layer.clear_cache()
    assert layer.get_memory_info()["cached_workspaces"] == 1
    layer.clear_cache(force=True)
    assert layer.get_memory_info()["cached_workspaces"] == 0


# ---- a rank dies


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_until_lost(rank: int, say: Callable, place: str, services: dict) -> None:
    training = make_training(dist.group.WORLD, **services)
    victims = [1, 2] if place == "twice" else [1]
    if place == "recovering" and rank == 2:
        training._start = lambda _: die()  # when all know the survivors
    if place == "gradients" and rank in victims:
        # The last gradient: the rings are done, and the other ranks wait for its bucket.
        weight = training.model.module.tokens.weight
        weight.register_hook(lambda _: die() if training.done == 4 else None)

    def loss(step: int) -> torch.Tensor:
        if place != "gradients" and rank in victims and step == 5 + 2 * victims.index(rank):
            die()
        return loss_of(training, step)

    try:
        training.run(10, loss, lambda step, value: say("step", step=step, loss=value))
    except (annulus.TransportError, RuntimeError) as error:
        say("raised", text=f"{type(error).__name__}: {error}", recoveries=training.recoveries)
        return
    lost = [event for event in monitor.read()[0] if event.name == "lost rank"]
    assert len(lost) == training.recoveries, lost
    training.close()
    left = dist.get_process_group_ranks(training.group)
    say("done", left=left, recoveries=training.recoveries)


def survive(place: str) -> None:
    """Loses one rank of three, or two of five one after the other. Losses equal those of an undisturbed run."""
    training = make_training(None)
    wanted: list[float] = []
    training.run(10, lambda step: loss_of(training, step), lambda _, value: wanted.append(value))
    ranks, lost = (5, [1, 2]) if place in ("twice", "recovering") else (3, [1])
    left = [rank for rank in range(ranks) if rank not in lost]
    with tempfile.TemporaryDirectory() as folder:
        services = {"enable_fault_tolerance": True, "checkpoint_folder": folder}
        services |= {"checkpoint_interval": 2, "enable_monitoring": True}
        with process_ring.joined_ring(ranks, train_until_lost, place, services, seconds=30) as ring:
            ring.wait("done", left, 120)
            for rank in left:
                said = ring.ranks[rank].said
                done = ring.ranks[rank].last("done")
                assert done is not None, said
                assert (done["left"], done["recoveries"]) == (left, len(lost)), done
                found = {line["step"]: line["loss"] for line in said if line["what"] == "step"}
                assert sorted(found) == list(range(1, 11)), said
                for step, loss in enumerate(wanted, 1):
                    assert abs(found[step] - loss) < 1e-5, (step, found[step], loss)


def raises(place: str, *more: str) -> None:
    """Without fault tolerance, or with max_recoveries=0, the loss of a rank is an error."""
    with tempfile.TemporaryDirectory() as folder:
        services: dict[str, object] = {}
        if "none" in more:
            services = {"enable_fault_tolerance": True, "checkpoint_folder": folder}
            services["max_recoveries"] = 0
        with process_ring.joined_ring(3, train_until_lost, place, services, seconds=30) as ring:
            ring.wait("raised", [0, 2], 120)
            for rank in (0, 2):
                raised = ring.ranks[rank].last("raised")
                assert raised is not None and raised["recoveries"] == 0, ring.ranks[rank].said
                assert "TransportError" in raised["text"] and "rank 1" in raised["text"], raised


if __name__ == "__main__":
    run_cases(globals())
