"""Training: a model with its services: gradients of all ranks, checkpoints, monitoring, recovery from a lost rank."""

from __future__ import annotations

import logging
import pathlib
import weakref
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from annulus import ConfigError, TransportError, monitor
from annulus.torch._modules import RingDilatedAttention
from annulus.torch._options import whole_complaint
from annulus.torch.checkpoints._checkpoints import Checkpoints
from annulus.torch.faults._survivors import survivors
from annulus.torch.ring._errors import collective
from annulus.torch.ring._process_groups import group_size_and_rank
from annulus.torch.training import _deepspeed
from annulus.torch.training._gradients import data_parallel
from annulus.torch.training._services import Services
from annulus.torch.training._watch import Watch

_log = logging.getLogger("annulus.training")

# Trainings that have something to close, also if their owner has dropped them.
_open: set[Training] = set()


class Training:
    """A model that trains; :meth:`RingAdvancedDistributedDilatedAttention.prepare` makes it.

        training = attention.prepare(model, optimizer)

        def loss_of(step):
            tokens, following = (shard(x, group=training.group) for x in batch(step))
            losses = F.cross_entropy(training.model(tokens).transpose(1, 2), following, reduction="none")
            return token_mean(losses, group=training.group)

        training.run(1000, loss_of)
        training.close()

    Every method is collective. When :attr:`group` has changed, objects that were made for the old group must be made
    again.
    """

    def __init__(
        self,
        services: Services,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, object],
        group: dist.ProcessGroup | None,
        maker: nn.Module,
    ):
        self._services, self._module, self._optimizer = services, model, optimizer
        self._maker = weakref.ref(maker)
        self._extra = dict(state)
        self._group = group
        self._done = self._recoveries = 0
        self._checkpoints: Checkpoints | _deepspeed.EngineCheckpoints | None = None
        self._model = model
        self._closed = False
        self._watch = Watch(services, model, _ring_of(model))
        _say_where_checkpoints_go(services, group)
        try:
            if services.use_deepspeed:
                self._start_engine()
            else:
                self._start(services.resumes)
        except BaseException:
            self._end()
            self._watch.close()
            raise
        if self._checkpoints is not None or self._watch.active:
            _open.add(self)

    @property
    def model(self) -> nn.Module:
        """The model to call, as wrapped by DistributedDataParallel or DeepSpeed."""
        return self._model

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that train now. A loss has to be the mean over their tokens. None: this process alone."""
        return self._group

    @property
    def done(self) -> int:
        """Steps so far, including those before the checkpoint that was loaded."""
        return self._done

    @property
    def recoveries(self) -> int:
        """How often the training has continued without a lost rank."""
        return self._recoveries

    def _state(self) -> dict[str, object]:
        return {"model": self._module, "optimizer": self._optimizer, **self._extra}

    def _start_engine(self) -> None:
        services = self._services
        self._model = _deepspeed.start(services, self._module, self._optimizer)
        if services.enable_fault_tolerance:
            checkpoints = _deepspeed.EngineCheckpoints(services, self._model)
            self._done = checkpoints.resume(self._extra)
            self._checkpoints = checkpoints

    def _start(self, resumes: bool) -> None:
        """Starts with the current group."""
        services = self._services
        # This comes first, because it sends the parameters of rank 0 to all ranks.
        self._model = data_parallel(
            self._module,
            self._group,
            bucket_size=services.bucket_size,
            overlap_comm=services.overlap_comm,
        )
        if not services.enable_fault_tolerance:
            return
        self._checkpoints = Checkpoints(
            services.folder, services.interval, auto_resume=resumes, group=self._group
        )
        resumed = self._checkpoints.resume(self._state())
        self._done = resumed.step
        if resumed.folder is None:  # so that there is always a checkpoint to return to
            self._checkpoints.save(0, self._state())

    def step(self, loss: torch.Tensor) -> None:
        """One step: gradients of all ranks, the optimizer's step, and a checkpoint if one is due.

        Args:
            loss: the loss of this step, from :func:`token_mean`: the mean over the tokens of all ranks.
        """
        if self._closed:
            raise ConfigError("Training.step: this training is closed: prepare a new one")
        if self._services.use_deepspeed:
            self._model.backward(loss)
            self._model.step()
        else:
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
        self._done += 1
        if self._checkpoints is not None:
            extra = self._extra if self._services.use_deepspeed else self._state()
            self._checkpoints.step(self._done, extra)

    def run(
        self,
        steps: int,
        loss_of: Callable[[int], torch.Tensor],
        report: Callable[[int, float], None] | None = None,
    ) -> None:
        """Runs the remaining steps of `steps`.

        With fault tolerance, and without DeepSpeed, the training continues after the loss of a rank, up to
        `max_recoveries` times: the other ranks agree on who is left, load the newest checkpoint and repeat the steps
        since. Without fault tolerance the error is raised. If a recovery fails, the training is closed.

        Args:
            steps: steps of the whole training, including those before a checkpoint.
            loss_of: returns the loss of a step, counted from 1. It must use the current :attr:`model` and
                :attr:`group`, and may be called more than once for a step.
            report: called with a step and its loss after each step.

        Raises:
            TransportError: a rank is lost and the training cannot continue. If PyTorch has noticed the loss first, its
                error is raised instead.
        """
        self._check_steps(steps)
        while self._done < steps:
            reason = self._attempt(loss_of, report)
            while reason is not None:
                try:
                    reason = self._recover(reason)
                except BaseException:
                    # The model is no longer wrapped: another step would be this rank's alone, without checkpoints.
                    self._end()
                    self.close()
                    raise

    # An error must reach the other ranks in the ring of the first layer, where they wait.
    @collective(lambda self, *_: (_ring_of(self._module), None))
    def _check_steps(self, steps: object) -> None:
        wrong = whole_complaint("steps", steps)
        if wrong is not None:
            raise ConfigError(f"Training.run: {wrong}")

    def _attempt(
        self,
        loss_of: Callable[[int], torch.Tensor],
        report: Callable[[int, float], None] | None,
    ) -> str | None:
        """One step. If a rank is lost, returns the error as a text: the error itself would keep the step's tensors
        alive."""
        value = 0.0
        try:
            loss = loss_of(self._done + 1)
            self.step(loss)
            if report is not None:
                value = loss.item()
        except Exception as error:
            if not self._can_recover(error):
                raise
            return f"{type(error).__name__}: {error}"
        if report is not None:
            report(self._done, value)
        return None

    def _can_recover(self, error: Exception) -> bool:
        if self._group is None or self._recoveries >= self._services.recoveries:
            return False
        # With several rings, the survivors of all ranks are not those of one ring.
        one_ring = all(layer.group in (None, self._group) for layer in _layers(self._module))
        return one_ring and _is_loss(error)

    def _recover(self, reason: str) -> str | None:
        """Goes back to the newest checkpoint with the ranks that are left. If another one is lost, returns the error's
        text."""
        before = dist.get_world_size(self._group)
        self._end()
        if isinstance(self._model, nn.parallel.DistributedDataParallel):
            self._model._remove_autograd_hooks()
        self._model = self._module
        self._optimizer.zero_grad()  # gradients are views of the old buckets
        old, self._group = self._group, survivors(self._group)
        for layer in _layers(self._module):
            if layer.group is old:
                layer.group = self._group
        self._recoveries += 1
        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        try:
            with monitor.span("recovery", "lost rank", rank=rank):
                self._start(True)
            self._watch.go_on(_ring_of(self._module))
        except Exception as error:
            if not self._can_recover(error):
                raise
            return f"{type(error).__name__}: {error}"
        _log.warning(
            "[rank %d/%d] continued after step %d with %d of %d ranks: %s",
            *(rank, ranks, self._done, ranks, before, reason),
        )
        return None

    def _end(self) -> None:
        """Ends the checkpoints after a failure: one that is being written gets a few seconds."""
        checkpoints, self._checkpoints = self._checkpoints, None
        if checkpoints is not None:
            checkpoints.__exit__(TransportError, None, None)

    def memory_report(self) -> dict[str, float] | None:
        """The report of :class:`annulus.monitor.profile_memory` so far: 'peak_bytes' and so on; None without
        profile_memory."""
        return self._watch.memory_report()

    def close(self) -> None:
        """Waits for the last checkpoint and ends monitoring. No step may follow. Call it before
        ``torch.distributed.destroy_process_group``. Idempotent."""
        _open.discard(self)
        self._closed = True
        checkpoints, self._checkpoints = self._checkpoints, None
        try:
            if checkpoints is not None:
                checkpoints.close()
        finally:
            self._watch.close()


_said: set[pathlib.Path] = set()


def _say_where_checkpoints_go(services: Services, group: dist.ProcessGroup | None) -> None:
    """Logs the folder once, if it is the default one."""
    if not services.enable_fault_tolerance or services.checkpoint_folder is not None:
        return
    if group_size_and_rank(group)[1] == 0 and services.folder not in _said:
        _said.add(services.folder)
        _log.warning(
            "checkpoints go to %s: checkpoint_folder or ANNULUS_CHECKPOINTS names another folder", services.folder
        )


def close_those_of(maker: nn.Module) -> None:
    """Closes the trainings that a module has prepared."""
    for training in [training for training in _open if training._maker() is maker]:
        training.close()


def _layers(model: nn.Module) -> list[RingDilatedAttention]:
    return [layer for layer in model.modules() if isinstance(layer, RingDilatedAttention)]


def _ring_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The ring of the first layer, whose rank the log shows."""
    return next((layer.group for layer in _layers(model)), None)


def _is_loss(error: Exception) -> bool:
    """Whether an error means that a rank is lost. Gloo's errors have no type of their own."""
    if isinstance(error, (TransportError, dist.DistError)):
        return True
    return type(error) is RuntimeError and "gloo" in str(error).lower()
