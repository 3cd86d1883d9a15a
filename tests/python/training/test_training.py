"""LongNet models train on rings as they do in one process. The ranks run training_worker.py."""

from __future__ import annotations

import pathlib
import runpy
import sys

import pytest
from losses import assert_as_alone, losses_of
from support import ROOT
from support.launch import need_gloo, run_program
from support.optional import needs_deepspeed

need_gloo()

WORKER = pathlib.Path(__file__).with_name("training_worker.py")
EXAMPLE = ROOT / "examples" / "python" / "train_longnet_lm.py"


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (1, ["losses_and_gradients_are_those_of_one_process"]),
        (
            3,
            [
                "losses_and_gradients_are_those_of_one_process",
                "a_mean_has_the_same_bits_on_every_rank",
                "a_checkpoint_that_rank_0_cannot_write_is_an_error_on_all_ranks",
                "ring_or_gather_by_length",
            ],
        ),
        (
            4,
            [
                "losses_and_gradients_are_those_of_one_process",
                "buckets_are_as_large_as_they_should_be",
                "ranks_that_disagree_are_told",
            ],
        ),
    ],
)
def test_ranks(ranks: int, cases: list[str]) -> None:
    out = run_program(WORKER, *cases, ranks=ranks)
    assert out.count("done") == ranks * len(cases), out


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """Losses of 20 steps in one process."""
    losses = losses_of(run_program(WORKER, "trains:alone"))
    assert len(losses) == 20 and losses[-1] < 0.9 * losses[0]
    return losses


def test_ddp_and_fsdp_train_as_one_process_does(alone: list[float]) -> None:
    cases = ["trains:ddp", "trains:fsdp"]
    assert_as_alone(run_program(WORKER, *cases, ranks=4), cases, alone)


@needs_deepspeed
def test_deepspeed_trains_as_one_process_does(alone: list[float]) -> None:
    cases = ["trains:zero1", "trains:zero2", "trains:zero3"]
    assert_as_alone(run_program(WORKER, *cases, ranks=4), cases, alone)


@pytest.mark.slow
def test_example_goes_on_with_any_number_of_processes(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 50)
    small = ["--text", str(text), "--batch", "2", "--tokens", "61", "--width", "32"]
    # The learning rate depends on the total number of steps, so all runs get the same number.
    small += ["--steps", "12", "--log-interval", "1"]
    whole = losses_of(run_program(EXAMPLE, *small))
    assert len(whole) == 12 and whole[0] == pytest.approx(5.545, abs=0.1) and whole[-1] < 5.2
    found = []
    for ranks, stop in ((2, 4), (0, 8), (4, 12)):
        checkpoints = ["--checkpoints", str(tmp_path / "run"), "--checkpoint-interval", "4"]
        out = run_program(EXAMPLE, *small, *checkpoints, "--stop-after", str(stop), ranks=ranks)
        assert "tokens/s" in out and " MB" in out
        found += losses_of(out)
    assert found == pytest.approx(whole, rel=0, abs=1e-4)


@pytest.mark.parametrize("flag", ["--batch", "--tokens", "--log-interval", "--stop-after"])
def test_example_refuses_what_it_cannot_train_on(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), flag, "0"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert f"argument {flag}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["zigzag", "contiguous"])
def test_example_learns_the_same_on_every_ring(placement: str) -> None:
    """200 steps on the documents of this repository."""
    curves = [
        losses_of(
            run_program(EXAMPLE, "--placement", placement, "--log-interval", "1", ranks=ranks)
        )
        for ranks in (0, 2, 4)
    ]
    assert [len(curve) for curve in curves] == [200] * 3
    assert curves[0][0] > 5.4 and sum(curves[0][-10:]) / 10 < 2.5
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=0, abs=1e-4)
