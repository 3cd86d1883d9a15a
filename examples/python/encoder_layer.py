"""Replaces the attention of torch.nn.TransformerEncoderLayer by ring attention, with the same weights.

python examples/python/encoder_layer.py
"""

import torch
from annulus.torch import RingMultiheadDilatedAttention
from torch import nn

torch.manual_seed(0)

# An encoder; usually it would be a trained one. Ring attention does not support dropout of attention weights. Dropout
# in other parts of the layer stays.
encoder = nn.TransformerEncoder(
    nn.TransformerEncoderLayer(d_model=128, nhead=4, dropout=0.1, batch_first=True), num_layers=2
)
encoder.eval()
x = torch.randn(2, 1000, 128)
before = encoder(x)

# The same weights in ring attention: state dicts are interchangeable.
for layer in encoder.layers:
    theirs = layer.self_attn
    ours = RingMultiheadDilatedAttention(theirs.embed_dim, theirs.num_heads, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    layer.self_attn = ours
encoder.eval()
after = encoder(x)
difference = (after - before).abs().max().item()
print(f"dense: largest difference to torch.nn.MultiheadAttention {difference:.1e}")
assert difference < 1e-5

# Causal and padded calls work as before. Padded tokens are ignored as keys; their output rows have no meaning.
mask = torch.ones(1000, 1000, dtype=torch.bool).triu(1)
padding = torch.zeros(2, 1000, dtype=torch.bool)
padding[1, 700:] = True
causal = encoder(x, mask=mask, is_causal=True, src_key_padding_mask=padding)
again = encoder(x[1:, :700], mask=mask[:700, :700], is_causal=True)
difference = (causal[1:, :700] - again).abs().max().item()
print(f"padded: largest difference to the shorter sequence {difference:.1e}")
assert difference < 1e-5

# The same weights with a dilated pattern, and ten training steps.
for layer in encoder.layers:
    dilated = RingMultiheadDilatedAttention(
        128, 4, batch_first=True, segment_lengths=[128, 512], dilation_rates=[1, 4]
    )
    dilated.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = dilated
encoder.train()
optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
first = last = 0.0
for step in range(10):
    loss = (encoder(x) - x.roll(1, dims=1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    first, last = (loss.item() if step == 0 else first), loss.item()
print(f"dilated: loss {first:.3f} -> {last:.3f} in ten steps")
assert last < first
