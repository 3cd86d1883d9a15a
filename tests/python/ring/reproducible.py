"""Attention over rings of processes over torch.distributed, of the q, k, v and do that a folder has as .npy:

    PYTHONPATH=tests/python python tests/python/ring/reproducible.py FOLDER PATTERN [NUMBER OF RANKS PLACEMENT]...

Prints one line for each ring: its number of ranks and the digest of outputs and gradients. `test_reproducible.py` compares
them with those of other transports.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterable

import annulus.torch as at
import numpy as np
import torch
import torch.distributed as dist
from support.process_ring import Ring, free_port, join


def digest_of(arrays: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def attend(
    rank: int, say: Callable, orders: int, ranks: int, port: int, folder: str, pattern: dict, placement: str
) -> None:
    join(rank, ranks, port)
    place = {"placement": placement, "group": dist.group.WORLD}
    whole = [torch.from_numpy(np.load(pathlib.Path(folder) / f"{name}.npy")) for name in ("q", "k", "v", "do")]
    *qkv, do = (at.shard(x, **place) for x in whole)
    leaves = [x.clone().requires_grad_() for x in qkv]
    o = at.ring_attention(*leaves, reproducible=True, **pattern, **place)
    o.backward(do)
    found = [at.unshard(x, **place) for x in (o.detach(), *(x.grad for x in leaves))]
    say("digest", digest=digest_of(x.numpy() for x in found))
    dist.barrier()


def main() -> int:
    folder, pattern, *rings = sys.argv[1:]
    for ranks, placement in zip(map(int, rings[::2]), rings[1::2]):
        with Ring(ranks, attend, ranks, free_port(), folder, json.loads(pattern), placement) as ring:
            ring.wait("digest", list(range(ranks)), 120)
            for rank in ring.ranks:
                print(ranks, (rank.last("digest") or {}).get("digest", rank.said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
