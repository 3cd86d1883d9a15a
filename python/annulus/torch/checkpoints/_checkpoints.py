"""Checkpoints of a training, written every few steps in the background."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import importlib.util
import logging
import os
import pathlib
import shutil
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from annulus import ConfigError
from annulus.torch.checkpoints import _files as files
from annulus.torch.checkpoints._background import GRACE, abandon, in_background
from annulus.torch.checkpoints._ranks import CheckpointError, Ranks
from annulus.torch.checkpoints._removal import OldCheckpoints
from annulus.torch.ring._registry import has_lost, waiting_elsewhere

if TYPE_CHECKING:
    from annulus.torch.checkpoints._writer import Writer

_log = logging.getLogger("annulus.checkpoints")


def check_installed() -> None:
    """Raises ModuleNotFoundError if safetensors is not installed."""
    if importlib.util.find_spec("safetensors") is None:
        raise ModuleNotFoundError(
            "annulus.torch.Checkpoints needs safetensors (pip install safetensors)",
            name="safetensors",
        )


@dataclasses.dataclass(frozen=True)
class Resumed:
    """The result of :meth:`Checkpoints.resume`.

    Args:
        step: the step after which training continues; 0: from the start.
        folder: the folder of the checkpoint; None: there was none.
        passed_over: (name, reason) of newer or unfinished checkpoints that were not loaded. They stay on disk.
        random_anew: random number generators that do not continue from their saved state. Empty if the number of ranks
            is the same; otherwise those whose states differed between ranks.
    """

    step: int
    folder: str | None
    passed_over: tuple[tuple[str, str], ...]
    random_anew: tuple[str, ...]


class Checkpoints:
    """Saves a training every few steps, in the background, and loads the newest complete checkpoint.

        checkpoints = Checkpoints("runs/7", checkpoint_interval=100)
        state = {"model": model, "optimizer": optimizer, "data": data}
        for step in range(checkpoints.resume(state).step + 1, steps + 1):
            ...
            checkpoints.step(step, state)
        checkpoints.close()

    A state is a dict of modules, optimizers, ``torch.Generator`` s, and other objects with ``state_dict`` and
    ``load_state_dict``: schedulers, the position in the data. Tensors may be sharded (``DTensor``: FSDP). All other
    values must be the same on every rank. Each rank's random number generators (PyTorch's, Python's, NumPy's) are
    always saved.

    A checkpoint is a folder ``step-00000100``. It contains safetensors files, one from each rank, written by
    ``torch.distributed.checkpoint``, and ``manifest.json`` with their SHA-256 and all values that are not tensors. The
    folder gets this name only when everything is on disk. Nothing in it is pickled. Any number of ranks can load it.

    Every method is collective: all ranks of the group call it. All of them must see the folder. Only one job at a
    time can write there.

    Args:
        folder: created if it does not exist, unless it is only read. A link is followed.
        checkpoint_interval: steps from one checkpoint to the next; None: nothing is written, and ``folder`` is only
            read.
        keep: how many checkpoints to keep, at least 2. Older ones are removed when a new one is complete. Damaged ones
            are never removed. Unfinished checkpoints of killed jobs are removed, and logged, when a checkpoint of the
            same step or a later one is complete.
        auto_resume: False: start from the beginning. The folder must not contain checkpoints.
        max_failures: how many checkpoints in a row may fail before :meth:`step` raises.
        timeout: seconds that a rank may keep the others waiting. It must be longer than writing a checkpoint takes.
            None: that of the group.
        group: the ranks; None: all of them, or this process alone without ``torch.distributed``.

    Raises:
        CheckpointError: the folder cannot be used, or another job writes there.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        checkpoint_interval: int | None = 100,
        *,
        keep: int = 2,
        auto_resume: bool = True,
        max_failures: int = 3,
        timeout: float | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        check_installed()
        # Imported here: torch.distributed.checkpoint takes a second, and most programs do not need it.
        from annulus.torch.checkpoints import _loading, _state, _writer

        self._loading, self._state, self._writer = _loading, _state, _writer
        in_time = timeout is None or (type(timeout) in (int, float) and 0 < timeout < 1e9)
        # The ranks connect first, so that an error of one rank reaches the others at once.
        self._ranks = Ranks(group, timeout if in_time else None)
        self._interval, self._keep = checkpoint_interval, keep
        self._auto_resume, self._max_failures = auto_resume, max_failures
        self._lock: files.Lock | None = None
        self._pending: concurrent.futures.Future | None = None
        self._writing: Writer | None = None
        self._failures = self._failures_in_a_row = 0
        self._folder = pathlib.Path()
        self._closed = False
        error: Exception | None = None
        try:
            if not in_time:
                raise ConfigError(f"Checkpoints: timeout is {timeout!r}, expected seconds above 0, or None")
            if os.fspath(folder) == "":  # for pathlib, this is the working directory
                raise ValueError("an empty path")
            self._open(pathlib.Path(folder))
        except (ConfigError, CheckpointError) as failure:
            error = failure
        except FileExistsError:
            error = CheckpointError(f"Checkpoints: {folder} is a file: a folder was expected")
        except OSError as failure:
            error = CheckpointError(f"Checkpoints: {folder}: {failure.strerror or failure}")
        except (TypeError, ValueError) as failure:  # None, bytes, a zero byte
            error = ConfigError(f"Checkpoints: folder is {folder!r}: {failure}")
        try:
            self._ranks.agree(error)
            told = self._ranks.gather((checkpoint_interval, keep, auto_resume, max_failures))
            if len(set(told)) > 1:
                raise ConfigError(
                    "Checkpoints: checkpoint_interval, keep, auto_resume and max_failures differ between ranks: "
                    f"{told}"
                )
            # An identifier of this job, to tell its unfinished folders from those of other jobs.
            self._job = self._ranks.gather(uuid.uuid4().hex[:12])[0]
        except BaseException:
            self._release()
            raise
        self._old = OldCheckpoints(self._folder, keep, self._job)

    def _open(self, folder: pathlib.Path) -> None:
        for name, value, least in (
            ("checkpoint_interval", self._interval, 1),
            ("keep", self._keep, 2),
            ("max_failures", self._max_failures, 0),
        ):
            if name == "checkpoint_interval" and value is None:
                continue
            if type(value) is not int or value < least:
                raise ConfigError(f"Checkpoints: {name} is {value!r}, expected a whole number of at least {least}")
        if self._interval is None:
            self._folder = folder.absolute()
            return
        self._folder = files.make_folder(folder)
        if self._ranks.rank != 0:
            return
        self._lock = files.Lock(self._folder)
        files.finish_removals(self._folder)
        found = files.find(self._folder)
        if found and not self._auto_resume:
            raise CheckpointError(
                f"Checkpoints: {self._folder} has checkpoints ({found[0].name} is the newest) and auto_resume is "
                "False: a later run could not tell them from those of this run. Choose another folder"
            )

    @property
    def failures(self) -> int:
        """How many checkpoints could not be written so far. Each is logged, with the rank and the reason."""
        return self._failures

    def step(self, step: int, state: Mapping[str, object]) -> bool:
        """Saves after every ``checkpoint_interval``-th step. Call it after every step.

        A checkpoint that fails, for instance on a full disk, is logged, and training continues; max_failures limits
        how many may fail in a row. Waits for the checkpoint before if that is still being written.

        Returns:
            whether a checkpoint was begun.

        Raises:
            CheckpointError: more than max_failures in a row have failed. Raised on all ranks.
        """
        if not self._closed and (self._interval is None or step % self._interval != 0):
            return False
        error = self._finish()
        if error is not None and self._failures_in_a_row > self._max_failures:
            raise error
        self._begin(step, state)
        return True

    def save(self, step: int, state: Mapping[str, object]) -> None:
        """Begins a checkpoint. Returns when the state has been copied and may change.

        Raises:
            CheckpointError: the checkpoint before has failed and :meth:`wait` was not called.
        """
        error = self._finish()
        if error is not None:
            raise error
        self._begin(step, state)

    def wait(self) -> None:
        """Waits until the checkpoint that was begun is on disk.

        Raises:
            CheckpointError: it could not be written. Raised on all ranks, with the rank that failed and the reason.
        """
        error = self._finish()
        if error is not None:
            raise error

    def close(self) -> None:
        """Waits like :meth:`wait`, and releases the folder for other jobs. Call it before
        ``torch.distributed.destroy_process_group``. Idempotent."""
        try:
            self.wait()
        finally:
            self._release()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        else:  # the caller gets the error of the block
            self._finish(GRACE)
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self._closed = True
        self._ranks.close()

    def _say(self, level: int, text: str, *arguments: object) -> None:
        _log.log(level if self._ranks.rank == 0 else logging.DEBUG, text, *arguments)

    def _begin(self, step: int, state: Mapping[str, object]) -> None:
        if self._closed or self._interval is None:
            how = "closed" if self._closed else "read only (checkpoint_interval=None)"
            raise ConfigError(f"Checkpoints: cannot save, because these checkpoints are {how}")
        failure: Exception | None = None
        plain, tensors, random_digests = {}, {}, {}
        try:
            if type(step) is not int or not 0 <= step < 10**18:
                raise ConfigError(f"Checkpoints: step is {step!r}, expected a whole number of at least 0")
            plain, live = self._state.take(state)
            tensors = self._state.stage(live)
            mine = self._state.stage(self._state.take_random(state))
            random_digests = {
                name: hashlib.sha256(t.numpy().tobytes()).hexdigest() for name, t in mine.items()
            }
            tensors |= {f"rng/{self._ranks.rank}/{name}": t for name, t in mine.items()}
        except Exception as error:  # the writer reports it to the other ranks
            failure, tensors = error, {}
        if type(step) is not int:
            step = 0  # nothing is written under that name
        partial = self._folder / f"{files.name_of(step)}.{self._job}{files.PARTIAL}"
        content = {"step": step, "torch": torch.__version__, "state": plain}
        writer = self._writing = self._writer.Writer(partial, content, random_digests, failure)
        self._pending = in_background(self._write, step, tensors, writer)
        if isinstance(failure, ConfigError):
            raise failure

    def _finish(self, patience: float | None = None) -> CheckpointError | None:
        """Waits for the checkpoint that was begun last, and returns its error. If a rank is known to be lost, the wait
        is limited."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        if patience is None and has_lost():
            patience = GRACE
        with waiting_elsewhere(lambda s: concurrent.futures.wait([pending], s).done):
            concurrent.futures.wait([pending], patience)
        if pending.done():
            error = pending.result()
        else:
            # A collective of Gloo cannot be cancelled. Its thread and connections end with the process.
            abandon(pending)
            error = CheckpointError(
                "gave up waiting for the last checkpoint: a rank does not answer"
            )
            self._say(logging.ERROR, "%s", error)
            self._writing.given_up = True
            self._ranks.give_up(waiting=True)
        if error is None:
            self._failures_in_a_row = 0
        else:
            self._failures += 1
            self._failures_in_a_row += 1
        return error

    def _write(self, step: int, tensors: dict, writer: Writer) -> CheckpointError | None:
        """Writes a checkpoint, in the background."""
        import torch.distributed.checkpoint as dcp

        partial, group = pathlib.Path(writer.path), self._ranks.group
        try:
            self._ranks.check()
            dcp.save(
                tensors,
                storage_writer=writer,
                process_group=group,
                no_dist=group is None,
            )
        except dcp.CheckpointException as error:
            # All ranks have stopped writing. The next checkpoint needs the space.
            rank, (why, _) = min(error.failures.items())
            if self._ranks.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            failed = CheckpointError(
                f"the checkpoint of step {step} is not written: rank {rank}: {why}. Earlier checkpoints are unchanged"
            )
        except Exception as error:  # a rank is lost
            failed = CheckpointError(f"the checkpoint of step {step} is not written: {error}")
            self._ranks.give_up()
        else:
            if writer.committed is not None:
                self._old.whole.append(writer.committed)
                self._say(logging.INFO, "checkpoint %s", self._folder / writer.committed.name)
                self._old.remove()
            return None
        self._say(logging.ERROR, "%s", failed)
        return failed

    def resume(self, state: Mapping[str, object]) -> Resumed:
        """Loads the newest complete checkpoint into a state: all of it or nothing, unless a ``load_state_dict`` raises.

        Every byte is checked first. Checkpoints that are damaged, unfinished or of another version are passed over,
        logged, and not changed.

        Raises:
            ConfigError: the newest complete checkpoint does not fit the model. The state is unchanged.
            CheckpointError: the checkpoint cannot be read, or a ``load_state_dict`` has raised.
        """
        self.wait()
        if not self._auto_resume:
            return Resumed(0, None, (), ())
        error: Exception | None = None
        found: list[files.Found] = []
        partial: list[str] = []
        try:
            if self._ranks.rank == 0:
                found, partial = files.find(self._folder), files.find_partial(self._folder)
        except OSError as failure:
            error = CheckpointError(f"Checkpoints: {self._folder}: {failure.strerror}")
        self._ranks.agree(error)
        found, partial = self._ranks.gather((found, partial))[0]
        passed_over = [(name, "it was never finished") for name in partial]
        content = None
        for candidate in found:
            content, reason = self._check(candidate)
            if reason is None:
                break
            passed_over.append((candidate.name, reason))
            if candidate in self._old.whole:  # it has been damaged since
                self._old.whole.remove(candidate)
        else:
            candidate = None
        for name, reason in passed_over:
            self._say(logging.WARNING, "passed over %s: %s", self._folder / name, reason)
        if candidate is None:
            if found:
                self._say(logging.ERROR, "no checkpoint in %s is complete", self._folder)
            return Resumed(0, None, tuple(passed_over), ())
        path = self._folder / candidate.name
        anew = self._loading.load(path, content, state, self._ranks)
        self._old.whole.append(candidate)
        self._say(logging.INFO, "resumed at step %d: %s", candidate.step, path)
        if anew:
            self._say(
                logging.WARNING,
                "random number generators start anew (%s): %s was written by %d ranks, and now there are %d",
                *(", ".join(anew), path.name, content["ranks"], self._ranks.size),
            )
        return Resumed(candidate.step, str(path), tuple(passed_over), anew)

    def _check(self, candidate: files.Found) -> tuple[dict, str | None]:
        """The manifest of a checkpoint, and why it cannot be loaded, or None. Each rank reads a part of the files."""
        path = self._folder / candidate.name
        content: dict = {}
        mine = None
        try:
            content = files.read_manifest(path, candidate.step)
            files.check_files(path, content, self._ranks.rank, self._ranks.size)
        except files.Damaged as damage:
            mine = str(damage)
        reasons = self._ranks.gather(mine)
        if all(reason is None for reason in reasons):
            return content, None
        rank, reason = next((r, text) for r, text in enumerate(reasons) if text is not None)
        # All ranks see wrong sizes. An error on some ranks only may be a fault of those ranks.
        alone = sum(each is not None for each in reasons) < len(reasons)
        return content, f"rank {rank}: {reason}" if alone else reason
