"""ring_pass and ring_pass_kv: sending tensors to the next rank of a ring."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from annulus import ConfigError
from annulus.torch._memory import with_room
from annulus.torch._options import timeout_complaint
from annulus.torch._transforms import refuse_transforms
from annulus.torch.ring._errors import collective, report_errors_to_ranks
from annulus.torch.ring._messages import bytes_of, exchange
from annulus.torch.ring._process_groups import group_name, group_size_and_rank
from annulus.torch.ring._registry import ring_of_group

# Alignment of each tensor in a message, in bytes, for every dtype.
_ALIGNMENT = 64


@torch.compiler.disable(reason="the other ranks decide on the shapes of the result")
@collective(
    lambda *args, group=None, timeout=None, **_: (args[1] if len(args) > 1 else group, timeout)
)
def ring_pass(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    timeout: float | None = None,
) -> torch.Tensor:
    """Sends a tensor to the next rank of a ring, and returns the tensor of the previous rank.

    Rank r sends to rank r + 1, the last rank to rank 0. Collective: every rank of the group calls it. Differentiable:
    backward sends gradients to the previous rank. Every rank has to run backward, and all ranks or none with
    create_graph. After as many passes as there are ranks, every rank has its own tensor again:

        for _ in range(dist.get_world_size(group)):
            use(x)
            x = ring_pass(x, group)

    Args:
        tensor: on the CPU or a CUDA device, of any dtype that is not quantized, any shape and strides. The dtype, the
            number of axes, the kind of device and whether a gradient is needed are the same on all ranks; sizes may
            differ.
        group: the ranks of the ring; None: this process alone, which gets a copy.
        timeout: seconds that one transfer may take; None: the group's timeout. The ranks' may differ.

    Returns:
        a new contiguous tensor on this rank's device. NCCL carries CUDA tensors if the group has it and its ranks are
        on several hosts. Otherwise they go through host memory, and the call waits for them.

    Raises:
        ConfigError: an argument is wrong on any rank; the ranks' calls differ; two threads call on one group at the
            same time. Raised on every rank.
        TransportError: a rank died, left or took too long; its ``rank`` is the rank at fault, if known.
    """
    return _pass_on("ring_pass", {"tensor": tensor}, group, timeout)[0]


@torch.compiler.disable(reason="the other ranks decide on the shapes of the result")
@collective(
    lambda *args, group=None, timeout=None, **_: (args[2] if len(args) > 2 else group, timeout)
)
def ring_pass_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    timeout: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`ring_pass`, for two tensors in one message. Returns k and v of the previous rank.

    Shapes and dtypes of k and v may differ; both are on one device. If only one of them requires a gradient, backward
    sends only its gradient.

        k, v = ring_pass_kv(k, v, group)

    Args:
        k, v: as the tensor of :func:`ring_pass`.
        group, timeout: as in :func:`ring_pass`.
    """
    return _pass_on("ring_pass_kv", {"k": k, "v": v}, group, timeout)


@dataclasses.dataclass(frozen=True)
class _Hop:
    """Everything about a pass except the contents of its tensors."""

    call: str
    names: tuple[str, ...]  # of the tensors
    needs_gradient: tuple[bool, ...]
    group: str
    timeout: float | None
    step: int = 1  # rank r sends to rank r + step

    def back(self, gradients: Sequence[torch.Tensor]) -> _Hop:
        """The pass of the gradients of the tensors that need one."""
        names = tuple(n for n, needed in zip(self.names, self.needs_gradient) if needed)
        call = self.call if self.call.startswith("backward of ") else f"backward of {self.call}"
        return dataclasses.replace(
            self, call=call, names=names, needs_gradient=_needs_gradient(gradients), step=-self.step
        )


def _needs_gradient(tensors: Sequence[torch.Tensor]) -> tuple[bool, ...]:
    graph = torch.is_grad_enabled()
    return tuple(graph and x.requires_grad for x in tensors)


