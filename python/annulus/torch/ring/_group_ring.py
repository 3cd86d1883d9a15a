"""One call on a process group: which executor computes it, and what happens when the ranks disagree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

import annulus
from annulus import ConfigError, RingAttention, TransportError
from annulus._core import ExecutorPool
from annulus.torch._config import MOST_CALLS, Call, Config, pattern_of
from annulus.torch._placements import placement_of_lengths
from annulus.torch.ring._executors import make_executor, set_documents, takes_documents
from annulus.torch.ring._records import CALL, claims_of, compare
from annulus.torch.ring._transport import ProcessGroupTransport, sendable, timeout_of

T = TypeVar("T")

_UNKNOWN = "unknown"  # the documents of an executor whose last call failed


class GroupRing:
    """The ring over one process group.

    An executor compares the call with the calls of the other ranks before rows move. Which executor a call needs
    depends on the lengths of the other ranks, which this rank does not know. It tries the executor of its last call
    with the same key, which is nearly always right. If it is wrong on any rank, or a rank has none, or a rank refuses
    the call, the comparison raises a ConfigError on all ranks. Then all ranks exchange their claims and lengths.
    """

    def __init__(
        self, group: dist.ProcessGroup, timeout: float | None, loss: TransportError | None
    ):
        self.process_group = group
        self.transport = ProcessGroupTransport._instead_of(loss, group, timeout)
        self._usual_deadline = timeout_of(group)
        self.pool = ExecutorPool()
        # By Call.executor_key: the numbers of queries and keys of all ranks when the call was last made, and the key of
        # its executor.
        self._last: dict[str, tuple[tuple[list[int], ...], str]] = {}

    def messages(self) -> int:
        """The number of messages sent so far. If it has not changed, the other ranks have not heard from this one."""
        return self.transport.counters()["messages_sent"]

    def set_timeout(self, timeout: float | None) -> None:
        self.transport.set_deadline(self._usual_deadline if timeout is None else timeout)

    def _is_waited_for(self, messages: int) -> bool:
        """Whether the other ranks still wait for this one, which had sent `messages` when the call began."""
        return (
            self.transport.size() > 1 and not self.transport.failed and self.messages() == messages
        )

    def refuse(self, reason: str) -> NoReturn:
        """Makes a call that fails on this rank a ConfigError on every rank."""
        with contextlib.suppress(ConfigError):
            RingAttention.refuse(self.transport, reason)
        compare(self.transport, reason)
        raise AssertionError("compare returned although there was a complaint")

    def agree(self, call: str, claims: dict, own: T) -> tuple[T, ...]:
        """The value `own` (number of tokens, or shapes) of every rank, in a call that needs no executor.

        Raises a ConfigError on all ranks unless all of them make this call with equal claims."""
        if self.transport.size() > 1:
            with contextlib.suppress(ConfigError):
                RingAttention.refuse(self.transport, f"this rank calls {call}")
        return compare(self.transport, None, {CALL: call} | claims, own, where=call)[0]

    def run(
        self,
        what: str,
        call: Call,
        q: torch.Tensor,
        k: torch.Tensor,
        body: Callable[[RingAttention], T],
    ) -> T | None:
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                "ring_attention: a call on a group cannot be part of a CUDA graph: ranks have to agree on "
                "every call"
            )
        config = call.config
        self.set_timeout(config.timeout)
        lengths, key = self._last.get(call.executor_key, (None, ""))
        executor = None if lengths is None else self.pool.take(key)
        if executor is not None and not takes_documents(executor, config):
            executor = None
        messages = self.messages()
        try:
            if executor is None:
                RingAttention.refuse(self.transport, "this rank makes this call for the first time")
            self._set_documents(executor, config, lengths, q)
            return body(executor)
        except Exception as error:
            if executor is not None:
                executor.documents_key = _UNKNOWN
            if executor is not None and self._is_waited_for(messages):
                self._refuse_because_of(error)
            if not isinstance(error, ConfigError):
                raise
            # Without the traceback: its frames would keep this ring and its connections alive.
            failure = error.with_traceback(None)
        finally:
            if executor is not None:
                self.pool.give_back(key, executor)

        claims = claims_of(what, config, q.shape, k.shape[2], str(q.dtype), q.device.type)
        expected = None if executor is None else lengths
        own = [q.shape[1], k.shape[1]]
        lengths, all_knew = compare(self.transport, None, claims, own, expected)
        if all_knew:
            raise failure  # lengths and claims are as expected, so the error has another cause
        key = f"{lengths} {call.executor_key}"
        tokens, key_tokens = (sum(of_ranks) for of_ranks in zip(*lengths))
        if q.shape[0] * max(tokens, key_tokens) == 0 and config.n_global in (None, tokens):
            return None
        executor = self.pool.take(key)
        if executor is not None and not takes_documents(executor, config):
            executor = None
        kept = b"" if executor is None else b"kept"
        if not all(annulus.gather_records(self.transport, kept)):
            executor = None  # construction is collective: if one rank has none, all ranks make a new one
        messages = self.messages()
        try:
            if executor is None:
                self.pool.make_room()
                executor = self._make(config, lengths, q, k)
                messages = self.messages()
            self._set_documents(executor, config, lengths, q)
            result = body(executor)
        except Exception as error:
            if self._is_waited_for(messages):
                RingAttention.refuse(self.transport, reason_of(error))
            raise
        self.pool.give_back(key, executor)
        if len(self._last) >= MOST_CALLS:
            self._last.clear()
        self._last[call.executor_key] = lengths, key
        return result

    def _refuse_because_of(self, error: Exception) -> NoReturn:
        try:
            self.refuse(reason_of(error))
        except ConfigError as refusal:
            raise refusal from error

    def _set_documents(
        self, executor: RingAttention, config: Config, lengths: Sequence[Sequence[int]], q: torch.Tensor
    ) -> None:
        tokens, key_tokens = (sum(of_ranks) for of_ranks in zip(*lengths))
        set_documents(executor, config, q.shape[2], tokens, key_tokens)

    def _make(
        self, config: Config, lengths: Sequence[Sequence[int]], q: torch.Tensor, k: torch.Tensor
    ) -> RingAttention:
        tokens, key_tokens = ([of_rank[side] for of_rank in lengths] for side in (0, 1))
        placement = placement_of_lengths(config.placement, tokens, config.n_global)
        keys = None if tokens == key_tokens else placement_of_lengths(config.placement, key_tokens)
        pattern = pattern_of(config, q.shape[2], sum(tokens), sum(key_tokens))
        return make_executor(config, pattern, placement, self.transport, q, k, keys)


def reason_of(error: BaseException) -> str:
    """The text of an error for the other ranks."""
    try:
        text = str(error)
    except Exception:
        text = "(it cannot be printed)"
    return sendable(text if isinstance(error, annulus.Error) else f"{type(error).__name__}: {text}")
