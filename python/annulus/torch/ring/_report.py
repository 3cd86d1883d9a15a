"""check_ring: checks that a ring works, and measures its links."""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
import time

import torch
import torch.distributed as dist

import annulus
from annulus import ConfigError, Pattern, Placement, RingAttention, TransportError
from annulus._core import check_ring as check_blocks
from annulus.torch._options import timeout_complaint
from annulus.torch.ring._errors import collective
from annulus.torch.ring._messages import exchange
from annulus.torch.ring._process_groups import group_name, group_size_and_rank
from annulus.torch.ring._registry import ring_of_group
from annulus.torch.ring._transport import sendable

_TAG = 65  # exchange() uses 64
_PING_BYTES = 8
_PINGS = 11
# Large enough for a link's speed to show, small enough to take a second at 10 Mbit/s.
_BLOCK_BYTES = 2**20
_BLOCKS = 3
_HEAD_DIM = 64
_ROWS = 4  # of each rank


@dataclasses.dataclass(frozen=True)
class RingLink:
    """The speed of the link from rank `source` to rank `target`, measured by `source`."""

    source: int
    target: int
    latency: float  # seconds; half of the median round trip of a small message
    bandwidth: float  # bytes per second; of the median block


@dataclasses.dataclass(frozen=True)
class RingReport:
    """The result of :func:`check_ring`, the same on every rank. str() gives a table."""

    hosts: tuple[str, ...]  # of each rank
    processes: tuple[int, ...]  # the number of each rank in the whole job
    devices: tuple[str, ...]  # the device of each rank, such as "cuda:0"; empty: no usable device
    links: tuple[RingLink, ...]  # between neighbours, in both directions
    # How ring_attention transfers rows of CUDA tensors: "shared device memory", "NCCL", "staged through host memory
    # (reason)" or "none (reason)". ring_pass uses one of the latter three.
    device_path: str

    @property
    def ranks(self) -> int:
        """Number of ranks in the ring."""
        return len(self.hosts)

    def __str__(self) -> str:
        lines = [f"Ring of {self.ranks} rank{'s' * (self.ranks > 1)}: all blocks arrived as they were sent."]
        width = max(4, *map(len, self.hosts))
        lines.append(f"  {'rank':>4}  {'process':>7}  {'host':<{width}}  device")
        for rank in range(self.ranks):
            device = self.devices[rank] or "cpu"
            lines.append(
                f"  {rank:>4}  {self.processes[rank]:>7}  {self.hosts[rank]:<{width}}  {device}"
            )
        if self.links:
            lines.append(f"  {'from':>4}  {'to':>4}  {'latency':>10}  {'bandwidth':>12}")
        for link in self.links:
            latency, bandwidth = f"{link.latency * 1e6:.1f} us", f"{link.bandwidth / 1e6:.1f} MB/s"
            lines.append(f"  {link.source:>4}  {link.target:>4}  {latency:>10}  {bandwidth:>12}")
        lines.append(f"  CUDA tensors: {self.device_path}")
        return "\n".join(lines)


@torch.compiler.disable(reason="it measures time")
@collective(
    lambda *args, group=None, timeout=None, **_: (args[0] if args else group, timeout)
)
def check_ring(
    group: dist.ProcessGroup | None = None, *, timeout: float | None = None
) -> RingReport:
    """Checks that a ring works, and measures its links, as ``annulus doctor`` does, for a group of processes.

    Collective: every rank of the group calls it. First, neighbours exchange stamped blocks in both directions and
    compare every byte. Then they measure latency and bandwidth, pair by pair. Then the ranks compute a small attention
    in host memory and, if all ranks have a CUDA device, on their devices. Every rank gets the same report:

        import torch.distributed as dist
        from annulus.torch import check_ring

        dist.init_process_group("gloo")
        report = check_ring(dist.group.WORLD, timeout=20)
        if dist.get_rank() == 0:
            print(report)
        slowest = min(report.links, key=lambda link: link.bandwidth)

    Args:
        group: the ranks of the ring; None: this process alone.
        timeout: seconds that one transfer may take; None: the group's timeout.

    Raises:
        TransportError: a rank died, left or took too long, or sent wrong data; its ``rank`` is the one at fault, if
            known.
        ConfigError: an argument is wrong on any rank, or the ranks' calls differ. Raised on every rank.
    """
    name = group_name(group)
    complaint = timeout_complaint(timeout)
    if complaint is not None:
        raise ConfigError(f"check_ring: {complaint}")
    timeout = None if timeout is None else float(timeout)
    ranks, _ = group_size_and_rank(group)
    if name is None or ranks == 1:
        device, _ = _usable_device()
        return RingReport((platform.node(),), (_process(),), (device,), (), "none (there is one rank)")
    with ring_of_group(name, timeout, "check_ring") as ring:
        ring.set_timeout(timeout)
        device, complaint = _usable_device()
        facts = [sendable(platform.node()), _process(), device, sendable(complaint)]
        hosts, processes, devices, complaints = zip(*ring.agree("check_ring", {}, facts))
        transport = ring.transport
        _check_blocks(transport)
        links = _time_links(transport)
        _check_rows(transport, "cpu")
        if all(devices):
            path = _check_rows(transport, device)
        else:
            rank = devices.index("")
            path = f"none (rank {rank}: {complaints[rank]})"
    return RingReport(hosts, processes, devices, links, path)


