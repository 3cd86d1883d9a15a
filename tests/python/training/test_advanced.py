"""RingAdvancedDistributedDilatedAttention: every argument has an effect or is refused. The ranks run
advanced_worker.py."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import pathlib
import pickle
import re
import threading
import time

import numpy as np
import pytest
from losses import assert_as_alone, losses_of
from support.launch import ENVIRONMENT, need_gloo, run_program
from support.optional import HAS_DEEPSPEED, needs_deepspeed, needs_safetensors

need_gloo()

import annulus  # noqa: E402
import annulus.torch as at  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from annulus import monitor  # noqa: E402
from annulus.torch.training import _deepspeed  # noqa: E402

Advanced = at.RingAdvancedDistributedDilatedAttention
WORKER = pathlib.Path(__file__).with_name("advanced_worker.py")
LONGNET = {"segment_lengths": [16, 64], "dilation_rates": [1, 2]}


def make(**arguments: object) -> Advanced:
    torch.manual_seed(0)
    return Advanced(32, 2, **{**LONGNET, **arguments})


@pytest.fixture(autouse=True)
def pretend_that_deepspeed_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration of DeepSpeed can be made without DeepSpeed."""
    if not HAS_DEEPSPEED:
        monkeypatch.setattr(_deepspeed, "check_installed", lambda: None)


def loss_of(made: at.Training, step: int) -> torch.Tensor:
    x = torch.randn(2, 50, 32, generator=torch.Generator().manual_seed(step))
    return (made.model(x, x, x, need_weights=False)[0] - x).square().mean()


def run(made: at.Training, steps: int) -> dict[int, float]:
    losses: dict[int, float] = {}
    made.run(steps, lambda step: loss_of(made, step), losses.__setitem__)
    return losses


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"zero_stage": 2}, "use_deepspeed=True"),
        ({"zero_stage": 0}, "use_deepspeed=True"),
        ({"cpu_offload": True}, "use_deepspeed=True"),
        ({"nvme_offload": True}, "use_deepspeed=True"),
        ({"nvme_path": "/tmp"}, "use_deepspeed=True"),
        ({"use_deepspeed": 1}, "True or False"),
        ({"use_deepspeed": True, "zero_stage": 0}, "1, 2 or 3"),
        ({"use_deepspeed": True, "zero_stage": True}, "1, 2 or 3"),
        ({"use_deepspeed": True, "zero_stage": 2, "nvme_offload": True}, "zero_stage 3"),
        ({"use_deepspeed": True, "nvme_offload": True}, "go together"),
        ({"use_deepspeed": True, "nvme_path": "/tmp"}, "go together"),
        ({"use_deepspeed": True, "nvme_offload": True, "nvme_path": "/none"}, "written to"),
        ({"use_deepspeed": True, "nvme_offload": True, "nvme_path": __file__}, "written to"),
        ({"use_deepspeed": True, "nvme_offload": True, "nvme_path": "a\0b"}, "written to"),
        ({"use_deepspeed": True, "nvme_offload": True, "nvme_path": 5}, "path of a folder"),
        ({"overlap_comm": "yes"}, "True or False"),
        ({"enable_fault_tolerance": True, "checkpoint_folder": 5}, "path of a folder"),
        ({"enable_fault_tolerance": True, "checkpoint_folder": ""}, "path of a folder"),
        ({"checkpoint_folder": "x"}, "enable_fault_tolerance=True"),
        ({"checkpoint_interval": 10}, "enable_fault_tolerance=True"),
        ({"auto_resume": True}, "enable_fault_tolerance=True"),
        ({"max_recoveries": 1}, "enable_fault_tolerance=True"),
        (
            {"enable_fault_tolerance": True, "checkpoint_folder": "x", "checkpoint_interval": 0},
            "from 1 to",
        ),
        ({"enable_fault_tolerance": True, "checkpoint_folder": "x", "auto_resume": 1}, "True or"),
        ({"enable_fault_tolerance": True, "checkpoint_folder": "x", "max_recoveries": -1}, "from 0"),
        ({"use_deepspeed": True, "max_recoveries": 1}, "max-restarts"),
        ({"enable_monitoring": 1}, "True or False"),
        ({"profile_memory": "yes"}, "True or False"),
        ({"log_level": "loud"}, "'debug', 'info'"),
        ({"log_level": 10}, "'debug', 'info'"),
        ({"use_gradient_checkpointing": None}, "True or False"),
        ({"dropout": 1.0}, "less than 1"),
    ],
)
def test_arguments_without_effect_or_that_cannot_work_are_refused(arguments: dict, words: str) -> None:
    with pytest.raises(annulus.ConfigError, match=words):
        make(**arguments)


