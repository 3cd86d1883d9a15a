"""Sending tensors from rank to rank without an executor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import annulus

_TAG = 64  # executors use smaller tags


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in row-major order: a view of its memory if that is dense, else a copy."""
    dense = x.detach().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8)


def exchange(
    transport: annulus.Transport,
    sends: Sequence[tuple[int, torch.Tensor]],
    receives: Sequence[tuple[int, torch.Tensor]],
) -> None:
    """Sends tensors to other ranks and receives into contiguous tensors, as one batch of (rank, tensor) pairs.

    All tensors are on one device, and the devices of all ranks are of one kind. Both sides know the sizes; empty
    tensors are not sent. If the transport reaches device memory (NCCL), it is sent directly, and later work on the
    current stream sees the received data. Otherwise data go through host memory, and the host waits.
    """
    leaving = [(peer, bytes_of(x)) for peer, x in sends if x.numel() > 0]
    arriving = [(peer, bytes_of(x)) for peer, x in receives if x.numel() > 0]
    if not leaving and not arriving:
        return
    device = (leaving or arriving)[0][1].device
    if device.type != "cpu" and transport.reaches(str(device)):
        batch = [
            (way, peer, _TAG, x.data_ptr(), x.numel())
            for way, part in (("receive", arriving), ("send", leaving))
            for peer, x in part
        ]
        stream = torch.cuda.current_stream(device).cuda_stream
        transport.post_device(batch, str(device), stream).wait()
        return
    # These lists keep the memory alive, because transfers do not.
    landings = [(peer, x, torch.empty_like(x, device="cpu") if x.is_cuda else x) for peer, x in arriving]
    received = [transport.receive(peer, _TAG, memoryview(host.numpy())) for peer, _, host in landings]
    departures = [(peer, x.cpu()) for peer, x in leaving]
    sent = [transport.send(peer, _TAG, memoryview(host.numpy())) for peer, host in departures]
    for transfer, (_, x, host) in zip(received, landings):
        transfer.wait()
        if host is not x:
            x.copy_(host)
    for transfer in sent:
        transfer.wait()
