"""Making executors, and the executors of calls without a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

import annulus
from annulus import ConfigError, Pattern, Placement, RingAttention
from annulus._core import ExecutorPool
from annulus.torch._config import Call, Config, pattern_of
from annulus.torch._memory import LOG
from annulus.torch._placements import placement_of_tokens

T = TypeVar("T")

_NO_LIMIT = 2**62
# Executors that CUDA graphs use. A graph may be replayed at any time, so the memory of its executors is kept.
_captured: dict[int, RingAttention] = {}


def make_executor(
    config: Config,
    pattern: Pattern,
    placement: Placement,
    transport: annulus.Transport,
    q: torch.Tensor,
    k: torch.Tensor,
    key_placement: Placement | None = None,
) -> RingAttention:
    executor = RingAttention(
        pattern,
        placement,
        key_placement=key_placement,
        transport=transport,
        batch=q.shape[0],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        dtype=q.dtype,
        device=str(q.device),
        max_qkv_elements=_NO_LIMIT,
        **config.executor_options,
    )
    executor.documents_key = config.documents_text
    if executor.recovery:
        here = f"[rank {transport.rank()}/{transport.size()}] " if transport.size() > 1 else ""
        LOG.warning("%sring_attention: memory ran out: %s", here, executor.recovery)
    return executor


def takes_documents(executor: RingAttention, config: Config) -> bool:
    """Whether an executor has the documents of a call or can plan for them. It cannot if a CUDA graph uses it."""
    return executor.documents_key == config.documents_text or id(executor) not in _captured


def set_documents(executor: RingAttention, config: Config, heads: int, tokens: int, key_tokens: int) -> None:
    """Plans for the documents of a call, unless the executor has them."""
    if executor.documents_key != config.documents_text:
        executor.set_documents(pattern_of(config, heads, tokens, key_tokens))
        executor.documents_key = config.documents_text


class LocalExecutors:
    """Executors of calls without a group. Threads that call at the same time take different executors."""

    def __init__(self) -> None:
        self.pool = ExecutorPool()

    def run(
        self,
        call: Call,
        q: torch.Tensor,
        k: torch.Tensor,
        body: Callable[[RingAttention], T],
    ) -> T | None:
        tokens, key_tokens = q.shape[1], k.shape[1]
        if q.shape[0] == 0 or tokens == 0:
            return None
        config, key = call
        capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
        executor = self.pool.take(key)
        if executor is not None and (
            not takes_documents(executor, config)
            or (capturing and executor.documents_key != config.documents_text)
        ):
            self.pool.give_back(key, executor)
            executor = None
        if executor is not None:
            set_documents(executor, config, q.shape[2], tokens, key_tokens)
        else:
            if capturing:
                raise ConfigError(
                    "ring_attention: a CUDA graph is being captured and this call has not been made before, so "
                    "that its workspace would have to be allocated: make it once before capturing"
                )
            if config.n_global not in (None, tokens):
                raise ConfigError(
                    f"n_global is {config.n_global}, but q has {tokens} tokens and there is no group"
                )
            transport = annulus.make_in_process_ring(1)[0]
            placement = placement_of_tokens(config.placement, tokens, 1)
            keys = None if key_tokens == tokens else placement_of_tokens(config.placement, key_tokens, 1)
            pattern = pattern_of(config, q.shape[2], tokens, key_tokens)
            self.pool.make_room()
            executor = make_executor(config, pattern, placement, transport, q, k, keys)
        if capturing:
            _captured[id(executor)] = executor
        result = body(executor)
        self.pool.give_back(key, executor)  # not after an error: its transport may have failed
        return result


def forget_captured() -> None:
    """Drops the executors of CUDA graphs. The graphs must not be replayed any more."""
    _captured.clear()
