"""What a call asks for, apart from its tensors."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import operator
import re
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from annulus import ConfigError, Pattern, Placement
from annulus._core import ring_options

F = TypeVar("F", bound=Callable)

_MOST_TEXTS = 1000
NAMES = {
    "pattern": ("dense", "longnet", "head_groups"),
    "offsets": ("blocked", "interleaved"),
    "placement": ("contiguous", "zigzag", "striped", "hilbert"),
}
# Options of an executor that are no arguments, and who says them.
NO_ARGUMENTS = {
    "batch": "the tensors",
    "kv_heads": "the tensors",
    "head_dim": "the tensors",
    "dtype": "the tensors",
    "device": "the tensors",
    "max_qkv_elements": "the tensors, which exist already: there is nothing to protect them from",
    "backward": "autograd",
}
# All others, as the library lists them: their names, defaults and what is valid come from there.
_OF_EXECUTORS = {o["name"]: o for o in ring_options() if o["name"] not in NO_ARGUMENTS}
# And what is done here, where tensors can be converted.
_OF_CALLS = {
    "allow_half": {
        "kind": "flag",
        "default": False,
        "annotation": "bool",
        "shared": "same",
        "help": "Compute float32 in bfloat16 rather than fail for want of memory",
    }
}
OPTIONS = _OF_EXECUTORS | _OF_CALLS
DEFAULTS = {name: o["default"] for name, o in OPTIONS.items()}
# Of one rank alone: how long it waits, what it calls the group, how much memory it has.
_OF_ONE_RANK = {"group", "timeout"} | {n for n, o in OPTIONS.items() if o["shared"] == "own"}
# How the ranks call a mask; what else they would find different follows from it.
MASKED = "whether there is a key_padding_mask"
MOST_NUMBER = 3.4e38  # what fp32 holds
_MOST_SECONDS = 1e9  # what a clock counts
_MOST_WHOLE = 2**63 - 1  # what C++ holds


def _is_flag(x: object) -> bool:
    """Of Python's, NumPy's or PyTorch's: Python counts them among the numbers."""
    return isinstance(x, bool) or str(getattr(x, "dtype", "")) in ("bool", "torch.bool")


# Objects of other libraries raise what they like when they are asked for their number (a tensor without data a
# RuntimeError): whatever it is, they have none.


def _is_whole(x: object, least: int, most: int = _MOST_WHOLE) -> bool:
    try:
        return not _is_flag(x) and least <= operator.index(x) <= most
    except Exception:
        return False


def _is_finite(x: object) -> bool:
    try:
        return not _is_flag(x) and math.isfinite(x)
    except Exception:
        return False


def plain(x: object) -> bool | int | float:
    """A valid option of another library's type, or a Fraction, as JSON has it."""
    if isinstance(x, np.bool_):
        return bool(x)
    try:
        return operator.index(x)
    except TypeError:
        return float(x)


def number_complaint(name: str, value: object, most: float) -> str | None:
    if getattr(value, "requires_grad", False):
        instead = " or multiply q by it" if name == "scale" else ""
        return f"{name} requires a gradient, which it would not get: pass {name}.item(){instead}"
    if _is_finite(value) and 0 < float(value) <= most:
        return None
    return f"{name} is {value!r}: a number above 0 and up to {most:g} was expected"


def whole_complaint(
    name: str, value: object, most: int = _MOST_WHOLE, *, least: int = 0
) -> str | None:
    if _is_whole(value, least, most):
        return None
    last = "2**63 - 1" if most == _MOST_WHOLE else most
    return f"{name} is {value!r}: a whole number from {least} to {last} was expected"


def timeout_complaint(value: object) -> str | None:
    return None if value is None else number_complaint("timeout", value, _MOST_SECONDS)


def flag_complaint(name: str, value: object) -> str | None:
    if isinstance(value, (bool, np.bool_)):
        return None
    return f"{name} is {value!r}: True or False was expected"


# In MB: a byte, and more than any device holds. DeepSpeed allocates buckets, and DDP counts their bytes in 64 bits.
_LEAST_BUCKET, _MOST_BUCKET = 2.0**-20, 2.0**20


def bucket_complaint(value: object) -> str | None:
    if _is_finite(value) and _LEAST_BUCKET <= float(value) <= _MOST_BUCKET:
        return None
    return f"bucket_size is {value!r}: a number of MB above 0 (a byte, 2**-20, at least) and up to 2**20 was expected"


def name_complaint(name: str, value: object, names: tuple[str, ...]) -> str | None:
    if isinstance(value, str) and value in names:
        return None
    return f"{name} is {value!r}: one of {', '.join(map(repr, names))} was expected"


