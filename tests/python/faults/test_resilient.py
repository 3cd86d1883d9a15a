"""The loss of examples/python/train_resilient.py is the same whenever its processes are killed."""

from __future__ import annotations

import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from support import HANG, ROOT
from support.launch import ENVIRONMENT, need_gloo

need_gloo()
pytest.importorskip("safetensors", reason="safetensors is not installed")


def command(ranks: int, folder: pathlib.Path) -> list[str]:
    script = [str(ROOT / "examples/python/train_resilient.py"), "--steps", "40"]
    script += ["--checkpoint-interval", "5", "--checkpoints", str(folder)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
    run = [*torchrun, "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *run, *script]


def rank_of(process: int) -> tuple[int, int] | None:
    """(parent, rank) of a process."""
    try:
        status = pathlib.Path(f"/proc/{process}/stat").read_text()
        variables = pathlib.Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return None
    ranks = [int(v[5:]) for v in variables if v.startswith(b"RANK=")]
    return (int(status.rpartition(")")[2].split()[1]), ranks[0]) if ranks else None


def kill(torchrun: int, rank: int, how: signal.Signals) -> None:
    for name in os.listdir("/proc"):
        if name.isdigit() and rank_of(int(name)) == (torchrun, rank):
            os.kill(int(name), how)
            return
    pytest.fail(f"rank {rank} is not running")


def train(
    folder: pathlib.Path,
    ranks: int,
    kills: dict[int, int] | None = None,
    how: signal.Signals = signal.SIGKILL,
) -> str:
    """Returns the last line. `kills`: after which step which rank is killed, once."""
    kills = dict(kills or {})
    generator = random.Random(str(kills))
    log = folder.with_suffix(".log")
    lines = []
    with open(log, "w") as errors:
        run = subprocess.Popen(
            command(ranks, folder),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=ENVIRONMENT,
        )
        try:
            for line in run.stdout:
                lines.append(line.strip())
                step = re.match(r"step (\d+) ", line)
                if step and int(step[1]) in kills:
                    time.sleep(generator.uniform(0, 0.02))  # a random moment of the next steps
                    kill(run.pid, kills.pop(int(step[1])), how)
            assert run.wait(HANG) == 0
        except BaseException:
            print("\n".join(lines), log.read_text()[-8000:])
            raise
        finally:
            run.terminate()
            run.wait()
    assert not kills
    assert re.fullmatch(r"loss \d+\.\d+", lines[-1]), lines
    return lines[-1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, str]:
    folder = tmp_path_factory.mktemp("resilient") / "undisturbed"
    return folder, train(folder, 4)


# In make test, test_checkpoints_distributed kills and resumes a smaller training.
@pytest.mark.slow
def test_killed_and_resumed_has_the_bits_of_the_undisturbed(
    undisturbed: tuple[pathlib.Path, str], tmp_path: pathlib.Path
) -> None:
    assert train(tmp_path / "killed", 4, {17: 2}) == undisturbed[1]
    said = (tmp_path / "killed.log").read_text()
    assert re.search(r"resumed at step 1[05]: ", said), said


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_resumed_on_another_number_of_ranks(
    ranks: int, undisturbed: tuple[pathlib.Path, str], tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(undisturbed[0] / "step-00000035", folder / "step-00000035")
    loss, expected = (float(line.split()[1]) for line in (train(folder, ranks), undisturbed[1]))
    assert loss == pytest.approx(expected, rel=1e-5)
    assert "resumed at step 35" in folder.with_suffix(".log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV], ids=lambda how: how.name
)
@pytest.mark.parametrize("seed", range(4))
def test_any_ranks_at_any_steps(
    seed: int, how: signal.Signals, undisturbed: tuple[pathlib.Path, str], tmp_path: pathlib.Path
) -> None:
    generator = random.Random(seed)
    steps = generator.sample(range(1, 40), 3)
    kills = {step: generator.randrange(4) for step in sorted(steps)}
    assert train(tmp_path / "killed", 4, kills, how) == undisturbed[1]