NOT_A_NUMBER = [True, "25", None, [25], 25j, torch.ones(2), math.nan, math.inf, -math.inf, -1]


@pytest.mark.parametrize("value", [*NOT_A_NUMBER, 0, 1e300, 1e-300, 2**21, 10**400], ids=repr)
def test_impossible_bucket_sizes_are_refused(value: object) -> None:
    """DDP would overflow, and DeepSpeed would allocate them."""
    with pytest.raises(annulus.ConfigError, match=r"bucket_size is .*MB above 0 .* up to 2\*\*20"):
        make(bucket_size=value)
    with pytest.raises(annulus.ConfigError, match=r"data_parallel: bucket_size is"):
        at.data_parallel(torch.nn.Linear(1, 1), bucket_size=value)


@pytest.mark.parametrize("value", [*NOT_A_NUMBER, 0.5, 10**30], ids=repr)
@pytest.mark.parametrize("name", ["checkpoint_interval", "max_recoveries", "zero_stage"])
def test_values_that_are_no_counts_are_refused(name: str, value: object) -> None:
    services = {"use_deepspeed": True}
    if name != "zero_stage":
        services = {"enable_fault_tolerance": True, "checkpoint_folder": "never made"}
    if value is None:
        make(**services | {name: value})
        return
    with pytest.raises(annulus.ConfigError, match=f"{name} is "):
        make(**services | {name: value})


def test_numbers_of_numpy_are_fine() -> None:
    layer = make(use_deepspeed=True, zero_stage=np.int64(2), bucket_size=np.float32(8))
    config = layer.deepspeed_config["zero_optimization"]
    assert (config["stage"], config["reduce_bucket_size"]) == (2, 2 * 2**20)
    json.dumps(layer.deepspeed_config)
    services = {"enable_fault_tolerance": True, "checkpoint_folder": "never made"}
    make(checkpoint_interval=np.int32(5), max_recoveries=np.uint8(0), **services)


@pytest.mark.parametrize("steps", [True, math.nan, math.inf, 2.5, -1, "10", None, 10**30], ids=repr)
def test_a_training_is_of_a_whole_number_of_steps(steps: object) -> None:
    made = make().prepare()
    with pytest.raises(annulus.ConfigError, match="Training.run: steps is"):
        made.run(steps, lambda step: loss_of(made, step))
    assert made.done == 0


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="zero_step"):
        make(zero_step=3)


def test_modules_of_a_model_need_the_same_services() -> None:
    layers = torch.nn.ModuleList([make(), make(bucket_size=10)])
    with pytest.raises(annulus.ConfigError, match=r"bucket_size: 25\.0 and 10"):
        layers[0].prepare(layers)
    with pytest.raises(annulus.ConfigError, match="no part of the model"):
        make().prepare(layers[1])
    with pytest.raises(annulus.ConfigError, match="'model' of its own"):
        layers[0].prepare(state={"model": layers[1]})


def test_prepare_checks_model_optimizer_and_state() -> None:
    layer, other = make(), make()
    with pytest.raises(annulus.ConfigError, match="model is a str"):
        layer.prepare("layer")
    with pytest.raises(annulus.ConfigError, match="optimizer is a function, expected"):
        layer.prepare(optimizer=torch.optim.AdamW.__init__)
    with pytest.raises(annulus.ConfigError, match="not the model's"):
        layer.prepare(optimizer=torch.optim.SGD(other.parameters()))
    with pytest.raises(annulus.ConfigError, match="state is a list"):
        layer.prepare(state=[other])
    with pytest.raises(annulus.ConfigError, match="1 as a name"):
        layer.prepare(state={1: other})
    with pytest.raises(annulus.ConfigError, match="a dict as 'data'"):  # not after 100 steps
        make(use_deepspeed=True).prepare(state={"data": {}})


