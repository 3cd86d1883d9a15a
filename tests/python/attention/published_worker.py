"""One rank of test_published.py: published_worker.py <case>..., under torchrun, or alone in one process."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import warnings

import annulus
import annulus.torch as at
import torch
import torch.distributed as dist
from annulus.torch import variants
from annulus.torch.training import _deepspeed
from support import torch_reference
from support.rank_cases import run_cases
from torch import nn

WORLD = None
BRANCHES = {"segment_lengths": [32, 64, 128], "dilation_rates": [1, 2, 4]}
CLASSES = [getattr(variants, name) for name in variants.__all__]

# The production configuration, as published.
BLOCK = """
attention = RingAdvancedDistributedDilatedAttention(
    embed_dim=2048, num_heads=32, segment_lengths=[4096, 8192, 16384], dilation_rates=[1, 2, 4],
    use_deepspeed=True, zero_stage=3, cpu_offload=True, nvme_offload=False,
    enable_fault_tolerance=True, checkpoint_interval=100, auto_resume=True,
    enable_monitoring=True, profile_memory=True, log_level="INFO",
    bucket_size=25, overlap_communication=True)
deepspeed_config = attention.deepspeed_config      # accepted by deepspeed.initialize as it is
info = attention.get_memory_info()
info["memory_complexity"]; info["model_parallel_buffers"]; info.get("gpu_utilization_percent", "N/A")
attention.clear_cache(); attention.cleanup()
"""


def make(kind: type, **options: object) -> nn.Module:
    branches = {} if kind is at.StandardRingAttention else BRANCHES
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return kind(**branches, **options)


def whole(tokens: int, seed: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, in float64."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, tokens, heads, 16, generator=generator, dtype=torch.float64)
        for heads in (4, 2, 2, 4)
    ]


def expected_of(kind: type, causal: bool, q, k, v, grad) -> list[torch.Tensor]:
    """The output and the gradients, from the plain float64 formula."""
    pattern = (
        annulus.Pattern.dense(4, causal=causal)
        if kind is at.StandardRingAttention
        else annulus.Pattern.longnet(4, *BRANCHES.values(), causal=causal)
    )
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    o = torch_reference.attention(*inputs, pattern)
    o.backward(grad)
    return [o.detach(), *(x.grad for x in inputs)]


def variants_are_exact() -> None:
    seed = 0
    for kind in CLASSES:
        for causal in (False, True):
            seed += 1
            *qkv, grad = whole(150, seed)
            expected = expected_of(kind, causal, *qkv, grad)
            module = make(kind, group=WORLD)
            place = {"placement": module.placement, "group": WORLD}
            if WORLD is None:  # whole tensors, in the order of the sequence
                place["placement"] = "contiguous"
            mine = [at.shard(x.float(), **place).clone().requires_grad_() for x in qkv]
            o = module(*mine, is_causal=causal)
            o.backward(at.shard(grad.float(), **place))
            found = [at.unshard(x, **place) for x in (o.detach(), *(x.grad for x in mine))]
            for f, e in zip(found, expected, strict=True):
                assert (f - e).norm() <= 2e-6 * e.norm(), (kind.__name__, causal, seed)


class Layer(nn.Module):
    """Projections around a variant."""

    def __init__(self, kind: type):
        super().__init__()
        self.project = nn.Linear(32, 3 * 64)
        self.attention = make(kind, group=WORLD)
        self.out = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 4, 16)).unbind(-3)
        return self.out(self.attention(q, k, v, is_causal=True).flatten(-2))


def gradients(wrap) -> list[torch.Tensor]:
    """Summed over layers of every variant, of a loss over the whole sequence."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(*map(Layer, CLASSES)))
    x = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(1))
    model(at.shard(x, group=WORLD)).square().sum().backward()
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return [g.clone() for g in grads]


def variants_sit_in_ddp_and_fsdp() -> None:
    def summed(model: nn.Module) -> nn.Module:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        return model

    def sharded(model: nn.Module) -> nn.Module:
        for layer in model:
            dist.fsdp.fully_shard(layer)
        return dist.fsdp.fully_shard(model)

    expected = gradients(summed)
    for wrap in (nn.parallel.DistributedDataParallel, sharded):
        for mine, e in zip(gradients(wrap), expected, strict=True):  # both average over ranks
            torch.testing.assert_close(mine * dist.get_world_size(), e, rtol=1e-4, atol=1e-5)


def variants_sit_in_deepspeed() -> None:
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}  # nothing to compile: Gloo carries everything
    model = Layer(at.RingDilatedAttentionV2DeepSpeed)
    config = make_advanced(use_deepspeed=True, zero_stage=3).deepspeed_config
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
    )
    x = at.shard(torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(1)), group=WORLD)
    losses = []
    for _ in range(3):
        loss = (engine(x) - x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[2] < losses[0], losses


def make_advanced(**options: object) -> nn.Module:
    return at.RingAdvancedDistributedDilatedAttention(64, 4, **BRANCHES, **options)


def block_runs() -> None:
    at.cleanup()
    if importlib.util.find_spec("deepspeed") is None:
        try:
            exec(BLOCK, vars(at).copy())
        except ModuleNotFoundError as error:
            assert "pip install deepspeed" in str(error), error
        else:
            raise AssertionError("there is no DeepSpeed")
        _deepspeed.check_installed = lambda: None  # all but deepspeed.initialize can be tried
    names = vars(at).copy()
    exec(BLOCK, names)
    info, config = names["info"], names["deepspeed_config"]
    assert info["memory_complexity"].startswith("O(n/P)"), info
    assert info["model_parallel_buffers"] == 0
    assert config["zero_optimization"]["stage"] == 3 and config["zero_optimization"]["overlap_comm"]


def deepspeed_takes_the_config() -> None:
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}
    names = vars(at).copy()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ANNULUS_CHECKPOINTS"] = folder
        exec(BLOCK, names)
        attention = names["attention"]
        engine, *_ = deepspeed.initialize(
            model=attention,
            optimizer=torch.optim.SGD(attention.parameters(), lr=1e-3),
            config=names["deepspeed_config"],
        )
        x = torch.randn(1, 100, 2048)
        output, weights = engine(x, x, x, is_causal=True)
        assert weights is None and output.shape == x.shape
        engine.backward(output.square().mean())
        engine.step()


if __name__ == "__main__":
    run_cases(globals())
