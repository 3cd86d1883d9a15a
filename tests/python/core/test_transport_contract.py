"""Every transport that Python sees keeps the contract."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
from annulus import Transport, make_in_process_ring
from support import on_ranks
from support.launch import need_gloo, run_program
from support.queue_transport import PostingTransport, PreparingTransport, queue_ring
from support.transport_contract import CHECKS, NEEDS, Check

FACTORIES: dict[str, Callable[[int], list[Transport]]] = {
    "in_process": make_in_process_ring,
    "python_send_receive": queue_ring,
    "python_post": lambda ranks: queue_ring(ranks, PostingTransport),
    "python_prepare": lambda ranks: queue_ring(ranks, PreparingTransport),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
def test_contract(make: Callable[[int], list[Transport]], check: Check, ranks: int) -> None:
    ring = make(ranks)
    assert on_ranks(ring, check) == [None] * ranks
    for transport in ring:
        transport.abort("the test is over")  # whatever a check left waiting


# Executors send nothing to themselves; Gloo does not compare sizes, and loses the message that meets a
# receive which was called off.
BETWEEN_PROCESSES = [name for name in CHECKS if not NEEDS[name]]


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_contract_over_a_process_group(processes: int) -> None:
    need_gloo()
    cases = [f"contract:{name}" for name in BETWEEN_PROCESSES]
    worker = pathlib.Path(__file__).parents[1] / "ring" / "torch_worker.py"
    out = run_program(worker, *cases, ranks=processes)
    assert out.count("done") == processes * len(cases), out
