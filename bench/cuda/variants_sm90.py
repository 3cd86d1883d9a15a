#!/usr/bin/env python3
"""What variants_sm90.sh built: checks, times beside cuDNN and the prototype, or runs for ncu.

  variants_sm90.py run VARIANT...
  variants_sm90.py ncu VARIANT
  variants_sm90.py table FILE.csv
"""
import csv
import ctypes
import importlib.util
import json
import os
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
BUILT = os.path.join(HERE, "../../build/variants_sm90")
os.environ["LIB"] = os.path.join(BUILT, "base.so")
sys.path.insert(0, HERE)
import forward_sm90 as f  # noqa: E402

LONGNET = f.LONGNET
CASES = [  # title, pattern, tokens, dim, causal, shared; which offsets, where not blocked
    ("dense 16384", [(16384, 1)], 65536, 128, False, False),
    ("dense 2048", [(2048, 1)], 65536, 128, False, False),
    ("dense 2048 causal", [(2048, 1)], 65536, 128, True, False),
    ("longnet", LONGNET, 262144, 128, False, True),
    ("longnet causal", LONGNET, 262144, 128, True, True),
    ("longnet d64", LONGNET, 262144, 64, False, True),
    ("longnet interleaved", LONGNET, 262144, 128, False, True, "interleaved"),
    ("longnet 1M", LONGNET, 1048576, 128, False, True),
]
SECONDS = 46  # no case is begun later


def libraries(names):
    out = {}
    for name in names:
        path = os.path.join(BUILT, name + ".so")
        if not os.path.exists(path):
            print(f"{name}: not built")
            continue
        f._library, f.LIBRARY = None, path
        out[name] = f.library()
    return out


