"""Writing a checkpoint: safetensors files by torch.distributed.checkpoint, then the manifest and the final name."""

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
    """Turns errors into text, because they are sent to all ranks and their objects may not be picklable."""

    @functools.wraps(function)
    def guarded(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from None

    return guarded


class _DigestingFile:
    """A new file that computes the digest of the written bytes; the bytes on a faulty disk may differ.

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
    """What one rank has written."""

    files: dict[str, dict]
    plain_digest: str
    random_digests: dict[str, str]


class Writer(HuggingFaceStorageWriter):
    """Writes into a folder with a temporary name. When all ranks are done, rank 0 adds the manifest and renames it.

    If one rank fails, :func:`torch.distributed.checkpoint.save` reports it to all, and the folder is not renamed.
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
        self._failure = failure  # an earlier error of this rank
        self.committed: files.Found | None = None
        self.given_up = False  # True: it may finish later, but must not become a checkpoint

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
        os.makedirs(self.path, exist_ok=True)  # only after all ranks have agreed on the step
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
                    f"a value of the state that is not a tensor differs between rank 0 and rank {rank}: make it equal"
                )
            for name, expected in written.files.items():
                with contextlib.suppress(FileNotFoundError):
                    if (partial / name).stat().st_size == expected["bytes"]:
                        content["files"][name] = expected
                        continue
                raise FileNotFoundError(
                    f"rank 0 does not find {name} as written by rank {rank}: do all ranks share the folder?"
                )
        files.write_manifest(partial, content)
        if self.given_up:
            raise TimeoutError("a rank did not answer in time")
        self.committed = files.commit(partial, content["step"])
