"""Training of models with ring attention: models, gradients, and the services around a training.

Here belong the LongNet models, losses and gradients over several ranks, and :class:`Training` with its services:
DeepSpeed, checkpoints, monitoring, going on after the loss of a rank. DeepSpeed is imported only where it is asked for.
"""

from annulus.torch.training._advanced import RingAdvancedDistributedDilatedAttention
from annulus.torch.training._gradients import data_parallel, token_mean
from annulus.torch.training._longnet import LongNet, LongNetLM
from annulus.torch.training._training import Training

__all__ = [
    "LongNet",
    "LongNetLM",
    "RingAdvancedDistributedDilatedAttention",
    "Training",
    "data_parallel",
    "token_mean",
]