def prototype(dim):
    folder = os.path.join(BUILT, f"prototype_d{dim}")
    if not os.path.exists(os.path.join(folder, f"liblnfwd_d{dim}.so")):
        return None
    os.environ.update(DD=str(dim), LIB=os.path.join(folder, f"liblnfwd_d{dim}.so"))
    spec = importlib.util.spec_from_file_location(f"prototype_d{dim}", os.path.join(folder, "bench_fwd.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prototype_call(module, pattern, n, dim, causal, share, q, k, v, kind="blocked"):
    o, l = module.state(n)
    plan = module.plan(pattern, kind, 2 if share else 0)
    q, k, v = q[0], k[0], v[0]
    return lambda: module.merged(plan, causal, q, k, v, o, l, 5 if dim == 128 else 4)


def by_launch(title, libs, problem, module, pattern, dim, causal, share, kind, q, k, v):
    """Times of single launches, coarsest first, each repeated on its own."""
    import torch

    def reading(call):
        call()
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2000000)
        a.record()
        for _ in range(12):
            call()
        b.record()
        torch.cuda.synchronize()
        return a.elapsed_time(b) / 12

    rows = {}
    for name in ("base", "state_direct"):
        if name in libs:
            rows[name] = [lambda c=c, lib=libs[name]: lib.forward(c[0], problem.scale, c[1]) for c in problem.calls]
    if module:
        o, l = module.state(q.shape[1])
        branches = module.plan(pattern, kind, 2 if share else 0).b
        variant = 5 if dim == 128 else 4
        rows["prototype"] = [lambda i=i: module.step(branches[i], causal, 3 if i else 0, q[0], k[0], v[0], o, l, variant)
                             for i in reversed(range(len(branches)))]
    for name, calls in rows.items():
        print(f"  {title}, launches of {name}: " + "  ".join(f"{sorted(reading(c) for _ in range(3))[1]:.3f}" for c in calls),
              flush=True)


def run(names):
    import torch
    torch.backends.cuda.matmul.allow_tf32 = False
    began = time.time()
    libs = libraries(names)
    good = {}
    for name, lib in libs.items():
        f._library = lib
        every = f.checks()
        chosen = []
        for dim in (128, 64):
            for kind in ("full", "causal"):
                chosen += [f"dense 1024 d{dim} {kind}", f"longnet d{dim} {kind}", f"ragged d{dim} {kind}",
                           f"shared blocked d{dim} {kind}"]
            chosen += [f"parcels d{dim} causal 37", f"two long runs d{dim} causal -50", f"NaN in the future d{dim}"]
        bad = []
        sys.stdout.flush()
        save = os.dup(1)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        try:
            for check in chosen:
                try:
                    if not every[check][1]():
                        bad.append(check)
                except Exception as error:  # noqa: BLE001
                    bad.append(f"{check}: {str(error)[:80]}")
        finally:
            sys.stdout.flush()
            os.dup2(save, 1)
        good[name] = not bad
        print(f"checks {name}: {len(chosen)} {'ok' if not bad else 'BAD ' + '; '.join(bad[:4])} ({time.time() - began:.0f} s)",
              flush=True)
    table, absolute = {}, {}
    for title, pattern, n, dim, causal, share, *kind in CASES:
        if time.time() - began > SECONDS:
            print(f"{title}: no time")
            continue
        kind = kind[0] if kind else "blocked"
        q, k, v = f.tensors(1, n, 16, 16, dim)
        launches = f.longnet_launches(pattern, n, 16, 16, 1, kind, causal, share)
        f._library = next(iter(libs.values()))
        problem = f.Problem(q, k, v, launches)
        functions = {}

        def caller(lib):
            def call():
                f._library = lib
                problem.run()
            return call

        for name, lib in libs.items():
            functions[name] = caller(lib)
        module = prototype(dim)
        if module:
            try:
                functions["prototype"] = prototype_call(module, pattern, n, dim, causal, share, q, k, v, kind)
                functions["prototype"]()
            except Exception as error:  # noqa: BLE001
                print(f"prototype, {title}: {type(error).__name__} {str(error)[:100]}")
                functions.pop("prototype", None)
        functions["cudnn"] = lambda: f.cudnn(q, k, v, pattern, causal)
        found = f.times(functions, rounds=4 if len(pattern) == 1 or n > 262144 else 5)
        flops = sum(4.0 * dim * (n // w) * 16 * (w // r) ** 2 for w, r in pattern) * (0.5 if causal else 1)
        for name, (median, low, high) in found.items():
            table.setdefault(name, {})[title] = median / found["cudnn"][0]
            absolute.setdefault(name, {})[title] = (median, low, high, flops / median / 1e9)
        print(f"{title}: " + "  ".join(f"{name} {t[0]:.3f} ms ({t[1]:.3f}..{t[2]:.3f}) {flops / t[0] / 1e9:.0f} TF"
                                       for name, t in found.items()), flush=True)
        if title in ("longnet", "longnet causal"):
            try:
                by_launch(title, libs, problem, module if "prototype" in functions else None, pattern, dim, causal, share,
                          kind, q, k, v)
            except Exception as error:  # noqa: BLE001
                print(f"{title} by launch: {type(error).__name__} {str(error)[:100]}")
        del q, k, v, problem, functions, module
        torch.cuda.empty_cache()
    print("\n| time / cuDNN | " + " | ".join(c[0] for c in CASES) + " |\n|---|" + "---|" * len(CASES))
    for name, row in table.items():
        print(f"| {name}{'' if good.get(name, True) else ' (WRONG)'} | " + " | ".join(f"{row[c[0]]:.3f}" if c[0] in row else "" for c in CASES)
              + " |")
    print(f"{time.time() - began:.0f} s", flush=True)
    if os.environ.get("OUT"):
        with open(os.path.join(os.environ["OUT"], "variants_sm90.json"), "w") as file:
            json.dump(absolute, file, indent=1)


def for_ncu(name):
    import torch
    libs = libraries([name])
    f._library = libs[name]
    for title, pattern, n, dim, causal, share, *_ in CASES:
        if title not in ("dense 16384", "longnet"):
            continue
        n = min(n, 65536)
        q, k, v = f.tensors(1, n, 16, 16, dim)
        problem = f.Problem(q, k, v, f.longnet_launches(pattern, n, 16, 16, 1, "blocked", causal, share))
        problem.run()  # longnet: the last is r = 1
        torch.cuda.synchronize()
        module = prototype(dim)
        if module:
            prototype_call(module, pattern, n, dim, causal, share, q, k, v)()  # longnet: the first is r = 1
        torch.cuda.synchronize()
        del q, k, v, problem
        torch.cuda.empty_cache()


def ncu_table(path):
    rows = [r for r in csv.reader(open(path)) if len(r) > 10]
    head = next(i for i, r in enumerate(rows) if "Kernel Name" in r)
    names, units, data = rows[head], rows[head + 1], rows[head + 2:]
    at = names.index("Kernel Name")
    keep = [i for i, n in enumerate(names) if "__" in n]
    titles = []
    own = proto = 0
    for r in data:
        if "lnfwd" in r[at]:
            titles.append("proto dense" if proto == 0 else f"proto ln{proto - 1}")
            proto += 1
        else:
            titles.append("own dense" if own == 0 else f"own ln{own - 1}")
            own += 1
    shown = [i for i, t in enumerate(titles) if t in ("own dense", "proto dense", "own ln4", "own ln3", "proto ln0", "proto ln1")]
    print(f"{'':60s} " + " ".join(f"{titles[i]:>14s}" for i in shown))
    for c in keep:
        print(f"{(names[c] + ' ' + units[c])[:60]:60s} " + " ".join(f"{data[i][c]:>14s}" for i in shown))


if __name__ == "__main__":
    what = sys.argv[1]
    if what == "run":
        run(sys.argv[2:])
    elif what == "ncu":
        for_ncu(sys.argv[2])
    else:
        ncu_table(sys.argv[2])
