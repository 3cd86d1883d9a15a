"""Shared by the scripts in bench/peer: the library behind c_api.cpp, inputs, alternating runs, options and results."""

import argparse
import ctypes
import json
import pathlib
import statistics
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from machine import ROOT, commit, cpu_name

SEGMENTS = [2048, 4096, 8192, 16384, 32768]
DILATIONS = [1, 2, 4, 8, 16]
DTYPES = {"fp32": (torch.float32, 0), "bf16": (torch.bfloat16, 1), "fp16": (torch.float16, 2)}


class Annulus:
    """One executor set of the library behind bench/peer/c_api.cpp."""

    lib = None

    @classmethod
    def load(cls, path):
        cls.lib = ctypes.CDLL(str(path))
        cls.lib.annulus_bench_open.restype = ctypes.c_void_p
        cls.lib.annulus_bench_error.restype = ctypes.c_char_p
        cls.lib.annulus_bench_isa.restype = ctypes.c_char_p
        for name in ("forward", "backward", "peak_gflops"):
            getattr(cls.lib, "annulus_bench_" + name).restype = ctypes.c_double

    def __init__(
        self,
        shape,
        dtype,
        causal,
        branches=(),
        ranks=1,
        threads=2,
        schedule=2,
        reproducible=False,
        backward=True,
    ):
        batch, tokens, heads, dim = shape
        n = len(branches)
        segments = (ctypes.c_int64 * max(n, 1))(*[w for w, _ in branches])
        dilations = (ctypes.c_int64 * max(n, 1))(*[r for _, r in branches])
        self.handle = self.lib.annulus_bench_open(
            ctypes.c_int64(batch),
            ctypes.c_int64(tokens),
            heads,
            heads,
            dim,
            DTYPES[dtype][1],
            int(causal),
            n,
            segments,
            dilations,
            ranks,
            threads,
            schedule,
            int(reproducible),
            int(backward),
        )
        if not self.handle:
            raise RuntimeError(self.lib.annulus_bench_error().decode())

    def __del__(self):
        if getattr(self, "handle", None):
            self.lib.annulus_bench_close(ctypes.c_void_p(self.handle))

    def forward(self, q, k, v, o, lse):
        return self.lib.annulus_bench_forward(
            ctypes.c_void_p(self.handle),
            *[ctypes.c_void_p(t.data_ptr()) for t in (q, k, v, o, lse)],
        )

    def backward(self, *tensors):
        return self.lib.annulus_bench_backward(
            ctypes.c_void_p(self.handle), *[ctypes.c_void_p(t.data_ptr()) for t in tensors]
        )


def alternate(bodies, repeat, pause=0.02):
    """Runs the bodies in turn, `repeat` rounds after one to warm up, and returns a list of seconds for each. A body may return its own
    seconds instead of None. The pause lets idle threads of the other side stop spinning."""
    seconds = [[] for _ in bodies]
    for round_ in range(repeat + 1):
        for i, body in enumerate(bodies):
            time.sleep(pause)
            start = time.perf_counter()
            own = body()
            spent = own if isinstance(own, float) else time.perf_counter() - start
            if round_ > 0:
                seconds[i].append(spent)
    return seconds


def summary(seconds):
    ordered = sorted(seconds)
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "max": ordered[-1],
        "runs": len(ordered),
    }


def make(shape, dtype, count, scale=1.0):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(shape, generator=generator) * (scale if i < 2 else 1.0)).to(DTYPES[dtype][0])
        for i in range(count)
    ]


def relative_rms(found, expected):
    """Root mean square of the difference over that of the expected values, as in the tests."""
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def pairs(tokens, causal):
    return tokens * (tokens + 1) / 2 if causal else tokens * tokens


def header(args):
    """Prints and returns the facts that a result is stored with."""
    result = {
        "cpu": cpu_name(),
        "isa": Annulus.lib.annulus_bench_isa().decode(),
        "threads": args.threads,
        "torch": torch.__version__,
        "commit": commit(),
        "command": " ".join(sys.argv),
        "suites": {},
    }
    print(
        f"{result['cpu']}, {result['isa']}, {args.threads} threads, PyTorch {torch.__version__}",
        flush=True,
    )
    return result


def parser_of(doc, suites):
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default=ROOT / "build/release/bench/libannulus_bench_c.so")
    parser.add_argument("--suite", nargs="+", choices=suites, default=list(suites))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--out", type=pathlib.Path)
    return parser


def run_suites(suites, args):
    Annulus.load(args.library)
    torch.set_num_threads(args.threads)
    result = header(args)
    for name in args.suite:
        result["suites"][name] = suites[name](args)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
