#!/usr/bin/env python3
"""Compares backward of several builds and of cuDNN in one process: python3 backward_engine.py [--seconds S] OLD.so NEW.so...

A .so is backward_engine.cpp linked with a build's libannulus.a (backward_engine.sh). First checks that the gradients of all builds agree
within rounding, whatever was in memory before. Then takes medians of readings of at least 80 ms, in random order, and lists the time of
each kernel of a call.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import pathlib
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from peers import DILATIONS, SEGMENTS, cudnn_backward, cudnn_forward, medians, views

HEADS = 16


class Engine:
    def __init__(self, library: ctypes.CDLL, *, branches: int = 0, causal: bool = False, interleaved: bool = False, heads: int = HEADS,
                 kv_heads: int = HEADS, batch: int = 1, tokens: int, dim: int = 128, half: bool = False) -> None:
        self.library, self.message = library, ctypes.create_string_buffer(500)
        library.engine_make.restype = ctypes.c_void_p
        self.handle = library.engine_make(branches, int(causal), int(interleaved), heads, kv_heads, ctypes.c_int64(batch),
                                          ctypes.c_int64(tokens), dim, int(half), 0, self.message, 500)
        if not self.handle:
            raise RuntimeError(self.message.value.decode())

    def run(self, tensors: list[torch.Tensor], backward: bool) -> None:
        data = (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if self.library.engine_run(ctypes.c_void_p(self.handle), data, int(backward), stream, self.message, 500):
            raise RuntimeError(self.message.value.decode())

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            torch.cuda.synchronize()
            self.library.engine_drop(ctypes.c_void_p(self.handle))


def make_tensors(batch: int, tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q k v o lse do dq dk dv; results are NaN."""
    def normal(of: int) -> torch.Tensor:
        return torch.randn(batch, tokens, of, dim, device="cuda", dtype=torch.float32).to(dtype)

    q, k, v, do = normal(heads), normal(kv_heads), normal(kv_heads), normal(heads)
    nan = [torch.full_like(t, math.nan) for t in (q, q, k, v)]
    lse = torch.full((batch, tokens, heads), math.nan, device="cuda")
    return [q, k, v, nan[0], lse, do, *nan[1:]]


def check(libraries: dict[str, ctypes.CDLL]) -> None:
    cases: list[dict[str, Any]] = []
    for causal in (False, True):
        for half in (False, True):
            for dim in (64, 128):
                cases.append(dict(tokens=1000, batch=2, heads=4, kv_heads=2, dim=dim, half=half, causal=causal))
        cases += [dict(tokens=2048, batch=2, heads=2, kv_heads=2, causal=causal),
                  dict(tokens=65536, branches=5, causal=causal), dict(tokens=65536, branches=5, causal=causal, interleaved=True),
                  dict(tokens=40000, branches=4, causal=causal, heads=6, kv_heads=6, half=True),
                  dict(tokens=20000, branches=3, causal=causal, heads=8, kv_heads=2, dim=64)]
    for case in cases:
        try:
            full = dict(batch=1, heads=HEADS, kv_heads=HEADS, dim=128) | {k: v for k, v in case.items() if k in ("batch", "heads", "kv_heads", "dim")}
            t = make_tensors(tokens=case["tokens"], dtype=torch.float16 if case.get("half") else torch.bfloat16, **full)
            expected: list[torch.Tensor] = []
            far: dict[str, list[float]] = {}
            for name, library in libraries.items():
                engine = Engine(library, **case)
                engine.run(t[:5], False)
                for _ in range(2):  # nothing may be left over from the call before
                    for x in t[6:]:
                        x.fill_(math.nan)
                    engine.run(t, True)
                    torch.cuda.synchronize()
                    expected = expected or [x.double() for x in t[6:]]
                    far.setdefault(name, []).extend(
                        ((x.double() - y).norm() / y.norm()).item() for x, y in zip(t[6:], expected, strict=True))
            good = all(x < 2e-4 for xs in far.values() for x in xs)
            print("ok  " if good else "FAIL", case, {n: f"{max(x):.1e}" for n, x in far.items()} if good else far, flush=True)
        except Exception as error:  # noqa: BLE001
            print("FAIL", case, error, flush=True)


def peer(tensors: list[torch.Tensor], branches: int, causal: bool) -> Callable[[], Any]:
    q, k, v, _, _, do = tensors[:6]
    if branches == 0:
        calls = [[t.transpose(1, 2) for t in (q, k, v, do)]]
    else:
        calls = [views([q, k, v, do], w, r, o) for w, r in zip(SEGMENTS, DILATIONS, strict=True) for o in range(r)]
    kept = [(a, cudnn_forward(*a[:3], causal)) for a in calls]
    grads = [torch.empty_like(x[0]).copy_(a[3]) for a, x in kept]
    return lambda: [cudnn_backward(g, *a[:3], x, causal) for (a, x), g in zip(kept, grads, strict=True)]


def kernels(name: str, function: Callable[[], Any]) -> None:
    """Microseconds of each kernel of a call."""
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            function()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    total: dict[str, float] = {}
    for e in events:
        total[e.name] = total.get(e.name, 0.0) + e.device_time_total / 5
    for key, us in sorted(total.items(), key=lambda x: -x[1]):
        short = key.replace("annulus::cuda::", "").replace("(anonymous namespace)::", "")
        print(f"    {name:12s} {us:10.1f} us  {short[:90]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("library", nargs="+", type=pathlib.Path)
    arguments = parser.parse_args()
    end = time.time() + arguments.seconds
    libraries = {path.stem: ctypes.CDLL(str(path.resolve())) for path in arguments.library}
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    torch.manual_seed(1)
    check(libraries)
    bytes_ = torch.empty(2, 1 << 29, dtype=torch.uint8, device="cuda")
    ms = medians({"copy": lambda: bytes_[0].copy_(bytes_[1]), "clear": lambda: bytes_[0].zero_()}, 3)
    print(f"copy {(2 << 29) / ms['copy'] / 1e9:.2f} TB/s, clear {(1 << 29) / ms['clear'] / 1e9:.2f} TB/s", flush=True)
    del bytes_
    cases = [dict(tokens=n, batch=65536 // n, causal=c) for n in (2048, 4096, 16384) for c in (False, True)]
    cases += [dict(tokens=262144, batch=1, causal=c, branches=5) for c in (False, True)]
    for case in cases:
        if time.time() > end:
            print("out of time")
            return
        try:
            t = make_tensors(case["batch"], case["tokens"], HEADS, HEADS, 128, torch.bfloat16)
            engines = {n: Engine(x, **case) for n, x in libraries.items()}
            next(iter(engines.values())).run(t[:5], False)
            functions: dict[str, Callable[[], Any]] = {n: lambda e=e: e.run(t, True) for n, e in engines.items()}
            functions["cudnn"] = peer(t, case.get("branches", 0), case["causal"])
            ms = medians(functions, 5)
            print(case, "ms:", {n: round(x, 3) for n, x in ms.items()}, "over cuDNN:",
                  {n: round(x / ms["cudnn"], 3) for n, x in ms.items()}, flush=True)
            if case["tokens"] in (2048, 262144):
                for name in engines:
                    kernels(name, functions[name])
            del engines, functions, t
            torch.cuda.empty_cache()
        except Exception:  # noqa: BLE001
            traceback.print_exc(file=sys.stdout)


if __name__ == "__main__":
    main()
