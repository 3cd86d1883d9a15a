"""Checkpoints in one process: saved states are loaded, damaged checkpoints are passed over."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import shutil
import sys

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

import annulus  # noqa: E402
import annulus.torch as at  # noqa: E402
from annulus.torch.checkpoints import _files as files  # noqa: E402
from small_training import Position, Training, names, only_file, resumed, said, train  # noqa: E402
from torch import nn  # noqa: E402


def test_resumed_training_has_the_bits_of_the_undisturbed(tmp_path: pathlib.Path) -> None:
    undisturbed = train(tmp_path / "a", 9)
    assert train(tmp_path / "b", 4) + train(tmp_path / "b", 9) == undisturbed
    before, after = Training(), Training(5)
    for step in (1, 2, 3):
        before.step(step)
    with at.Checkpoints(tmp_path / "c", 1) as checkpoints:
        checkpoints.save(3, before.state)
        checkpoints.wait()
        assert checkpoints.resume(after.state).step == 3
    for one, other in zip(before.model.parameters(), after.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert after.model[3].weight is after.model[0].weight
    state, order = dict(before.position.state), before.position.state["order"]
    assert torch.equal(after.position.state.pop("order"), order)
    del state["order"]
    assert after.position.state == state and type(after.position.state["file"]) is tuple


def test_keeps_the_newest_by_step(tmp_path: pathlib.Path) -> None:
    train(tmp_path, 9)
    assert names(tmp_path) == ["step-00000006", "step-00000008"]
    # Clocks may jump: here the older checkpoint has the newer time.
    os.utime(tmp_path / "step-00000006", (2e9, 2e9))
    os.utime(tmp_path / "step-00000008", (0, 0))
    assert resumed(tmp_path).step == 8
    train(tmp_path, 12, keep=4)
    assert names(tmp_path) == [f"step-{step:08d}" for step in (6, 8, 10, 12)]
    train(tmp_path, 14, keep=3)
    assert names(tmp_path) == [f"step-{step:08d}" for step in (6, 8, 10, 12, 14)]
    train(tmp_path, 18, keep=3)
    assert names(tmp_path) == [f"step-{step:08d}" for step in (14, 16, 18)]


def truncate(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: pathlib.Path, offset: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def change_manifest(path: pathlib.Path, change: object) -> None:
    manifest = json.loads(path.read_bytes())
    change(manifest)
    path.write_text(json.dumps(manifest))


def change_content(path: pathlib.Path, change: object) -> None:
    """Changes the manifest and updates its digest."""

    def both(manifest: dict) -> None:
        change(manifest["content"])
        manifest["sha256"] = files.digest_of(manifest["content"])

    change_manifest(path, both)


DAMAGES = {
    "truncated": (lambda f: truncate(only_file(f, "")), "bytes, expected"),
    "flipped": (lambda f: flip(only_file(f, "")), "SHA-256"),
    "flipped_header": (lambda f: flip(only_file(f, ""), 20), "SHA-256"),
    "emptied": (lambda f: only_file(f, "").write_bytes(b""), "has 0 bytes"),
    "missing": (lambda f: only_file(f, "").unlink(), "is missing"),
    "stray": (lambda f: shutil.copy(only_file(f, ""), f / "z.safetensors"), "not in its manifest"),
    "folder_for_file": (
        lambda f: (only_file(f, "").rename(f / "x"), (f / "y.safetensors").mkdir()),
        "not in its manifest",
    ),
    "no_manifest": (lambda f: (f / "manifest.json").unlink(), "no manifest.json"),
    "half_a_manifest": (lambda f: truncate(f / "manifest.json"), "not JSON"),
    "junk_manifest": (lambda f: (f / "manifest.json").write_bytes(b"\xff\0" * 99), "not JSON"),
    "deep_manifest": (lambda f: (f / "manifest.json").write_text("[" * 10**5), "not JSON"),
    "another_manifest": (lambda f: (f / "manifest.json").write_text("[1]"), "has no version"),
    "another_version": (
        lambda f: change_manifest(f / "manifest.json", lambda m: m.update(version=2)),
        "version 2",
    ),
    "changed_manifest": (
        lambda f: change_manifest(f / "manifest.json", lambda m: m["content"]["state"].clear()),
        "SHA-256",
    ),
    "strange_manifest": (
        lambda f: change_content(f / "manifest.json", lambda content: content.pop("ranks")),
        "'ranks'",
    ),
    "empty": (lambda f: (shutil.rmtree(f), f.mkdir()), "no manifest.json"),
    "a_file": (lambda f: (shutil.rmtree(f), f.write_text("")), "cannot be read"),
    "dangling_link": (
        lambda f: (shutil.rmtree(f), f.symlink_to("nowhere")),
        "no manifest.json",
    ),
}


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "six"
    train(folder, 6)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_logged_and_kept(
    damage: str, six_steps: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(six_steps, folder)
    action, reason = DAMAGES[damage]
    action(folder / "step-00000006")
    found = resumed(folder)
    assert found.step == 4 and found.folder == str(folder / "step-00000004")
    ((name, why),) = found.passed_over
    assert name == "step-00000006" and reason in why
    assert any(name in text and reason in text for _, text in said(caplog))
    # Training reaches the step again and gives it another name. The damaged checkpoint stays.
    train(folder, 10)
    assert names(folder) == ["step-00000006", "step-00000008", "step-00000010"]
    assert resumed(folder).step == 10


def test_another_step_by_name_is_passed_over(
    six_steps: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(six_steps, folder)
    (folder / "step-00000004").rename(folder / "step-00000007")
    found = resumed(folder)
    assert found.step == 6 and "step 4" in found.passed_over[0][1]


def test_no_checkpoint_is_complete(
    six_steps: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(six_steps, folder)
    for name in names(folder):
        flip(only_file(folder, name))
    found = resumed(folder)
    assert found.step == 0 and found.folder is None and len(found.passed_over) == 2
    assert [level for level, _ in said(caplog)][-1] == logging.ERROR


def test_old_but_damaged_is_never_removed(
    six_steps: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(six_steps, folder)
    flip(only_file(folder, "step-00000004"))
    (folder / "step-00000002").symlink_to("step-00000006")
    (folder / "step-00000001.abc.partial").mkdir()
    train(folder, 12)
    assert names(folder) == [
        "step-00000001.abc.partial",
        "step-00000002",
        "step-00000004",
        "step-00000010",
        "step-00000012",
    ]
    levels = [level for level, text in said(caplog) if "is not removed" in text]
    assert levels == [logging.WARNING] * 2


def test_damaged_after_this_job_wrote_it_is_never_removed(tmp_path: pathlib.Path) -> None:
    training = Training()
    training.step(1)
    with at.Checkpoints(tmp_path, 1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, training.state)
        checkpoints.wait()
        flip(only_file(tmp_path, "step-00000002"))
        assert checkpoints.resume(training.state).step == 1
        for step in (2, 3, 4):
            checkpoints.save(step, training.state)
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]
    assert "SHA-256" in damage_of(tmp_path, "step-00000002")


def test_unfinished_checkpoints_are_removed_once_a_later_one_is_complete(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 2)
    for name in ("step-00000003.0123456789ab", "step-00000004.0123456789ab", "step-00000009.0123456789ab", "mine"):
        (tmp_path / f"{name}.partial").mkdir()
        (tmp_path / f"{name}.partial" / "half").touch()
    found = resumed(tmp_path)
    assert len(found.passed_over) == 4 and len(names(tmp_path)) == 5  # only read
    training = Training()
    with at.Checkpoints(tmp_path, 2) as checkpoints:
        first = checkpoints.resume(training.state).step + 1
        assert len(names(tmp_path)) == 5
        for step in range(first, 5):
            training.step(step)
            checkpoints.step(step, training.state)
    assert names(tmp_path) == [
        "mine.partial",
        "step-00000002",
        "step-00000004",
        "step-00000009.0123456789ab.partial",
    ]
    removed = [text for level, text in said(caplog) if level == logging.WARNING and "removed" in text]
    assert len(removed) == 2 and all("killed" in text for text in removed)


def test_a_relative_folder_is_resolved_at_the_start(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "here", 2)
    monkeypatch.chdir(tmp_path)
    with at.Checkpoints("here", None) as checkpoints:
        monkeypatch.chdir("/")
        assert checkpoints.resume(Training().state).step == 2


def damage_of(folder: pathlib.Path, name: str) -> str:
    with pytest.raises(files.Damaged) as damage:
        files.check_files(folder / name, files.read_manifest(folder / name, int(name[5:13])))
    return str(damage.value)


def test_another_models_checkpoint_is_an_error_and_changes_nothing(tmp_path: pathlib.Path) -> None:
    train(tmp_path, 2)
    with at.Checkpoints(tmp_path, None) as checkpoints:
        other = nn.Sequential(nn.Embedding(12, 8), nn.Dropout(), nn.LayerNorm(8))
        with pytest.raises(annulus.ConfigError, match="optimizer"):
            checkpoints.resume({"model": other})
        training = Training()
        training.model[2] = nn.LayerNorm(9)
        training.model.register_parameter("more", nn.Parameter(torch.ones(1)))
        training.state["optimizer"] = torch.optim.AdamW(training.model.parameters())
        before = {k: v.clone() for k, v in training.model.state_dict().items()}
        with pytest.raises(annulus.ConfigError, match=r"model/more is not in .* is \[8\] .* \[9\]"):
            checkpoints.resume(training.state)
        assert not training.state["optimizer"].state
        for key, value in training.model.state_dict().items():
            assert torch.equal(value, before[key])


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"x": 3}, "state_dict"),
        ({"rng": Position()}, "is a name in the state"),
        ({"a/b": Position()}, "is a name in the state"),
        ({"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])}, "no one module"),
    ],
)
def test_states_that_cannot_be_saved(state: dict, words: str, tmp_path: pathlib.Path) -> None:
    with at.Checkpoints(tmp_path, 1) as checkpoints:
        with pytest.raises(annulus.ConfigError, match=words):
            checkpoints.save(1, state)
        with pytest.raises(at.CheckpointError, match=words):  # as on the other ranks
            checkpoints.wait()
        position = Position()
        position.state = {"file": {"handle": sys.stdout}}
        with pytest.raises(annulus.ConfigError, match="position/file/handle is a"):
            checkpoints.save(1, {"position": position})
        with pytest.raises(at.CheckpointError):
            checkpoints.save(1, {})
    assert names(tmp_path) == []


def test_arguments(tmp_path: pathlib.Path) -> None:
    for bad in ({"checkpoint_interval": 0}, {"keep": 1}, {"keep": 2.5}, {"max_failures": -1}, {"timeout": 0}):
        with pytest.raises(annulus.ConfigError, match=next(iter(bad))):
            at.Checkpoints(tmp_path, **bad)
    (tmp_path / "file").write_text("")
    with pytest.raises(at.CheckpointError, match="file"):
        at.Checkpoints(tmp_path / "file")
    nothing = at.Checkpoints(tmp_path / "none", None)
    with pytest.raises(at.CheckpointError, match="none: No such file"):
        nothing.resume({})
    reading = at.Checkpoints(tmp_path / "new", None)
    assert not reading.step(1, {})
    with pytest.raises(annulus.ConfigError, match="read only"):
        reading.save(1, {})
    writing = at.Checkpoints(tmp_path / "new", 1)
    for step in (-1, 1.0, 10**18):
        with pytest.raises(annulus.ConfigError, match="step"):
            writing.save(step, {})
        with pytest.raises(at.CheckpointError, match="step"):  # as on the other ranks
            writing.wait()
    writing.close()
    writing.close()
    with pytest.raises(annulus.ConfigError, match="closed"):
        writing.step(3, {})


def test_auto_resume_can_be_off(tmp_path: pathlib.Path) -> None:
    train(tmp_path, 4, auto_resume=False)
    with pytest.raises(at.CheckpointError, match="step-00000004"):
        at.Checkpoints(tmp_path, 2, auto_resume=False)
    with at.Checkpoints(tmp_path, None, auto_resume=False) as checkpoints:
        assert checkpoints.resume(Training().state).step == 0


def test_a_fresh_optimizer_stays_fresh(tmp_path: pathlib.Path) -> None:
    saved, loaded = Training(), Training(3)
    Training()  # seeds
    with at.Checkpoints(tmp_path, 1) as checkpoints:
        checkpoints.save(0, saved.state)
        assert not saved.optimizer.state
        checkpoints.wait()
        expected = [saved.step(step) for step in range(1, 4)]
        found = checkpoints.resume(loaded.state)
    assert found.step == 0 and found.folder is not None
    assert [loaded.step(step) for step in range(1, 4)] == expected


def test_parameters_without_gradients_have_no_state(tmp_path: pathlib.Path) -> None:
    def made() -> dict:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

    state = made()
    state["model"][0](torch.ones(1, 3)).sum().backward()
    state["optimizer"].step()
    with at.Checkpoints(tmp_path, 1) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        again = made()
        assert checkpoints.resume(again).step == 1
    loaded = again["optimizer"].state
    assert set(loaded) == set(again["model"][0].parameters())