def _pass_on(
    call: str,
    tensors: dict[str, torch.Tensor],
    group: dist.ProcessGroup | None,
    timeout: float | None,
) -> tuple[torch.Tensor, ...]:
    name = group_name(group)
    complaint = _complaint(tensors) or timeout_complaint(timeout)
    if complaint is not None:
        raise ConfigError(f"{call}: {complaint}")
    if refuse_transforms(call, *tensors.values()):
        raise ConfigError(f"{call} does not work inside torch.func.vmap: pass the whole batch")
    timeout = None if timeout is None else float(timeout)
    # One rank sends nothing.
    if name is None or group_size_and_rank(group)[0] == 1:
        return tuple(x.clone(memory_format=torch.contiguous_format) for x in tensors.values())
    values = tuple(tensors.values())
    return _Pass.apply(_Hop(call, tuple(tensors), _needs_gradient(values), name, timeout), *values)


def _complaint(tensors: dict[str, torch.Tensor]) -> str | None:
    device = None
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            return f"{name} is a {type(x).__name__}: a torch.Tensor was expected"
        if x.layout != torch.strided or x.is_nested:
            kind = "nested" if x.is_nested else x.layout
            return f"{name} is a {kind} tensor: a dense one was expected"
        # The memory of a subclass may have another layout.
        if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return f"{name} is a {type(x).__name__}: a plain torch.Tensor was expected (of a DTensor: to_local())"
        if x.is_quantized:
            return f"{name} is {x.dtype}: a tensor that is not quantized was expected (x.int_repr() or x.dequantize())"
        if x.device.type not in ("cpu", "cuda"):
            return f"{name} is on {x.device}: the CPU or a CUDA device was expected"
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured, and ranks have to agree on every call"
        if device not in (None, x.device):
            return f"{name} is on {x.device}, and {next(iter(tensors))} on {device}: one device was expected"
        device = x.device
    return None


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hop, *tensors):
        ctx.hop = hop
        return _move(hop, tensors)

    @staticmethod
    def backward(ctx, *grads):
        hop = ctx.hop
        # PyTorch passes zeros for unused outputs, so that all ranks send the same gradients.
        with report_errors_to_ranks(hop.group, hop.timeout):
            needed = [g.to_dense() for g, needs in zip(grads, hop.needs_gradient) if needs]
        passed = iter(_Pass.apply(hop.back(needed), *needed))
        return None, *(next(passed) if needs else None for needs in hop.needs_gradient)


def _move(hop: _Hop, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    claims: dict[str, object] = {"kind of device": tensors[0].device.type}
    for name, x, needs in zip(hop.names, tensors, hop.needs_gradient):
        claims[f"the dtype of {name}"] = str(x.dtype)
        claims[f"the number of axes of {name}"] = x.dim()
        claims[f"whether {name} needs a gradient"] = needs
    with ring_of_group(hop.group, hop.timeout, hop.call) as ring:
        ring.set_timeout(hop.timeout)
        shapes = ring.agree(hop.call, claims, [list(x.shape) for x in tensors])
        rank, ranks = ring.transport.rank(), ring.transport.size()
        source, target = (rank - hop.step) % ranks, (rank + hop.step) % ranks
        if len(tensors) == 1:
            result = with_room(_empty, tensors[0], shapes[source][0])
            exchange(ring.transport, [(target, tensors[0])], [(source, result)])
            return (result,)
        packed = with_room(_packed, tensors)
        places = _places(tensors, shapes[source])
        arrived = with_room(_empty, packed, [places[-1][1]])
        exchange(ring.transport, [(target, packed)], [(source, arrived)])
    return tuple(
        # .data, because autograd forbids to modify several views of one tensor in place.
        arrived[first:last].view(x.dtype).view(shape).data
        for x, shape, (first, last) in zip(tensors, shapes[source], places)
    )


def _empty(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of all tensors, each starting at a multiple of the alignment."""
    parts = []
    for x in tensors:
        part = bytes_of(x)
        parts += [part.new_zeros(-sum(map(len, parts)) % _ALIGNMENT), part]
    return torch.cat(parts)


def _places(
    tensors: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """The first byte of each tensor in the result of _packed, and its end, given the shapes of the tensors."""
    places: list[tuple[int, int]] = []
    end = 0
    for x, shape in zip(tensors, shapes):
        first = end + -end % _ALIGNMENT
        end = first + torch.Size(shape).numel() * x.element_size()
        places.append((first, end))
    return places
