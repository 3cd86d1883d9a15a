"""RingAttention over in-process rings: one executor per rank, each on its own thread."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import annulus
import numpy as np
import pytest
from annulus import Pattern, Placement, RingAttention, Transport, make_in_process_ring
from annulus._core import ExecutorPool
from support import normal, on_ranks, problem
from support.reference import attention as reference
from support.reference import relative_rms

PATTERN = Pattern.longnet(4, [16, 64], [1, 2], causal=True)


def shards(placement: Placement, rank: int, *arrays: np.ndarray) -> list[np.ndarray]:
    return [np.ascontiguousarray(array[:, placement.positions(rank)]) for array in arrays]


def run_ring(placement: Placement, **options: Any) -> tuple[list[np.ndarray], list[RingAttention]]:
    """Whole o, lse, dq, dk, dv of the usual problem, and the executors."""
    arrays = problem()

    def body(transport: Transport) -> tuple[RingAttention, list[np.ndarray]]:
        ring = RingAttention(
            PATTERN, placement, transport=transport, batch=2, kv_heads=2, head_dim=16, **options
        )
        q, k, v, do = shards(placement, transport.rank(), *arrays)
        state = ring.make_branch_state() if options.get("mix_gradient") == "detached" else None
        before = transport.counters()["bytes_sent"]
        o, lse = ring.forward(q, k, v, state=state)
        between = transport.counters()["bytes_sent"]
        gradients = ring.backward(q, k, v, o, lse, do, state=state)
        assert between - before == ring.predicted_forward_bytes
        assert transport.counters()["bytes_sent"] - between == ring.predicted_backward_bytes
        return ring, [o, lse, *gradients]

    results = on_ranks(make_in_process_ring(placement.ranks), body)
    for result in results:
        if isinstance(result, Exception):
            raise result
    wholes = []
    for index, like in enumerate([arrays[0], arrays[0][..., 0], *arrays[:3]]):
        whole = np.empty(like.shape, np.float32)
        for rank, (_, mine) in enumerate(results):
            whole[:, placement.positions(rank)] = mine[index]
        wholes.append(whole)
    return wholes, [ring for ring, _ in results]


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped", "hilbert"])
@pytest.mark.parametrize("schedule", ["ring", "gather"])
@pytest.mark.parametrize("travel", ["keys", "queries"])
def test_matches_the_definition(name: str, schedule: str, travel: str) -> None:
    found, rings = run_ring(Placement.named(name, 70, 3), schedule=schedule, backward_travel=travel)
    expected = reference(PATTERN, *problem())
    attends = np.isfinite(expected.lse)
    assert np.abs(found[1][attends] - expected.lse[attends]).max() < 5e-6
    for mine, theirs in zip(
        found[:1] + found[2:], (expected.o, expected.dq, expected.dk, expected.dv)
    ):
        assert relative_rms(mine, theirs) < 2e-6
    assert {ring.schedule for ring in rings} == {schedule}
    assert rings[0].backward_plan.travel == travel and rings[0].plan.steps == (
        1 if schedule == "gather" else 2
    )


def test_reproducible_gives_the_same_bits_on_every_ring() -> None:
    one, _ = run_ring(Placement.contiguous(70, 1), reproducible=True)
    many, _ = run_ring(Placement.zigzag(70, 4), reproducible=True)
    assert all(np.array_equal(a, b) for a, b in zip(one, many))


def test_detached_mixing_needs_its_state_which_may_live_in_the_callers_arrays() -> None:
    found, _ = run_ring(Placement.contiguous(70, 2), mix_gradient="detached")
    full, _ = run_ring(Placement.contiguous(70, 2))
    assert np.allclose(found[0], full[0], atol=1e-6) and not np.allclose(
        found[2], full[2], atol=1e-3
    )
    exact = annulus.reference_backward(
        *(x.astype(np.float64) for x in problem()), PATTERN, mix_gradient="detached"
    )
    for mine, theirs in zip(found[2:], exact):
        assert relative_rms(mine, theirs) < 2e-6

    q, k, v, do = problem()
    ring = RingAttention(
        PATTERN,
        Placement.contiguous(70, 1),
        transport=make_in_process_ring(1)[0],
        batch=2,
        kv_heads=2,
        head_dim=16,
        mix_gradient="detached",
    )
    # Of every token in the first branch, of every second one in the other.
    assert ring.branch_state_rows == 2 * (70 + 35) * 4
    state = ring.make_branch_state()
    o, lse = ring.forward(q, k, v, state=state)
    expected = ring.backward(q, k, v, o, lse, do, state=state)
    branch_o = np.empty((ring.branch_state_rows, 16), np.float32)
    branch_lse = np.empty(ring.branch_state_rows, np.float32)
    ring.forward(q, k, v, state=ring.make_branch_state(o=branch_o, lse=branch_lse))
    kept = ring.make_branch_state(o=branch_o.copy(), lse=branch_lse.copy(), filled=True)
    gc.collect()  # the state keeps its arrays alive
    for a, b in zip(ring.backward(q, k, v, o, lse, do, state=kept), expected):
        assert np.array_equal(a, b)
    with pytest.raises(annulus.ConfigError, match="needs the branch state"):
        ring.backward(q, k, v, o, lse, do)
    with pytest.raises(annulus.ConfigError, match="lse is a NoneType"):
        ring.make_branch_state(o=branch_o)
    with pytest.raises(
        annulus.ConfigError, match="o is a numpy.ndarray, expected a contiguous float32"
    ):
        ring.make_branch_state(o=np.zeros(branch_o.shape), lse=branch_lse)


def one_rank(**options: Any) -> RingAttention:
    arguments: dict[str, Any] = {"transport": make_in_process_ring(1)[0], "head_dim": 16, **options}
    return RingAttention(
        arguments.pop("pattern", PATTERN),
        arguments.pop("placement", Placement.contiguous(70, 1)),
        **arguments,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 513}, "head_dim is 513, expected 1 to 512"),
        ({"kv_heads": 3}, "kv_heads is 3"),
        ({"batch": 0}, "batch is 0"),
        ({"dtype": "float64"}, "dtype is 'float64', expected one of 'float32'"),
        ({"dtype": np.int32}, "dtype is 'int32'"),
        ({"mix_gradient": "half"}, "mix_gradient is 'half'"),
        ({"schedule": "best"}, "schedule is 'best'"),
        ({"backward_travel": "both"}, "backward_travel is 'both'"),
        ({"reproducible": True, "schedule": "ring"}, "reproducible"),
        ({"placement": Placement.contiguous(70, 2)}, "is for 2 ranks"),
        ({"max_qkv_elements": 100}, "limits.qkv_elements"),
        ({"scale": float("nan")}, "scale is nan"),
    ],
)
def test_wrong_options_are_config_errors_that_name_them(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(annulus.ConfigError) as caught:
        one_rank(**options)
    assert message in str(caught.value)


def test_dtypes_have_many_names() -> None:
    q = normal(1, 70, 4, 16)
    for dtype in ("float32", "fp32", np.float32, np.dtype("float32")):
        assert one_rank(dtype=dtype).forward(q, q, q)[0].dtype == np.float32
    half = q.astype(np.float16)
    for dtype in ("float16", "fp16", np.float16, np.dtype("float16")):
        assert one_rank(dtype=dtype).forward(half, half, half)[0].dtype == np.float16


def test_executor_tells_about_itself() -> None:
    ring = one_rank(backward=False)
    assert ring.kernels == annulus.isa() and ring.schedule in ("ring", "gather")
    assert set(ring.memory_info) == {
        "device",
        "complexity", "workspace_bytes", "communication_bytes", "state_bytes", "scratch_bytes", "cached_workspaces",
    }  # fmt: skip
    assert "longnet, contiguous: rank 0 of 1" in repr(ring)
    assert ring.plan.pattern == PATTERN and ring.transport.size() == 1
    plan = ring.plan
    del ring
    gc.collect()
    assert plan.ranks == 1  # a plan keeps its executor alive
    q = normal(1, 70, 4, 16)
    with pytest.raises(annulus.ConfigError, match="backward = false"):
        one_rank(backward=False).backward(q, q, q, q, q[..., 0], q)
    with pytest.raises(annulus.ConfigError, match="backward = false"):
        _ = one_rank(backward=False).backward_plan


def test_executor_keeps_its_transport_alive() -> None:
    ring = one_rank()
    gc.collect()
    q = normal(1, 70, 4, 16)
    assert ring.forward(q, q, q)[0].shape == q.shape


def test_wrong_array_on_one_rank_is_an_error_on_all() -> None:
    placement = Placement.contiguous(70, 3)

    def body(transport: Transport) -> Any:
        rank = transport.rank()
        ring = RingAttention(PATTERN, placement, transport=transport, head_dim=16)
        q = normal(1, placement.local_tokens(rank), 4, 16)
        with pytest.raises(annulus.ConfigError) as caught:
            ring.forward(q, q.astype(np.float64) if rank == 1 else q, q)
        ring.forward(q, q, q)  # and everything still works
        return str(caught.value)

    messages = on_ranks(make_in_process_ring(3), body)
    assert "k is float64, expected float32" in messages[1]
    assert all(f"[rank {r}/3]" in messages[r] for r in range(3)) and all(
        "rank 1 refused: k" in messages[r] for r in (0, 2)
    )


class WithoutMemory:
    """An array of a framework that cannot make another one."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def new_empty(self, *_: Any, **__: Any) -> Any:
        raise MemoryError("no room for results")


