"""key_padding_mask as lengths: the range of keys that it leaves in each batch entry of the whole sequence.

Kernels skip the keys outside of it, and nobody sends them. A rank has the mask of its own shard only, so all ranks of a
group find the ranges together, in one exchange of small records for each new mask.

A rank remembers what was found with a mask and takes part in the next call at once. The others may have new masks then,
which it cannot know: they refuse the call in its first comparison, and all ranks exchange records (StaleMask). If all
ranks remember ranges, and the same ones, these are right, also if they were found in different calls: ranges determine
the mask of every shard.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from annulus import Placement
from annulus.torch._options import HOLES, NEW_MASK, PADDING
from annulus.torch._placements import claim_of, placement_of_lengths
from annulus.torch.ring._errors import report_errors_to_ranks
from annulus.torch.ring._process_groups import rank_in
from annulus.torch.ring._records import CALL, StaleMask
from annulus.torch.ring._registry import ring_of_group

_MOST_KNOWN = 64


class Ranges(NamedTuple):
    """How a mask is computed."""

    state: str  # for Config.key_padding
    # Arguments of ring_attention that hide the same keys; None: the mask leaves holes.
    arguments: dict[str, list[int]] | None


# For each batch entry, of one rank: the number of keys that are not ignored, and the first and last position of them.
# None: the mask is no choice of keys, but a bias.
_Spans = list[list[int]] | None


class _Known(NamedTuple):
    mask: weakref.ref  # the tensor that owns the memory
    version: int | None  # of its values; None: it is not counted
    lengths: tuple[int, ...]  # keys of each rank
    spans: _Spans
    ranges: Ranges


# By the identity of a mask. Models pass one mask to all their layers.
_known: dict[tuple, _Known] = {}
# The keys of each rank, by group, placement and own keys. A guess, which the ranks compare.
_lengths: dict[tuple, tuple[int, ...]] = {}
_lock = threading.Lock()


def find_ranges(
    mask: torch.Tensor,
    group: str | None,
    timeout: float | None,
    placement: str | Placement,
    *,
    again: bool = False,
) -> Ranges:
    """The ranges of a valid mask. Collective if it is new on any rank, or if all ranks pass `again`.

    A mask on a CUDA device is read only if it was not passed before, or changed since: reading waits for the device.
    `_version` does not count every change (not those through .data, for example). So a mask on the CPU is always read.
    """
    gradient = mask.requires_grad and torch.is_grad_enabled()  # which lengths would not have
    owner = mask if mask._base is None else mask._base  # modules make new views of one mask
    where = (group, claim_of(placement))
    key = (id(owner), mask.storage_offset(), mask.shape, mask.stride(), mask.dtype, gradient, *where)
    version = None if mask.is_inference() else mask._version
    with _lock:
        known = None if again else _known.get(key)
    if known is not None and known.mask() is owner:
        if mask.is_cuda and version is not None and known.version == version:
            return known.ranges
        if gradient or known.spans == _spans_of(mask, placement, known.lengths, group):
            with _lock:
                _known[key] = known._replace(version=version)
            return known.ranges
    if group is None:
        lengths: tuple[int, ...] = (mask.shape[1],)
        spans = None if gradient else _spans_of(mask, placement, lengths, None)
        of_ranks = [spans]
    else:
        lengths, of_ranks = _exchanged(mask, gradient, group, timeout, placement)
        spans = of_ranks[rank_in(group)]
    ranges = _united(of_ranks, sum(lengths))
    if mask.is_cuda or group is not None:
        with _lock:
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            _known[key] = _Known(weakref.ref(owner), version, lengths, spans, ranges)
    return ranges


def _exchanged(
    mask: torch.Tensor, gradient: bool, group: str, timeout: float | None, placement: str | Placement
) -> tuple[tuple[int, ...], list[_Spans]]:
    """The number of keys and the spans of every rank. Collective."""
    batch, keys = mask.shape
    claims = {CALL: "forward", PADDING: NEW_MASK, "batch": batch, "placement": claim_of(placement)}
    key = (group, claims["placement"], keys)
    while True:
        # The positions of this rank's keys depend on how many the other ranks have.
        with _lock:
            lengths = _lengths.get(key)
        with report_errors_to_ranks(group, timeout):  # others may wait for the second exchange
            spans = None if gradient or lengths is None else _spans_of(mask, placement, lengths, group)
        own = [keys, _digest(lengths), spans]
        try:
            with ring_of_group(group, timeout) as ring:
                ring.set_timeout(timeout)
                records = ring.agree("ring_attention", claims, own)
        except StaleMask:
            continue  # other ranks remember ranges: now they come here, too
        lengths = tuple(record[0] for record in records)
        if sum(lengths) > 0:
            placement_of_lengths(placement, lengths)  # if they do not fit, they do not on any rank
        with _lock:
            if len(_lengths) >= _MOST_KNOWN:
                _lengths.clear()
            _lengths[key] = lengths
        if {record[1] for record in records} == {_digest(lengths)}:
            return lengths, [record[2] for record in records]


def _digest(values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:12]


def _spans_of(
    mask: torch.Tensor, placement: str | Placement, lengths: Sequence[int], group: str | None
) -> _Spans:
    batch, keys = mask.shape
    total = sum(lengths)
    if batch * keys == 0:
        return [[0, total, -1] for _ in range(batch)]
    mask = mask.detach()
    used = ~mask if mask.dtype == torch.bool else mask == 0
    places = _places_of_name if isinstance(placement, str) else _places
    at = places(placement, tuple(lengths), rank_in(group), mask.device)
    parts = [used.sum(1), torch.where(used, at, total).amin(1), torch.where(used, at, -1).amax(1)]
    if mask.dtype != torch.bool:
        parts.append((used | (mask == -torch.inf)).logical_not().sum(1))
    rows = torch.stack(parts, 1).tolist()  # the only copy from the device
    if any(bias > 0 for row in rows for bias in row[3:]):
        return None
    return [row[:3] for row in rows]


def _places(
    placement: str | Placement, lengths: tuple[int, ...], rank: int, device: torch.device
) -> torch.Tensor:
    """The positions of a rank's keys."""
    return torch.from_numpy(placement_of_lengths(placement, lengths).positions(rank)).to(device)


_places_of_name = functools.lru_cache(maxsize=16)(_places)


def _united(of_ranks: Sequence[_Spans], keys: int) -> Ranges:
    """The ranges of the whole sequence, of so many keys, from the spans of all ranks."""
    if any(spans is None for spans in of_ranks):
        return Ranges(HOLES, None)
    begin, end = [], []
    for entry in zip(*of_ranks):
        count = sum(used for used, _, _ in entry)
        first, last = min(first for _, first, _ in entry), max(last for _, _, last in entry)
        if count == 0:
            first, last = 0, -1
        elif last - first + 1 != count:
            return Ranges(HOLES, None)
        begin.append(first)
        end.append(last + 1)
    arguments = {} if set(begin) <= {0} and set(end) <= {keys} else {"leftpad_k": begin, "seqused_k": end}
    return Ranges(f"given, ranges {_digest((begin, end))}", arguments)
