"""Fault tolerance: continuing after the loss of a rank.

This package contains what the remaining ranks do when a ring has ended: where they meet, how they agree on the members,
and the new process group. How a ring notices a loss is part of :mod:`annulus.torch.ring`; what a training does after a
loss is part of :mod:`annulus.torch.training`.
"""

from annulus.torch.faults._survivors import survivors

__all__ = ["survivors"]