def test_results_that_one_rank_cannot_allocate_are_an_error_on_all() -> None:
    transports = make_in_process_ring(3)
    q = normal(1, 3, 2, 16)

    def body(transport: annulus.Transport) -> list[Any]:
        ring = RingAttention(
            Pattern.dense(2), Placement.contiguous(9, 3), transport=transport, head_dim=16
        )
        o, lse = ring.forward(q, q, q)
        mine = WithoutMemory(q) if transport.rank() == 1 else q
        found = []
        for call in (
            lambda: ring.forward(mine, q, q),
            lambda: ring.backward(q, mine, q, o, lse, q),
        ):
            try:
                found.append(call())
            except (annulus.Error, MemoryError) as error:
                found.append(error)
            ring.forward(q, q, q)  # as good as before
        return found

    outcomes = on_ranks(transports, body)
    for rank, outcome in enumerate(outcomes):
        for error in outcome:
            assert isinstance(error, MemoryError if rank == 1 else annulus.ConfigError), outcomes
            assert "no room for results" in str(error), outcomes


def test_objects_of_another_class_on_one_rank_are_an_error_on_all() -> None:
    transports = make_in_process_ring(3)
    q = normal(1, 3, 2, 16)
    right = {"pattern": Pattern.dense(2), "placement": Placement.contiguous(9, 3)}

    def body(transport: annulus.Transport) -> list[Any]:
        def make(**wrong: Any) -> RingAttention:
            mine = wrong if transport.rank() == 1 else {}
            return RingAttention(**right | mine, transport=transport, head_dim=16)

        ring = make()
        o, lse = ring.forward(q, q, q)

        def forward(**wrong: Any) -> Any:
            return ring.forward(q, q, q, **wrong if transport.rank() == 1 else {})

        def backward(**wrong: Any) -> Any:
            return ring.backward(q, q, q, o, lse, q, **wrong if transport.rank() == 1 else {})

        found = []
        for call in (
            lambda: make(pattern="dense"),
            lambda: make(placement=None),
            lambda: forward(state="dense"),
            lambda: forward(stream="s"),
            lambda: forward(dropout_seed=-1),
            lambda: forward(dropout_seed_of_rank_0=2),
            lambda: forward(claims=3),
            lambda: backward(stream=1.5),
            lambda: backward(dropout_seed="x"),
        ):
            try:
                found.append(call())
            except (annulus.Error, TypeError) as error:
                found.append(error)
        return found

    outcomes = on_ranks(transports, body)
    words = ["pattern is 'dense'", "placement is None", "state is 'dense'", "stream is 's'"]
    words += ["dropout_seed is -1", "dropout_seed_of_rank_0 is 2", "claims is 3", "stream is 1.5"]
    words += ["dropout_seed is 'x'"]
    for rank, outcome in enumerate(outcomes):
        assert len(outcome) == len(words)
        for error, text in zip(outcome, words):
            assert isinstance(error, TypeError if rank == 1 else annulus.ConfigError), outcomes
            assert text in str(error), outcomes