def _option_complaint(name: str, value: object) -> str | None:
    """What is wrong with an option of the executor, by its kind."""
    kind = OPTIONS[name]["kind"]
    if kind == "name":
        return name_complaint(name, value, OPTIONS[name]["names"])
    if kind == "flag":
        return flag_complaint(name, value)
    if kind == "whole":
        return whole_complaint(name, value, OPTIONS[name]["most"])
    if kind == "number or none" and value is None:
        return None
    return number_complaint(name, value, MOST_NUMBER)


class _Call:
    """Everything about a call that is not a tensor. Travels through operators as its JSON text, which says
    it all: a compiled graph that holds it may be loaded by another process."""

    def complaint(self) -> str | None:
        """What is wrong with it that no tensor is needed to see."""
        complaints = [name_complaint(n, getattr(self, n), names) for n, names in NAMES.items()]
        complaints += [_option_complaint(name, getattr(self, name)) for name in OPTIONS]
        complaints += [flag_complaint(n, getattr(self, n)) for n in ("is_causal", "group_scale")]
        if self.n_global is not None:
            complaints.append(whole_complaint("n_global", self.n_global))
        complaints.append(timeout_complaint(self.timeout))
        return next((c for c in complaints if c is not None), None) or self._branch_complaint()

    def _branch_complaint(self) -> str | None:
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
        return None

    def text(self) -> str:
        # Numbers of NumPy's and tensors of one element are fine, too. Not dataclasses.astuple, which copies what it finds.
        fields = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return json.dumps(fields, default=plain)

    @functools.cached_property
    def executors(self) -> str:
        """Its text as far as executors depend on it."""
        calls = {name: o["default"] for name, o in _OF_CALLS.items()}
        return dataclasses.replace(self, timeout=None, **calls).text()

    @functools.cached_property
    def options(self) -> dict[str, object]:
        """What it says about the executor, by the executor's names."""
        return {name: getattr(self, name) for name in (*_OF_EXECUTORS, "backward")}

    @functools.cached_property
    def claims(self) -> dict[str, object]:
        """What all ranks have to pass alike, by name."""
        every = dataclasses.asdict(self)
        said = {
            MASKED: every.pop("has_key_padding_mask"),
            "whether gradients are needed": every.pop("backward"),
        }
        return said | {name: value for name, value in every.items() if name not in _OF_ONE_RANK}


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


# Texts and configurations of the calls so far. They are few; should they not be, they are made anew. Only of values
# that cannot change: a tensor is still the same object when it holds another number.
_CONSTANTS = (str, int, float, type(None), np.generic)
_texts: dict[tuple, str] = {}
_configs: dict[str, Config] = {}


def text_of(*values: object) -> str:
    """The text of a configuration, given the fields in their order; or "!" and what is wrong with it."""
    # With the types, because 6 == 6.0 == np.int64(6) and 1 == True: one is not valid because another was.
    key = (values, *map(type, values), *map(type, values[2]), *map(type, values[3]))
    try:
        text = _texts.get(key)
    except Exception:  # something unhashable, which is hardly right
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


def with_options(function: F) -> F:
    """Says in the signature of a function what its **options may be, and in its docstring what of them it leaves
    out."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
    for name, o in OPTIONS.items():
        new = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=o["default"])
        parameters.append(new.replace(annotation=o["annotation"].replace("typing.", "")))
    function.__signature__ = signature.replace(parameters=parameters)
    head, arguments, rest = re.fullmatch(
        r"(.*\n    Args:\n)?(.*?)(\n\n    [A-Z].*)?", function.__doc__ or "", re.DOTALL
    ).groups()
    if head is not None:
        for name, o in OPTIONS.items():
            if re.search(rf"^ {{8}}(\w+, )*{name}\b[\w, ]*:", arguments, re.MULTILINE) is None:
                arguments += f"\n        {name}: {o['help'][0].lower()}{o['help'][1:]}."
        function.__doc__ = head + arguments + (rest or "")
    return function


def branch_numbers(name: str, values: object) -> tuple:
    """segment_lengths or dilation_rates as a tuple; what is in it is checked later."""
    if values is None:
        return ()
    try:
        # Sets have no order, by which a length would find its rate.
        if not isinstance(values, (set, frozenset, dict)):
            return tuple(values)
    except TypeError:
        pass
    raise ConfigError(
        f"ring_attention: {name} is {values!r}: a sequence of whole numbers was expected"
    )


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
