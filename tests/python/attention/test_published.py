"""Code written for the published ring-dilated-attention modules runs unchanged. published_worker.py is run by ranks."""

from __future__ import annotations

import importlib.util
import logging
import pathlib
import sys
import warnings

import numpy as np
import pytest
from support.launch import need_gloo, run_program
from support.optional import needs_deepspeed, needs_safetensors

need_gloo()

import annulus  # noqa: E402
import annulus.torch as at  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from annulus.torch import variants  # noqa: E402
from annulus.torch.training import _training  # noqa: E402

WORKER = pathlib.Path(__file__).parent / "published_worker.py"
BRANCHES = {"segment_lengths": [32, 64], "dilation_rates": [1, 2]}
VARIANTS = [getattr(variants, name) for name in variants.__all__]
HAS_BRANCHES = [kind for kind in VARIANTS if kind is not at.StandardRingAttention]
ALL = [at.RingDilatedAttention, *HAS_BRANCHES]

pytestmark = pytest.mark.filterwarnings("ignore:RingDistributedDilatedAttention:DeprecationWarning")


def advanced(**options: object) -> at.RingAdvancedDistributedDilatedAttention:
    return at.RingAdvancedDistributedDilatedAttention(32, 2, **BRANCHES, **options)


def multihead(**options: object) -> at.RingMultiheadDilatedAttention:
    return at.RingMultiheadDilatedAttention(32, 2, **BRANCHES, **options)


@pytest.mark.parametrize("ranks", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 4])
def test_ranks(ranks: int) -> None:
    cases = ["variants_are_exact", "block_runs"]
    if ranks in (2, 4):
        cases.append("variants_sit_in_ddp_and_fsdp")
    out = run_program(WORKER, *cases, ranks=ranks)
    assert out.count("done") == max(ranks, 1) * len(cases), out


@needs_deepspeed
def test_deepspeed() -> None:
    out = run_program(
        WORKER, "variants_sit_in_deepspeed", "deepspeed_takes_the_config", ranks=2
    )
    assert out.count("done") == 4, out


# ---- spellings


def test_published_names_are_translated() -> None:
    layer = advanced(
        overlap_communication=False, min_seq_for_distributed=100, use_checkpointing=True, attention_dropout=0.0
    )
    assert layer._services.overlap_comm is False
    assert layer.attention.min_tokens_for_ring == 100
    assert layer.use_gradient_checkpointing is True
    assert advanced(activation_checkpointing=True).use_gradient_checkpointing is True
    for make in (at.RingDilatedAttention, *HAS_BRANCHES):
        module = make(**BRANCHES, min_seq_for_distributed=100, dropout=0.2)
        assert module.min_tokens_for_ring == 100, make
        assert module.dropout_p == 0.2, make


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"overlap_communication": True, "overlap_comm": True}, "another name of overlap_comm"),
        ({"overlap_communication": "yes"}, "overlap_comm is 'yes'"),
        ({"use_checkpointing": True, "activation_checkpointing": True}, "another name"),
        ({"attention_dropout": 1}, "dropout is 1: a number from 0 to less than 1"),
        ({"attention_dropout": 0.1, "dropout": 0.1}, "another name of dropout"),
        ({"ring_size": 2}, "there is no group"),
        ({"ring_size": 0}, "from 1 to"),
        ({"ring_size": "1"}, "from 1 to"),
        ({"model_parallel": True}, "tensor.parallel"),
        ({"sequence_parallel": False}, "group=None"),
        ({"use_8bit_optimizer": True}, "prepare"),
        ({"use_gradient_compression": True}, "communication hook"),
        ({"use_flash_attention": False}, "matrix of scores"),
        ({"compile_model": True}, "torch.compile"),
    ],
)
def test_unsupported_values_are_errors(given: dict[str, object], words: str) -> None:
    with pytest.raises(annulus.ConfigError, match=words):
        advanced(**given)


@pytest.mark.parametrize("make", [advanced, multihead, *(lambda k=k, **o: k(**BRANCHES, **o) for k in ALL)])
def test_the_supported_values_are_accepted(make: type) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make(
            ring_size=1,
            model_parallel=False,
            sequence_parallel=True,
            data_parallel=True,
            use_flash_attention=True,
            use_checkpointing=False,
            communication_backend="nccl",
            compile_model=False,
            attention_dropout=0.0,
        )
        make(ring_size=None)


@pytest.mark.parametrize("kind", ALL)
def test_errors_name_the_class(kind: type) -> None:
    for given in ({"ring_size": 3}, {"model_parallel": True}, {"use_checkpointing": True}):
        with pytest.raises(annulus.ConfigError, match=kind.__name__):
            kind(**BRANCHES, **given)


