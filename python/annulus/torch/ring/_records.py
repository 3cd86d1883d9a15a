"""Records: what the ranks of a group send each other about a call, and the error if the calls differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TypeVar

import annulus
from annulus import ConfigError
from annulus.torch._config import Config
from annulus.torch._options import NO_MASK, PADDING, UNREAD_MASK

T = TypeVar("T")

CALL = "the call"


class StaleMask(ConfigError):
    """The ranks remember different things of their key_padding_masks, or some of them have new ones. Raised on all
    ranks, which then find out together what is true."""


def claims_of(
    what: str, config: Config, shape: tuple[int, ...], kv_heads: int, dtype: str, device: str
) -> dict:
    """The values that all ranks have to pass equally, by name. `shape` is the shape of q."""
    return {
        CALL: what,
        "dtype": dtype,
        "kind of device": device,
        "batch": shape[0],
        "heads": shape[2],
        "heads of k and v": kv_heads,
        "head_dim": shape[3],
    } | config.claims


def _digest(every: Sequence | None) -> str:
    return "" if every is None else hashlib.sha256(repr(tuple(every)).encode()).hexdigest()[:16]


def compare(
    transport: annulus.Transport,
    complaint: str | None,
    claims: dict | None = None,
    own: T = 0,
    expected: Sequence[T] | None = None,
    where: str = "ring_attention",
) -> tuple[tuple[T, ...], bool]:
    """Compares the claims of all ranks. Collective.

    Returns the value `own` of every rank, which may differ (the number of tokens, or another JSON value), and whether
    every rank passed these values as `expected`. Raises a ConfigError on every rank if a rank has a complaint or if the
    claims differ.
    """
    mine = {
        "complaint": complaint,
        "claims": claims,
        "own": own,
        "expected": _digest(expected),
    }
    texts = annulus.gather_records(transport, json.dumps(mine).encode())
    records = [json.loads(text) for text in texts]
    here = f"[rank {transport.rank()}/{transport.size()}] "
    if complaint is not None:
        raise ConfigError(here + complaint)
    for rank, record in enumerate(records):
        if record["complaint"] is not None:
            raise ConfigError(f"{here}rank {rank} refused: {record['complaint']}")
    differences = {}
    for name, value in records[0]["claims"].items():
        others = (r for r, record in enumerate(records) if record["claims"].get(name) != value)
        rank = next(others, None)
        if rank is not None:
            other = records[rank]["claims"].get(name)
            differences[name] = f"{name} (rank 0: {value!r}, rank {rank}: {other!r})"
    # If the calls differ, only they are reported. If one rank has a mask, head_dim, scale or documents differ, too:
    # then only the mask is reported.
    for name in (CALL, PADDING):
        if name in differences:
            differences = {name: differences[name]}
    if differences:
        masks = {record["claims"].get(PADDING) for record in records}
        stale = PADDING in differences and not masks & {NO_MASK, UNREAD_MASK}
        raise (StaleMask if stale else ConfigError)(
            f"{here}{where}: the ranks disagree about {', '.join(differences.values())}: every rank must pass "
            "the same"
        )
    every = tuple(record["own"] for record in records)
    return every, {record["expected"] for record in records} == {_digest(every)}
