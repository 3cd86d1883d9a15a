"""One rank of test_training.py; runs under torchrun: training_worker.py <case>... Without torchrun: one process."""

from __future__ import annotations

import copy
import pathlib
import tempfile
from collections.abc import Callable

import annulus
import annulus.torch as at
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from annulus.torch.training import _deepspeed
from support.rank_cases import run_cases
from torch import nn

WORLD = None
TOKENS, VOCABULARY, BATCH = 61, 40, 3
BRANCHES = {"segment_lengths": [16, 64], "dilation_rates": [1, 2]}


def make_model(**options: object) -> at.LongNetLM:
    torch.manual_seed(0)
    return at.LongNetLM(VOCABULARY, 2, 32, 2, **{**BRANCHES, **options})


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences that count up by 1 to 3 from a random start: tokens, and the token after each of them."""
    generator = torch.Generator().manual_seed(step)
    start, by = (torch.randint(*b, (BATCH, 1), generator=generator) for b in ((0, 40), (1, 4)))
    counted = (start + by * torch.arange(TOKENS + 1)) % VOCABULARY
    return counted[:, :-1].clone(), counted[:, 1:].clone()


def loss_of(
    model: nn.Module,
    tokens: torch.Tensor,
    following: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    n_global: int | None = None,
) -> torch.Tensor:
    logits = model(tokens, n_global=n_global)
    losses = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none")
    return at.token_mean(losses, weights=(following != -100).flatten(), group=group)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n.removeprefix("module."): p.grad.clone() for n, p in model.named_parameters()}


def assert_same(found: dict, expected: dict, *what: object) -> None:
    assert found.keys() == expected.keys()
    for name, e in expected.items():
        error = (found[name] - e).norm() / e.norm()
        assert error <= 2e-5, (name, error, *what)


def of_one_process(tokens: torch.Tensor, following: torch.Tensor) -> tuple[float, dict]:
    model = make_model()
    loss = loss_of(model, tokens, following)
    loss.backward()
    return loss.item(), gradients(model)


def losses_and_gradients_are_those_of_one_process() -> None:
    tokens, following = batch(7)
    following[1, 30:] = -100  # the ranks have different numbers of tokens that count
    loss, expected = of_one_process(tokens, following)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    of_our_own = [TOKENS - 5 * (ranks - 2)] + [5] * (ranks - 2) + [0] if ranks > 1 else [TOKENS]
    cases: list[tuple[str, list[int] | None, int | None]] = [
        (placement, None, n_global)
        for placement in ("contiguous", "zigzag", "striped", "hilbert")
        for n_global in (None, TOKENS)
    ]
    for placement, lengths, n_global in [*cases, ("contiguous", of_our_own, None)]:
        model = at.data_parallel(make_model(placement=placement, group=WORLD), WORLD)
        mine = (
            (
                at.shard(x, placement=placement, group=WORLD)
                if lengths is None
                else x.split(lengths, 1)[rank]
            )
            for x in (tokens, following)
        )
        found = loss_of(model, *mine, WORLD, n_global)
        found.backward()
        assert abs(found.item() - loss) < 1e-5, (placement, lengths, found.item(), loss)
        assert_same(gradients(model), expected, placement, lengths)


def a_mean_has_the_same_bits_on_every_rank() -> None:
    """A rank that decides by it, to stop or to skip a step, must decide like the others."""
    ranks = dist.get_world_size()
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        counts = torch.randint(1, 200, (ranks,), generator=generator).tolist()
        losses = [5 * torch.rand(count, generator=generator) for count in counts]
        mean = at.token_mean(losses[dist.get_rank()], group=WORLD)
        found = [torch.empty(()) for _ in range(ranks)]
        dist.all_gather(found, mean)
        assert len({x.item() for x in found}) == 1, (seed, found)


def a_checkpoint_that_rank_0_cannot_write_is_an_error_on_all_ranks() -> None:
    """A checkpoint of DeepSpeed, for which the other ranks would wait."""
    with tempfile.TemporaryDirectory() as folder:
        if dist.get_rank() == 0:
            (pathlib.Path(folder) / "deepspeed").touch()  # a file in place of the folder
        _deepspeed.check_installed = lambda: None  # DeepSpeed itself is not called
        module = at.RingAdvancedDistributedDilatedAttention(
            *(16, 2),
            **{"group": WORLD, "segment_lengths": [16], "dilation_rates": [1], "use_deepspeed": True},
            **{"enable_fault_tolerance": True, "checkpoint_interval": 1, "checkpoint_folder": folder},
        )
        checkpoints = _deepspeed.EngineCheckpoints(module._services, torch.nn.Identity())
        with pytest.raises(at.CheckpointError, match="writing a checkpoint: rank 0: "):
            checkpoints.step(1, {})


def buckets_are_as_large_as_they_should_be() -> None:
    """Gradients are those without buckets, whatever the bucket size. Buckets are sent while backward computes."""
    tokens, following = (at.shard(x, placement="zigzag", group=WORLD) for x in batch(3))
    model = make_model(placement="zigzag", group=WORLD)
    loss_of(model, tokens, following, WORLD).backward()
    expected = gradients(model)
    for grad in expected.values():
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    size = sum(4 * p.numel() for p in model.parameters())
    largest = max(4 * p.numel() for p in model.parameters())

    # What DDP does without a hook. Not annotated: DDP compares annotations with types, and here they are strings.
    def send(state, bucket):
        state.append(4 * bucket.buffer().numel())
        sent = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return sent.then(lambda done: done.value()[0] / dist.get_world_size())

    for bucket_size in (25, 0.02):
        parallel = at.data_parallel(
            make_model(placement="zigzag", group=WORLD), WORLD, bucket_size=bucket_size
        )
        events: list = []  # bytes of a bucket that is sent, or the name of another event
        first = parallel.module.longnet.blocks[0]
        first.register_full_backward_hook(lambda *_, events=events: events.append("first layer"))
        plain = loss_of(parallel, tokens, following, WORLD)
        plain.backward()
        assert_same(gradients(parallel), expected, bucket_size)
        parallel.register_comm_hook(events, send)
        for _ in range(3):  # after the first backward, DDP sorts its buckets by when they are ready
            events.clear()
            parallel.zero_grad()
            loss_of(parallel, tokens, following, WORLD).backward()
            assert_same(gradients(parallel), expected, bucket_size)
        sizes = [event for event in events if event != "first layer"]
        assert sum(sizes) == size, (sizes, size)
        if bucket_size == 25:
            assert len(sizes) == 1, sizes
        else:  # the last gradient of a bucket may exceed its size
            assert len(sizes) > 3 and max(sizes) < bucket_size * 2**20 + largest, sizes
            assert events.index("first layer") > 1, events


def ranks_that_disagree_are_told() -> None:
    """A wrong number of tokens, or a wrong n_global on one rank, is an error on all ranks."""
    model = make_model(group=WORLD)
    rank = dist.get_rank()
    tokens = at.shard(batch(1)[0], group=WORLD)
    for wrong in (
        {"n_global": 99 if rank == 1 else TOKENS},
        {"n_global": None if rank == 1 else TOKENS},
    ):
        with pytest.raises(annulus.ConfigError):
            model(tokens, **wrong)
    with pytest.raises(annulus.ConfigError, match="IndexError"):  # a token beyond the vocabulary, on one rank
        model(tokens + VOCABULARY if rank == 1 else tokens)
    model(tokens, n_global=TOKENS)  # the ring still works


def ring_or_gather_by_length() -> None:
    """From min_tokens_for_ring tokens on, the schedule is ring, below it gather. Results are the same."""
    for tokens, gathers in ((63, True), (64, False), (65, False)):
        q, k, v = torch.randn(3, 1, tokens, 2, 16, generator=torch.Generator().manual_seed(tokens))
        mine = [at.shard(x, group=WORLD) for x in (q, k, v)]
        at.clear_cache()
        o = at.ring_attention(*mine, group=WORLD, min_tokens_for_ring=64)
        chosen = at.get_memory_info()["complexity"]
        torch.testing.assert_close(
            at.unshard(o, group=WORLD), at.ring_attention(q, k, v), rtol=1e-4, atol=1e-5
        )
        assert ("every needed row" in chosen) == gathers, (tokens, chosen)


def steps_of(model: nn.Module, step: Callable[[int, torch.Tensor], None]) -> None:
    """Trains 20 steps and prints losses."""
    ring = {"placement": "zigzag", "group": WORLD}
    for number in range(1, 21):
        tokens, following = (x if WORLD is None else at.shard(x, **ring) for x in batch(number))
        loss = loss_of(model, tokens, following, WORLD, TOKENS)
        step(number, loss)
        if WORLD is None or dist.get_rank() == 0:
            print(f"step {number} loss {loss.item():.9f}", flush=True)


def trains(how: str) -> None:
    model = make_model(placement="zigzag", group=WORLD)
    whole = copy.deepcopy(model)
    wrapped: nn.Module = model
    if how == "ddp":
        wrapped = at.data_parallel(model, WORLD)
    elif how == "fsdp":
        from torch.distributed.fsdp import fully_shard

        if WORLD is not None:
            mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
            for block in model.longnet.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            share = sum(p.to_local().numel() for p in model.parameters())
            size = sum(p.numel() for p in whole.parameters())
            assert share < size, "nothing is sharded"
    elif how.startswith("zero"):
        trains_with_deepspeed(model, int(how.removeprefix("zero")))
        return
    else:
        assert how == "alone"
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=3e-3, eps=1e-6)

    def step(number: int, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    steps_of(wrapped, step)


def avoid_compiling() -> None:
    """Turns off DeepSpeed's shared memory for the ranks of one host: Gloo then carries everything. DeepSpeed would
    compile it for a minute, behind a lock that a killed run leaves to the next one."""
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}


def trains_with_deepspeed(model: nn.Module, stage: int) -> None:
    import deepspeed

    avoid_compiling()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # DeepSpeed clips at norm 1 unless told otherwise
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-3, "eps": 1e-6, "weight_decay": 0.01, "torch_adam": True},
        },
        # Small, so that there are several buckets and stage 3 shards every parameter.
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "reduce_bucket_size": 10000,
            "stage3_param_persistence_threshold": 0,
        },
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    assert engine.zero_optimization_stage() == stage

    def step(number: int, loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    steps_of(engine, step)


if __name__ == "__main__":
    run_cases(globals())
