"""Checkpoints as folders: their names, manifests and digests, which are whole, and which may go. No tensors here.

A folder of checkpoints holds

- ``step-00000010``: a checkpoint. It got this name once everything in it, the manifest included, was on disk.
- ``step-00000010.1``: another of the same step, because something that may not be overwritten has the name.
- ``step-00000010.<job>.partial``: being written, or left by a job that was killed. Nobody reads it; a later job removes
  it once it has a whole one of that step or later.
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
_PATIENCE = 10.0  # seconds for a writer that is being ended to be gone
_MIB = 1 << 20


class Damaged(Exception):
    """Why a checkpoint is not to be loaded."""


@dataclasses.dataclass(frozen=True, order=True)
class Found:
    """A folder with the name of a checkpoint. The order is that of training: clocks have no part in it."""

    step: int
    again: int
    name: str


def name_of(step: int, again: int = 0) -> str:
    return f"step-{step:08d}" + (f".{again}" if again else "")


def find(folder: pathlib.Path) -> list[Found]:
    """What has the name of a checkpoint, newest first."""
    matches = (_CHECKPOINT.fullmatch(name) for name in os.listdir(folder))
    return sorted((Found(int(m[1]), int(m[2] or 0), m[0]) for m in matches if m), reverse=True)


def find_partial(folder: pathlib.Path) -> list[str]:
    return sorted((name for name in os.listdir(folder) if name.endswith(PARTIAL)), reverse=True)


def find_left_behind(folder: pathlib.Path, step: int, job: str) -> list[str]:
    """What other jobs than this one have begun, up to a step, and not finished."""
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
    """Makes names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that have no such thing
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: pathlib.Path) -> pathlib.Path:
    """The folder, made if need be. Links are followed here, once: what one is changed to later is not."""
    folder = pathlib.Path(os.path.realpath(folder))
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        with contextlib.suppress(
            PermissionError
        ):  # to open a folder takes more than to make one in it
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
    """The content of a manifest that is as it was written; Damaged otherwise."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise Damaged(f"it has no {MANIFEST}") from None
    except OSError as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is not JSON: {error}") from None
    if not isinstance(manifest, dict) or "version" not in manifest:
        raise Damaged(f"{MANIFEST} says no version")
    if manifest["version"] != VERSION:
        raise Damaged(
            f"{MANIFEST} has version {manifest['version']!r}, and this Annulus reads version {VERSION}"
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
            raise Damaged(f"{MANIFEST} is not one of Annulus: its {key!r} is {content.get(key)!r}")
    if content["step"] != step:
        raise Damaged(f"{MANIFEST} is that of step {content['step']}")
    return content


def check_files(folder: pathlib.Path, content: dict, share: int = 0, shares: int = 1) -> None:
    """Damaged unless the files are those of the manifest: all by size, and every `shares`-th by its bytes."""
    wanted: dict[str, dict] = content["files"]
    try:
        for name in sorted(os.listdir(folder)):
            if name not in wanted and name.endswith(".safetensors"):
                raise Damaged(f"{name} is not in its manifest")
        for index, (name, expected) in enumerate(sorted(wanted.items())):
            size = (folder / name).stat().st_size
            if size != expected["bytes"]:
                raise Damaged(f"{name} has {size} bytes of {expected['bytes']}")
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
    """Gives what has been written its name. From here on it is a checkpoint."""
    folder = partial.parent
    sync_folder(partial)
    again = 0
    while os.path.lexists(folder / name_of(step, again)):
        again += 1  # perhaps damaged: never overwritten
    os.rename(partial, folder / name_of(step, again))
    sync_folder(folder)
    return Found(step, again, name_of(step, again))


def remove(folder: pathlib.Path, name: str) -> None:
    """Removes a checkpoint: first its name, so that no reader finds an incomplete one."""
    old = folder / (name + OLD)
    os.rename(folder / name, old)
    shutil.rmtree(old)


def finish_removals(folder: pathlib.Path) -> None:
    """Of a job that was killed over it."""
    for name in os.listdir(folder):
        was = name.removesuffix(OLD)
        if was != name and (_CHECKPOINT.fullmatch(was) or _UNFINISHED.fullmatch(was)):
            shutil.rmtree(folder / name, ignore_errors=True)


def is_link(folder: pathlib.Path, name: str) -> bool:
    return stat.S_ISLNK(os.lstat(folder / name).st_mode)


class Lock:
    """Keeps a folder to one writing job. It ends with the process, however that ends.

    A record lock: forked children, a data loader's workers, do not hold it, and NFS knows it.
    """

    _held: set[pathlib.Path] = set()

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        if folder in Lock._held:  # the kernel would not mind, and would free both at once
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
        with contextlib.suppress(OSError):  # a full disk: who holds it is then not said
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def release(self) -> None:
        if not self._file.closed:
            self._file.close()
            Lock._held.discard(self._folder)
