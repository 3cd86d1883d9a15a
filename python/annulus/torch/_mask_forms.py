"""Recognises matrices of masks that are causal, a window, or documents, so that no matrix has to be computed."""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

import numpy as np
import torch

from annulus.torch._config import DOCUMENTS
from annulus.torch._fast_path import is_eager

_MOST_KNOWN = 64


class MaskForm(NamedTuple):
    """The same mask as arguments of ring_attention for a dense pattern.

    `query_start` is the position of the first query, if that is not 0 or queries and keys differ in number.
    """

    window: tuple[int, int] | None = None
    query_start: int | None = None
    cu_seqlens: tuple[int, ...] | None = None
    cu_seqlens_k: tuple[int, ...] | None = None


# Forms of masks on devices by the id of their tensor. Models pass one mask to all their layers, and to every step.
_known: dict[int, tuple[weakref.ref, int, MaskForm | None]] = {}
_lock = threading.Lock()


def mask_form(mask: torch.Tensor) -> MaskForm | None:
    """The form of a mask [queries, keys] or [any number, queries, keys], boolean (True: hidden) or floating point.

    None: it has no such form, or nobody can look at it: without data, inside a compiler, a tracer or a transform.

    Waits for the device, unless the same tensor was passed before and PyTorch has counted no write to it since. (It
    does not count those through `mask.data`, of replayed CUDA graphs or of other libraries.)
    """
    if mask.is_meta or not is_eager((mask,)):
        return None
    # On the CPU nothing waits, and other code often writes to the memory, as NumPy does.
    if not mask.is_cuda or mask.is_inference():
        return _form(mask.detach())
    with _lock:
        found = _known.get(id(mask))
    if found is not None and found[0]() is mask and found[1] == mask._version:
        return found[2]
    version, form = mask._version, _form(mask.detach())
    with _lock:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[id(mask)] = weakref.ref(mask), version, form
    return form


def _form(mask: torch.Tensor) -> MaskForm | None:
    if 0 in mask.shape:
        return MaskForm()
    if mask.dtype == torch.bool:
        seen = ~mask
    else:
        seen = mask == 0
        if not bool((seen | (mask == -torch.inf)).all()):
            return None
    if seen.dim() == 3:
        if not bool((seen == seen[0]).all()):
            return None
        seen = seen[0]
    keys = seen.shape[1]
    matrix = seen.cpu().numpy()
    # Each row's keys must be one interval [low, high).
    low, high, count = matrix.argmax(1), keys - matrix[:, ::-1].argmax(1), np.count_nonzero(matrix, 1)
    rows = count > 0
    if not (high - low == count)[rows].all():
        return None
    low, high = np.where(rows, low, 0), np.where(rows, high, 0)
    for form in (_band, _documents, _documents_of_both_sides):
        found = form(low, high, rows, keys)
        if found is not None:
            return found
    return None


def _limit(values: np.ndarray, unlimited: int) -> int | None:
    """The one value of all; None: there are several."""
    if len(values) == 0:
        return unlimited
    return int(values[0]) if (values == values[0]).all() else None


def _band(low: np.ndarray, high: np.ndarray, rows: np.ndarray, keys: int) -> MaskForm | None:
    """Limits on key minus query: causal masks and windows, wherever their diagonal is."""
    query = np.arange(len(low))
    far = len(low) + keys
    least = _limit((low - query)[rows & (low > 0)], -far)
    most = _limit((high - 1 - query)[rows & (high < keys)], far)
    if least is None or most is None:
        return None
    expected_low = np.clip(query + least, 0, keys)
    expected_high = np.clip(query + most + 1, 0, keys)
    empty = expected_low >= expected_high
    if not (empty == ~rows).all():
        return None
    if not ((low == expected_low) & (high == expected_high))[rows].all():
        return None
    if least == -far and most == far:
        return MaskForm()
    start = max(0, least)  # a window contains its query
    if start > most:
        return None
    before = -1 if least == -far else start - least
    after = -1 if most == far else most - start
    return MaskForm((before, after), None if start == 0 and len(low) == keys else start)


