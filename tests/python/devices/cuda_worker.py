"""One rank of test_cuda_processes.py: cuda_worker.py <case>... All ranks share one GPU."""

from __future__ import annotations

import datetime
import itertools
import os
import signal
import time

import annulus
import annulus.torch as at
import torch
import torch.distributed as dist
from support.rank_cases import run_cases
from support.reference import relative_rms

WORLD = None
PATTERNS = {
    "dense": {},
    "longnet": {"segment_lengths": [64, 160], "dilation_rates": [1, 2]},
    "window": {"window": (70, -1)},
}


def whole(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output of the whole sequence, the same on all ranks."""
    make = torch.Generator("cuda").manual_seed(5)
    shapes = [(2, tokens, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(s, device="cuda", generator=make).to(dtype) for s in shapes]


def results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, **options: object) -> list:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    o = at.ring_attention(*leaves, **options)
    o.backward(do)
    return [o.detach(), *(x.grad for x in leaves)]


def ways() -> set[str]:
    """How the rows of this process's executors on the group travel."""
    ring = at.ring._registry._groups[WORLD.group_name]
    return {executor.transfers for executor in ring.pool.executors()}


def expected_way() -> str:
    return {"staged": "staged through host memory (ANNULUS_DEVICE_MESSAGES is staged)"}.get(
        os.environ.get("ANNULUS_DEVICE_MESSAGES", ""), "shared device memory"
    )


def equals_one_process() -> None:
    limits = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}
    cases = itertools.product(PATTERNS, ["contiguous", "zigzag", "striped"], [False, True], ["ring", "gather"])
    for number, (pattern, placement, causal, schedule) in enumerate(cases):
        dtype = [torch.float32, torch.bfloat16, torch.bfloat16][number % 3]
        heads, kv_heads = [(4, 4), (4, 2)][number // 2 % 2]
        options = {**PATTERNS[pattern], "is_causal": causal}
        inputs = whole([331, 640][number % 2], heads, kv_heads, 64, dtype)
        expected = results(*(x.float() for x in inputs), **options)
        place = {"placement": placement, "group": WORLD}
        mine = [at.shard(x, **place) for x in inputs]
        found = results(*mine, schedule=schedule, **options, **place)
        for name, f, e in zip(("o", "dq", "dk", "dv"), found, expected):
            off = relative_rms(f, at.shard(e, **place))
            assert off < limits[dtype], (number, pattern, placement, causal, schedule, dtype, name, off)
    assert ways() == {expected_way()}, ways()


def reproducible_is_one_process_bits() -> None:
    inputs = whole(500, 4, 2, 64, torch.bfloat16)
    options = {**PATTERNS["longnet"], "is_causal": True, "reproducible": True}
    expected = results(*inputs, **options)
    place = {"placement": "zigzag", "group": WORLD}
    found = results(*(at.shard(x, **place) for x in inputs), **options, **place)
    for f, e in zip(found, expected):
        assert torch.equal(f, at.shard(e, **place))


def passes_follow_at_once() -> None:
    """Passes with different inputs on streams of the caller, without waits between them."""
    place = {"placement": "zigzag", "group": WORLD}
    options = {"is_causal": True}
    inputs = [at.shard(x, **place) for x in whole(2048, 4, 4, 64, torch.bfloat16)]
    expected = [results(*(x * scale for x in inputs), **options, **place) for scale in (1.0, 0.5, 0.25)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(3):
        found = []
        for i, scale in enumerate((1.0, 0.5, 0.25)):
            with torch.cuda.stream(streams[i % 2]):
                found.append(results(*(x * scale for x in inputs), **options, **place))
        torch.cuda.synchronize()
        for f, e in zip(found, expected):
            assert torch.equal(f[0], e[0])
            assert all(relative_rms(a, b) < 1e-3 for a, b in zip(f, e))


def wrong_input_on_one_rank() -> None:
    rank = dist.get_rank()
    q, k, v, _ = (x[:, :64] for x in whole(64, 4, 4, 64, torch.bfloat16))
    for wrong, words in (
        ({"v": v[:, :10]}, "v is [2, 10, 4, 64]"),
        ({"k": k.cpu()}, "k is on cpu"),
        ({"is_causal": True}, "is_causal (rank 0: False, rank 1: True)"),
        ({"q": q.cpu(), "k": k.cpu(), "v": v.cpu()}, "cuda"),
    ):
        call = {"q": q, "k": k, "v": v, "group": WORLD} | (wrong if rank == 1 else {})
        try:
            at.ring_attention(**call)
        except annulus.ConfigError as refusal:
            assert words in str(refusal), refusal
        else:
            raise AssertionError(f"{words}: went unnoticed")
    at.ring_attention(q, k, v, group=WORLD)  # the ring still works
    torch.cuda.synchronize()


class Pretending(at.ProcessGroupTransport):
    """Carries device memory in order over Gloo, in place of NCCL, which refuses ranks that share a GPU. A batch is
    complete when post_device returns."""

    in_order = True

    def reaches(self, device: str) -> bool:
        return True

    def post_device(self, messages: list, device: str, stream: int) -> Pretending:
        torch.cuda.ExternalStream(stream, device).synchronize()
        under_way = []
        for way, peer, tag, address, size in messages:
            on_device = torch.as_tensor(at.ring._transport._DeviceMemory(address, size), device=device)
            host = on_device.cpu()
            begin, arguments = self.prepare(way, peer, tag, memoryview(host.numpy()))
            under_way.append((way, on_device, host, begin(*arguments)))
        for way, on_device, host, work in under_way:
            work.wait(datetime.timedelta(seconds=20))
            if way == "receive":
                on_device.copy_(host)
        torch.cuda.synchronize()
        return self

    def wait(self) -> None:
        pass


def groups_may_carry_device_memory() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = whole(300, 4, 2, 64, torch.bfloat16)
    expected = results(*(x.float() for x in inputs), is_causal=True)
    transport = Pretending(WORLD, timeout=20)
    for schedule in ("ring", "gather"):
        ring = annulus.RingAttention(
            annulus.Pattern.dense(4, causal=True),
            annulus.Placement.contiguous(300, size),
            transport=transport,
            batch=2,
            kv_heads=2,
            head_dim=64,
            dtype="bfloat16",
            device="cuda:0",
            schedule=schedule,
            backward_travel="keys",
        )
        assert ring.transfers == "device memory", ring.transfers
        q, k, v, do = (at.shard(x, group=WORLD).contiguous() for x in inputs)
        o, lse = ring.forward(q, k, v)
        found = [o, *ring.backward(q, k, v, o, lse, do)]
        ring.synchronize()
        for f, e in zip(found, expected):
            assert relative_rms(f, at.shard(e, group=WORLD)) < 1.5e-2, (rank, schedule)
    dist.barrier()
    transport.close()


def primitives() -> None:
    """ring_pass, ring_pass_kv, reshard and check_ring of CUDA tensors: through host memory, and carried by the
    group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    previous, following = (rank - 1) % size, (rank + 1) % size

    def held(r: int, dtype: torch.dtype) -> torch.Tensor:
        make = torch.Generator("cuda").manual_seed(r)
        return (9 * torch.randn(5, 7 + r, 3, device="cuda", generator=make)).to(dtype).transpose(0, 2)

    def check() -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            x = at.ring_pass(held(rank, dtype), WORLD)
            k, v = at.ring_pass_kv(held(rank, dtype), held(rank, torch.bfloat16)[1:], WORLD)
            assert x.is_cuda and x.dtype == dtype and torch.equal(x, held(previous, dtype))
            assert torch.equal(k, x) and torch.equal(v, held(previous, torch.bfloat16)[1:])
        leaf = held(rank, torch.float32).requires_grad_()
        (at.ring_pass(leaf, WORLD).sum() * (rank + 1)).backward()
        assert torch.equal(leaf.grad, torch.full_like(leaf, following + 1.0))
        whole = torch.arange(2 * 53 * 3.0, device="cuda").view(2, 53, 3)
        mine = at.shard(whole, placement="zigzag", group=WORLD)
        moved = at.reshard(mine, "zigzag", "striped", group=WORLD)
        assert torch.equal(moved, at.shard(whole, placement="striped", group=WORLD))

    check()
    ring = at.ring._registry._groups[WORLD.group_name]
    own, ring.transport = ring.transport, Pretending(WORLD, timeout=20)
    check()
    dist.barrier()
    ring.transport.close()
    ring.transport = own
    report = at.check_ring(WORLD)
    assert report.device_path == expected_way(), report
    assert report.devices == ("cuda:0",) * size, report


def workspaces_come_and_go() -> None:
    """Makes more executors than are kept; every rank drops them in a different order."""
    rank = dist.get_rank()
    for _ in range(3):
        for tokens in range(64, 64 + 12 * 8, 8):
            x = torch.ones(1, tokens, 2, 64, device="cuda", dtype=torch.bfloat16)
            o = at.ring_attention(x, x, x, group=WORLD)
            assert torch.equal(o, x)
            if tokens % 5 == rank:
                at.clear_cache()
    torch.cuda.synchronize()


def killed() -> None:
    """Rank 1 is killed when all ranks have enqueued their work and its own is not done. The other devices must not wait
    for ever, and the next call must name rank 1."""
    q = torch.randn(1, 600, 4, 64, device="cuda")
    at.ring_attention(q, q, q, group=WORLD, timeout=8.0)
    torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() == 1:
        torch.cuda._sleep(20_000_000_000)  # about 10 s
    at.ring_attention(q, q, q, group=WORLD, timeout=8.0)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    torch.cuda.synchronize()
    took = time.monotonic() - begin
    begin = time.monotonic()
    try:
        at.ring_attention(q, q, q, group=WORLD, timeout=8.0)
    except annulus.TransportError as loss:
        assert loss.rank == 1, loss
        print(f"rank {dist.get_rank()} lost rank 1: {took:.2f} s and {time.monotonic() - begin:.2f} s", flush=True)
        print(loss, flush=True)
    else:
        raise AssertionError("the loss of rank 1 was not noticed")
    assert took < 60  # not for ever
    os._exit(0)


if __name__ == "__main__":
    run_cases(globals(), patience=30)
