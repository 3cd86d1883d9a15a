"""Checkpoints that cannot be written, jobs that are killed, and writing while a training goes on."""

from __future__ import annotations

import errno
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest
from support import HANG, comes_true

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

import annulus.torch as at  # noqa: E402
from annulus.torch.checkpoints import _files as files  # noqa: E402
from small_training import Position, Training, names, only_file, said, train  # noqa: E402


def test_the_next_step_does_not_alter_what_is_being_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    from annulus.torch.checkpoints import _writer as writer

    usual = writer._DigestingFile.write

    def slow(self: object, data: bytes) -> int:
        begun.set()
        assert go_on.wait(120)
        return usual(self, data)

    training = Training()
    training.step(1)
    expected = [p.detach().clone() for p in training.model.parameters()]
    moments = training.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    monkeypatch.setattr(writer._DigestingFile, "write", slow)
    with at.Checkpoints(tmp_path, 1) as checkpoints:
        checkpoints.save(1, training.state)
        assert begun.wait(120)
        training.step(2)  # while it is being written
        assert names(tmp_path)[0].endswith(".partial")
        go_on.set()
        checkpoints.wait()
        again = Training(1)
        checkpoints.resume(again.state)
    for one, other in zip(again.model.parameters(), expected, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(again.optimizer.state_dict()["state"][0]["exp_avg"], moments)
    assert again.position.state["step"] == 1


def full(self: object, data: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_logged_and_training_continues(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from annulus.torch.checkpoints import _writer as writer

    training = Training()
    with at.Checkpoints(tmp_path, 1, max_failures=2) as checkpoints:
        for step in (1, 2):
            training.step(step)
            assert checkpoints.step(step, training.state)
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(writer._DigestingFile, "write", full)
            for step in (3, 4):
                checkpoints.step(step, training.state)
            with pytest.raises(at.CheckpointError, match=r"step 4 .* rank 0: .*No space left"):
                checkpoints.wait()
            checkpoints.wait()  # the error is raised only once
        assert names(tmp_path) == ["step-00000001", "step-00000002"]
        assert checkpoints.failures == 2
        assert sum("No space left" in text for _, text in said(caplog)) == 2
        training.step(5)
        checkpoints.step(5, training.state)
        checkpoints.wait()
        assert names(tmp_path) == ["step-00000002", "step-00000005"]
        with monkeypatch.context() as patch:
            patch.setattr(writer._DigestingFile, "write", full)
            for step in (6, 7, 8):
                checkpoints.step(step, training.state)
            with pytest.raises(at.CheckpointError, match="step 8"):  # the third in a row
                checkpoints.step(9, training.state)
        assert checkpoints.failures == 5
    assert names(tmp_path) == ["step-00000002", "step-00000005"]


def test_a_limit_on_file_sizes_is_an_error_not_a_short_file(tmp_path: pathlib.Path) -> None:
    train(tmp_path, 2, 1)
    size = only_file(tmp_path, "step-00000002").stat().st_size
    training = Training()
    training.step(3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with at.Checkpoints(tmp_path, 1) as checkpoints:
            for limit in (size - 1, size // 2):
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
                checkpoints.save(3, training.state)
                with pytest.raises(at.CheckpointError, match="File too large"):
                    checkpoints.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("where", ["write_manifest", "sync_folder", "commit"])
def test_errors_after_the_tensors(
    where: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, 2, 1)

    def fails(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with at.Checkpoints(tmp_path, 1) as checkpoints:
        monkeypatch.setattr(files, where, fails)
        checkpoints.save(3, Training().state)
        with pytest.raises(at.CheckpointError, match="Input/output"):
            checkpoints.wait()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_one_job_at_a_time(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PATIENCE", 0.2)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real", target_is_directory=True)
    with at.Checkpoints(link, 1):
        with pytest.raises(at.CheckpointError, match="already"):
            at.Checkpoints(tmp_path / "real", 1)
        at.Checkpoints(link, None).close()  # reading is always possible
        code = (
            "import sys; from annulus.torch.checkpoints import _files as f, CheckpointError, Checkpoints\n"
            "f._PATIENCE = 0.2\n"
            "try: Checkpoints(sys.argv[1], 1)\n"
            "except CheckpointError as error: print(error)"
        )
        command = [sys.executable, "-c", code, str(tmp_path / "real")]
        out = subprocess.run(command, capture_output=True, text=True, timeout=HANG).stdout
        assert "another job writes" in out and f"process {os.getpid()} on" in out
    with at.Checkpoints(link, 1) as checkpoints:
        checkpoints.save(1, Training().state)
        link.unlink()  # the link was resolved at the start
    assert names(tmp_path / "real") == ["step-00000001"]


def killed_at_any_moment(folder: pathlib.Path, steps: int) -> None:
    """Runs in a forked child: saves after every step until it is killed."""
    with at.Checkpoints(folder, 1) as checkpoints:
        state = {"position": Position()}
        first = checkpoints.resume(state).step + 1
        for step in range(first, first + steps):
            state["position"].state = {"step": step, "tensor": torch.full((20_000,), step)}
            checkpoints.step(step, state)


def whole_ones(folder: pathlib.Path) -> list[str]:
    return [name for name in names(folder) if not name.endswith((".partial", ".old"))]


def test_killed_at_any_moment_the_newest_is_complete(tmp_path: pathlib.Path) -> None:
    generator = random.Random(1)
    reached = rounds = 0
    while rounds < 25:
        rounds += 1
        child = os.fork()
        if child == 0:
            try:
                killed_at_any_moment(tmp_path, 10**6)
            finally:
                os._exit(1)
        if rounds % 4 == 0:  # on a busy machine, the other children may get nowhere
            newer = f"step-{reached + 1:08d}"
            assert comes_true(lambda: any(newer <= name[:13] for name in whole_ones(tmp_path)))
        time.sleep(generator.uniform(0.02, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        position = Position()
        with at.Checkpoints(tmp_path, None) as checkpoints:
            found = checkpoints.resume({"position": position})
        # Only unfinished checkpoints were passed over.
        assert all(reason == "it was never finished" for _, reason in found.passed_over)
        assert found.step >= reached
        reached = found.step
        if reached:
            assert position.state["step"] == reached
            assert torch.equal(position.state["tensor"], torch.full((20_000,), reached))
    assert reached >= 4
    assert 2 <= len(whole_ones(tmp_path)) <= 4


def test_a_process_that_ends_finishes_its_last_checkpoint(tmp_path: pathlib.Path) -> None:
    code = (
        "import sys, time, torch, annulus.torch as at\n"
        "from annulus.torch.checkpoints import _writer as writer\n"
        "usual = writer._DigestingFile.write\n"
        "def slow(self, data):\n"
        "    time.sleep(0.5)\n"
        "    return usual(self, data)\n"
        "writer._DigestingFile.write = slow\n"
        "at.Checkpoints(sys.argv[1], 1).save(1, {'model': torch.nn.Linear(3, 3)})\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=HANG)
    assert names(tmp_path) == ["step-00000001"]


def test_without_safetensors_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    import importlib.util

    usual = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "safetensors" else usual(name)
    )
    with pytest.raises(ModuleNotFoundError, match="pip install safetensors"):
        at.Checkpoints(tmp_path)
