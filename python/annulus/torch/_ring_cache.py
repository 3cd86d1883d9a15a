"""RingCache: keys and values of growing sequences over a process group, for decoding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

import annulus
from annulus import Placement, RingAttention
from annulus.torch._options import timeout_complaint
from annulus.torch.ring import ProcessGroupTransport

P = ParamSpec("P")
R = TypeVar("R")


def _collective(method: Callable[P, R]) -> Callable[P, R]:
    """A method whose wrong number or names of arguments are an error on all ranks."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # from inside of the method
            reason = f"RingCache: {error}"
        RingAttention.refuse(args[0]._transport, reason)

    return call


class RingCache:
    """Keys and values of growing sequences, spread over the ranks of a process group: :class:`annulus.RingCache` for
    tensors.

    Construction, :meth:`append`, :meth:`attend` and :meth:`step` are collective: every rank makes the same calls in
    the same order. Without a `placement` every rank passes all new rows, as ranks do that each run the whole model, and
    gets all results, with the same bits. With one, a rank passes the rows that it gives to it, and gets the
    results of its own queries.

    A cache over a group has connections of its own: close it on every rank when it is not needed any more, by
    :meth:`close` or by ``with``. A cache that is dropped may end the last call of a rank that is behind.

    There are no gradients: tensors that require them are refused, unless gradients are off (`torch.no_grad()`,
    `torch.inference_mode()`).

    Args:
        group: the ranks, in this order; None: this process alone.
        batch: entries, sequences of lengths of their own.
        capacity: tokens that an entry may have, over all ranks. With a window: tokens that it has to hold at a
            time, which is the window and the new tokens of one append.
        heads: query heads.
        kv_heads: key/value heads, a divisor of `heads`; None: as many.
        head_dim: 1 to 512.
        dtype: of q, k, v and o: torch.float32, torch.float16 or torch.bfloat16.
        device: of all tensors; 'cuda' is the current CUDA device.
        scale: of q.k, above 0; None: 1/sqrt(head_dim).
        causal: new tokens see those before them, and themselves; False: all tokens of their entry.
        window: (before, after). Tokens that no later query can see give their memory to new ones. None: no window.
        block: neighbouring tokens stay on one rank in blocks of this length, and blocks go round the ranks.
        timeout: seconds that one operation may take; None: the group's own timeout.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        capacity: int,
        heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        scale: float | None = None,
        causal: bool = True,
        window: tuple[int, int] | None = None,
        block: int = 128,
        timeout: float | None = None,
    ):
        if group is None:
            self._transport = annulus.make_in_process_ring(1)[0]
        else:
            complaint = timeout_complaint(timeout)
            self._transport = ProcessGroupTransport(group, timeout if complaint is None else None)
            if complaint is not None:
                RingAttention.refuse(self._transport, f"RingCache: {complaint}")
        if str(device) == "cuda" and torch.cuda.is_available():
            device = f"cuda:{torch.cuda.current_device()}"
        # What is wrong with an argument, all ranks hear from here.
        self._core = annulus.RingCache(
            self._transport,
            batch=batch,
            capacity=capacity,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            scale=scale,
            causal=causal,
            window=window,
            block=block,
            device=str(device),
        )

    @_collective
    def append(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        lengths: Sequence[int] | None = None,
        placement: Placement | None = None,
    ) -> None:
        """Adds keys and values of new tokens behind those that the entries have.

        k and v are [batch, new tokens, kv_heads, head_dim]. `lengths`: how many rows of each entry count, from the
        first on; None: all. `placement`: which of the new tokens this rank passes."""
        self._refuse_gradients(k=k, v=v)
        self._core.append(k, v, lengths, placement)

    @_collective
    def attend(
        self,
        q: torch.Tensor,
        lengths: Sequence[int] | None = None,
        placement: Placement | None = None,
        *,
        sinks: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of the last tokens of the entries.

        q is [batch, tokens, heads, head_dim]: the last rows of each entry, `lengths` of them where given. Returns o like
        q and, if asked for, lse (float32 [batch, tokens, heads], the natural log-sum-exp). Rows that do not count get 0
        and -inf. `sinks`: float32 [heads], see :func:`ring_attention`."""
        self._refuse_gradients(q=q, sinks=sinks)
        o, lse = self._core.attend(q, lengths, placement, sinks=sinks)
        return (o, lse) if return_lse else o

    @_collective
    def step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lengths: Sequence[int] | None = None,
        placement: Placement | None = None,
        *,
        sinks: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """append(k, v) and attend(q) of the same tokens, with one agreement between the ranks."""
        self._refuse_gradients(q=q, k=k, v=v, sinks=sinks)
        o, lse = self._core.step(q, k, v, lengths, placement, sinks=sinks)
        return (o, lse) if return_lse else o

    def truncate(self, entry: int, length: int = 0) -> None:
        """Forgets an entry's tokens from `length` on: 0 for a new sequence, or less than a draft was long.

        Sends nothing; every rank must do the same."""
        self._core.truncate(entry, length)

    def copy_entry(self, source: int, target: int) -> None:
        """Entry `target` becomes a copy of `source`, for beams. Sends nothing; every rank must do the same."""
        self._core.copy_entry(source, target)

    def close(self) -> None:
        """Frees the keys and values, and closes the connections after the other ranks have received what this one has
        sent. Every rank closes its cache. Idempotent; also done by ``with``."""
        self._core.close()
        if isinstance(self._transport, ProcessGroupTransport):
            self._transport.close()

    def __enter__(self) -> RingCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def lengths(self) -> list[int]:
        """Tokens appended so far, by entry."""
        return self._core.lengths

    @property
    def core(self) -> annulus.RingCache:
        """The cache that does the work."""
        return self._core

    def _refuse_gradients(self, **tensors: torch.Tensor | None) -> None:
        if not torch.is_grad_enabled():
            return
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                _ = self._core.lengths  # a closed cache says so
                RingAttention.refuse(
                    self._transport,
                    f"RingCache: {name} requires a gradient, and a cache has none: call it under torch.no_grad(), or "
                    f"detach {name}",
                )

    def __repr__(self) -> str:
        return repr(self._core)