@pytest.mark.parametrize("name", ["enable_memory_pool", "flash_chunk_size", "use_tf32", "block_size", "device"])
def test_arguments_without_effect_give_a_warning(name: str) -> None:
    with pytest.warns(UserWarning, match=f"{name} has no effect") as said:
        at.RingDilatedAttention(**BRANCHES, **{name: 1})
    assert said[0].filename == __file__
    for make in (advanced, at.RingDilatedAttentionSDPA):
        with pytest.warns(UserWarning, match="use_tf32 has no effect") as said:
            make(use_tf32=True)
        assert said[0].filename == __file__, make


def test_numpy_numbers_are_valid() -> None:
    for zero in (np.float32(0), np.float64(0), np.int64(0)):
        at.RingDilatedAttentionSDPA(**BRANCHES, dropout=zero, model_parallel=np.False_, ring_size=np.int64(1))
        with pytest.raises(annulus.ConfigError, match="dropout is"):
            multihead(dropout=zero + 1)


def test_unknown_names_are_errors() -> None:
    for make in (advanced, multihead, *(lambda k=k, **o: k(**BRANCHES, **o) for k in ALL)):
        with pytest.raises(TypeError, match="ring_sise"):
            make(ring_sise=1)
    for make in (advanced, multihead):
        with pytest.raises(TypeError, match=r"^Ring(Advanced|Multihead)\w+\(\) got"):
            make(ring_sise=1)


@pytest.mark.usefixtures("one_rank")
def test_a_group_is_checked() -> None:
    world = dist.group.WORLD
    advanced(group=world, ring_size=1, communication_backend="gloo")
    with pytest.raises(annulus.ConfigError, match="ring_size is 4, but the group has 1 rank"):
        advanced(group=world, ring_size=4)
    with pytest.raises(annulus.ConfigError, match="'nccl', but the group's backend is 'gloo'"):
        advanced(group=world, communication_backend="nccl")
    with pytest.raises(annulus.ConfigError, match="group is a str"):
        advanced(group="world", ring_size=1)


# ---- variants


def test_a_variant_fixes_its_options() -> None:
    assert at.RingDilatedAttentionV2Collective(**BRANCHES).schedule == "gather"
    assert at.RingDilatedAttentionTrue(**BRANCHES, schedule="ring").schedule == "ring"
    with pytest.raises(annulus.ConfigError, match="V2Collective: schedule is 'ring'"):
        at.RingDilatedAttentionV2Collective(**BRANCHES, schedule="ring")
    with pytest.raises(annulus.ConfigError, match="schedule is array"):
        at.RingDilatedAttentionV2Collective(**BRANCHES, schedule=np.array(["gather", "ring"]))
    with pytest.raises(TypeError):
        at.StandardRingAttention([32], [1])
    with pytest.raises(annulus.ConfigError, match="pattern 'dense'"):
        x = torch.zeros(1, 8, 2, 16)
        at.StandardRingAttention(**BRANCHES)(x, x, x)


def test_a_variant_takes_the_seed_of_its_dropout() -> None:
    x = torch.randn(1, 32, 2, 16)
    module = at.RingDilatedAttentionTrue(**BRANCHES, dropout=0.5)
    expected = at.ring_attention(x, x, x, **BRANCHES, dropout_p=0.5, dropout_seed=3)
    assert torch.equal(module(x, x, x, dropout_seed=3), expected)


@pytest.mark.parametrize("kind", ALL)
def test_masks_are_errors(kind: type) -> None:
    x = torch.randn(1, 8, 2, 16)
    module = kind(**BRANCHES)
    with pytest.raises((annulus.ConfigError, TypeError), match="attention_mask"):
        module(x, x, x, attention_mask=torch.ones(8, 8, dtype=torch.bool))


def test_the_deprecated_name_warns_and_works() -> None:
    with pytest.warns(DeprecationWarning, match="use RingDilatedAttention") as said:
        module = at.RingDistributedDilatedAttention(**BRANCHES)
    assert said[0].filename == __file__
    x = torch.randn(1, 40, 2, 16)
    expected = at.ring_attention(x, x, x, **BRANCHES, is_causal=True)
    assert torch.equal(module(x, x, x, is_causal=True), expected)
    with pytest.warns(DeprecationWarning, match="use RingAdvanced"):
        layer = at.RingDistributedDilatedAttention(embed_dim=32, num_heads=2, **BRANCHES)
    assert type(layer) is at.RingAdvancedDistributedDilatedAttention
    layer = at.RingDistributedDilatedAttention(np.int64(32), np.int64(2), **BRANCHES)
    assert type(layer) is at.RingAdvancedDistributedDilatedAttention

    class Derived(at.RingDistributedDilatedAttention):
        pass

    assert type(Derived(**BRANCHES)) is Derived
    with pytest.raises(annulus.ConfigError, match="Derived: .* derive from RingAdvanced"):  # which would be lost
        Derived(embed_dim=32, num_heads=2, **BRANCHES)


