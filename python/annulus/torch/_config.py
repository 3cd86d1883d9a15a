"""What a call asks for, apart from its tensors."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator

from annulus import ConfigError, Pattern, Placement

_MOST_TEXTS = 1000
_NAMES = {
    "pattern": ("dense", "longnet", "head_groups"),
    "offsets": ("blocked", "interleaved"),
    "mix_gradient": ("full", "detached"),
    "placement": ("contiguous", "zigzag", "striped", "hilbert"),
    "schedule": ("auto", "ring", "gather"),
}
# Of one rank alone: how long it waits, what it calls the group, how much memory it has.
_OF_ONE_RANK = ("group", "timeout", "max_communication_bytes")


def _is_whole(x: object, least: int) -> bool:
    """Whether x is a whole number from `least` on that C++ can hold."""
    try:
        return not isinstance(x, bool) and least <= operator.index(x) < 2**63
    except TypeError:
        return False


def _is_finite(x: object) -> bool:
    try:
        return math.isfinite(x)
    except (TypeError, ValueError, OverflowError):
        return False


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything about a call that is not a tensor. Travels through operators as its JSON text, which says
    it all: a compiled graph that holds it may be loaded by another process."""

    group: str | None  # name of the process group; None: this process alone
    pattern: str
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    is_causal: bool
    offsets: str
    mix_gradient: str
    group_scale: bool
    scale: float | None
    placement: str
    n_global: int | None
    schedule: str
    reproducible: bool
    min_tokens_for_ring: int
    max_communication_bytes: int
    timeout: float | None
    backward: bool  # whether gradients are needed

    def complaint(self) -> str | None:
        """What is wrong with it that no tensor is needed to see."""
        for name, names in _NAMES.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in names:
                return f"{name} is {value!r}: one of {', '.join(map(repr, names))} was expected"
        for name in ("is_causal", "group_scale", "reproducible"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                return f"{name} is {value!r}: True or False was expected"
        plain = self.pattern == "dense"
        if len(self.segment_lengths) != len(self.dilation_rates):
            return (
                f"there are {len(self.segment_lengths)} segment_lengths and {len(self.dilation_rates)} "
                "dilation_rates: one of each per branch was expected"
            )
        if plain == bool(self.segment_lengths) or (plain and self.group_scale):
            return (
                "pattern 'dense' has no segment_lengths, dilation_rates or group_scale, the others need "
                "segment_lengths and dilation_rates"
            )
        if self.offsets != "blocked" and self.pattern != "longnet":
            return f"offsets is {self.offsets!r}, which means something for pattern 'longnet' only"
        for name in ("segment_lengths", "dilation_rates"):
            values = getattr(self, name)
            if not all(_is_whole(x, 1) for x in values):
                return f"{name} is {list(values)}: whole numbers from 1 to 2**63 - 1 were expected"
        for name in ("n_global", "min_tokens_for_ring", "max_communication_bytes"):
            value = getattr(self, name)
            if not _is_whole(value, 0) and not (name == "n_global" and value is None):
                return f"{name} is {value!r}: a whole number from 0 to 2**63 - 1 was expected"
        # What fp32 holds, and what a clock counts.
        for name, most in (("scale", 3.4e38), ("timeout", 1e9)):
            value = getattr(self, name)
            if value is not None and not (_is_finite(value) and 0 < value <= most):
                return f"{name} is {value!r}: a number above 0 and up to {most:g} was expected"
        return None

    def text(self) -> str:
        # Numbers of NumPy's and tensors of one element are fine, too.
        return json.dumps(dataclasses.astuple(self), default=lambda x: x.item())

    @functools.cached_property
    def executors(self) -> str:
        """Its text as far as executors depend on it."""
        return dataclasses.replace(self, timeout=None).text()

    @functools.cached_property
    def claims(self) -> dict[str, object]:
        """What all ranks have to pass alike, by name."""
        every = dataclasses.asdict(self)
        needs_gradients = every.pop("backward")
        return {"whether gradients are needed": needs_gradients} | {
            name: value for name, value in every.items() if name not in _OF_ONE_RANK
        }


# Texts and configurations of the calls so far. They are few; should they not be, they are made anew.
_texts: dict[tuple, str] = {}
_configs: dict[str, Config] = {}


def text_of(*values: object) -> str:
    """The text of a configuration, given the fields in their order; or "!" and what is wrong with it."""
    # With the types, because 6 == 6.0 == np.int64(6) and 1 == True: one is not valid because another was.
    key = (values, *map(type, values), *map(type, values[2]), *map(type, values[3]))
    try:
        text = _texts.get(key)
    except TypeError:  # something unhashable, which is hardly right
        key = text = None
    if text is None:
        config = Config(*values)
        complaint = config.complaint()
        if complaint is not None:
            return "!" + complaint
        text = config.text()
        if key is not None:
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


def branch_numbers(name: str, values: object) -> tuple:
    """segment_lengths or dilation_rates as a tuple; what is in it is checked later."""
    try:
        return () if values is None else tuple(values)
    except TypeError:
        raise ConfigError(
            f"ring_attention: {name} is {values!r}: a sequence of whole numbers was expected"
        ) from None


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
