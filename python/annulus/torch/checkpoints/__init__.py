"""Checkpoints of a training: written in the background, checked when they are read, loaded by any number of ranks.

This package contains everything about the folder of checkpoints: names, manifests and digests, writing, loading and
removal, and the agreement of the ranks. The caller decides when to write one; see :mod:`annulus.torch.training`.
Needs safetensors, which is imported on first use.
"""

from annulus.torch.checkpoints._checkpoints import Checkpoints, Resumed
from annulus.torch.checkpoints._ranks import CheckpointError

__all__ = ["CheckpointError", "Checkpoints", "Resumed"]