@pytest.mark.usefixtures("one_rank")
def test_a_group_that_is_set_later_has_the_same_placement() -> None:
    """With another placement than that of the shards, results would be wrong."""
    module = at.RingDilatedAttentionHilbertGPUOptimized(**BRANCHES)
    x = torch.randn(1, 203, 2, 16)
    expected = at.ring_attention(x, x, x, **BRANCHES)
    assert torch.equal(module(x, x, x), expected)
    module.group = dist.group.WORLD
    assert module.placement == "hilbert"
    torch.testing.assert_close(module(x, x, x), expected)


# ---- the module with everything around it


def test_tensors_are_batch_first_and_weights_are_returned_if_possible() -> None:
    x = torch.randn(2, 50, 32)
    layer = advanced(is_causal=True)
    output, weights = layer(x, x, x)
    assert weights is None
    torch.testing.assert_close(output[:1], layer(x[:1], x[:1], x[:1])[0])
    dense = at.RingAdvancedDistributedDilatedAttention(32, 2)
    assert dense(x, x, x)[1].shape == (2, 50, 50)
    assert layer(x, x, x, need_weights=True)[1].shape == (2, 50, 50)
    with pytest.raises(annulus.ConfigError, match="RingAdvanced.*: query is a NoneType"):
        layer(None, x, x)


def test_memory_complexity_describes_the_calls() -> None:
    at.cleanup()
    layer = advanced(schedule="ring")
    before = layer.get_memory_info()
    assert before["memory_complexity"] == (
        "O(n/P): fp32 accumulators of the own rows and two slots of travelling rows; no call yet"
    )
    assert (before["memory_complexity_bytes"], before["model_parallel_buffers"]) == (0, 0)
    sizes = []
    for tokens in (64, 128):
        x = torch.randn(1, tokens, 32)
        layer(x, x, x)[0].sum().backward()
        info = layer.get_memory_info()
        sizes.append(info["memory_complexity_bytes"])
        assert f"{sizes[-1]} bytes per rank" in info["memory_complexity"]
    assert sizes[1] > sizes[0] > 0
    assert info["model_parallel_buffers"] == info["cached_workspaces"] == 2
    for tokens in range(1, 40):
        x = torch.randn(1, tokens, 32)
        layer(x, x, x)
    assert layer.get_memory_info()["model_parallel_buffers"] <= 20
    layer.clear_cache()
    assert layer.get_memory_info()["model_parallel_buffers"] == 0


@needs_safetensors
def test_checkpoints_have_a_default_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("ANNULUS_CHECKPOINTS", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_training, "_said", set())
    for _ in range(2):
        layer = advanced(enable_fault_tolerance=True)
        with caplog.at_level(logging.INFO, logger="annulus"):
            layer.prepare()
        layer.cleanup()
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert (folder / "step-00000000").is_dir()
    assert [str(folder) in record.getMessage() for record in caplog.records if "checkpoints go" in record.msg] == [True]

    monkeypatch.setenv("ANNULUS_CHECKPOINTS", str(tmp_path / "mine"))
    layer = advanced(enable_fault_tolerance=True)
    layer.prepare()
    layer.cleanup()
    assert (tmp_path / "mine" / "step-00000000").is_dir()


def test_the_default_folder_names_the_package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANNULUS_CHECKPOINTS", raising=False)
    monkeypatch.chdir(tmp_path)
    for program, name in (("/jobs/train/__main__.py", "train"), ("/jobs/train.py", "train"), (None, "annulus")):
        monkeypatch.setattr(sys.modules["__main__"], "__file__", program, raising=False)
        assert advanced(enable_fault_tolerance=True)._services.folder == tmp_path / "checkpoints" / name


@needs_safetensors
def test_a_file_instead_of_a_folder_is_an_error(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("ANNULUS_CHECKPOINTS", str(file))
    with pytest.raises(at.CheckpointError, match="file is a file: a folder was expected"):
        advanced(enable_fault_tolerance=True).prepare()


def test_deepspeed_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install deepspeed"):
        advanced(use_deepspeed=True)
