"""Arrays of unknown frameworks."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np


class CudaArray:
    """An array that claims to be on a CUDA device. Its memory is never read. Records the streams it was asked for."""

    def __init__(self) -> None:
        self.array = np.zeros((1, 12, 2, 16), np.float32)
        self.streams: list[int | None] = []

    def __dlpack__(self, stream: int | None = None, **kwargs: Any) -> Any:
        self.streams.append(stream)
        capsule = self.array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # A DLTensor begins with the data pointer, then the type of the device.
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8).value = 2
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)