def test_no_step_follows_the_end() -> None:
    """Such a step would be in no checkpoint."""
    made = make().prepare()
    run(made, 1)
    made.close()
    with pytest.raises(annulus.ConfigError, match="closed"):
        run(made, 2)
    assert made.done == 1


@needs_safetensors
def test_a_failed_recovery_closes_the_training(
    one_rank: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model is not wrapped any more, so each rank would train alone."""

    def no_survivors(group: dist.ProcessGroup) -> dist.ProcessGroup:
        raise annulus.TransportError("no survivors")

    def lost(step: int) -> torch.Tensor:
        raise annulus.TransportError("a rank is lost")

    services = {"enable_fault_tolerance": True, "checkpoint_folder": tmp_path}
    made = make(group=dist.group.WORLD, enable_monitoring=True, **services).prepare()
    run(made, 1)
    monkeypatch.setattr("annulus.torch.training._training.survivors", no_survivors)
    with pytest.raises(annulus.TransportError, match="no survivors"):
        made.run(2, lost)
    assert not monitor.running()
    with pytest.raises(annulus.ConfigError, match="closed"):
        run(made, 2)
    assert made.done == 1


def test_unfinished_checkpoints_of_killed_jobs_do_not_count(
    one_rank: None, tmp_path: pathlib.Path
) -> None:
    """The newest two of DeepSpeed's checkpoints are kept. Unfinished ones do not count."""

    class Engine:
        def save_checkpoint(self, folder: str, tag: str, client_state: dict) -> None:
            (pathlib.Path(folder) / tag / "whole").touch()

    services = make(
        **{"use_deepspeed": True, "enable_fault_tolerance": True, "checkpoint_interval": 8},
        checkpoint_folder=tmp_path,
    )._services
    for unfinished in (20, 21):
        (tmp_path / "deepspeed" / f"step-{unfinished:08d}").mkdir(parents=True)
    checkpoints = _deepspeed.EngineCheckpoints(services, Engine())
    for step in range(1, 17):
        checkpoints.step(step, {})
    whole = sorted(path.parent.name for path in tmp_path.glob("deepspeed/*/whole"))
    assert whole == ["step-00000008", "step-00000016"]
    for step in range(17, 33):
        checkpoints.step(step, {})
    left = sorted(path.name for path in tmp_path.glob("deepspeed/*"))
    assert left == ["step-00000024", "step-00000032"]


def test_deepspeed_needs_processes() -> None:
    with pytest.raises(annulus.ConfigError, match="torchrun"):
        make(use_deepspeed=True).prepare()


# ---- what acts in one process


def test_it_is_the_multihead_module() -> None:
    plain = at.RingMultiheadDilatedAttention(32, 2, batch_first=True, **LONGNET)
    theirs = torch.nn.MultiheadAttention(32, 2, batch_first=True)
    layer = make(use_gradient_checkpointing=True)
    for other in (theirs, plain):
        layer.load_state_dict(other.state_dict())
        other.load_state_dict(layer.state_dict())
    x = torch.randn(2, 50, 32)
    padding = torch.arange(50)[None] > torch.tensor([[49], [30]])
    for again in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        for mask in (None, padding):
            found, _ = again(x, x, x, key_padding_mask=mask, need_weights=False)
            expected, _ = plain(x, x, x, key_padding_mask=mask, need_weights=False)
            assert torch.equal(found, expected)
    encoder = torch.nn.TransformerEncoderLayer(32, 2, batch_first=True)
    encoder.self_attn = layer
    encoder(x, src_key_padding_mask=padding).sum().backward()
    assert layer.in_proj_weight.grad is not None


def test_gradient_checkpointing_keeps_inputs_only() -> None:
    x = torch.randn(2, 50, 32, requires_grad=True)
    kept, grads = [], []
    for use_gradient_checkpointing in (False, True):
        layer = make(use_gradient_checkpointing=use_gradient_checkpointing)
        saved: list[torch.Tensor] = []

        def keep(t: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(t)
            return t.clone()  # as hooks that offload tensors do

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out, _ = layer(x, x, x, need_weights=False)
        kept.append(saved)
        grads.append(torch.autograd.grad(out.sum(), [x, *layer.parameters()]))
    assert len(kept[0]) > 4
    assert len(kept[1]) == 1 and torch.equal(kept[1][0], x)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@needs_safetensors
def test_checkpoints_come_at_the_interval_and_are_resumed(tmp_path: pathlib.Path) -> None:
    whole = run(make().prepare(), 7)
    services = {"enable_fault_tolerance": True, "checkpoint_folder": tmp_path / "run"}
    layer = make(checkpoint_interval=3, **services)
    counter = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)]), 1)
    made = layer.prepare(state={"counter": counter})
    assert (made.done, made.recoveries, made.group) == (0, 0, None)
    found = run(made, 5)
    counter.last_epoch = 42
    found |= run(made, 6)
    with pytest.raises(at.CheckpointError, match="already"):  # the first training is still open
        make(checkpoint_interval=3, **services).prepare(state={"counter": counter})
    layer.cleanup()
    layer.cleanup()
    assert {p.name for p in (tmp_path / "run").glob("step-*")} == {"step-00000003", "step-00000006"}

    counter.last_epoch = 0
    again = make(checkpoint_interval=3, **services)
    resumed = again.prepare(state={"counter": counter})
    assert (resumed.done, counter.last_epoch) == (6, 42)
    assert found | run(resumed, 7) == whole  # to the last bit
    again.cleanup()
    with pytest.raises(at.CheckpointError, match="auto_resume is False"):
        make(auto_resume=False, **services).prepare()
    fresh = make(auto_resume=False, **services | {"checkpoint_folder": tmp_path / "fresh"})
    assert fresh.prepare().done == 0
    fresh.cleanup()


