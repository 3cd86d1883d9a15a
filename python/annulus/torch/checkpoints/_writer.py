"""Writing a checkpoint: torch.distributed.checkpoint's plan and safetensors files, then manifest and name."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from annulus.torch.checkpoints import _files as files

F = TypeVar("F", bound=Callable)


def _as_text(function: F) -> F:
    """Errors travel to all ranks: what they hold may not, but their text can."""

    @functools.wraps(function)
    def guarded(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from None

    return guarded


class _DigestingFile:
    """A new file that knows the digest of what it was given, which is not always what a disk has.

    Unbuffered: FileSystemWriter calls fsync without a flush before it.
    """

    def __init__(self, path: pathlib.Path):
        self._file = open(path, "xb", buffering=0)
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes) -> int:
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self._size += len(view)
        done = 0
        while done < len(view):  # one call writes 2 GiB at most
            done += self._file.write(view[done : done + (1 << 30)])
        return len(view)

    def tell(self) -> int:
        return self._size

    def fileno(self) -> int:
        return self._file.fileno()

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._file.close()

    def seen(self) -> dict:
        return {"bytes": self._size, "sha256": self._digest.hexdigest()}


class _DigestingFiles(FileSystem):
    def __init__(self) -> None:
        self.written: dict[str, dict] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[_DigestingFile]:
        stream = _DigestingFile(pathlib.Path(path))
        try:
            yield stream
        finally:
            stream.close()
        self.written[os.path.basename(path)] = stream.seen()


@dataclasses.dataclass
class _Written:
    """What one rank did."""

    files: dict[str, dict]
    plain_digest: str
    random_digests: dict[str, str]


class Writer(HuggingFaceStorageWriter):
    """Writes into a folder of a temporary name; rank 0 gives it a manifest and its name once all ranks are done.

    What fails on one rank, :func:`torch.distributed.checkpoint.save` makes known to all, and the name is not given.
    """

    def __init__(
        self,
        partial: pathlib.Path,
        content: dict,
        random_digests: dict[str, str],
        failure: Exception | None,
    ):
        super().__init__(path=str(partial), save_distributed=True)
        self.fs = _DigestingFiles()
        self._content = content
        self._random_digests = random_digests
        self._failure = failure  # of this rank, before it came here
        self.committed: files.Found | None = None
        self.given_up = (
            False  # then it may come to its end whenever it likes, but not become a checkpoint
        )

    @_as_text
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self._failure is not None:
            raise self._failure
        return dataclasses.replace(plan, storage_data=self._content["step"])

    @_as_text
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        steps = [plan.storage_data for plan in plans]
        if len(set(steps)) > 1:
            raise ValueError(f"the ranks are at different steps: {steps}")
        return super().prepare_global_plan(plans)

    @_as_text
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future:
        os.makedirs(self.path, exist_ok=True)  # not before all are known to mean the same one
        super().write_data(plan, planner).wait()
        plain_digest = files.digest_of(self._content["state"])
        result: Future = Future()
        result.set_result([_Written(self.fs.written, plain_digest, self._random_digests)])
        return result

    @_as_text
    def finish(self, metadata: Metadata, results: list[list[_Written]]) -> None:
        ranks = [rank[0] for rank in results]
        partial = pathlib.Path(self.path)
        content = self._content | {"ranks": len(ranks), "files": {}}
        content["same_random"] = [
            name
            for name, digest in sorted(ranks[0].random_digests.items())
            if all(rank.random_digests.get(name) == digest for rank in ranks)
        ]
        for rank, written in enumerate(ranks):
            if written.plain_digest != ranks[0].plain_digest:
                raise ValueError(
                    f"what is no tensor in the state differs between rank 0 and rank {rank}: which one is meant?"
                )
            for name, expected in written.files.items():
                with contextlib.suppress(FileNotFoundError):
                    if (partial / name).stat().st_size == expected["bytes"]:
                        content["files"][name] = expected
                        continue
                raise FileNotFoundError(
                    f"rank 0 does not see {name} as rank {rank} wrote it: do all ranks share the folder?"
                )
        files.write_manifest(partial, content)
        if self.given_up:
            raise TimeoutError("a rank did not answer in time")
        self.committed = files.commit(partial, content["step"])