def test_ranks_without_tokens() -> None:
    placement = Placement.contiguous(2, 4)
    q = normal(1, 2, 4, 16)

    def body(transport: Transport) -> np.ndarray:
        ring = RingAttention(PATTERN, placement, transport=transport, head_dim=16)
        (mine,) = shards(placement, transport.rank(), q)
        o, lse = ring.forward(mine, mine, mine)
        assert [g.shape for g in ring.backward(mine, mine, mine, o, lse, mine)] == [mine.shape] * 3
        return o

    found = on_ranks(make_in_process_ring(4), body)
    assert [o.shape[1] for o in found] == [1, 1, 0, 0]
    assert (
        relative_rms(np.concatenate(found, axis=1), annulus.attention(q, q, q, pattern=PATTERN))
        < 1e-6
    )


@pytest.mark.parametrize("letters", range(4))
def test_reasons_may_be_cut_off_inside_a_letter(letters: int) -> None:
    """Records have a fixed length in bytes, and letters have several."""
    reason = "x" * letters + "\u65e5" * 1000

    def refuse(transport: annulus.Transport) -> None:
        RingAttention.refuse(transport, reason if transport.rank() == 1 else "")

    for error in on_ranks(make_in_process_ring(3), refuse):
        assert isinstance(error, annulus.ConfigError), repr(error)
        assert reason[:100] in str(error)