def test_deepspeed_config_says_what_the_arguments_say(tmp_path: pathlib.Path) -> None:
    assert make().deepspeed_config is None
    config = make(use_deepspeed=True).deepspeed_config
    zero = config["zero_optimization"]
    assert zero == {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 25 * 2**20 // 4,
        "stage3_prefetch_bucket_size": 25 * 2**20 // 4,
    }
    assert config["gradient_clipping"] == 0.0 and not config["bf16"]["enabled"]

    config = make(
        use_deepspeed=np.bool_(True),
        zero_stage=1,
        bucket_size=8,
        overlap_comm=np.bool_(False),
        cpu_offload=True,
        dtype=torch.bfloat16,
    ).deepspeed_config
    assert config == json.loads(json.dumps(config))
    assert config["bf16"]["enabled"] and not config["fp16"]["enabled"]
    assert config["zero_optimization"] == {
        "stage": 1,
        "overlap_comm": False,
        "reduce_bucket_size": 4 * 2**20,  # two bytes each
        "allgather_bucket_size": 4 * 2**20,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    }
    for cpu_offload, place in ((False, "nvme"), (True, "cpu")):
        zero = make(
            use_deepspeed=True, cpu_offload=cpu_offload, nvme_offload=True, nvme_path=tmp_path
        ).deepspeed_config["zero_optimization"]
        assert zero["offload_param"]["device"] == place
        assert zero["offload_optimizer"]["device"] == "nvme"
        assert zero["offload_optimizer"]["nvme_path"] == str(tmp_path)


