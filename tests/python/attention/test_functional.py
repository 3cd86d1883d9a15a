"""ring_attention in one process: values, gradients, and everything PyTorch does with an operator."""

from __future__ import annotations

import threading
import time

import pytest
from support import resident_bytes
from support.reference import relative_rms

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import annulus  # noqa: E402
import annulus.torch as at  # noqa: E402
from annulus import ConfigError, Pattern  # noqa: E402
from annulus.torch.ring import _registry  # noqa: E402
from support import torch_reference  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

LONGNET = {"segment_lengths": [16, 32, 64], "dilation_rates": [1, 2, 4]}


def tensors(
    tokens=70, heads=4, kv_heads=2, dim=16, batch=2, dtype=torch.float32, seed=0, grad=True
):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, tokens, h, dim) for h in (heads, kv_heads, kv_heads, heads)]
    q, k, v, do = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    return [x.requires_grad_(grad) for x in (q, k, v)] + [do]


def gradients(function, q, k, v, do):
    o = function(q, k, v)
    return (o, *torch.autograd.grad(o, (q, k, v), do))


CASES = [
    ({}, lambda h, c: Pattern.dense(h, causal=c)),
    (LONGNET, lambda h, c: Pattern.longnet(h, [16, 32, 64], [1, 2, 4], causal=c)),
    (
        {**LONGNET, "offsets": "interleaved", "group_scale": True},
        lambda h, c: Pattern.longnet(
            h, [16, 32, 64], [1, 2, 4], causal=c, offsets="interleaved", group_scale=True
        ),
    ),
    (
        {**LONGNET, "pattern": "head_groups", "group_scale": True},
        lambda h, c: Pattern.head_groups(h, [16, 32, 64], [1, 2, 4], causal=c, group_scale=True),
    ),
    ({"window": (20, 0)}, lambda h, c: Pattern.dense(h, causal=c, window=(20, 0))),
    (
        {**LONGNET, "window": [9, -1]},
        lambda h, c: Pattern.longnet(h, [16, 32, 64], [1, 2, 4], causal=c, window=(9, -1)),
    ),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_matches_a_pure_torch_reference(case: int, causal: bool, kv_heads: int) -> None:
    options, pattern = CASES[case]
    q, k, v, do = tensors(kv_heads=kv_heads)
    found = gradients(lambda *x: at.ring_attention(*x, is_causal=causal, **options), q, k, v, do)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = gradients(
        lambda *x: torch_reference.attention(*x, pattern(4, causal)), *wide, do.double()
    )
    for f, e in zip(found, expected):
        assert relative_rms(f, e) < 2e-6


HEAD_DIMS = (1, 2, 3, 7, 20, 33, 65, 80, 96, 100, 112, 160, 192, 250, 256, 257, 384, 511, 512)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_takes_any_head_dim(dim: int, dtype: torch.dtype) -> None:
    causal = dim % 2 == 0
    q, k, v, do = tensors(tokens=45, dim=dim, dtype=dtype)
    found = gradients(lambda *x: at.ring_attention(*x, is_causal=causal, **LONGNET), q, k, v, do)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    pattern = Pattern.longnet(4, [16, 32, 64], [1, 2, 4], causal=causal)
    expected = gradients(lambda *x: torch_reference.attention(*x, pattern), *wide, do.double())
    largest = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    for f, e in zip(found, expected):
        assert f.dtype == dtype and relative_rms(f.detach().float(), e) < largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mix", ["full", "detached"])
def test_has_the_bits_of_the_core(dtype: torch.dtype, mix: str) -> None:
    q, k, v, do = tensors(dtype=dtype)
    found = gradients(
        lambda *x: at.ring_attention(*x, mix_gradient=mix, is_causal=True, **LONGNET), q, k, v, do
    )
    ring = annulus.RingAttention(
        Pattern.longnet(4, [16, 32, 64], [1, 2, 4], causal=True),
        annulus.Placement.contiguous(70, 1),
        transport=annulus.make_in_process_ring(1)[0],
        batch=2,
        kv_heads=2,
        head_dim=16,
        dtype=dtype,
        mix_gradient=mix,
    )
    state = ring.make_branch_state() if mix == "detached" else None
    o, lse = ring.forward(q, k, v, state=state)
    expected = (o, *ring.backward(q, k, v, o, lse, do, state=state))
    for f, e in zip(found, expected):
        assert torch.equal(f, e)


@pytest.mark.parametrize("mix", ["full", "detached"])
def test_gradcheck_in_float64(mix: str) -> None:
    q, k, v, _ = tensors(tokens=12, dim=8, batch=1, heads=2, kv_heads=1, dtype=torch.float64)
    options = {"segment_lengths": [4, 8], "dilation_rates": [1, 2], "is_causal": True}
    if mix == "full":
        assert torch.autograd.gradcheck(lambda *x: at.ring_attention(*x, **options), (q, k, v))
    else:  # not the derivative, on purpose
        with pytest.raises(RuntimeError, match="Jacobian mismatch"):
            torch.autograd.gradcheck(
                lambda *x: at.ring_attention(*x, mix_gradient=mix, **options), (q, k, v)
            )


def test_directional_derivative_in_float32() -> None:
    q, k, v, do = tensors(tokens=40)
    function = lambda *x: at.ring_attention(*x, **LONGNET)  # noqa: E731
    _, dq, dk, dv = gradients(function, q, k, v, do)
    *steps, _ = tensors(tokens=40, seed=1, grad=False)
    slope = sum(float((g.double() * s.double()).sum()) for g, s in zip((dq, dk, dv), steps))
    ends = []
    with torch.no_grad():
        for sign in (1, -1):
            o = function(*[x + sign * 1e-2 * s for x, s in zip((q, k, v), steps)])
            ends.append(float((o.double() * do.double()).sum()))
    assert (ends[0] - ends[1]) / 2e-2 == pytest.approx(slope, rel=2e-3)


def test_a_second_derivative_is_an_error() -> None:
    q, k, v, do = tensors()
    (dq,) = torch.autograd.grad(at.ring_attention(q, k, v), q, do, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dq.sum().backward()


def test_return_lse_has_no_gradient() -> None:
    q, k, v, _ = tensors()
    o, lse = at.ring_attention(q, k, v, return_lse=True)
    assert o.requires_grad and not lse.requires_grad
    scores = torch.einsum("bqhd,bkhd->bqhk", q.double(), k.double().repeat_interleave(2, 2)) / 4
    assert relative_rms(lse, scores.logsumexp(-1)) < 1e-6


@pytest.mark.parametrize("mix", ["full", "detached"])
def test_operators_pass_pytorchs_own_checks(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at._fast_path, "_calls", {})
    q, k, v, _ = tensors()
    at.ring_attention(q, k, v, mix_gradient=mix, **LONGNET)
    (call,) = at._fast_path._calls.values()
    torch.library.opcheck(torch.ops.annulus.attend, (q, k, v, None, call.config.text))


@pytest.mark.parametrize("mix", ["full", "detached"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_takes_it_as_one_operator(mix: str, dynamic: bool) -> None:
    def function(q, k, v):
        return 2 * at.ring_attention(q * 1.5, k, v, is_causal=True, mix_gradient=mix, **LONGNET)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (70, 33, 5):
        q, k, v, do = tensors(tokens)
        for found, expected in zip(
            gradients(compiled, q, k, v, do), gradients(function, q, k, v, do)
        ):
            assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "branches",
    [
        {},
        LONGNET,
        {**LONGNET, "offsets": "interleaved"},
        {**LONGNET, "pattern": "head_groups"},
        {"segment_lengths": [5, 7], "dilation_rates": [2, 9]},  # do not divide, exceed the segment
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_detached_keeps_selected_rows_only(dtype: torch.dtype, branches: dict) -> None:
    """The number of rows is the one that compilers expect, for every length."""
    for tokens in (1, 5, 64, 70, 131):
        q, k, v, _ = tensors(tokens, dtype=dtype)
        calls = []
        with pytest.MonkeyPatch.context() as patch:
            attend = torch.ops.annulus.attend
            patch.setattr(torch.ops.annulus, "attend", lambda *x: calls.append(x) or attend(*x))
            patch.setattr(at._fast_path, "only_autograd_active", lambda *x: False)
            at.ring_attention(q, k, v, mix_gradient="detached", **branches)
        pattern = at._config.branches_of(at._config.config_of(calls[0][4]), 4)
        selected = sum(
            offset >= 0 and t % (branch.segment_length or tokens) % branch.dilation == offset
            for branch in pattern.branches
            for offset in branch.offset
            for t in range(tokens)
        )
        _, _, state_o, state_lse = attend(*calls[0])
        assert state_o.shape == (2 * selected, 16) and state_o.dtype == dtype
        assert state_lse.shape == (2 * selected,) and state_lse.dtype == torch.float32
        torch.library.opcheck(attend, calls[0], test_utils="test_faketensor")


def test_checkpointing_computes_the_same() -> None:
    q, k, v, do = tensors()
    function = lambda *x: at.ring_attention(*x, is_causal=True, **LONGNET)  # noqa: E731
    expected = gradients(function, q, k, v, do)
    for reentrant in (False, True):
        o = checkpoint(function, q, k, v, use_reentrant=reentrant)
        for x in (q, k, v):
            x.grad = None
        o.backward(do)
        for found, e in zip((o, q.grad, k.grad, v.grad), expected):
            assert torch.equal(found, e)


def test_autocast_computes_in_its_dtype() -> None:
    q, k, v, do = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = at.ring_attention(q, k, v)
    assert o.dtype == torch.bfloat16
    o.backward(do.bfloat16())
    assert q.grad.dtype == torch.float32
    expected = at.ring_attention(*(x.detach().bfloat16() for x in (q, k, v)))
    assert torch.equal(o, expected)


@pytest.mark.parametrize("layout", ["contiguous", "heads_first", "packed"])
def test_nothing_is_copied(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if layout == "contiguous":
        q, k, v = (torch.randn(2, 50, 4, 16) for _ in range(3))
    elif layout == "heads_first":
        q, k, v = (torch.randn(2, 4, 50, 16).transpose(1, 2) for _ in range(3))
    else:
        q, k, v = torch.randn(2, 50, 3, 4, 16).unbind(2)
    seen: list[int] = []
    run = at.ring._executors.LocalExecutors.run

    class Spy:
        def __init__(self, executor):
            self.executor = executor

        def __getattr__(self, name):
            return getattr(self.executor, name)

        def forward(self, *arrays, **more):
            seen.extend(x.data_ptr() for x in arrays[:5])
            return self.executor.forward(*arrays, **more)

    def spying_run(self, config, q, k, body):
        return run(self, config, q, k, lambda executor: body(Spy(executor)))

    monkeypatch.setattr(at.ring._executors.LocalExecutors, "run", spying_run)
    o, lse = at.ring_attention(q, k, v, return_lse=True)
    assert seen == [x.data_ptr() for x in (q, k, v, o, lse)]
    if layout != "packed":
        assert o.stride() == q.stride()


def test_gradients_of_any_layout() -> None:
    q, k, v, do = tensors(kv_heads=4)
    expected = gradients(at.ring_attention, q, k, v, torch.ones_like(do))
    o = at.ring_attention(q, k, v)
    found = torch.autograd.grad(o.sum(), (q, k, v))  # an expanded gradient: strides of 0
    for f, e in zip(found, expected[1:]):
        assert torch.equal(f, e)
    strided = [
        torch.randn(2, 70, 16, 4).transpose(2, 3).requires_grad_() for _ in range(3)
    ]  # last axis not dense
    dense = [x.detach().contiguous().requires_grad_() for x in strided]
    for f, e in zip(
        gradients(at.ring_attention, *strided, do), gradients(at.ring_attention, *dense, do)
    ):
        assert torch.equal(f, e)


def test_keeps_nothing_but_q_k_v_o_and_lse() -> None:
    q, k, v, _ = tensors()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        o = at.ring_attention(q, k, v, **LONGNET)
    inputs = {x.data_ptr() for x in (q, k, v, o)}
    others = [x for x in kept if x.data_ptr() not in inputs and x.numel() > 0]
    assert [tuple(x.shape) for x in others] == [(2, 70, 4)]  # lse


def test_a_second_thread_on_a_group_is_noticed_before_there_is_a_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first thread has the lock, but no ring that the second one could abort. It has to abort the ring itself."""
    dist = torch.distributed
    begun = threading.Event()
    tried = threading.Event()

    class Slow(_registry.CallLock):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "disturbed" and value is False and threading.current_thread() is first:
                begun.set()
                time.sleep(0.2)  # the second one comes
            super().__setattr__(name, value)

        def take(self) -> bool:
            taken = super().take()
            if threading.current_thread() is first:
                assert tried.wait(120)  # its call may not be over before the second one has come
            return taken

    given_up = []
    abort = at.ProcessGroupTransport.abort
    monkeypatch.setattr(
        at.ProcessGroupTransport,
        "abort",
        lambda self, reason: (given_up.append(reason), abort(self, reason)),
    )
    q = tensors(grad=False)[0]
    outcomes = {}

    def call(name: str) -> None:
        try:
            at.ring_attention(q, q, q, group=dist.group.WORLD)
            outcomes[name] = "fine"
        except annulus.Error as error:
            outcomes[name] = type(error).__name__

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD.group_name
        first = threading.Thread(target=call, args=("first",))
        monkeypatch.setitem(_registry._call_locks, group, Slow())
        first.start()
        assert begun.wait(120)
        call("second")
        tried.set()
        first.join()
        assert outcomes["second"] == "ConfigError"
        assert any("two threads" in reason for reason in given_up)  # what met it on other ranks ends, too
    finally:
        at.cleanup()
        dist.destroy_process_group()


def test_threads_may_call_at_once() -> None:
    q, k, v, do = tensors(tokens=300)
    expected = gradients(lambda *x: at.ring_attention(*x, **LONGNET), q, k, v, do)
    wrong: list[object] = []

    def work() -> None:
        mine = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        for _ in range(10):
            found = gradients(lambda *x: at.ring_attention(*x, **LONGNET), *mine, do)
            if not all(torch.equal(f, e) for f, e in zip(found, expected)):
                wrong.append(found)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mix", ["full", "detached"])
def test_default_dtypes_change_nothing(default: torch.dtype, mix: str) -> None:
    q, k, v, do = tensors()
    function = lambda *x: at.ring_attention(*x, mix_gradient=mix, **LONGNET)  # noqa: E731
    expected = gradients(function, q, k, v, do)
    torch.set_default_dtype(default)
    try:
        found = gradients(function, q, k, v, do)
    finally:
        torch.set_default_dtype(torch.float32)
    for f, e in zip(found, expected):
        assert torch.equal(f, e)


@pytest.mark.parametrize("shape", [(2, 0, 4, 16), (0, 5, 4, 16)])
def test_empty_tensors_give_empty_results(shape: tuple[int, ...]) -> None:
    q = torch.empty(shape, requires_grad=True)
    o = at.ring_attention(q, q, q, is_causal=True, mix_gradient="detached", **LONGNET)
    o.sum().backward()
    assert o.shape == shape and q.grad.shape == shape
    o64 = at.ring_attention(*[q.detach().double()] * 3, **LONGNET)
    assert o64.shape == shape


def test_placements_of_empty_sequences() -> None:
    x = torch.empty(2, 0, 3)
    for placement in ("contiguous", "zigzag", "striped", "hilbert"):
        assert at.positions(0, placement=placement).tolist() == []
        assert at.unshard(at.shard(x, placement=placement), placement=placement).shape == x.shape
    with pytest.raises(ConfigError, match="zig-zag"):
        at.positions(0, placement="zig-zag")


def test_other_kinds_of_derivatives_are_errors() -> None:
    q, k, v, _ = tensors(kv_heads=4, grad=False)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: at.ring_attention(q, k, v), (q,), (k,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, k)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            at.ring_attention(dual, k, v)
    with pytest.raises(NotImplementedError, match="torch.func.grad"):
        torch.func.grad(lambda q: at.ring_attention(q, k, v).sum())(q)


def test_vmap_adds_an_axis() -> None:
    q, k, v, _ = tensors(kv_heads=4)
    stacked = torch.stack([q, q.flip(1)])
    o = torch.vmap(lambda q: at.ring_attention(q, k, v))(stacked)
    assert torch.equal(o[1], at.ring_attention(q.flip(1), k, v))
    o.sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("mix", ["full", "detached"])
def test_float64_has_the_layout_that_compilers_expect(mix: str) -> None:
    q, k, v = (x.transpose(1, 2) for x in torch.randn(3, 1, 2, 12, 8, dtype=torch.float64).unbind())
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        attend = torch.ops.annulus.attend
        patch.setattr(torch.ops.annulus, "attend", lambda *x: calls.append(x) or attend(*x))
        patch.setattr(at._fast_path, "only_autograd_active", lambda *x: False)
        at.ring_attention(q.requires_grad_(), k, v, mix_gradient=mix, **LONGNET)
    torch.library.opcheck(attend, calls[0])


def test_workspaces_are_bounded_and_can_be_dropped() -> None:
    at.clear_cache()
    for tokens in range(10, 10 + 30):
        q, k, v, _ = tensors(tokens=tokens, grad=False)
        at.ring_attention(q, k, v)
    info = at.get_memory_info()
    assert info["cached_workspaces"] == 20 and info["workspace_bytes"] > 0
    at.clear_cache()
    at.cleanup()
    at.cleanup()
    info = at.get_memory_info()
    assert info["cached_workspaces"] == 0 and info["workspace_bytes"] == 0
    assert set(info) == set(
        annulus.RingAttention(
            Pattern.dense(1),
            annulus.Placement.contiguous(1, 1),
            transport=annulus.make_in_process_ring(1)[0],
            head_dim=8,
        ).memory_info
    ) | {"device_utilization", "recovered_workspaces"}
    assert info["device_utilization"] is None, "there is no GPU in it"


def test_memory_stays_flat() -> None:
    q, k, v, do = tensors(tokens=32)

    def calls(count: int) -> None:
        for _ in range(count):
            gradients(
                lambda *x: at.ring_attention(*x, mix_gradient="detached", **LONGNET), q, k, v, do
            )

    calls(500)
    before = resident_bytes()
    calls(4500)
    assert resident_bytes() - before < 4 << 20


def test_positions_and_shards_of_one_process() -> None:
    x = torch.arange(24).reshape(1, 24, 1)
    for placement in ("contiguous", "zigzag", "striped", "hilbert"):
        mine = at.positions(24, placement=placement)
        assert mine.dtype == torch.int64 and sorted(mine.tolist()) == list(range(24))
        shard = at.shard(x, placement=placement)
        assert torch.equal(shard[0, :, 0], mine)
        assert torch.equal(at.unshard(shard, placement=placement), x)
    assert at.shard(x).data_ptr() == x.data_ptr()
    with pytest.raises(ConfigError, match="zigzag"):
        at.positions(24, placement="nowhere")
    for wrong in ({"n_global": 2.5}, {"n_global": True}, {"n_global": 2**64}, {"placement": None}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            at.positions(**{"n_global": 24} | wrong)
    with pytest.raises(ConfigError, match="rank is 1"):
        at.positions(24, rank=1)
