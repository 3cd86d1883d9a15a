"""Conversion of a training's objects to JSON and named tensors, and back."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from annulus import ConfigError

Tensors = dict[str, torch.Tensor]


def encode(value: object, path: str, tensors: Tensors) -> object:
    """Encodes a value as JSON and puts its tensors into `tensors`, by path. Raises ConfigError for other types."""
    if isinstance(value, torch.Tensor):
        if path in tensors:
            raise ConfigError(f"Checkpoints: two tensors of the state have the path {path!r}")
        tensors[path] = value
        return {"$tensor": path}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        items = [(key, encode(each, f"{path}/{key}", tensors)) for key, each in value.items()]
        if all(type(key) is str and not key.startswith("$") for key, _ in items):
            return dict(items)
        return {"$items": [[encode(key, path, {}), each] for key, each in items]}
    if type(value) in (list, tuple):
        listed = [encode(each, f"{path}/{i}", tensors) for i, each in enumerate(value)]
        return listed if type(value) is list else {"$tuple": listed}
    raise ConfigError(
        f"Checkpoints: {path} is a {type(value).__name__}: a state dict may hold tensors, numbers, strings, None, "
        "and lists, tuples and dicts of these"
    )


def decode(value: object, tensors: Tensors) -> object:
    if isinstance(value, list):
        return [decode(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$tuple" in value:
        return tuple(decode(each, tensors) for each in value["$tuple"])
    if "$items" in value:
        return {decode(key, tensors): decode(each, tensors) for key, each in value["$items"]}
    return {key: decode(each, tensors) for key, each in value.items()}


def tensors_of(value: object) -> list[str]:
    """The paths of an encoded value's tensors."""
    if isinstance(value, list):
        return [path for each in value for path in tensors_of(each)]
    if not isinstance(value, dict):
        return []
    if "$tensor" in value:
        return [value["$tensor"]]
    return [path for each in value.values() for path in tensors_of(each)]


def _module_of(name: str, optimizer: torch.optim.Optimizer, state: Mapping) -> torch.nn.Module:
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for thing in state.values():
        if isinstance(thing, torch.nn.Module) and mine <= {id(p) for p in thing.parameters()}:
            return thing
    raise ConfigError(
        f"Checkpoints: no one module in the state has all parameters of the optimizer state[{name!r}]: add the module "
        "to the state"
    )


def _state_dict_of(name: str, state: Mapping[str, object], to_load: bool = False) -> object:
    # PyTorch's functions use the parameter names without DDP, FSDP and torch.compile. So a checkpoint can be loaded
    # with other wrappers and by another number of ranks.
    thing = state[name]
    if isinstance(thing, torch.nn.Module):
        return get_model_state_dict(thing)
    if isinstance(thing, torch.optim.Optimizer):
        fresh = not thing.state
        taken = get_optimizer_state_dict(_module_of(name, thing, state), thing)
        if fresh:  # PyTorch has made a step with zero gradients to create the state
            thing.state.clear()
            taken["state"] = taken["state"] if to_load else {}
        return taken
    return thing.state_dict()


def check(state: Mapping[str, object]) -> None:
    for name, thing in state.items():
        if type(name) is not str or not name or "/" in name or name == "rng":
            raise ConfigError(
                f"Checkpoints: {name!r} is a name in the state, expected a string without '/' other than 'rng'"
            )
        if isinstance(thing, torch.Generator):
            continue
        if not callable(getattr(thing, "state_dict", None)) or not callable(
            getattr(thing, "load_state_dict", None)
        ):
            raise ConfigError(
                f"Checkpoints: state[{name!r}] is a {type(thing).__name__}, which has no state_dict and "
                "load_state_dict: pass modules, optimizers, schedulers, torch.Generators, or objects with these two "
                "methods"
            )


def take(state: Mapping[str, object]) -> tuple[dict, Tensors]:
    """The state as JSON and tensors. The tensors are not copied."""
    check(state)
    tensors: Tensors = {}
    plain = {
        name: encode(_state_dict_of(name, state), name, tensors)
        for name, thing in state.items()
        if not isinstance(thing, torch.Generator)
    }
    return plain, tensors


