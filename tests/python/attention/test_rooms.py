"""The sub-packages of annulus.torch (rooms): which may import which, and names that must not move."""

from __future__ import annotations

import ast
import pathlib
import pickle
import subprocess
import sys

import pytest
from support import HANG

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import annulus.torch as at  # noqa: E402

PACKAGE = pathlib.Path(at.__file__).parent
# Modules of a room import those of their own room and of these; "": attention, which has no folder of its own.
MAY_IMPORT = {
    "ring": {"options"},
    "": {"options", "ring"},
    "checkpoints": {"options", "ring"},
    "faults": {"options", "ring"},
    "training": {"options", "ring", "", "checkpoints", "faults"},
}
# Modules that all rooms may import. They import none of them.
OPTIONS = {"_config", "_fast_path", "_memory", "_options", "_placements", "_transforms"}
# variants.py has the published names of attention and of training.
TOP = {"__init__", "variants"}


def room_of(module: str) -> str:
    """The room of annulus.torch.<module>."""
    first = module.split(".")[0]
    return "options" if first in OPTIONS else first if first in MAY_IMPORT else ""


def imports_of(path: pathlib.Path) -> list[str]:
    """Modules of annulus.torch that a file imports, relative to it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("annulus.torch"):
            module = node.module.removeprefix("annulus.torch").removeprefix(".")
            found += [module] if module else [name.name for name in node.names]
    return found


def test_rooms_import_only_those_below_them() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] in TOP:
            continue
        room = room_of(".".join(parts))
        may = {"options"} if room == "options" else MAY_IMPORT[room] | {room}
        for module in imports_of(path):
            assert room_of(module) in may, f"{path} imports annulus.torch.{module}"


@pytest.mark.parametrize("room", ["checkpoints", "faults", "ring", "training", "variants"])
def test_rooms_can_be_imported_first_and_have_docstrings(room: str) -> None:
    optional = ["deepspeed", "safetensors", "torch.distributed.checkpoint", "wandb"]
    code = (
        f"import sys, annulus.torch.{room} as room, annulus.torch as at\n"
        "assert room.__doc__ and all(getattr(at, name) is getattr(room, name) for name in room.__all__)\n"
        f"print([name for name in {optional} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_stored_modules_name_no_private_module() -> None:
    model = at.LongNetLM(7, 1, 16, 2)
    stored = pickle.dumps([model.longnet, model.longnet.blocks[0].attention, at.LongNetLM])
    assert b"annulus.torch" in stored and b"annulus.torch._m" not in stored
    for name in at.__all__:
        assert getattr(at, name).__module__ in ("annulus.torch", "annulus.torch.variants")


@pytest.mark.parametrize(
    "name",
    [
        "_advanced.RingAdvancedDistributedDilatedAttention",
        "_longnet.LongNet",
        "_longnet.LongNetLM",
        "_longnet._Block",
        "_modules.RingDilatedAttention",
        "_modules.RingMultiheadDilatedAttention",
        "_services.Services",
    ],
)
def test_modules_that_were_stored_before_there_were_rooms_can_be_loaded(name: str) -> None:
    module, _, kind = name.rpartition(".")
    stored = b"\x80\x04c" + f"annulus.torch.{module}\n{kind}\n".encode() + b"."  # a reference to the class
    assert pickle.loads(stored).__name__ == kind
