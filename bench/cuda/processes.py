"""A ring of processes that share one GPU, over one process with the whole sequence.

    python3 bench/cuda/processes.py --out bench/results/h200.json [--processes 2] [--tokens 131072]

Dense causal attention, 16 heads of 128, bf16, zigzag. The processes take turns on the GPU, so the best possible ratio
is 1. Times are medians of host times from a barrier to the end of all work; the two kinds run alternately.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import time

HEADS, DIM = 16, 128


def rank_main(arguments: argparse.Namespace) -> None:
    import annulus.torch as at
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    place = {"placement": "zigzag", "group": dist.group.WORLD, "max_communication_bytes": 2**40}
    make = torch.Generator("cuda").manual_seed(5)
    shape = (1, arguments.tokens, HEADS, DIM)
    whole = [torch.randn(shape, device="cuda", generator=make).bfloat16() for _ in range(4)]
    mine = [at.shard(x, placement="zigzag", group=dist.group.WORLD).contiguous() for x in whole]
    if not first:
        whole = []

    def run(tensors: list, backward: bool, **options: object) -> torch.Tensor:
        leaves = [x.detach().requires_grad_(backward) for x in tensors[:3]]
        o = at.ring_attention(*leaves, is_causal=True, **options)
        if backward:
            o.backward(tensors[3])
        return o.detach()

    def meet() -> None:
        torch.cuda.synchronize()
        dist.barrier()

    # Verified once, then timed.
    found = at.unshard(run(mine, False, **place), placement="zigzag", group=dist.group.WORLD)
    if first:
        difference = (found.float() - run(whole, False).float()).norm() / found.float().norm()
        assert difference < 1e-2, difference
    del found
    for backward in (False, True):
        one: list[float] = []
        ring: list[float] = []
        for _ in range(arguments.rounds + 1):
            meet()
            begin = time.perf_counter()
            if first:
                run(whole, backward)
                torch.cuda.synchronize()
            one.append(time.perf_counter() - begin)
            meet()
            begin = time.perf_counter()
            run(mine, backward, **place)
            meet()
            ring.append(time.perf_counter() - begin)
        if first:
            ours, peer = (1e3 * statistics.median(times[1:]) for times in (ring, one))
            what = "forward_backward" if backward else "forward"
            name = f"processes{dist.get_world_size()}_dense_d128_{arguments.tokens // 1024}k_causal_zigzag_{what}"
            row = {"name": name, "ours_ms": ours, "peer": "one process", "peer_ms": peer, "ratio": ours / peer}
            # Of forward, 4 flops a pair and dimension, and 2.5 times that of backward.
            flops = 2 * arguments.tokens**2 * HEADS * DIM * (3.5 if backward else 1)
            print(json.dumps({**row, "tflops": flops / ours / 1e9}), flush=True)
    dist.barrier()
    at.cleanup()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(arguments)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(arguments.processes)}
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"} | common
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv], stdout=subprocess.PIPE, text=True, env=environment | {"RANK": str(rank)}
        )
        for rank in range(arguments.processes)
    ]
    out = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("a process failed")
    rows = [json.loads(line) for line in out[0].splitlines() if line.startswith("{")]
    for row in rows:
        print(f"{row['name']}: {row['ours_ms']:.2f} ms, {row['peer']} {row['peer_ms']:.2f} ms, {row['ratio']:.3f}")
    if arguments.out is not None:
        whole = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"cases": []}
        names = {row["name"] for row in rows}
        whole["cases"] = [case for case in whole["cases"] if case["name"] not in names] + rows
        arguments.out.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