def test_memory_info_and_caches() -> None:
    at.cleanup()
    layer = make()
    info = layer.get_memory_info()
    assert info.keys() > at.get_memory_info().keys()
    size = 4 * sum(p.numel() for p in layer.parameters())
    assert (info["parameter_bytes"], info["gradient_bytes"], info["ring_size"]) == (size, 0, 1)
    x = torch.randn(2, 50, 32)
    layer(x, x, x, need_weights=False)[0].sum().backward()
    info = layer.get_memory_info()
    assert info["gradient_bytes"] == size
    assert info["workspace_bytes"] > 0 and info["cached_workspaces"] > 0
    q = x.unflatten(-1, (2, -1)).numpy()
    annulus.attention(q, q, q)
    layer.clear_cache()
    assert layer.get_memory_info()["cached_workspaces"] == 0 < annulus.cache_info()["size"]
    layer.clear_cache(force=True)
    assert annulus.cache_info()["size"] == 0
    with pytest.raises(annulus.ConfigError, match="True or False"):
        layer.clear_cache("yes")


def test_monitoring_records_while_a_training_goes_on() -> None:
    monitor.clear()
    layer = make()
    run(layer.prepare(), 2)
    assert monitor.summary() == {}
    watched = make(enable_monitoring=True)
    made = watched.prepare()
    run(made, 2)
    assert monitor.running() and monitor.summary()[0]["passes"] == 4  # forward and backward
    watched.cleanup()
    assert not monitor.running()
    monitor.start()  # the program's own monitoring stays on
    run(watched.prepare(), 1)
    watched.cleanup()
    assert monitor.running()
    monitor.stop()
    monitor.clear()


def test_the_log_has_its_level_while_a_training_goes_on() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("annulus")
    log.addHandler(handler)
    level = log.level
    try:
        for log_level, passes in (("INFO", 2), ("debug", 2), ("warning", 0), ("off", 0)):
            lines.clear()
            layer = make(log_level=log_level)
            run(layer.prepare(), 1)
            layer.cleanup()
            told = [line for line in lines if re.match(r"\[rank 0/1\] (forward|backward)", line)]
            assert len(told) == passes, (log_level, lines)
            assert any("compute" in line for line in lines) == (log_level == "debug"), lines
            assert (log.level, monitor.running()) == (level, False)
    finally:
        log.removeHandler(handler)


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_trainings_at_once_watch_until_the_last_one_ends(first_ends_first: bool) -> None:
    log = logging.getLogger("annulus")
    level = log.level
    one = make(enable_monitoring=True, log_level="info").prepare()
    two = make(enable_monitoring=True, log_level="debug").prepare()
    first, second = (one, two) if first_ends_first else (two, one)
    first.close()
    assert monitor.running()
    assert log.level == (logging.DEBUG if first_ends_first else logging.INFO)
    second.close()
    assert (log.level, monitor.running()) == (level, False)


def test_a_log_that_was_there_before_a_training_goes_on() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("annulus")
    level = log.level
    log.addHandler(handler)
    try:
        monitor.set_log_level("info", ranks=7)
        made = make(log_level="off").prepare()
        run(made, 1)
        made.close()
        assert lines == []
        run(make().prepare(), 1)
        monitor.flush_log()
        assert sum(line.startswith("[rank 0/7] forward") for line in lines) == 1, lines
    finally:
        monitor.set_log_level("off")
        monitor.stop()
        log.removeHandler(handler)
        log.setLevel(level)


def test_memory_is_profiled_while_a_training_goes_on() -> None:
    layer = make()
    assert layer.prepare().memory_report() is None
    profiled = make(profile_memory=True).prepare()
    x = torch.zeros(1, 1, 32)

    def loss(step: int) -> torch.Tensor:
        held = torch.ones(2**25)  # 128 MB, until two samples have been taken
        before = profiled.memory_report()["samples"]
        while profiled.memory_report()["samples"] < before + 2:
            time.sleep(0.01)
        assert held[-1] == 1
        return profiled.model(x, x, x, need_weights=False)[0].sum()

    profiled.run(1, loss)
    profiled.close()
    report = profiled.memory_report()
    assert report["samples"] >= 2
    assert report["peak_bytes"] - report["begin_bytes"] > 100 * 2**20