def stage(tensors: Tensors) -> Tensors:
    """Separate copies in host memory, so that training can continue. Tied weights become two tensors."""
    return {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }


def targets(
    plain: dict, state: Mapping[str, object], saved: Mapping[str, TensorStorageMetadata]
) -> Tensors:
    """New tensors to load into, so that a failed load changes nothing. Raises ConfigError if the checkpoint does not
    fit the model. `saved`: the tensors of the files, by name."""
    check(state)
    here = sorted(name for name, thing in state.items() if not isinstance(thing, torch.Generator))
    if here != sorted(plain):
        raise ConfigError(
            f"Checkpoints: the checkpoint holds {', '.join(sorted(plain))}, the state {', '.join(here)}"
        )
    live: Tensors = {}
    wrong = []
    for name in here:
        mine: Tensors = {}
        encode(_state_dict_of(name, state, to_load=True), name, mine)
        live |= mine
        if isinstance(state[name], torch.nn.Module):
            stored = set(tensors_of(plain[name]))
            wrong += [f"{path} is not in the checkpoint" for path in sorted(mine.keys() - stored)]
            wrong += [f"{path} is not in the model" for path in sorted(stored - mine.keys())]
            wrong += [
                f"{path} is {list(saved[path].size)} in the checkpoint and {list(mine[path].shape)} in the model"
                for path in sorted(stored & mine.keys())
                if saved[path].size != mine[path].shape
            ]
    if wrong:
        more = f", and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise ConfigError(f"Checkpoints: the checkpoint does not fit the model: {', '.join(wrong[:4])}{more}")
    made = {}
    for path in tensors_of(plain):
        if isinstance(live.get(path), DTensor):
            made[path] = torch.empty_like(live[path])
        else:
            made[path] = torch.empty(saved[path].size, dtype=saved[path].properties.dtype)
    return made


def put(plain: dict, tensors: Tensors, state: Mapping[str, object]) -> None:
    """Puts loaded values into the objects of a training."""
    parts = {name: decode(value, tensors) for name, value in plain.items()}
    for name, part in parts.items():
        thing = state[name]
        if isinstance(thing, torch.nn.Module):
            set_model_state_dict(thing, part)
        elif isinstance(thing, torch.optim.Optimizer):
            # Not strict: a parameter without a gradient so far has no state. targets() has compared the names.
            module = _module_of(name, thing, state)
            set_optimizer_state_dict(module, thing, part, options=StateDictOptions(strict=False))
        else:
            thing.load_state_dict(part)


def take_random(state: Mapping[str, object]) -> Tensors:
    """The states of this rank's random number generators: PyTorch's, Python's, NumPy's and those of the state."""
    kind, words, *rest = np.random.get_state()
    taken = {
        "torch": torch.get_rng_state(),
        "python": _bytes_of(random.getstate()),
        "numpy": _bytes_of([kind, words.tolist(), *rest]),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        taken["cuda"] = torch.cuda.get_rng_state()
    for name, thing in state.items():
        if isinstance(thing, torch.Generator):
            taken[f"state/{name}"] = thing.get_state()
    return taken


def put_random(taken: Tensors, state: Mapping[str, object]) -> None:
    """Restores the generators that are in `taken`."""
    if "torch" in taken:
        torch.set_rng_state(taken["torch"])
    if "cuda" in taken and torch.cuda.is_available():
        torch.cuda.set_rng_state(taken["cuda"])
    if "python" in taken:
        version, words, gauss = _content_of(taken["python"])
        random.setstate((version, tuple(words), gauss))
    if "numpy" in taken:
        kind, words, *rest = _content_of(taken["numpy"])
        np.random.set_state((kind, np.array(words, np.uint32), *rest))
    for name, thing in state.items():
        if isinstance(thing, torch.Generator) and f"state/{name}" in taken:
            thing.set_state(taken[f"state/{name}"])


def _bytes_of(content: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)


def _content_of(data: torch.Tensor) -> list:
    return json.loads(data.numpy().tobytes())
