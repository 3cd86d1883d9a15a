"""What happens around a call: threads, signals, memory."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap

import annulus
import pytest
from annulus import Pattern, Placement, RingAttention, make_in_process_ring
from support import HANG, executors_missed, normal, problem, python_calls, resident_bytes


def run_python(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=HANG,
        **options,
    )


# Other threads run during a pass, or nobody could interrupt it. Left alone, the passes would take very long.
INTERRUPT = """
    import os, signal, threading, time
    import numpy as np, annulus
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell may have it ignored
    q = np.zeros((1, 4_000_000, 1, 8), np.float32)

    def interrupt():
        for _ in range(300):
            time.sleep(0.001)  # gives the interpreter away each time
        os.kill(os.getpid(), signal.SIGINT)

    try:
        threading.Thread(target=interrupt).start()
        {call}
    except KeyboardInterrupt:
        small = q[:, :64]
        assert annulus.attention(small, small, small).shape == small.shape  # everything else works
        print("interrupted")
"""


@pytest.mark.parametrize(
    "call",
    [
        "annulus.attention(q, q, q)",
        "annulus.attention(q, q, q, ranks=3)",
        "annulus.RingAttention(annulus.Pattern.dense(1), annulus.Placement.contiguous(4_000_000, 1), head_dim=8, "
        "transport=annulus.make_in_process_ring(1)[0], backward=False).forward(q, q, q)",
        # Waits for a rank that never comes.
        "ring = annulus.make_in_process_ring(2, deadline=86400); annulus.RingAttention(annulus.Pattern.dense(8), "
        "annulus.Placement.contiguous(64, 2), head_dim=64, transport=ring[0])",
    ],
    ids=["attention", "attention_ring", "executor", "waiting"],
)
def test_ctrl_c_ends_a_long_pass(call: str) -> None:
    found = run_python(INTERRUPT.format(call=call))
    assert found.stdout.strip() == "interrupted", found.stderr


def test_ten_thousand_calls_leave_memory_flat() -> None:
    q, k, v, do = problem(tokens=16, dim=8, batch=1)
    ring = RingAttention(
        Pattern.dense(4),
        Placement.contiguous(16, 1),
        transport=make_in_process_ring(1)[0],
        kv_heads=2,
        head_dim=8,
    )

    def calls(count: int) -> None:
        for _ in range(count):
            o, lse = annulus.attention(q, k, v, return_lse=True)
            ring.forward(q, k, v)
            annulus.attention_backward(q, k, v, o, lse, do)
            try:
                annulus.attention(q, k, do[:, :5])
            except annulus.ConfigError:
                pass

    calls(1000)
    before = resident_bytes()
    calls(10_000)
    assert resident_bytes() - before < 1 << 20


EVERYTHING = """
    import sys
    sys.path.insert(0, {folder!r})
    import numpy as np, annulus
    from support import on_ranks, problem
    import test_transport as t
    q, k, v, do = problem()
    o, lse = annulus.attention(q, k, v, return_lse=True, ranks=2, placement="zigzag")
    annulus.attention_backward(q, k, v, o, lse, do)
    on_ranks(t.queue_ring(2), t.passes)
    on_ranks(t.queue_ring(3, t.Broken), t.passes)
    positions = annulus.Placement.striped(9, 2).positions(1)
    plan = annulus.Plan(annulus.Pattern.dense(2), annulus.Placement.zigzag(9, 2))
    cache = annulus.RingAttentionCache(annulus.make_in_process_ring(1)[0])
    kept = cache.get(annulus.Pattern.dense(2), annulus.Placement.contiguous(9, 1), head_dim=8)
    print("done")
"""


def test_nothing_leaks_until_exit() -> None:
    found = run_python(EVERYTHING.format(folder=str(pathlib.Path(__file__).parent)))
    assert found.stdout.strip() == "done", found.stderr
    assert found.stderr == ""
    # The check can fail: nanobind tells of an object that is never released.
    leak = run_python(
        "import annulus, ctypes; p = annulus.Pattern.dense(2); ctypes.pythonapi.Py_IncRef(ctypes.py_object(p))"
    )
    assert "leaked" in leak.stderr


def test_a_placement_may_be_an_argument_until_exit() -> None:
    """Calls that were valid are kept with their arguments."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    found = run_python("""
        import annulus, annulus.torch, torch
        def call():
            placement = annulus.Placement.explicit(24, [[range(12, 24), range(12)]])
            q = torch.randn(1, 24, 2, 8)
            annulus.torch.ring_attention(q, q, q, placement=placement)
        call()
        """)
    assert (found.returncode, found.stderr) == (0, "")


def test_a_pool_may_live_until_exit() -> None:
    """An exception that a program keeps holds the frames of the call, and with them the ring's executors."""
    found = run_python("""
        import annulus
        from annulus._core import ExecutorPool
        transport = annulus.make_in_process_ring(1)[0]
        pool = ExecutorPool()
        pool.give_back("key", annulus.RingAttention(
            annulus.Pattern.dense(2), annulus.Placement.contiguous(9, 1), transport=transport, head_dim=8))
        """)
    assert (found.returncode, found.stderr) == (0, "")


def test_import_needs_no_torch() -> None:
    found = run_python("""
        import sys
        import numpy as np, annulus
        q = np.ones((1, 8, 1, 8), np.float32)
        annulus.attention(q, q, q)
        assert "torch" not in sys.modules
        """)
    assert found.returncode == 0, found.stderr


def test_small_calls_do_little() -> None:
    """How long they take is measured by 'make perf'."""
    q = normal(1, 64, 2, 64)

    def call() -> None:
        annulus.attention(q, q, q)

    call()
    assert executors_missed(call) == 0
    called = python_calls(call)
    assert len(called) <= 5, called  # itself


@pytest.mark.parametrize("module", ["annulus", "annulus.torch"])
def test_forked_children_compute(module: str) -> None:
    """As workers of a DataLoader do; the parent's threads are not theirs."""
    if module == "annulus.torch":
        pytest.importorskip("torch", reason="PyTorch is not installed")
        make, call = (
            "torch.randn(1, 300, 4, 64)",
            "annulus.torch.ring_attention(q, q, q)[0, 7, 1, 3].item()",
        )
    else:
        make, call = "numpy.ones((1, 300, 4, 64), 'float32')", "annulus.attention(q, q, q).sum()"
    code = f"""
        import os, signal, numpy, annulus
        {"import torch, annulus.torch" if module == "annulus.torch" else ""}
        q = {make}
        expected = {call}
        child = os.fork()
        if child == 0:
            signal.alarm(600)
            os._exit(0 if {call} == expected else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert {call} == expected
    """
    run = run_python(code)
    assert run.returncode == 0, run.stderr
