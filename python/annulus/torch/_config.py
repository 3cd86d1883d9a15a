"""Config: everything about a call that is not a tensor, and what follows from it (pattern, placement)."""

from __future__ import annotations

import dataclasses
import functools
import json

import numpy as np

from annulus import ConfigError, Pattern, Placement
from annulus.torch._options import (
    MASKED,
    NAMES,
    OF_CALLS,
    OF_EXECUTORS,
    OF_ONE_RANK,
    OPTIONS,
    flag_complaint,
    is_whole,
    name_complaint,
    option_complaint,
    plain,
    timeout_complaint,
    whole_complaint,
)

_MOST_TEXTS = 1000


class _Call:
    """Everything about a call that is not a tensor.

    Operators take it as JSON text, which is complete: another process may load a compiled graph that holds it.
    """

    def complaint(self) -> str | None:
        """What is wrong with the call, as far as that does not depend on its tensors."""
        complaints = [name_complaint(n, getattr(self, n), names) for n, names in NAMES.items()]
        complaints += [option_complaint(name, getattr(self, name)) for name in OPTIONS]
        complaints += [flag_complaint(n, getattr(self, n)) for n in ("is_causal", "group_scale")]
        if self.n_global is not None:
            complaints.append(whole_complaint("n_global", self.n_global))
        complaints.append(timeout_complaint(self.timeout))
        return next((c for c in complaints if c is not None), None) or self._branch_complaint()

    def _branch_complaint(self) -> str | None:
        dense = self.pattern == "dense"
        if len(self.segment_lengths) != len(self.dilation_rates):
            return (
                f"there are {len(self.segment_lengths)} segment_lengths and {len(self.dilation_rates)} "
                "dilation_rates: one of each per branch was expected"
            )
        if dense == bool(self.segment_lengths) or (dense and self.group_scale):
            return (
                "pattern 'dense' has no segment_lengths, dilation_rates or group_scale, the others need "
                "segment_lengths and dilation_rates"
            )
        if self.offsets != "blocked" and self.pattern != "longnet":
            return f"offsets is {self.offsets!r}, which means something for pattern 'longnet' only"
        for name in ("segment_lengths", "dilation_rates"):
            values = getattr(self, name)
            if not all(is_whole(x, 1) for x in values):
                return f"{name} is {list(values)}: whole numbers from 1 to 2**63 - 1 were expected"
        return None

    def text(self) -> str:
        # Numbers of NumPy and tensors of one element are valid, too. Not dataclasses.astuple, which copies the values.
        fields = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return json.dumps(fields, default=plain)

    @functools.cached_property
    def executors(self) -> str:
        """The text of the part that executors depend on."""
        calls = {name: o["default"] for name, o in OF_CALLS.items()}
        return dataclasses.replace(self, timeout=None, **calls).text()

    @functools.cached_property
    def options(self) -> dict[str, object]:
        """The arguments of annulus.RingAttention."""
        return {name: getattr(self, name) for name in (*OF_EXECUTORS, "backward")}

    @functools.cached_property
    def claims(self) -> dict[str, object]:
        """What must be equal on all ranks, by name."""
        every = dataclasses.asdict(self)
        said = {
            MASKED: every.pop("has_key_padding_mask"),
            "whether gradients are needed": every.pop("backward"),
        }
        return said | {name: value for name, value in every.items() if name not in OF_ONE_RANK}


# The fields, in the order of text_of's arguments.
Config = dataclasses.make_dataclass(
    "Config",
    [
        ("group", "str | None"),  # name of the process group; None: this process alone
        ("pattern", "str"),
        ("segment_lengths", "tuple[int, ...]"),
        ("dilation_rates", "tuple[int, ...]"),
        ("is_causal", "bool"),
        ("offsets", "str"),
        ("group_scale", "bool"),
        ("placement", "str"),
        ("n_global", "int | None"),
        ("timeout", "float | None"),
        ("has_key_padding_mask", "bool"),  # it is part of q and k
        *((name, o["annotation"]) for name, o in OPTIONS.items()),
        ("backward", "bool"),  # whether gradients are needed
    ],
    bases=(_Call,),
    frozen=True,
)


# Texts and configurations of the calls so far. Programs make few different calls; if there are many, all are forgotten.
# Only calls whose arguments are immutable: a tensor that holds another number is still the same object.
_CONSTANTS = (str, int, float, type(None), np.generic)
_texts: dict[tuple, str] = {}
_configs: dict[str, Config] = {}


def text_of(*values: object) -> str:
    """The text of a configuration, given the fields in their order; or "!" and what is wrong with it."""
    # With the types, because 6 == 6.0 == np.int64(6) and 1 == True: one is not valid because another is.
    key = (values, *map(type, values), *map(type, values[2]), *map(type, values[3]))
    try:
        text = _texts.get(key)
    except Exception:  # an argument that cannot be hashed, which is hardly valid
        key = text = None
    if text is None:
        config = Config(*values)
        complaint = config.complaint()
        if complaint is not None:
            return "!" + complaint
        text = config.text()
        if key is not None and all(
            isinstance(x, _CONSTANTS) for x in (*values[:2], *values[2], *values[3], *values[4:])
        ):
            if len(_texts) >= _MOST_TEXTS:
                _texts.clear()
            _texts[key] = text
    return text


def config_of(text: str) -> Config:
    config = _configs.get(text)
    if config is None:
        if len(_configs) >= _MOST_TEXTS:
            _configs.clear()
        config = Config(*(tuple(x) if isinstance(x, list) else x for x in json.loads(text)))
        _configs[text] = config
    return config


def pattern_of(config: Config, heads: int) -> Pattern:
    """The pattern of a configuration for this many query heads."""
    if config.pattern == "dense":
        return Pattern.dense(heads, causal=config.is_causal)
    if config.pattern == "head_groups":
        return Pattern.head_groups(
            heads,
            config.segment_lengths,
            config.dilation_rates,
            causal=config.is_causal,
            group_scale=config.group_scale,
        )
    return Pattern.longnet(
        heads,
        config.segment_lengths,
        config.dilation_rates,
        causal=config.is_causal,
        offsets=config.offsets,
        group_scale=config.group_scale,
    )


def placement_of_lengths(name: str, lengths: list[int], n_global: int | None = None) -> Placement:
    """The placement of these numbers of tokens per rank. Contiguous shards may have any lengths, unless
    n_global says how many tokens there are to share out."""
    tokens = sum(lengths) if n_global is None else n_global
    placement = Placement.named(name, tokens, len(lengths))
    if all(placement.local_tokens(r) == n for r, n in enumerate(lengths)):
        return placement
    if name != "contiguous" or n_global is not None:
        expected = [placement.local_tokens(r) for r in range(len(lengths))]
        raise ConfigError(
            f"the ranks hold {lengths} tokens, but placement {name!r} of {tokens} tokens gives them "
            f"{expected}: make the shards with annulus.torch.shard"
        )
    ranges, first = [], 0
    for n in lengths:
        ranges.append([range(first, first + n)] if n > 0 else [])
        first += n
    return Placement.explicit(tokens, ranges)
