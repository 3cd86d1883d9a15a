"""The arguments of a training's services: DeepSpeed, gradient buckets, checkpoints, fault tolerance, monitoring."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import sys

import numpy as np
import torch
from torch import nn

from annulus.monitor._logging import LEVELS
from annulus.torch._options import bucket_complaint, flag_complaint, name_complaint, whole_complaint

_MB = 2**20
# These may differ between ranks: paths, and what is monitored.
_OF_ONE_RANK = (
    "nvme_path",
    "checkpoint_folder",
    "enable_monitoring",
    "log_level",
    "profile_memory",
)


@dataclasses.dataclass(frozen=True)
class Services:
    """The arguments of :class:`RingAdvancedDistributedDilatedAttention` that are not about attention.

    None means that an argument was not given. An argument that would have no effect is an error.
    """

    use_deepspeed: bool
    zero_stage: int | None
    cpu_offload: bool
    nvme_offload: bool
    nvme_path: str | os.PathLike | None
    overlap_comm: bool
    bucket_size: float
    enable_fault_tolerance: bool
    checkpoint_folder: str | os.PathLike | None
    checkpoint_interval: int | None
    auto_resume: bool | None
    max_recoveries: int | None
    enable_monitoring: bool
    log_level: str | None
    profile_memory: bool

    def __post_init__(self) -> None:
        # Numbers and flags of NumPy are valid, too, but JSON does not know them.
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (np.bool_, np.number)):
                object.__setattr__(self, field.name, value.item())

    def complaint(self) -> str | None:
        """The first error in the arguments; None if there is none."""
        complaints = [
            flag_complaint(name, getattr(self, name))
            for name in (
                "use_deepspeed",
                "cpu_offload",
                "nvme_offload",
                "overlap_comm",
                "enable_fault_tolerance",
                "enable_monitoring",
                "profile_memory",
            )
        ]
        if self.log_level is not None:
            complaints.append(name_complaint("log_level", self.level, tuple(LEVELS)))
        complaints.append(bucket_complaint(self.bucket_size))
        for name in ("nvme_path", "checkpoint_folder"):
            path = getattr(self, name)
            # An empty path would be the working directory.
            if path is not None and (
                not isinstance(path, (str, os.PathLike)) or os.fspath(path) in ("", b"")
            ):
                complaints.append(f"{name} is {path!r}, expected the path of a folder")
        wrong = next((text for text in complaints if text is not None), None)
        if wrong is not None:  # the checks below rely on the types
            return wrong
        complaints += [self._deepspeed_complaint(), self._fault_tolerance_complaint()]
        return next((text for text in complaints if text is not None), None)

    def _deepspeed_complaint(self) -> str | None:
        if not self.use_deepspeed:
            for name in ("zero_stage", "cpu_offload", "nvme_offload", "nvme_path"):
                if getattr(self, name) is not None and getattr(self, name) is not False:
                    return f"{name} is {getattr(self, name)!r}, which needs use_deepspeed=True"
            return None
        if self.zero_stage is not None and (
            type(self.zero_stage) is not int or self.zero_stage not in (1, 2, 3)
        ):
            return (
                f"zero_stage is {self.zero_stage!r}, expected 1, 2 or 3. To shard nothing, pass "
                "use_deepspeed=False"
            )
        if self.nvme_offload and self.stage != 3:
            return f"nvme_offload needs zero_stage 3, and zero_stage is {self.stage}"
        if self.nvme_offload != (self.nvme_path is not None):
            return (
                "nvme_offload and nvme_path go together: pass both, with a folder on a local disk in which every "
                "process may write"
            )
        if self.nvme_offload and not _can_be_written_to(self.nvme_path):
            return f"nvme_path is {str(self.nvme_path)!r}, expected a folder that can be written to"
        if self.max_recoveries is not None:
            return (
                "max_recoveries cannot be used with use_deepspeed: ZeRO's shards are lost with their rank, and "
                "DeepSpeed's engine cannot continue with other ranks. Start with torchrun --max-restarts: it restarts "
                "all ranks, and they continue from the newest checkpoint"
            )
        return None

    def _fault_tolerance_complaint(self) -> str | None:
        if not self.enable_fault_tolerance:
            for name in (
                "checkpoint_folder",
                "checkpoint_interval",
                "auto_resume",
                "max_recoveries",
            ):
                if getattr(self, name) is not None:
                    return f"{name} is {getattr(self, name)!r}, which needs enable_fault_tolerance=True"
            return None
        complaints = (
            whole_complaint("checkpoint_interval", self.interval, least=1),
            None if self.auto_resume is None else flag_complaint("auto_resume", self.auto_resume),
            whole_complaint("max_recoveries", self.recoveries),
        )
        return next((text for text in complaints if text is not None), None)

    def claims(self) -> dict[str, object]:
        """The arguments that must be equal on all ranks, by name."""
        every = dataclasses.asdict(self)
        return {name: value for name, value in every.items() if name not in _OF_ONE_RANK}

    @property
    def stage(self) -> int:
        return 3 if self.zero_stage is None else self.zero_stage

    @functools.cached_property
    def folder(self) -> pathlib.Path:
        """The folder of the checkpoints."""
        given = self.checkpoint_folder or os.environ.get("ANNULUS_CHECKPOINTS")
        if given is None or given == "":
            given = pathlib.Path("checkpoints", _name_of_program())
        return pathlib.Path(os.fsdecode(given)).expanduser().absolute()

    @property
    def interval(self) -> int:
        return 100 if self.checkpoint_interval is None else self.checkpoint_interval

    @property
    def resumes(self) -> bool:
        return self.auto_resume is not False

    @property
    def level(self) -> object:
        """The log level as annulus.monitor spells it."""
        return self.log_level.lower() if isinstance(self.log_level, str) else self.log_level

    @property
    def recoveries(self) -> int:
        if self.use_deepspeed or not self.enable_fault_tolerance:
            return 0
        return 3 if self.max_recoveries is None else self.max_recoveries

    def deepspeed_config(self, model: nn.Module) -> dict[str, object] | None:
        """DeepSpeed's configuration for a model; None without DeepSpeed."""
        if not self.use_deepspeed:
            return None
        parameters = list(model.parameters())
        dtype = parameters[0].dtype if parameters else torch.float32
        # DeepSpeed counts in elements.
        bucket = max(1, int(self.bucket_size * _MB / torch.empty(0, dtype=dtype).element_size()))
        zero: dict[str, object] = {
            "stage": self.stage,
            "overlap_comm": self.overlap_comm,
            "reduce_bucket_size": bucket,
        }
        if self.stage == 3:
            zero["stage3_prefetch_bucket_size"] = bucket
        else:
            zero["allgather_bucket_size"] = bucket
        pinned = any(p.is_cuda for p in parameters)
        host = {"device": "cpu", "pin_memory": pinned}
        if self.cpu_offload:
            zero["offload_optimizer"] = dict(host)
            if self.stage == 3:
                zero["offload_param"] = dict(host)
        if self.nvme_offload:
            disk = {"device": "nvme", "nvme_path": str(pathlib.Path(self.nvme_path).absolute())}
            zero["offload_optimizer"] = disk | {"pin_memory": pinned}
            if not self.cpu_offload:
                # By default DeepSpeed allocates five buffers of 10**8 elements, and keeps 10**9 elements in host memory
                # nevertheless.
                largest = max((_whole_size(p) for p in parameters), default=1)
                zero["offload_param"] = disk | {"buffer_size": largest, "max_in_cpu": 0}
                zero["offload_param"]["pin_memory"] = pinned
        return {
            # DeepSpeed requires a number. It has no meaning here, because all ranks hold parts of the same sequences.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,  # the default is 1
            # Allow any optimizer: DeepSpeed requires its own by default when states are in host memory.
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": dtype == torch.bfloat16},
            "fp16": {"enabled": dtype == torch.float16},
            "zero_optimization": zero,
        }


def _name_of_program() -> str:
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:  # an interactive session
        return "annulus"
    path = pathlib.Path(file).absolute()
    return path.parent.name if path.stem == "__main__" else path.stem  # python -m package


def _can_be_written_to(folder: str | os.PathLike) -> bool:
    try:
        return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)
    except ValueError:  # a zero byte
        return False


def _whole_size(parameter: nn.Parameter) -> int:
    """Elements of the whole parameter, also if DeepSpeed has sharded it."""
    return getattr(parameter, "ds_numel", parameter.numel())