def _process() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _usable_device() -> tuple[str, str]:
    """This process's current CUDA device; or "" and why there is none."""
    complaint = annulus.cuda_complaint()
    if complaint == "" and not torch.cuda.is_available():
        complaint = "this PyTorch has no CUDA device"
    return ("", complaint) if complaint else (f"cuda:{torch.cuda.current_device()}", "")


def _gather(transport: annulus.Transport, record: object) -> list:
    return [json.loads(x) for x in annulus.gather_records(transport, json.dumps(record).encode())]


def _raise_first(transport: annulus.Transport, found: tuple[int, str] | None) -> None:
    """Raises the first error of any rank on all ranks. `found`: a rank that sent wrong data, and the error."""
    for rank, record in enumerate(_gather(transport, found)):
        if record is not None:
            source, text = record
            error = TransportError(
                f"[rank {transport.rank()}/{transport.size()}] check_ring: rank {rank}: {text}"
            )
            error.rank = source
            raise error


def _check_blocks(transport: annulus.Transport) -> None:
    found = check_blocks(transport)
    if transport.failed:  # check_blocks does not raise
        raise transport._error()
    rank, ranks = transport.rank(), transport.size()
    wrong = None
    for way, step in (("backward", 1), ("forward", -1)):
        if not found[f"{way}_ok"]:
            wrong = (rank + step) % ranks, sendable(found["detail"])
    _raise_first(transport, wrong)


def _time_links(transport: annulus.Transport) -> tuple[RingLink, ...]:
    """Measures the links of all ranks, pair by pair. The order of the pairs is the same on all ranks, and pairs that
    measure at the same time have no rank in common, so that no rank waits for a rank that is busy with another one."""
    rank, ranks = transport.rank(), transport.size()
    pairs = [(first, (first + 1) % ranks) for first in range(ranks if ranks > 2 else 1)]
    # The last pair of an odd number of ranks has a rank in common with the first one.
    last = pairs[-1:] if ranks % 2 == 1 else []
    others = pairs[: len(pairs) - len(last)]
    mine = []
    for turn in (others[0::2], others[1::2], last):
        for pair in turn:
            if rank not in pair:
                continue
            for source, target in (pair, pair[::-1]):
                if rank == source:
                    mine.append((source, target, *_time_link(transport, target)))
                else:
                    _answer_link(transport, source)
    links = [RingLink(*link) for links in _gather(transport, mine) for link in links]
    return tuple(sorted(links, key=lambda link: (link.source, link.target)))


def _time_link(transport: annulus.Transport, peer: int) -> tuple[float, float]:
    """Latency and bandwidth to a rank that runs _answer_link."""
    block, answer = bytearray(_BLOCK_BYTES), bytearray(_PING_BYTES)

    def round_trip(size: int) -> float:
        begin = time.perf_counter()
        sent = transport.send(peer, _TAG, memoryview(block)[:size])
        transport.receive(peer, _TAG, answer).wait()
        taken = time.perf_counter() - begin
        sent.wait()
        return taken

    latency = statistics.median(round_trip(_PING_BYTES) for _ in range(_PINGS)) / 2
    taken = statistics.median(round_trip(_BLOCK_BYTES) for _ in range(_BLOCKS))
    # The answer to a block takes the latency, too. If a block takes hardly longer than that, a machine was busy.
    return latency, _BLOCK_BYTES / max(taken - latency, taken / 2)


def _answer_link(transport: annulus.Transport, peer: int) -> None:
    block, answer = bytearray(_BLOCK_BYTES), bytearray(_PING_BYTES)
    for size in (_PING_BYTES,) * _PINGS + (_BLOCK_BYTES,) * _BLOCKS:
        transport.receive(peer, _TAG, memoryview(block)[:size]).wait()
        transport.send(peer, _TAG, answer).wait()


def _check_rows(transport: annulus.Transport, device: str) -> str:
    """Computes a small attention on the ring and sends a tensor to the next rank. Returns how the rows travelled."""
    rank, ranks = transport.rank(), transport.size()
    previous, following = (rank - 1) % ranks, (rank + 1) % ranks
    executor = RingAttention(
        Pattern.dense(1),
        Placement.contiguous(_ROWS * ranks, ranks),
        transport=transport,
        head_dim=_HEAD_DIM,
        dtype=torch.float32,
        device=device,
        schedule="ring",
    )
    q = torch.zeros(1, _ROWS, 1, _HEAD_DIM, device=device)
    # All keys have equal weights, so that every row of the output is the mean of all ranks' numbers.
    o, _ = executor.forward(q, q, torch.full_like(q, rank))
    arrived = torch.empty(_BLOCK_BYTES // 4, dtype=torch.int32, device=device)
    exchange(transport, [(following, torch.full_like(arrived, rank))], [(previous, arrived)])
    wrong = None
    if not torch.allclose(o, torch.full_like(o, (ranks - 1) / 2), atol=1e-4):
        wrong = -1, f"received wrong rows of attention from other ranks on {device}"
    elif not bool((arrived == previous).all()):
        wrong = previous, f"received a wrong tensor from rank {previous} on {device}"
    _raise_first(transport, wrong)
    return "NCCL" if executor.transfers == "device memory" else executor.transfers
