"""Memory of the process while a block runs."""

import os
import sys
import threading
import time
from dataclasses import dataclass

from annulus import _core
from annulus.monitor import _events

_MOST_SAMPLES = 4096
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class MemorySample:
    """Bytes at one moment, `seconds` after the begin."""

    seconds: float
    process: int  # resident
    cached: int  # held by executors that annulus.attention keeps
    device: int  # allocated by PyTorch on the CUDA device; 0 without one


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE


def _high_water() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


class profile_memory:  # noqa: N801 (a context manager that reads like a function)
    """Samples the memory of this process every `interval` seconds while a block runs:

        with annulus.monitor.profile_memory() as profile:
            step()
        print(profile.report())

    `device`: a CUDA device, whose memory as counted by PyTorch is sampled, too. At most 4,096 samples are kept: then
    every second one is dropped and the interval is doubled. Use `start` and `stop` where a block is not possible.
    """

    def __init__(self, interval: float = 0.01, device=None):
        self.interval = _events.check_seconds("profile_memory", interval)
        self.samples: list[MemorySample] = []
        self._cuda = None
        if device is not None:
            torch = sys.modules.get("torch")
            if torch is None or not torch.cuda.is_available():
                raise _core.ConfigError(
                    f"profile_memory: device is {device!r}, but PyTorch has no CUDA device here"
                )
            self._cuda = (torch.cuda, torch.device(device))
        self._thread: threading.Thread | None = None

    def _device_bytes(self, peak: bool = False) -> int:
        if self._cuda is None:
            return 0
        cuda, device = self._cuda
        return cuda.max_memory_allocated(device) if peak else cuda.memory_allocated(device)

    def _sample(self) -> None:
        if len(self.samples) >= _MOST_SAMPLES:
            self.samples = self.samples[::2]
            self.interval *= 2
        self.samples.append(
            MemorySample(
                time.monotonic() - self._begin,
                _resident(),
                _core.cache_info()["bytes"],
                self._device_bytes(),
            )
        )

    def start(self) -> "profile_memory":
        """Takes the first sample and starts to take more."""
        if self._thread is not None:
            raise _core.ConfigError("profile_memory: started already: call stop() first")
        self.samples = []
        self._begin = time.monotonic()
        self._marks = (_high_water(), self._device_bytes(peak=True))
        self._stop = threading.Event()
        self._sample()
        self._thread = threading.Thread(target=self._run, name="annulus profile_memory", daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._stop.wait(min(self.interval, threading.TIMEOUT_MAX)):
            self._sample()

    def stop(self) -> None:
        """Takes the last sample. Idempotent."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        self._sample()
        # The records of the kernel and of PyTorch include peaks between two samples, if they have risen since start.
        marks = (_high_water(), self._device_bytes(peak=True))
        self._peaks = tuple(now if now > before else 0 for now, before in zip(marks, self._marks))

    __enter__ = start

    def __exit__(self, *_):
        self.stop()

    def _peak(self, which: str, mark: int) -> int:
        known = self._peaks[mark] if self._thread is None and self.samples else 0
        return max([known, *(getattr(sample, which) for sample in list(self.samples))])

    @property
    def begin_bytes(self) -> int:
        """What the process held at the begin of the block."""
        return self.samples[0].process if self.samples else 0

    @property
    def peak_bytes(self) -> int:
        """The most that the process held."""
        return self._peak("process", 0)

    @property
    def peak_device_bytes(self) -> int:
        """The most that PyTorch had allocated on the device; 0 without a device."""
        return self._peak("device", 1)

    def report(self) -> dict[str, float]:
        """The profile as numbers. The keys are always the same."""
        last = self.samples[-1] if self.samples else MemorySample(0.0, 0, 0, 0)
        return {
            "seconds": last.seconds,
            "samples": len(self.samples),
            "begin_bytes": self.begin_bytes,
            "peak_bytes": self.peak_bytes,
            "end_bytes": last.process,
            "cached_bytes": last.cached,
            "begin_device_bytes": self.samples[0].device if self.samples else 0,
            "peak_device_bytes": self.peak_device_bytes,
            "end_device_bytes": last.device,
        }
