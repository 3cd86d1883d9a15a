"""Removal of old checkpoints."""

from __future__ import annotations

import logging
import pathlib

from annulus.torch.checkpoints import _files as files

_log = logging.getLogger("annulus.checkpoints")


class OldCheckpoints:
    """Removes old checkpoints. Used by rank 0, which has the folder's lock.

    Only complete checkpoints count among those to keep, and only complete ones are removed.
    """

    def __init__(self, folder: pathlib.Path, keep: int, job: str):
        self._folder, self._keep, self._job = folder, keep, job
        self.whole: list[files.Found] = []  # written or read by this job
        self._left_alone: set[str] = set()

    def remove(self) -> None:
        """Removes all but the newest `keep` complete checkpoints, and unfinished checkpoints of killed jobs."""
        self._remove_unfinished()
        kept = sorted(self.whole, reverse=True)[: self._keep]
        if len(kept) < self._keep:
            return
        try:
            for found in files.find(self._folder):
                if found >= kept[-1] or found.name in self._left_alone:
                    continue
                try:
                    if files.is_link(self._folder, found.name):
                        raise files.Damaged("it is a link")
                    if found not in self.whole:
                        path = self._folder / found.name
                        files.check_files(path, files.read_manifest(path, found.step))
                except files.Damaged as reason:
                    self._left_alone.add(found.name)
                    _log.warning("the old checkpoint %s is not removed: %s", found.name, reason)
                    continue
                files.remove(self._folder, found.name)
                _log.info("removed %s", found.name)
            self.whole = kept
        except OSError as error:
            _log.warning("old checkpoints are not removed: %s", error)

    def _remove_unfinished(self) -> None:
        try:
            for name in files.find_left_behind(self._folder, max(self.whole).step, self._job):
                files.remove(self._folder, name)
                _log.warning("removed %s, an unfinished checkpoint of a killed job", name)
        except OSError as error:
            _log.warning("unfinished checkpoints are not removed: %s", error)
