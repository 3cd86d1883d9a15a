#!/usr/bin/env python3
"""Decoding on a GPU: one token against a cache, beside PyTorch's attention: python3 decode.py LIBRARY.so [--out decode.json]

LIBRARY.so is decode.cpp linked with the library: sh backward_engine.sh LIBANNULUS.a LIBRARY.so bench/cuda/decode.cpp. First
compares the results with fp64, then takes medians of interleaved readings. "read" is a plain read of as many bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import pathlib
import subprocess
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPES = {"bfloat16": 0, "float16": 1, "float32": 2}


class Cache:
    def __init__(self, library: ctypes.CDLL, batch: int, capacity: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        self.library, self.message = library, ctypes.create_string_buffer(500)
        library.engine_make.restype = ctypes.c_void_p
        name = str(dtype).removeprefix("torch.")
        self.handle = library.engine_make(ctypes.c_int64(batch), ctypes.c_int64(capacity), heads, kv_heads, dim, DTYPES[name], self.message, 500)
        if not self.handle:
            raise RuntimeError(self.message.value.decode())

    def call(self, function: Callable[..., int], *tensors: torch.Tensor) -> None:
        assert all(t.is_contiguous() for t in tensors)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        data = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
        if function(ctypes.c_void_p(self.handle), *data, ctypes.c_int64(tensors[0].shape[1]), stream, self.message, 500):
            raise RuntimeError(self.message.value.decode())

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.call(self.library.engine_append, k, v)

    def attend(self, q: torch.Tensor, o: torch.Tensor, lse: torch.Tensor) -> None:
        self.call(self.library.engine_attend, q, o, lse)

    def drop(self) -> None:
        torch.cuda.synchronize()
        self.library.engine_drop(ctypes.c_void_p(self.handle))


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[batch, tokens, heads, dim] in fp64, causal among the new tokens."""
    batch, new, heads, dim = q.shape
    length, kv_heads = k.shape[1], k.shape[2]
    outs, lses = [], []
    for h in range(heads):
        kh, vh = k[:, :, h * kv_heads // heads].double(), v[:, :, h * kv_heads // heads].double()
        scores = q[:, :, h].double() @ kh.transpose(1, 2) / math.sqrt(dim)
        positions = torch.arange(length - new, length, device=q.device)
        scores.masked_fill_(torch.arange(length, device=q.device)[None, None] > positions[None, :, None], -math.inf)
        lse = scores.logsumexp(-1)
        outs.append(torch.exp(scores - lse[..., None]) @ vh)
        lses.append(lse)
    return torch.stack(outs, 2), torch.stack(lses, 2)


def check(library: ctypes.CDLL) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for batch, length, new, heads, kv_heads, dim in ((1, 70_000, 1, 32, 8, 128), (2, 5_000, 3, 16, 2, 64), (1, 3_001, 20, 12, 4, 256),
                                                         (2, 2_000, 2, 40, 8, 80), (1, 900, 1, 8, 8, 320), (3, 10, 4, 24, 1, 128)):
            q, k, v = (torch.randn(batch, n, h, dim, device="cuda").to(dtype) for n, h in ((new, heads), (length, kv_heads), (length, kv_heads)))
            o, lse = torch.full_like(q, math.nan), torch.full((batch, new, heads), math.nan, device="cuda")
            cache = Cache(library, batch, length, heads, kv_heads, dim, dtype)
            for piece in range(0, length, 4_096):
                cache.append(k[:, piece:piece + 4_096].contiguous(), v[:, piece:piece + 4_096].contiguous())
            cache.attend(q, o, lse)
            cache.drop()
            expected, expected_lse = exact(q, k, v)
            error = ((o.double() - expected).norm() / expected.norm()).item()
            rounding = ((expected.to(dtype).double() - expected).norm() / expected.norm()).item()
            lse_error = (lse.double() - expected_lse).abs().max().item()
            good = lse_error < 2e-5 and (error < 2e-6 if dtype is torch.float32 else error < 2 * rounding)
            ratio = "" if dtype is torch.float32 else f", {error / rounding:.2f} of rounding once"
            print(f"{str(dtype):15} batch {batch} {length:7} keys, {new:2} new, {heads}/{kv_heads} heads of {dim}: o {error:.1e}{ratio}, "
                  f"lse {lse_error:.1e}{'' if good else '   WRONG'}", flush=True)


def medians(cases: dict[str, Callable[[], object]], rounds: int = 15) -> dict[str, float]:
    """Milliseconds of each, taking turns; every reading is of at least 20 ms."""
    def reading(body: Callable[[], object], times: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(times):
            body()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / times

    times = {}
    for name, body in cases.items():
        reading(body, 3)
        times[name] = max(1, int(20 / reading(body, 5)))
    readings: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, body in cases.items():
            readings[name].append(reading(body, times[name]))
    return {name: sorted(values)[len(values) // 2] for name, values in readings.items()}


def peers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], object]]:
    """PyTorch's attention of [batch, heads, tokens, dim], by those backends that take it."""
    out: dict[str, Callable[[], object]] = {}
    groups = q.shape[1] // k.shape[1]
    # The heads that share keys as rows of one head: the same result for a single token, and good for kernels with tiles of queries.
    grouped = q.reshape(q.shape[0], k.shape[1], groups * q.shape[2], q.shape[3])
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        for name, query, gqa in (("gqa", q, True), ("grouped", grouped, False)):
            def body(backend: SDPBackend = backend, query: torch.Tensor = query, gqa: bool = gqa) -> object:
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(query, k, v, enable_gqa=gqa)
            try:
                body()
                torch.cuda.synchronize()
            except RuntimeError:
                continue
            out[f"sdpa {backend.name.lower().removesuffix('_attention')} {name}"] = body
    return out


def measure(library: ctypes.CDLL, batch: int, length: int, dtype: torch.dtype) -> dict[str, object]:
    heads, kv_heads, dim = 32, 8, 128
    k, v = (torch.randn(batch, length, kv_heads, dim, device="cuda", dtype=dtype) for _ in range(2))
    q = torch.randn(batch, 1, heads, dim, device="cuda", dtype=dtype)
    o, lse = torch.empty_like(q), torch.empty(batch, 1, heads, device="cuda")
    cache = Cache(library, batch, length, heads, kv_heads, dim, dtype)
    cache.append(k, v)
    flat = torch.cat([k.view(torch.int32).view(-1), v.view(torch.int32).view(-1)])
    rows = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    del k, v
    cases = {"ours": lambda: cache.attend(q, o, lse), "read": lambda: torch.max(flat), **peers(*rows)}
    times = medians(cases)
    cache.drop()
    size = flat.numel() * 4
    best = min((name for name in times if name.startswith("sdpa")), key=lambda name: times[name])
    result = {"batch": batch, "keys": length, "dtype": str(dtype).removeprefix("torch."), "heads": heads, "kv_heads": kv_heads, "head_dim": dim,
              "bytes": size, "milliseconds": times, "best_peer": best, "terabytes_per_second": size / times["ours"] / 1e9,
              "share_of_read": times["read"] / times["ours"], "over_best_peer": times["ours"] / times[best]}
    shown = ", ".join(f"{name} {ms * 1000:.0f}" for name, ms in times.items())
    print(f"{result['dtype']} batch {batch} {length} keys: {result['terabytes_per_second']:.2f} TB/s, {result['share_of_read']:.0%} of a read, "
          f"{result['over_best_peer']:.2f} of {best}; us: {shown}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--commit", default="unknown", help="of the library, for --out")
    arguments = parser.parse_args()
    library = ctypes.CDLL(str(arguments.library.resolve()))
    torch.manual_seed(1)
    check(library)
    results = [measure(library, batch, length, dtype)
               for batch, length, dtype in ((1, 1_048_576, torch.bfloat16), (1, 131_072, torch.bfloat16), (1, 16_384, torch.bfloat16),
                                            (32, 8_192, torch.bfloat16), (1, 262_144, torch.float32))]
    if arguments.out:
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
                   "nvidia_smi": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(), "commit": arguments.commit}
        arguments.out.write_text(json.dumps({"machine": machine, "suites": {"gpu_decode": results}}, indent=1) + "\n")


if __name__ == "__main__":
    main()
