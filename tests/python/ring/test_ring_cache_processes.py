"""annulus.torch.RingCache over a process group (ring_cache_worker.py)."""

from __future__ import annotations

import pathlib

import pytest
from support.launch import need_gloo, run_program

need_gloo()

WORKER = pathlib.Path(__file__).with_name("ring_cache_worker.py")
EXAMPLE = pathlib.Path(__file__).resolve().parents[3] / "examples" / "python" / "decode.py"
CASES = [
    "replicated_tokens_give_every_rank_the_same_bits",
    "sharded_tokens_go_to_the_ranks_that_keep_them",
    "mistakes_of_one_rank_are_errors_on_all",
    "closed_caches_have_freed_everything",
    "dropped_transports_wait_briefly",
]


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes(processes: int) -> None:
    out = run_program(WORKER, *CASES, ranks=processes)
    assert out.count(" done in ") == processes * len(CASES), out


def test_the_example_decodes_the_same_tokens_on_every_ring() -> None:
    alone, two = (
        run_program(EXAMPLE, "--tokens", "6", ranks=ranks).splitlines()[0] for ranks in (0, 2)
    )
    assert alone == two and len(alone.split()) == 7, (alone, two)