@needs_safetensors
def test_trainings_leave_no_threads_and_descriptors(tmp_path: pathlib.Path) -> None:
    counts = []
    for number in range(6):
        services = {"enable_fault_tolerance": True, "checkpoint_folder": tmp_path / str(number)}
        services |= {"enable_monitoring": True, "log_level": "error", "profile_memory": True}
        layer = make(checkpoint_interval=1, **services)
        run(layer.prepare(), 2)
        layer.cleanup()
        for thread in threading.enumerate():  # it has written and may still be ending
            if thread.name == "annulus checkpoint":
                thread.join(60)
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert counts[-1] == counts[1], counts


# ---- what acts between processes


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """Losses of 20 steps in one process."""
    losses = losses_of(run_program(WORKER, "trains:alone"))
    assert len(losses) == 20 and losses[-1] < 0.9 * losses[0]
    return losses


def test_ranks(alone: list[float]) -> None:
    cases = [
        "buckets_leave_when_they_are_told_to",
        "caches_of_a_ring_are_its_own",
        "ranks_that_disagree_are_told",
        "rings_of_some_ranks_are_logged",
        "a_package_that_one_rank_misses_is_an_error_on_all_ranks",
        "deepspeed_takes_one_dtype",
        "ddp_is_refused",
        "fsdp_is_refused_and_held_bytes_are_the_shards",
    ]
    trained = ["trains:ddp", "trains:ddp+after+checkpointing"]
    out = run_program(WORKER, *cases, *trained, ranks=4)
    assert out.count("done") == 4 * len(cases + trained), out
    assert_as_alone(out, trained, alone)


@needs_safetensors
def test_a_killed_rank_is_an_error_or_is_recovered_from() -> None:
    """During the transfer of gradients PyTorch reports the loss; in forward, Annulus does."""
    run_program(WORKER, "survive:gradients", "raises:forward")


@pytest.mark.slow
@needs_safetensors
def test_several_losses_are_recovered_from_up_to_max_recoveries() -> None:
    places = ["survive:forward", "survive:twice", "survive:recovering"]
    run_program(WORKER, *places, "raises:forward:none")


@needs_deepspeed
def test_deepspeed_trains_as_one_process_does(alone: list[float]) -> None:
    """Every stage, with and without offload to the host, overlap and gradient checkpointing."""
    cases = [
        "trains:zero1",
        "trains:zero1+cpu",
        "trains:zero2+after",
        "trains:zero2+cpu",
        "trains:zero3",
        "trains:zero3+cpu+checkpointing",
    ]
    assert_as_alone(run_program(WORKER, *cases, ranks=4), cases, alone)


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_goes_on_from_its_checkpoint(
    stage: int, alone: list[float], tmp_path: pathlib.Path
) -> None:
    first = losses_of(run_program(WORKER, f"trains:zero{stage}:7:{tmp_path}", ranks=2))
    assert first == pytest.approx(alone[:7], rel=0, abs=1e-5)
    names = {p.name for p in (tmp_path / "deepspeed").glob("step-*")}
    assert names == {"step-00000004", "step-00000006"}
    refused = run_program(WORKER, f"cannot_go_on:zero{stage}:{tmp_path}:ranks = 2", ranks=3)
    refused += run_program(WORKER, f"cannot_go_on:zero2:{tmp_path}:zero_stage = {stage}", ranks=2)
    assert refused.count("done") == 5, refused
    rest = losses_of(run_program(WORKER, f"trains:zero{stage}:20:{tmp_path}", ranks=2))
    assert rest == pytest.approx(alone[6:], rel=0, abs=1e-5)


@needs_deepspeed
def test_nvme_is_used_or_refused_with_the_reason(
    alone: list[float], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With libaio, DeepSpeed first compiles its async_io, which takes minutes."""
    monkeypatch.setitem(ENVIRONMENT, "NVME_PATH", str(tmp_path))
    out = run_program(WORKER, "nvme", ranks=2)
    refused = re.findall("refused: (.*)", out)
    assert len(refused) == 2, out
    if "libaio-dev" not in refused[0]:
        assert_as_alone(out, ["nvme"], alone)
