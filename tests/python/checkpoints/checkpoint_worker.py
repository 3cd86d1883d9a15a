"""The ranks of test_checkpoints_distributed.py: checkpoint_worker.py FOLDER RANKS CASE..."""

from __future__ import annotations

import errno
import os
import pathlib
import random
import signal
import sys
import time
from collections.abc import Callable

import annulus
import annulus.torch as at
import numpy as np
import pytest
import small_training
import torch
import torch.distributed as dist
from annulus.torch.checkpoints import _files as files
from annulus.torch.checkpoints import _writer as writer
from support import HANG
from support.process_ring import joined_ring
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

# In these cases rank 1 is killed or hangs.
LOSES_RANK_1 = {"killed_while_writing", "stopped_while_writing", "stopped_and_lost_by_the_ring"}


class Data:
    def __init__(self, position: int = 0):
        self.position = position

    def state_dict(self) -> dict:
        return {"position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.position = state["position"]


def names(folder: pathlib.Path) -> list[str]:
    dist.barrier()  # rank 0 removes files
    found = small_training.names(folder)
    dist.barrier()
    return found


def sharded() -> dict:
    """A model whose parameters do not divide by the ranks; one has fewer rows than there may be ranks."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 2), nn.LayerNorm(2))
    if dist.get_world_size() > 1:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "data": Data()}


def train(state: dict, step: int) -> None:
    # All ranks have the same batch, so FSDP's mean of the gradients equals the gradient of each rank.
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
    state["model"](x).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["data"].position = step


def whole(state: dict) -> list[torch.Tensor]:
    tensors = [p.detach() for p in state["model"].parameters()]
    for parameter in state["model"].parameters():
        tensors += [v for v in state["optimizer"].state[parameter].values() if v.dim()]
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]


def save_shards(folder: pathlib.Path) -> None:
    """Writes checkpoints that other numbers of ranks load."""
    state = sharded()
    with at.Checkpoints(folder / "shards", 1) as checkpoints:
        for step in (1, 2):
            train(state, step)
            checkpoints.step(step, state)
    saved = list((folder / "shards/step-00000002").glob("*.safetensors"))
    assert len(saved) == dist.get_world_size()
    expected = whole(state)
    if dist.get_rank() == 0:
        torch.save(expected, folder / "expected.pt")
    dist.barrier()


def load_shards(folder: pathlib.Path) -> None:
    state = sharded()
    with at.Checkpoints(folder / "shards", None) as checkpoints:
        resumed = checkpoints.resume(state)
    assert resumed.step == 2 and state["data"].position == 2
    # Of the three generators, only PyTorch's has the same seed on all ranks.
    same = dist.get_world_size() == 3
    assert resumed.random_anew == (() if same else ("numpy", "python"))
    expected = torch.load(folder / "expected.pt")
    for mine, theirs in zip(whole(state), expected, strict=True):
        assert torch.equal(mine, theirs)
    train(state, 3)  # works only if the optimizer's state is sharded like the parameters


def a_full_disk_of_one_rank_is_an_error_on_all(folder: pathlib.Path) -> None:
    state = {"data": Data(1)}
    usual = writer._DigestingFile.write

    def full(self: object, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for unlucky in range(dist.get_world_size()):
        here = folder / f"full{unlucky}"
        with at.Checkpoints(here, 1) as checkpoints:
            checkpoints.step(1, state)
            checkpoints.wait()
            if dist.get_rank() == unlucky:
                writer._DigestingFile.write = full
            checkpoints.step(2, state)
            with pytest.raises(at.CheckpointError, match=f"rank {unlucky}: OSError: .*No space"):
                checkpoints.wait()
            writer._DigestingFile.write = usual
            assert checkpoints.failures == 1 and names(here) == ["step-00000001"]
            checkpoints.step(3, state)
            checkpoints.wait()
            assert names(here) == ["step-00000001", "step-00000003"]


def a_bad_state_of_one_rank_is_an_error_on_all(folder: pathlib.Path) -> None:
    last = dist.get_world_size() - 1
    with at.Checkpoints(folder / "bad", 1) as checkpoints:
        state = {"data": Data(object() if dist.get_rank() == last else 1)}
        if dist.get_rank() == last:
            with pytest.raises(annulus.ConfigError, match="data/position is a object"):
                checkpoints.save(1, state)
        else:
            checkpoints.save(1, state)
        with pytest.raises(at.CheckpointError, match=f"rank {last}: .*data/position"):
            checkpoints.wait()
        checkpoints.save(1, {"data": Data(dist.get_rank() // last)})
        with pytest.raises(at.CheckpointError, match=f"differs between rank 0 and rank {last}"):
            checkpoints.wait()
        assert names(folder / "bad") == []


def bad_arguments_of_one_rank_are_errors_on_all(folder: pathlib.Path) -> None:
    rank = dist.get_rank()
    with pytest.raises(annulus.ConfigError, match="differ between ranks"):
        at.Checkpoints(folder / "arguments", 1, keep=2 + (rank == 1))
    with pytest.raises(annulus.ConfigError, match="keep is 1"):
        at.Checkpoints(folder / "arguments", 1, keep=2 - (rank == 1))
    for wrong, words in (
        ({"folder": None}, "folder is None"),
        ({"folder": b"bytes"}, "folder is b'bytes'"),
        ({"timeout": -1}, "timeout is -1"),
    ):
        with pytest.raises(annulus.ConfigError, match=words):
            at.Checkpoints(**{"folder": folder / "arguments"} | (wrong if rank == 1 else {}))
    (folder / "file").touch()
    with pytest.raises(at.CheckpointError, match="file"):
        at.Checkpoints(folder / ("file" if rank == 1 else "arguments"), 1)
    # No rank holds the folder after these errors.
    with at.Checkpoints(folder / "arguments", 1) as checkpoints:
        files._PATIENCE = 0.1
        with pytest.raises(at.CheckpointError, match="writes checkpoints there already"):
            at.Checkpoints(folder / "arguments", 1)
        # A model that differs on one rank.
        model = nn.Linear(3, 3)
        checkpoints.save(1, {"model": model})
        checkpoints.wait()
        with pytest.raises(annulus.ConfigError, match=r"model/bias is \[3\] .* \[4\]"):
            checkpoints.resume({"model": nn.Linear(3, 4) if rank == 1 else model})


def different_steps_are_errors_on_all(folder: pathlib.Path) -> None:
    """Different steps, or an invalid step on one rank, are errors on all ranks. The next checkpoint is written."""
    rank, here = dist.get_rank(), folder / "steps"
    with at.Checkpoints(here, 1) as checkpoints:
        checkpoints.save(1 + rank, {"data": Data(1)})
        with pytest.raises(at.CheckpointError, match=r"different steps: \[1, 2, 3\]"):
            checkpoints.wait()
        for wrong in (-1, "4", None):
            if rank == 1:
                with pytest.raises(annulus.ConfigError, match="step"):
                    checkpoints.save(wrong, {"data": Data(1)})
            else:
                checkpoints.save(4, {"data": Data(1)})
            with pytest.raises(at.CheckpointError, match="rank 1: ConfigError: .*step"):
                checkpoints.wait()
        assert names(here) == []
        checkpoints.save(4, {"data": Data(1)})
        checkpoints.wait()
        assert names(here) == ["step-00000004"]


def folders_that_are_not_shared(folder: pathlib.Path) -> None:
    own = folder / f"own{dist.get_rank()}"
    with at.Checkpoints(own, 1) as checkpoints:
        checkpoints.save(1, {"model": nn.Linear(3, 3)})
        with pytest.raises(at.CheckpointError, match="do all ranks share the folder"):
            checkpoints.wait()
    assert not any(name.startswith("step-00000001") for name in names(folder / "own0"))


def random_numbers_go_on(folder: pathlib.Path) -> None:
    rank = dist.get_rank()
    for name, seed in (("same", 5), ("own", 5 + rank)):
        torch.manual_seed(seed)
        random.seed(seed)
        state = {"generator": torch.Generator().manual_seed(seed)}
        with at.Checkpoints(folder / name, 1) as checkpoints:
            checkpoints.save(1, state)
            checkpoints.wait()
            drawn = draw(state["generator"])
            assert checkpoints.resume(state).random_anew == ()
            assert draw(state["generator"]) == drawn
            drawn = dist.get_world_size() * [None]
        dist.all_gather_object(drawn, draw(state["generator"]))
        assert len(set(drawn)) == (1 if name == "same" else dist.get_world_size())


def draw(generator: torch.Generator) -> tuple[float, ...]:
    return torch.rand(()).item(), random.random(), torch.rand((), generator=generator).item()


def random_numbers_of_others(folder: pathlib.Path) -> None:
    """Loads what random_numbers_go_on has written with another number of ranks."""
    for name, anew in (
        ("same", {"numpy"}),
        ("own", {"numpy", "python", "torch", "state/generator"}),
    ):
        torch.manual_seed(5)
        random.seed(5)
        wanted = draw(torch.Generator().manual_seed(5))
        state = {"generator": torch.Generator().manual_seed(0)}
        with at.Checkpoints(folder / name, None) as checkpoints:
            assert set(checkpoints.resume(state).random_anew) == anew
        assert (draw(state["generator"]) == wanted) == (name == "same")


def damage_of_any_shard(folder: pathlib.Path) -> None:
    state = sharded()
    here = folder / "damaged"
    with at.Checkpoints(here, 1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state)
        checkpoints.wait()
        for path in sorted((here / "step-00000002").glob("*.safetensors")):
            data = path.read_bytes()
            dist.barrier()
            if dist.get_rank() == 0:
                path.write_bytes(data[:-1] + bytes([data[-1] ^ 128]))
            dist.barrier()
            resumed = checkpoints.resume(state)
            assert resumed.step == 1 and len(resumed.passed_over) == 1
            assert f"{path.name} is not what was written" in resumed.passed_over[0][1]
            dist.barrier()
            if dist.get_rank() == 0:
                path.unlink()
            dist.barrier()
            resumed = checkpoints.resume(state)
            assert resumed.passed_over == (("step-00000002", f"{path.name} is missing"),)
            dist.barrier()
            if dist.get_rank() == 0:
                path.write_bytes(data)
            dist.barrier()
        assert checkpoints.resume(state).step == 2


def some_of_the_ranks(folder: pathlib.Path) -> None:
    last = dist.get_world_size() - 1
    group = dist.new_group([0, last])
    if dist.get_rank() in (0, last):
        with at.Checkpoints(folder / "some", 1, group=group) as checkpoints:
            checkpoints.save(1, {"data": Data(4)})
            checkpoints.wait()
            assert checkpoints.resume({"data": Data()}).step == 1
    else:
        with pytest.raises(annulus.ConfigError, match="not in the group"):
            at.Checkpoints(folder / "some", 1, group=group)


def killed_while_writing(folder: pathlib.Path) -> None:
    """Rank 1 is killed with half a file written. The other ranks get an error, and older checkpoints stay."""
    state = {"model": nn.Linear(100, 100), "data": Data(1)}
    checkpoints = at.Checkpoints(folder / "killed", 1)
    checkpoints.save(1, state)
    checkpoints.wait()

    def dies(self: writer._DigestingFile, data: bytes) -> int:
        self._file.write(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == 1:
        writer._DigestingFile.write = dies
    checkpoints.step(2, state)
    with pytest.raises(at.CheckpointError, match="step 2 is not written"):
        checkpoints.wait()
    left = sorted(os.listdir(folder / "killed"))
    assert left[:2] == [".lock", "step-00000001"]
    assert all(name.endswith(".partial") for name in left[2:])
    checkpoints.close()


def stopped_while_writing(folder: pathlib.Path) -> None:
    """Rank 1 hangs in a write. The other ranks' training ends with an error, and they do not wait for rank 1."""
    from annulus.torch.checkpoints import _background, _checkpoints

    _checkpoints.GRACE = _background.GRACE = 1.0
    if dist.get_rank() == 1:
        writer._DigestingFile.write = lambda self, data: time.sleep(3600)
    begun = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        with at.Checkpoints(folder / "stopped", 1) as checkpoints:
            checkpoints.save(1, {"data": Data(1)})
            if dist.get_rank() == 1:
                time.sleep(10)
            1 / 0  # noqa: B018
    if dist.get_rank() != 1:
        assert time.monotonic() - begun < 120  # not for as long as it hangs


def stopped_and_lost_by_the_ring(folder: pathlib.Path) -> None:
    """Rank 1 hangs in a write. After the ring has lost it, no rank waits for the timeout of the checkpoint."""
    from annulus.torch.checkpoints import _background, _checkpoints

    _checkpoints.GRACE = _background.GRACE = 1.0
    q = torch.randn(1, 4, 1, 8)
    at.ring_attention(q, q, q, group=dist.group.WORLD)
    checkpoints = at.Checkpoints(folder / "lost", 1)
    if dist.get_rank() == 1:
        writer._DigestingFile.write = lambda self, data: time.sleep(3600)
    checkpoints.save(1, {"data": Data(1)})
    if dist.get_rank() == 1:
        time.sleep(3600)  # until the parent ends it
    with pytest.raises(annulus.TransportError):
        at.ring_attention(q, q, q, group=dist.group.WORLD, timeout=5.0)
    begun = time.monotonic()
    with pytest.raises(at.CheckpointError, match="a rank does not answer"):
        checkpoints.close()
    with pytest.raises(annulus.TransportError, match="lost each other"):
        checkpoints.resume({"data": Data()})
    assert time.monotonic() - begun < 120  # not for as long as it hangs


def be_rank(rank: int, say: Callable, folder: pathlib.Path, cases: list[str]) -> None:
    random.seed(rank)
    np.random.seed(rank)
    for case in cases:
        globals()[case](folder)
        if case not in LOSES_RANK_1:
            dist.barrier()
    say("done")


def main() -> int:
    """Prints what went wrong in ranks that were not to be lost."""
    folder, ranks, cases = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    with joined_ring(ranks, be_rank, folder, cases, seconds=HANG) as ring:
        left = [rank for rank in range(ranks) if rank != 1 or LOSES_RANK_1.isdisjoint(cases)]
        if ring.wait("done", left, HANG):
            return 0
        for rank in left:
            print(f"rank {rank} of {ranks}: {(ring.ranks[rank].last('broke') or {}).get('text', 'hangs')}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
