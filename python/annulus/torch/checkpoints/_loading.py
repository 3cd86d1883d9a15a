"""Loading a checkpoint into a state, on all ranks or on none."""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Mapping

import torch
import torch.distributed.checkpoint as dcp

from annulus import ConfigError, TransportError
from annulus.torch.checkpoints import _state
from annulus.torch.checkpoints._ranks import CheckpointError, Ranks

# A single process intentionally saves and loads without torch.distributed.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")


def load(
    path: pathlib.Path, content: dict, state: Mapping[str, object], ranks: Ranks
) -> tuple[str, ...]:
    """Loads a checked checkpoint into a state. Collective.

    Returns the names of the random number generators that do not continue from their saved state.
    """
    error: Exception | None = None
    tensors: dict[str, torch.Tensor] = {}
    # With another number of ranks, only generators that were equal on all ranks can be restored.
    same = content["ranks"] == ranks.size
    prefix = f"rng/{ranks.rank if same else 0}/"
    anew = []
    try:
        saved = dcp.HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
        tensors = _state.targets(content["state"], state, saved)
        for name in sorted(name for name in saved if name.startswith(prefix)):
            if same or name.removeprefix(prefix) in content["same_random"]:
                tensors[name] = torch.empty(saved[name].size, dtype=torch.uint8)
            else:
                anew.append(name.removeprefix(prefix))
    except ConfigError as failure:
        error = failure
    except Exception as failure:
        error = CheckpointError(f"{path}: {type(failure).__name__}: {failure}")
    ranks.agree(error)
    try:
        dcp.load(
            tensors,
            storage_reader=dcp.HuggingFaceStorageReader(str(path)),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
    except dcp.CheckpointException as failure:
        rank, (why, _) = min(failure.failures.items())
        error = CheckpointError(f"{path}: rank {rank}: {type(why).__name__}: {why}")
    except RuntimeError as failure:
        raise TransportError(f"Checkpoints: a rank is lost: {failure}") from failure
    ranks.agree(error)
    try:
        _state.put(content["state"], tensors, state)
        mine = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        _state.put_random(mine, state)
    except Exception as failure:  # raised by a load_state_dict
        error = CheckpointError(
            f"{path}: {type(failure).__name__}: {failure}. Earlier parts of the state are already loaded"
        )
    ranks.agree(error)
    return tuple(anew)
