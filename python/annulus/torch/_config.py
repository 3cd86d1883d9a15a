"""Config: the options of one call of ring_attention, validated. Call: a Config and the shapes of the tensors."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from typing import NamedTuple

import torch

from annulus import ConfigError, Pattern, Placement
from annulus.torch._options import (
    NAMES,
    NO_MASK,
    OF_CALLS,
    OF_EXECUTORS,
    OF_ONE_RANK,
    OPTIONS,
    PADDING,
    each_number,
    flag_complaint,
    is_whole,
    name_complaint,
    option_complaint,
    plain,
    timeout_complaint,
    whole_complaint,
    window_complaint,
)
from annulus.torch._placements import claim_of, placement_complaint, placement_from, plain_placement

MOST_CALLS = 1000  # different calls that one cache holds
# The fields of Config that make documents.
DOCUMENTS = ("cu_seqlens", "cu_seqlens_k", "query_start", "seqused_k", "leftpad_k")
_MOST_SHOWN = 12  # numbers of a field that are compared, and shown, as they are


def shortened(values: tuple | None) -> list | str | None:
    """Documents as ranks compare them: short lists as they are, of long ones how many there are, and a digest."""
    if values is None:
        return None
    numbers = list(each_number(values))
    if len(numbers) <= _MOST_SHOWN:
        return [list(x) if isinstance(x, tuple) else x for x in values]
    digest = hashlib.sha256(repr(values).encode()).hexdigest()[:12]
    return f"{len(numbers)} numbers ({', '.join(map(str, numbers[:3]))}, ..., {numbers[-1]}; digest {digest})"


class _ConfigMethods:
    """The methods of Config, whose fields are listed below.

    Operators of PyTorch take a Config as JSON text. The text is complete, because another process may load a compiled
    graph that holds it.
    """

    def complaint(self) -> str | None:
        """What is wrong with the options; None: nothing."""
        complaints = [name_complaint(n, getattr(self, n), names) for n, names in NAMES.items()]
        complaints.append(placement_complaint(self.placement))
        complaints += [option_complaint(name, getattr(self, name)) for name in OPTIONS]
        complaints += [flag_complaint(n, getattr(self, n)) for n in ("is_causal", "group_scale")]
        if self.n_global is not None:
            complaints.append(whole_complaint("n_global", self.n_global))
        complaints.append(timeout_complaint(self.timeout))
        complaints.append(window_complaint(self.window, self.is_causal))
        found = next((c for c in complaints if c is not None), None)
        return found or self._branch_complaint() or self._document_complaint()

    def _branch_complaint(self) -> str | None:
        dense = self.pattern == "dense"
        if len(self.segment_lengths) != len(self.dilation_rates):
            return (
                f"there are {len(self.segment_lengths)} segment_lengths and {len(self.dilation_rates)} "
                "dilation_rates: one of each per branch was expected"
            )
        if dense == bool(self.segment_lengths) or (dense and self.group_scale):
            return (
                f"pattern {self.pattern!r}: 'dense' has no segment_lengths, dilation_rates or group_scale; the other "
                "patterns need segment_lengths and dilation_rates"
            )
        if self.offsets != "blocked" and self.pattern != "longnet":
            return f"offsets is {self.offsets!r}, but pattern is {self.pattern!r}: offsets needs pattern 'longnet'"
        for name in ("segment_lengths", "dilation_rates"):
            values = getattr(self, name)
            if not all(is_whole(x, 1) for x in values):
                return f"{name} is {list(values)}: whole numbers from 1 to 2**63 - 1 were expected"
        return None

    def _document_complaint(self) -> str | None:
        for name in DOCUMENTS:
            values = getattr(self, name)
            if values is not None and not all(is_whole(x, 0) for x in each_number(values)):
                return f"{name} is {shortened(values)}: whole numbers from 0 to 2**63 - 1 were expected"
        if self.cu_seqlens is None and self.cu_seqlens_k is None:
            return None
        try:
            self.with_documents(Pattern.dense(1), None, None)
        except ConfigError as error:
            return str(error)
        return None

    def with_documents(self, pattern: Pattern, tokens: int | None, key_tokens: int | None) -> Pattern:
        """The pattern with the documents of a sequence of so many queries and keys (None: not known yet)."""
        given = {name: getattr(self, name) for name in DOCUMENTS}
        for name in ("query_start", "seqused_k", "leftpad_k"):
            if given[name] is not None and len(given[name]) == 1:
                given[name] = given[name][0]  # of all documents and batch entries
        return pattern.with_documents(**given, tokens=tokens, key_tokens=key_tokens)

    @functools.cached_property
    def text(self) -> str:
        """The fields as JSON; config_of is the inverse."""
        # Numbers of NumPy and tensors of one element are valid, too. Not dataclasses.astuple, which copies the values.
        fields = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return json.dumps(fields, default=_json_value)

    @functools.cached_property
    def executor_text(self) -> str:
        """The text without the fields on which executors do not depend. An executor takes any documents."""
        defaults = {name: o["default"] for name, o in OF_CALLS.items()} | dict.fromkeys(DOCUMENTS)
        defaults |= {"key_padding": NO_MASK, "draws_seed": False, "shared_gradient": "whole"}
        return dataclasses.replace(self, timeout=None, **defaults).text

    @functools.cached_property
    def claims_text(self) -> str:
        """The values that must be equal on all ranks and that an executor does not know: the ranks compare this text in
        every call, with what executors know."""
        fields = (self.n_global, self.key_padding, self.shared_keys, self.shared_gradient)
        return json.dumps((*fields, *(getattr(self, name) for name in OF_CALLS)), default=plain)

    @functools.cached_property
    def documents_text(self) -> str:
        """The documents as JSON; of lists without any, empty."""
        fields = [getattr(self, name) for name in DOCUMENTS]
        return "" if fields.count(None) == len(fields) else json.dumps(fields, default=plain)

    @functools.cached_property
    def executor_options(self) -> dict[str, object]:
        """The options as arguments of annulus.RingAttention."""
        return {name: getattr(self, name) for name in (*OF_EXECUTORS, "backward")}

    @functools.cached_property
    def claims(self) -> dict[str, object]:
        """The values that must be equal on all ranks, by name."""
        fields = dataclasses.asdict(self)
        fields["placement"] = claim_of(self.placement)
        renamed = {
            PADDING: fields.pop("key_padding"),
            "tokens of shared_k": fields.pop("shared_keys"),
            "whether dropout_seed is None": fields.pop("draws_seed"),
            "whether gradients are needed": fields.pop("backward"),
        }
        fields = {name: value for name, value in fields.items() if name not in OF_ONE_RANK}
        return renamed | fields | {name: shortened(fields[name]) for name in DOCUMENTS}


# The order of the fields is that of text_of's arguments.
Config = dataclasses.make_dataclass(
    "Config",
    [
        ("group", "str | None"),  # name of the process group; None: this process alone
        ("pattern", "str"),
        ("segment_lengths", "tuple[int, ...]"),
        ("dilation_rates", "tuple[int, ...]"),
        ("window", "tuple[int, int] | None"),
        # Tuples of numbers, or of such tuples for each batch entry. A tuple of one number: of all documents and entries.
        *((name, "tuple | None") for name in DOCUMENTS),
        ("is_causal", "bool"),
        ("offsets", "str"),
        ("group_scale", "bool"),
        ("placement", "str | Placement"),
        ("n_global", "int | None"),
        ("timeout", "float | None"),
        ("key_padding", "str"),  # how the mask is computed: NO_MASK, UNREAD_MASK, HOLES, or a text for its ranges
        ("shared_keys", "int"),  # that every query attends to besides those of the sequence; 0: none
        ("shared_gradient", "str"),
        ("draws_seed", "bool"),  # each rank has drawn a seed of dropout, and all of them use that of rank 0
        *((name, o["annotation"]) for name, o in OPTIONS.items()),
        ("backward", "bool"),  # whether gradients are needed
    ],
    bases=(_ConfigMethods,),
    frozen=True,
)


def _json_value(x: object) -> object:
    return plain_placement(x) if isinstance(x, Placement) else plain(x)


def text_of(*fields: object) -> str:
    """The text of a Config with these fields, in their order. If one is wrong: "!" and what is wrong with it."""
    config = Config(*fields)
    complaint = config.complaint()
    return config.text if complaint is None else "!" + complaint


@functools.lru_cache(maxsize=MOST_CALLS)
def config_of(text: str) -> Config:
    """The Config of a text, whose values are plain numbers, strings and tuples."""
    values = dict(zip((field.name for field in dataclasses.fields(Config)), json.loads(text)))
    values["placement"] = placement_from(values["placement"])
    return Config(**{name: _as_tuples(x) for name, x in values.items()})


def _as_tuples(x: object) -> object:
    return tuple(map(_as_tuples, x)) if isinstance(x, list) else x


class Call(NamedTuple):
    """A call of ring_attention without the contents of its tensors."""

    config: Config
    executor_key: str  # of the executors that can run it


def call_of(config: Config, q: torch.Tensor, k: torch.Tensor) -> Call:
    batch, tokens, heads, head_dim = q.shape
    # The shape first: keys are compared from the beginning.
    shape = f"{batch} {tokens} {k.shape[1]} {heads} {k.shape[2]} {head_dim}"
    return Call(config, f"{shape} {q.dtype} {q.device} {config.executor_text}")


def pattern_of(config: Config, heads: int, tokens: int, key_tokens: int) -> Pattern:
    """The pattern of a configuration for this many query heads, and queries and keys of the whole sequence."""
    return config.with_documents(branches_of(config, heads), tokens, key_tokens)


def branches_of(config: Config, heads: int) -> Pattern:
    """The pattern of a configuration without its documents."""
    mask = {"causal": config.is_causal, "window": config.window}
    if config.pattern == "dense":
        return Pattern.dense(heads, **mask)
    branches = (heads, config.segment_lengths, config.dilation_rates)
    options = {**mask, "group_scale": config.group_scale}
    if config.pattern == "head_groups":
        return Pattern.head_groups(*branches, **options)
    return Pattern.longnet(*branches, offsets=config.offsets, **options)
