# %% [markdown]
# # Annulus in one process
#
# Run it as a script (`python examples/python/one_process.py`), or cell by cell in an editor that knows `# %%`.

# %% Arrays of NumPy, PyTorch or any other library with DLPack are used without copies.
import threading

import annulus
import numpy as np

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 5000, 8, 64), dtype=np.float32) for _ in range(3))

o = annulus.attention(q, k, v, is_causal=True)
print("dense, causal:", o.shape, o.dtype)

# %% LongNet: dense attention to near tokens, sparse attention to far ones.
segments, dilations = [512, 2048, 8192], [1, 4, 16]
o, lse = annulus.attention(
    q, k, v, segment_lengths=segments, dilation_rates=dilations, is_causal=True, return_lse=True
)
pattern = annulus.Pattern.longnet(8, segments, dilations, causal=True)
share = pattern.allowed_pairs(5000) / annulus.Pattern.dense(8, causal=True).allowed_pairs(5000)
print(f"{pattern}\ncomputes {share:.0%} of the dense pairs")

# %% Compare with the reference: fp64 loops that follow the definition.
few = [x[:, :600] for x in (q, k, v)]
exact, _ = annulus.reference_forward(*(x.astype(np.float64) for x in few), pattern)
found = annulus.attention(*few, pattern=pattern)
error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
print(f"relative error against fp64: {error:.1e}")
assert error < 2e-6

# %% The rows that move between four ranks. In a notebook, `plan` alone shows a picture.
placement = annulus.Placement.zigzag(5000, 4)
plan = annulus.Plan(pattern, placement)
print(plan)

# %% The same on a ring whose ranks are threads. Each rank has only its own tokens.
whole = np.empty_like(q)


def rank_body(transport: annulus.Transport) -> None:
    mine = placement.positions(transport.rank())
    ring = annulus.RingAttention(pattern, placement, transport=transport, head_dim=64)
    whole[:, mine], _ = ring.forward(q[:, mine], k[:, mine], v[:, mine])


threads = [threading.Thread(target=rank_body, args=[t]) for t in annulus.make_in_process_ring(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
difference = np.abs(whole - o).max()
print(f"ring of four against one rank: largest difference {difference:.1e}")
assert difference < 1e-5

# %% With PyTorch: the same attention with gradients.
try:
    import torch
    from annulus.torch import ring_attention
except ImportError:
    print("PyTorch is not installed: the last cell is left out")
else:
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    out = ring_attention(
        *tensors, segment_lengths=segments, dilation_rates=dilations, is_causal=True
    )
    out.square().mean().backward()
    assert np.array_equal(out.detach().numpy(), o), "the same engine gives the same bits"
    print("gradients:", [tuple(x.grad.shape) for x in tensors])