def _documents(low: np.ndarray, high: np.ndarray, rows: np.ndarray, keys: int) -> MaskForm | None:
    """Blocks on the diagonal, perhaps with a causal mask or a window inside. Tokens behind the last one see nothing."""
    if len(low) != keys or not rows.any():
        return None
    length = int(np.flatnonzero(rows)[-1]) + 1
    low, high, query = low[:length], high[:length], np.arange(length)
    if not (rows[:length] & (low <= query) & (query < high)).all():
        return None
    highest = np.maximum.accumulate(high)
    lowest = np.minimum.accumulate(low[::-1])[::-1]
    if highest[-1] > length:
        return None
    cuts = np.flatnonzero((highest[:-1] <= query[1:]) & (lowest[1:] >= query[1:])) + 1
    edges = np.array([0, *cuts, length])
    document = np.searchsorted(edges, query, side="right") - 1
    begin, end = edges[document], edges[document + 1]
    before = _limit((query - low)[low > begin], -1)
    after = _limit((high - 1 - query)[high < end], -1)
    if before is None or after is None:
        return None
    expected_low = begin if before < 0 else np.maximum(begin, query - before)
    expected_high = end if after < 0 else np.minimum(end, query + after + 1)
    if not ((low == expected_low) & (high == expected_high)).all():
        return None
    window = None if before < 0 and after < 0 else (before, after)
    return MaskForm(window, None, tuple(edges.tolist()))


def _documents_of_both_sides(
    low: np.ndarray, high: np.ndarray, rows: np.ndarray, keys: int
) -> MaskForm | None:
    """Blocks of any shape, one behind the other, whose queries see all their keys: cross-attention of documents."""
    if not rows.any():
        return None
    length = int(np.flatnonzero(rows)[-1]) + 1
    if not rows[:length].all():
        return None
    low, high = low[:length], high[:length]
    starts = np.flatnonzero((low[1:] != low[:-1]) | (high[1:] != high[:-1])) + 1
    starts = np.array([0, *starts])
    if low[0] != 0 or (low[starts[1:]] != high[starts[:-1]]).any():
        return None
    cu_seqlens_k = (0, *high[starts].tolist())
    return MaskForm(None, None, (*starts.tolist(), length), cu_seqlens_k)


def arguments_of(form: MaskForm, options: dict[str, object], causal: bool) -> dict[str, object] | None:
    """The arguments of ring_attention that add a mask to `options`; None: they cannot express it.

    The mask counts tokens of the whole sequence. Segments and windows of `options` count positions, which differ from
    tokens where there are documents or a query_start.
    """
    window = options["window"]
    own_places = any(options[name] is not None for name in DOCUMENTS if name != "cu_seqlens")
    if form == MaskForm():
        return {"is_causal": causal}
    moves = form.query_start is not None or form.cu_seqlens_k is not None
    if own_places or (moves and (causal or window is not None)):
        return None
    if moves or form.cu_seqlens is not None:
        # Segments would begin anew in documents, and be moved by query_start.
        if options["segment_lengths"] is not None or options["cu_seqlens"] is not None:
            return None
    found: dict[str, object] = {"is_causal": causal}
    if moves:
        found["query_start"] = form.query_start
    if form.cu_seqlens is not None:
        found["cu_seqlens"], found["cu_seqlens_k"] = form.cu_seqlens, form.cu_seqlens_k
    if form.window is not None:
        before, after = (_nearer(*limits) for limits in zip(form.window, window or (-1, -1)))
        causal = causal or after == 0
        found["is_causal"] = causal
        found["window"] = None if causal and before < 0 else (before, 0 if causal else after)
    return found


def _nearer(a: int, b: int) -> int:
    """The stricter of two limits, where -1 is none."""
    return max(a, b) if min(a, b) < 0 else min(a, b)
