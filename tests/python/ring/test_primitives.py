"""ring_pass, ring_pass_kv and check_ring: alone, between processes (primitives_worker.py), and when one is lost
(ring_faults.py)."""

from __future__ import annotations

import pathlib

import pytest
from support.launch import need_gloo, run_program

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
need_gloo()

import annulus.torch as at  # noqa: E402
from annulus import ConfigError  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402

WORKER = pathlib.Path(__file__).with_name("primitives_worker.py")
FAULTS = WORKER.with_name("ring_faults.py")
VALUES = [
    "everybody_gets_the_previous_ranks_tensor",
    "strides_are_any",
    "shapes_may_differ",
    "as_many_passes_as_ranks_are_none",
    "k_and_v_are_one_message",
    "results_may_be_written_to",
    "gradients_go_the_other_way",
    "gradients_are_the_numerical_ones",
    "gradients_have_gradients",
    "some_need_no_gradient",
    "what_is_no_group_is_refused_here",
    "timeouts_are_any_numbers",
    "reports_are_the_same_on_all_ranks",
]
FAILURES = [
    "wrong_on_one_rank",
    "two_threads_on_one_group",
    "damaged:blocks",
    "damaged:tensors",
    "groups_without_a_store_get_one",
]
THREADS = ["rings_of_several_groups_are_made_at_once", "threads_with_groups_of_their_own"]


@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        (1, VALUES),
        pytest.param(2, [*VALUES, *FAILURES, *THREADS], marks=pytest.mark.slow),
        (3, [*VALUES, *FAILURES, "compiled_code_steps_aside", *THREADS]),
        pytest.param(4, [*VALUES, *FAILURES], marks=pytest.mark.slow),
    ],
)
def test_processes(processes: int, cases: list[str]) -> None:
    out = run_program(WORKER, *cases, ranks=processes)
    assert out.count(" done in ") == processes * len(cases), out


# ---- one process


def test_one_process_gets_a_copy() -> None:
    x = torch.randn(3, 4).t().requires_grad_()
    y = at.ring_pass(x)
    assert torch.equal(x, y) and y.is_contiguous() and y.data_ptr() != x.data_ptr()
    k, v = at.ring_pass_kv(x, torch.tensor(True))
    ((y + 2 * k) * v).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: at.ring_pass(None), "ring_pass: tensor is a NoneType"),
        (lambda x: at.ring_pass(x.to_sparse()), "tensor is a torch.sparse_coo tensor"),
        (lambda x: at.ring_pass(torch.nested.nested_tensor([x, x])), "tensor is a nested tensor"),
        (lambda x: at.ring_pass(x.to("meta")), "tensor is on meta"),
        (lambda x: at.ring_pass(torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)), "tensor is torch.qint8"),
        (lambda x: at.ring_pass(FakeTensorMode().from_tensor(x)), "tensor is a FakeTensor"),
        (lambda x: at.ring_pass(x, timeout=0), "timeout is 0"),
        (lambda x: at.ring_pass(x, "world"), "group is a str"),
        (lambda x: at.ring_pass_kv(x, 1.0), "ring_pass_kv: v is a float"),
        (lambda x: at.ring_pass_kv(x, x.to("meta")), "v is on meta"),
        (lambda x: at.check_ring(timeout=float("nan")), "check_ring: timeout is nan"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_wrong_arguments_are_refused(call: object, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        call(torch.ones(2, 3))
    assert words in str(refusal.value)


def test_transforms_are_refused() -> None:
    x = torch.ones(2, 3)
    for call in (
        lambda: torch.func.grad(lambda y: at.ring_pass(y).sum())(x),
        lambda: torch.func.jvp(at.ring_pass, (x,), (x,)),
    ):
        with pytest.raises(NotImplementedError, match="annulus: ring_pass"):
            call()
    with pytest.raises(ConfigError, match="inside torch.func.vmap"):
        torch.func.vmap(at.ring_pass)(x)


def test_one_process_gets_a_report() -> None:
    report = at.check_ring()
    assert report.ranks == 1 and report.links == ()
    assert "Ring of 1 rank:" in str(report) and "one rank" in report.device_path


# ---- a rank that is killed, stopped or slow


# Every call and every fault once; the other pairs take the same paths.
QUICK = [("check_ring", "kill"), ("ring_pass_kv", "stop"), ("ring_pass", "slow")]


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        pytest.param(call, fault, marks=[] if (call, fault) in QUICK else pytest.mark.slow)
        for call in ("ring_pass", "ring_pass_kv", "check_ring")
        for fault in ("kill", "stop", "slow")
    ],
)
def test_a_fault_of_one_of_four_processes(call: str, fault: str) -> None:
    # In a process of its own: ranks are forked from one that has no threads yet.
    run_program(FAULTS, call, fault)
