"""Power failures: every byte of a checkpoint must reach the disk before its name does."""

from __future__ import annotations

import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

import annulus.torch as at
from annulus.torch.checkpoints import _background
from annulus.torch.checkpoints import _files as files

Event = tuple[str, str]  # a call, and the path below the folder


@pytest.fixture
def events(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """The calls that change the folder, in order."""
    seen: list[Event] = []
    root = os.path.realpath(tmp_path)

    def below(path: str | os.PathLike) -> str:
        return os.path.relpath(os.path.realpath(path), root)

    def watch(module: object, name: str, path_of: Callable) -> None:
        usual = getattr(module, name)

        def watched(*arguments: object, **more: object) -> object:
            path = path_of(*arguments)
            result = usual(*arguments, **more)
            seen.append((name, path))
            return result

        monkeypatch.setattr(module, name, watched)

    watch(os, "fsync", lambda file: below(os.readlink(f"/proc/self/fd/{file}")))
    watch(os, "rename", lambda old, new: f"{below(old)} {below(new)}")
    watch(shutil, "rmtree", lambda path, *_: below(path))
    return seen


def save(folder: pathlib.Path, *steps: int) -> None:
    with at.Checkpoints(folder, 1) as checkpoints:
        for step in steps:
            checkpoints.save(step, {"model": torch.nn.Linear(3, 3)})
            checkpoints.wait()


def test_a_checkpoint_gets_its_name_when_all_of_it_is_on_disk(
    tmp_path: pathlib.Path, events: list[Event]
) -> None:
    save(tmp_path, 1)
    (named,) = (i for i, (what, _) in enumerate(events) if what == "rename")
    partial, name = events[named][1].split()
    assert name == "step-00000001" and partial.endswith(files.PARTIAL)
    before = [path for what, path in events[:named] if what == "fsync"]
    synced = {os.path.relpath(path, partial) for path in before}
    assert set(os.listdir(tmp_path / name)) <= synced, "a file that may be lost"
    assert any(path.endswith(".safetensors") for path in synced) and files.MANIFEST in synced
    assert before[-1] == partial, "the names of its files may be lost"
    assert ("fsync", ".") in events[named:], "its own name may be lost"


def test_a_checkpoint_loses_its_name_before_its_files(
    tmp_path: pathlib.Path, events: list[Event]
) -> None:
    save(tmp_path, 1, 2, 3)
    old = f"step-00000001{files.OLD}"
    gone = events.index(("rename", f"step-00000001 {old}"))
    assert events.index(("rmtree", old)) > gone
    assert gone > [path.endswith(" step-00000003") for _, path in events].index(True), "too early"


def test_the_names_of_new_folders_are_durable(tmp_path: pathlib.Path, events: list[Event]) -> None:
    files.make_folder(tmp_path / "a" / "b")
    assert {("fsync", "."), ("fsync", "a")} <= set(events)


def test_only_begun_removals_are_finished(tmp_path: pathlib.Path) -> None:
    for name in ("step-00000001.old", "step-00000002", "step-00000003.x.partial", "mine.old"):
        (tmp_path / name).mkdir()
    files.finish_removals(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["mine.old", "step-00000002", "step-00000003.x.partial"]


def test_the_end_of_the_process_waits_for_writing_threads() -> None:
    class Slow:  # like tensors that are freed slowly
        def __del__(self) -> None:
            time.sleep(0.5)

    begun = threading.Event()
    future = _background.in_background(lambda _: begun.wait(), Slow())
    begun.set()
    future.result(timeout=120)
    _background._finish_all()
    assert "annulus checkpoint" not in [thread.name for thread in threading.enumerate()]
