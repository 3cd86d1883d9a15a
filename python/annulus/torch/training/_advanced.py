"""Multihead attention over a ring, with services for training."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import annulus
from annulus import ConfigError
from annulus.torch._multihead import RingMultiheadDilatedAttention
from annulus.torch._options import flag_complaint
from annulus.torch._published import takes_published_names
from annulus.torch.checkpoints._checkpoints import check_installed
from annulus.torch.ring import _registry
from annulus.torch.ring._errors import collective
from annulus.torch.ring._memory_info import cached_calls_of, get_memory_info
from annulus.torch.ring._process_groups import group_name, group_size_and_rank
from annulus.torch.ring._registry import lengths_of_all
from annulus.torch.training import _deepspeed
from annulus.torch.training._services import Services
from annulus.torch.training._training import Training, close_those_of


class RingAdvancedDistributedDilatedAttention(RingMultiheadDilatedAttention):
    """:class:`RingMultiheadDilatedAttention` with services for training: DeepSpeed, gradient buckets, checkpoints,
    recovery from a lost rank, monitoring.

    Parameters, state dict and :meth:`forward` are those of :class:`RingMultiheadDilatedAttention`. The services apply
    to a model that contains such modules, or is one: :meth:`prepare` makes a :class:`Training` of it. Arguments that do
    not fit together, or would have no effect, are a :class:`ConfigError`.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, device, dtype: as in
            :class:`RingMultiheadDilatedAttention`, like all that are not below: segment_lengths, dilation_rates,
            layer_norm, gamma_init, is_causal, window, group, placement, min_tokens_for_ring and so on.
        batch_first: tensors are [batch, tokens, features]; False: [tokens, batch, features].
        use_gradient_checkpointing: keep only the inputs, and compute everything again for backward.
        use_deepspeed: train under DeepSpeed, which has to be installed (``pip install deepspeed``). All parameters of
            the model must have one dtype. False: under :func:`data_parallel`.
        zero_stage: DeepSpeed shards the optimizer's state (1), also gradients (2), also parameters (3); None: 3.
        cpu_offload: DeepSpeed keeps the optimizer's state in host memory, at stage 3 also parameters.
        nvme_offload: DeepSpeed keeps the optimizer's state and parameters on a local disk; with cpu_offload, parameters
            in host memory. Stage 3 only; its async_io needs libaio.
        nvme_path: the folder for nvme_offload.
        overlap_comm: gradients are sent while backward computes. False: after backward.
        bucket_size: size of a message of gradients in MB (2**20 bytes); up to 2**20.
        enable_fault_tolerance: write checkpoints and, in :meth:`Training.run`, continue without a lost rank. False: the
            loss of a rank is an error.
        checkpoint_folder: the folder of the checkpoints, which all ranks must see. None: the folder that the
            environment variable ``ANNULUS_CHECKPOINTS`` names, else ``checkpoints/<name of the program>`` in the
            working directory. DeepSpeed's checkpoints can be loaded only by as many ranks at the same stage.
        checkpoint_interval: steps from one checkpoint to the next; None: 100.
        auto_resume: continue from the newest checkpoint; None: True. False: the folder must not contain checkpoints.
        max_recoveries: how often to continue without a lost rank; None: 3. Not with DeepSpeed, which cannot do this:
            there ``torchrun --max-restarts`` restarts all ranks, and they continue from the newest checkpoint.
        enable_monitoring: record events in the stream of ``annulus.monitor`` during a training.
        log_level: level of the logger ``annulus`` for this rank during a training, as in
            :func:`annulus.monitor.set_log_level`: "debug", "info", "warning", "error" or "off", upper or lower case.
            None: unchanged.
        profile_memory: sample the memory of the process during a training: :meth:`Training.memory_report`.
        attention: further arguments of :class:`RingMultiheadDilatedAttention`.
    """

    @takes_published_names
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        use_gradient_checkpointing: bool = False,
        use_deepspeed: bool = False,
        zero_stage: int | None = None,
        cpu_offload: bool = False,
        nvme_offload: bool = False,
        nvme_path: str | os.PathLike | None = None,
        overlap_comm: bool = True,
        bucket_size: float = 25.0,
        enable_fault_tolerance: bool = False,
        checkpoint_folder: str | os.PathLike | None = None,
        checkpoint_interval: int | None = None,
        auto_resume: bool | None = None,
        max_recoveries: int | None = None,
        enable_monitoring: bool = False,
        log_level: str | None = None,
        profile_memory: bool = False,
        **attention: object,
    ):
        services = Services(
            use_deepspeed=use_deepspeed,
            zero_stage=zero_stage,
            cpu_offload=cpu_offload,
            nvme_offload=nvme_offload,
            nvme_path=nvme_path,
            overlap_comm=overlap_comm,
            bucket_size=bucket_size,
            enable_fault_tolerance=enable_fault_tolerance,
            checkpoint_folder=checkpoint_folder,
            checkpoint_interval=checkpoint_interval,
            auto_resume=auto_resume,
            max_recoveries=max_recoveries,
            enable_monitoring=enable_monitoring,
            log_level=log_level,
            profile_memory=profile_memory,
        )
        wrong = services.complaint() or flag_complaint(
            "use_gradient_checkpointing", use_gradient_checkpointing
        )
        if wrong is not None:
            raise ConfigError(f"{type(self).__name__}: {wrong}")
        if use_deepspeed:
            _deepspeed.check_installed()
        super().__init__(
            *(embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim),
            *(batch_first, device, dtype),
            **attention,
        )
        self.use_gradient_checkpointing = use_gradient_checkpointing
        self._services = services

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As :meth:`RingMultiheadDilatedAttention.forward`."""
        if not (self.use_gradient_checkpointing and torch.is_grad_enabled()):
            return super().forward(query, key, value, *args, **kwargs)
        attend = super().forward
        # Self-attention is recognised by identity, which inputs lose if they are offloaded meanwhile.
        inputs = (query,) if query is key and key is value else (query, key, value)

        def again(*kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            return attend(*(kept if len(kept) == 3 else kept * 3), *args, **kwargs)

        # Dropout draws its seed again. Nothing else is random.
        drops = self.training and self.dropout > 0
        return checkpoint(again, *inputs, use_reentrant=False, preserve_rng_state=drops)

    @property
    def deepspeed_config(self) -> dict[str, object] | None:
        """The configuration for ``deepspeed.initialize(config=...)``, to call it yourself; None without use_deepspeed.

        Bucket sizes are in elements, as DeepSpeed counts them. Gradients are not clipped. The configuration contains no
        optimizer.
        """
        return self._services.deepspeed_config(self)

    @collective(lambda self, *_, **given: (self._ranks_of(given), None))
    def prepare(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        state: Mapping[str, object] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Training:
        """Makes a training of a model with the services of this module. Collective: models, optimizers and states must
        be alike on all ranks.

        With fault tolerance the newest checkpoint is loaded: see :attr:`Training.done`.

        Args:
            model: a model that contains this module; None: this module. Other modules of this class in it must have the
                same services.
            optimizer: optimizer of the model's parameters; None: AdamW with PyTorch's default settings.
            state: further objects for a checkpoint, as in :class:`Checkpoints`: schedulers, the position in the data.
            group: the ranks over which gradients are averaged: all ranks if there are several rings; None: those of the
                ring. DeepSpeed always averages over all ranks.
        """
        model = self if model is None else model
        if state is not None and not isinstance(state, Mapping):
            raise ConfigError(
                f"{type(self).__name__}: prepare: state is a {type(state).__name__}, expected a dict"
            )
        state = {} if state is None else dict(state)
        ranks = self._ranks_of({"group": group})
        wrong = self._complaint(model, optimizer, state, group)
        if wrong is not None:
            raise ConfigError(f"{type(self).__name__}: prepare: {wrong}")
        if optimizer is None:
            optimizer = torch.optim.AdamW(model.parameters())
        if self._services.use_deepspeed:
            _deepspeed.check(self._services, model)
        elif self._services.enable_fault_tolerance:
            check_installed()
        if ranks is not None:
            claims = self._services.claims() | _claims_of(model, optimizer, state)
            lengths_of_all("prepare", group_name(ranks), claims, 0)
        return Training(self._services, model, optimizer, state, ranks, self)

    def _ranks_of(self, given: Mapping[str, object]) -> dist.ProcessGroup | None:
        """The ranks that train together, given the arguments of prepare."""
        if self._services.use_deepspeed:
            return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        group = given.get("group")
        return self.attention.group if group is None else group

    def _complaint(
        self, model: nn.Module, optimizer: object, state: dict, group: object
    ) -> str | None:
        if not isinstance(model, nn.Module):
            return f"model is a {type(model).__name__}, expected a torch.nn.Module"
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            return f"optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer"
        kind = RingAdvancedDistributedDilatedAttention
        layers = [layer for layer in model.modules() if isinstance(layer, kind)]
        if not any(layer is self for layer in layers):
            return "this module is no part of the model: call prepare of a module that is"
        for layer in layers:
            for field in dataclasses.fields(Services):
                mine, other = (getattr(x._services, field.name) for x in (self, layer))
                if mine != other:
                    return f"the model's modules differ in {field.name}: {mine!r} and {other!r}"
        if any(hasattr(p, "to_local") for p in model.parameters()):
            return (
                "the model is sharded by FSDP, which averages gradients itself, so they would be averaged twice. Train "
                "it without prepare, and use Checkpoints"
            )
        if any(isinstance(x, nn.parallel.DistributedDataParallel) for x in model.modules()):
            return "the model is in a DistributedDataParallel already: pass the module inside"
        if optimizer is not None:
            known = set(model.parameters())
            if not all(p in known for g in optimizer.param_groups for p in g["params"]):
                return "the optimizer has parameters that are not the model's: their gradients would not be averaged"
        for name in ("model", "optimizer"):
            if name in state:
                return f"state has a {name!r} of its own: choose another name"
        for name in state:
            if not isinstance(name, str):
                return f"state has {name!r} as a name, expected a string"
        services = self._services
        for name, thing in state.items() if services.use_deepspeed else ():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                found = type(thing).__name__
                return f"state has a {found} as {name!r}, expected an object with state_dict and load_state_dict"
        apart = self._ranks_of({"group": group}) is None and dist.is_initialized()
        if services.enable_fault_tolerance and apart and dist.get_world_size() > 1:
            return "without a group the ranks train apart, but they would write the same checkpoints: pass group"
        if services.use_deepspeed and group is not None:
            size, _ = group_size_and_rank(group)
            if size != dist.get_world_size():
                return (
                    f"group has {size} of {dist.get_world_size()} ranks, but DeepSpeed averages over all: pass no group"
                )
        return None

    def get_memory_info(self) -> dict[str, object]:
        """:func:`get_memory_info` of this process, and for this module:

        - 'ring_size': the number of ranks of its ring.
        - 'parameter_bytes', 'gradient_bytes': bytes on this rank; if they are sharded, bytes of its shards.
        - 'memory_complexity': a text: how the memory of calls on its ring grows with the sequence, and the bytes per
          rank of the largest call; 'memory_complexity_bytes' is that number.
        - 'model_parallel_buffers': workspaces that are kept for calls on its ring, at most 20.
        - 'gpu_utilization_percent': only with parameters on a GPU and if ``nvidia-ml-py`` is installed.
        """
        parameters = list(self.parameters())
        size, _ = group_size_and_rank(self.attention.group)
        complexity, most, buffers = cached_calls_of(self.attention.group, self.attention.schedule)
        info = {
            **get_memory_info(),
            "ring_size": size,
            "parameter_bytes": sum(map(_held_bytes, parameters)),
            "gradient_bytes": sum(_held_bytes(p.grad) for p in parameters if p.grad is not None),
            "memory_complexity": complexity,
            "memory_complexity_bytes": most,
            "model_parallel_buffers": buffers,
        }
        device = next((p.device for p in parameters if p.is_cuda), None)
        if device is not None:
            with contextlib.suppress(ModuleNotFoundError, RuntimeError):  # no nvidia-ml-py, no NVML
                info["gpu_utilization_percent"] = torch.cuda.utilization(device)
        return info

    def clear_cache(self, force: bool = False) -> None:
        """Frees the workspaces of this module's ring, which all calls over its group share. Safe at any time.

        Args:
            force: also free those of all rings of this process, what :func:`annulus.attention` keeps, and what
                PyTorch's allocators keep of CUDA devices.
        """
        wrong = flag_complaint("force", force)
        if wrong is not None:
            raise ConfigError(f"{type(self).__name__}: clear_cache: {wrong}")
        if not force:
            _registry.clear_cache_of(self.attention.group)
            return
        _registry.clear_cache()
        annulus.clear_cache()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def cleanup(self) -> None:
        """Closes the trainings that this module has prepared, waits for their checkpoints, and closes the rings of this
        process like :func:`cleanup`. Call it before ``torch.distributed.destroy_process_group``. Idempotent. The module
        can still be called."""
        close_those_of(self)
        _registry.cleanup()


def _claims_of(model: nn.Module, optimizer: object, state: dict) -> dict[str, object]:
    """What must be equal on all ranks. With different shapes or dtypes Gloo would end a process."""
    parameters, buffers = list(model.named_parameters()), list(model.named_buffers())
    every = [(n, list(t.shape), str(t.dtype), t.requires_grad) for n, t in parameters + buffers]
    digest = hashlib.sha256(repr(every).encode()).hexdigest()[:8]
    dtypes = " and ".join(sorted({str(t.dtype).removeprefix("torch.") for _, t in parameters}))
    elements = sum(t.numel() for _, t in parameters)
    kind = RingAdvancedDistributedDilatedAttention
    return {
        "the model's parameters": f"{len(parameters)} of {elements} {dtypes} ({digest})",
        "the optimizer": type(optimizer).__name__,
        "the names in state": sorted(state),
        "use_gradient_checkpointing": [
            bool(x.use_gradient_checkpointing) for x in model.modules() if isinstance(x, kind)
        ],
    }


def _held_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor on this rank."""
    held = getattr(tensor, "ds_tensor", tensor)  # DeepSpeed's shard of a parameter
    held = held.to_local() if hasattr(held, "to_local") else held  # FSDP's
    return held.numel() * held.element_size()