def test_ranks_must_agree() -> None:
    def body(transport: Transport) -> Any:
        return RingAttention(
            PATTERN,
            Placement.contiguous(70, 2),
            transport=transport,
            head_dim=8 * (1 + transport.rank()),
        )

    for error in on_ranks(make_in_process_ring(2), body):
        assert isinstance(error, annulus.ConfigError) and "head_dim" in str(error)


def test_busy_executor_and_interrupt() -> None:
    ring = one_rank()
    ring.interrupt()
    q = normal(1, 70, 4, 16)
    with pytest.raises(annulus.Interrupted):
        ring.forward(q, q, q)


def test_cache_keeps_the_latest_executors() -> None:
    cache = annulus.RingAttentionCache(make_in_process_ring(1)[0], capacity=2)
    q = normal(1, 70, 4, 16)

    def get(tokens: int) -> RingAttention:
        return cache.get(PATTERN, Placement.contiguous(tokens, 1), head_dim=16)

    first = get(70)
    assert np.array_equal(first.forward(q, q, q)[0], annulus.attention(q, q, q, pattern=PATTERN))
    assert cache.size == 1 and get(70).plan.digest == first.plan.digest and cache.size == 1
    get(60), get(50)
    assert cache.size == 2
    assert cache.memory_info["cached_workspaces"] == 2 and cache.memory_info["workspace_bytes"] > 0
    cache.clear_cache()
    cache.clear_cache()
    assert cache.size == 0
    del cache
    assert first.forward(q, q, q)[0].shape == q.shape  # who has one may keep it
    with pytest.raises(annulus.ConfigError, match="capacity is 0"):
        annulus.RingAttentionCache(make_in_process_ring(1)[0], capacity=0)


def test_pool_lends_executors_and_drops_the_least_recently_used() -> None:
    pool = ExecutorPool(capacity=2)

    def make() -> RingAttention:
        transport = make_in_process_ring(1)[0]
        return RingAttention(PATTERN, Placement.contiguous(9, 1), transport=transport, head_dim=16)

    a, b, c = make(), make(), make()
    assert pool.take("a") is None
    pool.give_back("a", a)
    pool.give_back("a", b)  # of another thread
    assert {pool.take("a"), pool.take("a")} == {a, b} and pool.take("a") is None
    pool.give_back("a", a)
    pool.give_back("b", b)
    pool.give_back("a", pool.take("a"))
    pool.give_back("c", c)
    assert pool.take("b") is None and set(pool.executors()) == {a, c}
    pool.make_room()
    assert pool.executors() == [c]
    pool.clear()
    assert pool.executors() == [] and pool.take("c") is None

    # Whatever refers back to its pool is found by the garbage collector.
    class Link(Transport):
        """A ring of one rank, which sends nothing."""

    link = Link(0, 1, "link")
    link.pool = ExecutorPool()
    link.pool.give_back(
        "x", RingAttention(PATTERN, Placement.contiguous(9, 1), transport=link, head_dim=16)
    )
    gone = weakref.ref(link)
    del link
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"dtype": "float64"}, "float64"),
        ({"schedule": "rign"}, "rign"),
        ({"threads": 1.5}, "threads is 1.5"),
        ({"no_such": 1}, "no_such"),
        ({"device": "gpu"}, "device is 'gpu'"),
        ({"threads": -1}, "threads is -1"),
    ],
)
def test_wrong_option_of_one_rank_is_an_error_of_all(wrong: dict[str, Any], words: str) -> None:
    def build(transport: annulus.Transport) -> None:
        options = {"head_dim": 16} | (wrong if transport.rank() == 1 else {})
        RingAttention(Pattern.dense(2), Placement.contiguous(9, 3), transport=transport, **options)

    transports = annulus.make_in_process_ring(3)
    errors = on_ranks(transports, build)
    assert isinstance(errors[1], (annulus.ConfigError, TypeError)) and words in str(errors[1])
    for other in (errors[0], errors[2]):
        assert isinstance(other, annulus.ConfigError) and words in str(other), other
    build_right = lambda t: RingAttention(  # noqa: E731
        Pattern.dense(2), Placement.contiguous(9, 3), transport=t, head_dim=16
    )
    assert all(isinstance(r, RingAttention) for r in on_ranks(transports, build_right))
