"""The files of checkpoints: names, manifests, digests and locks. Tensors are not handled here.

A folder of checkpoints holds

- ``step-00000010``: a checkpoint. It got this name when all its files, including the manifest, were on disk.
- ``step-00000010.1``: another checkpoint of the same step. Existing folders are never overwritten.
- ``step-00000010.<job>.partial``: being written, or left by a killed job. It is never read. A later job removes it
  when it has a complete checkpoint of the same step or a later one.
- ``step-00000010.old``: being removed.
- ``.lock``: locked by the job that writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
import socket
import stat
import time

MANIFEST = "manifest.json"
VERSION = 1
PARTIAL, OLD = ".partial", ".old"
_CHECKPOINT = re.compile(r"step-(\d{8,18})(?:\.(\d{1,9}))?")
_UNFINISHED = re.compile(r"step-(\d{8,18})\.([0-9a-f]{12})\.partial")
_PATIENCE = 10.0  # seconds to wait for another job to end
_MIB = 1 << 20


class Damaged(Exception):
    """Why a checkpoint cannot be loaded."""


@dataclasses.dataclass(frozen=True, order=True)
class Found:
    """A folder with the name of a checkpoint. Ordered by step, not by time."""

    step: int
    again: int
    name: str


def name_of(step: int, again: int = 0) -> str:
    return f"step-{step:08d}" + (f".{again}" if again else "")


def find(folder: pathlib.Path) -> list[Found]:
    """Folders with the name of a checkpoint, newest first."""
    matches = (_CHECKPOINT.fullmatch(name) for name in os.listdir(folder))
    return sorted((Found(int(m[1]), int(m[2] or 0), m[0]) for m in matches if m), reverse=True)


def find_partial(folder: pathlib.Path) -> list[str]:
    return sorted((name for name in os.listdir(folder) if name.endswith(PARTIAL)), reverse=True)


def find_left_behind(folder: pathlib.Path, step: int, job: str) -> list[str]:
    """Unfinished checkpoints of other jobs, up to a step."""
    matches = (_UNFINISHED.fullmatch(name) for name in os.listdir(folder))
    return [
        m[0]
        for m in matches
        if m and int(m[1]) <= step and m[2] != job and not is_link(folder, m[0])
    ]


def digest_of(content: object) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def sync_folder(folder: pathlib.Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system cannot sync folders
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: pathlib.Path) -> pathlib.Path:
    """Creates the folder if it does not exist. Links are resolved here, once; later changes of a link have no
    effect."""
    folder = pathlib.Path(os.path.realpath(folder))
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        with contextlib.suppress(PermissionError):  # opening a folder may be forbidden where creating one is not
            sync_folder(each.parent)
    return folder


def write_manifest(folder: pathlib.Path, content: dict) -> None:
    manifest = {"version": VERSION, "sha256": digest_of(content), "content": content}
    text = json.dumps(manifest, indent=1).encode()
    with open(folder / MANIFEST, "xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: pathlib.Path, step: int) -> dict:
    """The content of a manifest. Raises Damaged unless it is exactly as written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise Damaged(f"it has no {MANIFEST}") from None
    except OSError as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is not JSON: {error}") from None
    if not isinstance(manifest, dict) or "version" not in manifest:
        raise Damaged(f"{MANIFEST} has no version")
    if manifest["version"] != VERSION:
        raise Damaged(
            f"{MANIFEST} has version {manifest['version']!r}, but this Annulus reads version {VERSION}"
        )
    content = manifest.get("content")
    if not isinstance(content, dict) or digest_of(content) != manifest.get("sha256"):
        raise Damaged(f"{MANIFEST} is not what was written: its SHA-256 differs")
    for key, kind in (
        ("step", int),
        ("ranks", int),
        ("files", dict),
        ("state", dict),
        ("same_random", list),
    ):
        if type(content.get(key)) is not kind:
            raise Damaged(f"{MANIFEST} was not written by Annulus: {key!r} is {content.get(key)!r}")
    if content["step"] != step:
        raise Damaged(f"{MANIFEST} belongs to step {content['step']}")
    return content


def check_files(folder: pathlib.Path, content: dict, share: int = 0, shares: int = 1) -> None:
    """Raises Damaged unless the files match the manifest: compares all sizes, and the digest of every `shares`-th
    file."""
    wanted: dict[str, dict] = content["files"]
    try:
        for name in sorted(os.listdir(folder)):
            if name not in wanted and name.endswith(".safetensors"):
                raise Damaged(f"{name} is not in its manifest")
        for index, (name, expected) in enumerate(sorted(wanted.items())):
            size = (folder / name).stat().st_size
            if size != expected["bytes"]:
                raise Damaged(f"{name} has {size} bytes, expected {expected['bytes']}")
            if index % shares == share and _digest_of_file(folder / name) != expected["sha256"]:
                raise Damaged(f"{name} is not what was written: its SHA-256 differs")
    except FileNotFoundError as error:
        raise Damaged(f"{os.path.basename(error.filename)} is missing") from None
    except OSError as error:
        raise Damaged(f"it cannot be read: {error}") from None


def _digest_of_file(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(8 * _MIB):
            digest.update(block)
    return digest.hexdigest()


def commit(partial: pathlib.Path, step: int) -> Found:
    """Gives a written folder its final name, which makes it a checkpoint."""
    folder = partial.parent
    sync_folder(partial)
    again = 0
    while os.path.lexists(folder / name_of(step, again)):
        again += 1  # never overwrite, even if the other is damaged
    os.rename(partial, folder / name_of(step, again))
    sync_folder(folder)
    return Found(step, again, name_of(step, again))


def remove(folder: pathlib.Path, name: str) -> None:
    """Removes a checkpoint. Renames it first, so that no reader finds an incomplete one."""
    old = folder / (name + OLD)
    os.rename(folder / name, old)
    shutil.rmtree(old)


def finish_removals(folder: pathlib.Path) -> None:
    """Finishes removals that a killed job had begun."""
    for name in os.listdir(folder):
        was = name.removesuffix(OLD)
        if was != name and (_CHECKPOINT.fullmatch(was) or _UNFINISHED.fullmatch(was)):
            shutil.rmtree(folder / name, ignore_errors=True)


def is_link(folder: pathlib.Path, name: str) -> bool:
    return stat.S_ISLNK(os.lstat(folder / name).st_mode)


class Lock:
    """Allows only one job to write into a folder. The lock ends with the process.

    It is a record lock: forked children, such as a data loader's workers, do not hold it, and it works on NFS.
    """

    _held: set[pathlib.Path] = set()

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        if folder in Lock._held:  # within a process, the kernel would grant it again, and release both at once
            raise BlockingIOError(errno.EAGAIN, "this process writes checkpoints there already")
        self._file = open(folder / ".lock", "a+b", buffering=0)
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() < until:
                    time.sleep(0.05)
                    continue
                self._file.seek(0)
                owner = self._file.read(200).decode(errors="replace").strip()
                self._file.close()
                raise BlockingIOError(
                    errno.EAGAIN, f"another job writes checkpoints there ({owner})"
                ) from None
            except OSError as error:
                self._file.close()
                raise OSError(error.errno, f"cannot be locked: {error.strerror}") from None
        Lock._held.add(folder)
        with contextlib.suppress(OSError):  # on a full disk the name of the owner is missing
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def release(self) -> None:
        if not self._file.closed:
            self._file.close()
            Lock._held.discard(self._folder)
