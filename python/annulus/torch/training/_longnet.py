"""LongNet: transformers for sequences that are spread over a ring."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from annulus import ConfigError
from annulus.torch._multihead import RingMultiheadDilatedAttention
from annulus.torch._options import MOST_NUMBER, flag_complaint, number_complaint, whole_complaint
from annulus.torch._rotary import Table, own_positions, rotary_table
from annulus.torch.ring._errors import collective

# The published base model (LongNet, arXiv 2307.02486, section 4).
_BASE = {
    "layers": 12,
    "width": 768,
    "heads": 12,
    "segment_lengths": (2048, 4096, 8192, 16384, 32768),
    "dilation_rates": (1, 2, 4, 6, 12),
}
# Standard deviation of embeddings, as in GPT-2. Logits of tied embeddings start near 0, and the loss near
# log(vocabulary).
_STD = 0.02


def _size_complaint(name: str, value: object) -> str | None:
    return whole_complaint(name, value, 2**31 - 1, least=1)


def _head_complaint(width: object, heads: object) -> str | None:
    sizes = isinstance(width, int) and isinstance(heads, int) and heads > 0
    if sizes and width % heads == 0 and width // heads % 2 != 0:
        return f"width / heads is {width // heads}: an even number was expected, because rotary positions rotate pairs"
    return None


def _check(where: str, *complaints: str | None) -> None:
    for complaint in complaints:
        if complaint is not None:
            raise ConfigError(f"{where}: {complaint}")


class _Block(nn.Module):
    """A pre-norm block: the residual path is never normalised, so that deep stacks train without warm-up tricks."""

    def __init__(self, width: int, heads: int, mlp_width: int, layers: int, **attention: object):
        super().__init__()
        where = {"device": attention.get("device"), "dtype": attention.get("dtype")}
        self.attention_norm = nn.LayerNorm(width, **where)
        self.attention = RingMultiheadDilatedAttention(width, heads, batch_first=True, **attention)
        self.mlp_norm = nn.LayerNorm(width, **where)
        self.mlp = nn.Sequential(
            nn.Linear(width, mlp_width, **where), nn.GELU(), nn.Linear(mlp_width, width, **where)
        )
        # The residual path adds 2 * layers terms. They are scaled down, so that the sum does not grow with depth.
        with torch.no_grad():
            for last in (self.attention.out_proj, self.mlp[2]):
                last.weight.mul_((2 * layers) ** -0.5)

    def forward(
        self,
        x: torch.Tensor,
        key_padding_mask: torch.Tensor | None,
        n_global: int | None,
        rotary: Table,
    ) -> torch.Tensor:
        h = self.attention_norm(x)
        attended, _ = self.attention(
            *(h, h, h, key_padding_mask), need_weights=False, n_global=n_global, rotary=rotary
        )
        x = x + attended
        return x + self.mlp(self.mlp_norm(x))


class LongNet(nn.Module):
    """A pre-norm transformer encoder of dilated attention with rotary positions, over a ring.

    Every rank passes the embeddings of its tokens and gets their encodings. Results are the same, up to rounding, for
    every number of ranks and every placement, because positions are those in the whole sequence. Parameters are the
    same on every rank. See :func:`token_mean` for their gradients.

    Args:
        layers, width, heads: size of the stack; width / heads must be an even number up to 512.
        segment_lengths, dilation_rates: branches as in :func:`ring_attention`; None: dense attention.
        mlp_width: hidden features of the MLPs; None: 4 x width.
        rotary_base: as in :func:`rotary_table`.
        use_gradient_checkpointing: layers keep only their input and are computed again for backward.
        is_causal: tokens attend only to themselves and earlier tokens.
        window: (before, after), as in :func:`ring_attention`: which neighbours tokens attend to. None: all.
        attention: further arguments of :class:`RingMultiheadDilatedAttention`: group, placement, device, dtype,
            timeout, schedule and so on.
    """

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        *,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        mlp_width: int | None = None,
        rotary_base: float = 10000.0,
        use_gradient_checkpointing: bool = False,
        is_causal: bool = False,
        window: Sequence[int] | None = None,
        **attention: object,
    ):
        super().__init__()
        _check(
            "LongNet",
            _size_complaint("layers", layers),
            _size_complaint("width", width),
            _head_complaint(width, heads),
            None if mlp_width is None else _size_complaint("mlp_width", mlp_width),
            number_complaint("rotary_base", rotary_base, MOST_NUMBER),
            flag_complaint("use_gradient_checkpointing", use_gradient_checkpointing),
        )
        attention |= {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
        attention |= {"is_causal": is_causal, "window": window}
        self.rotary_base = rotary_base
        self.use_gradient_checkpointing = use_gradient_checkpointing
        self.blocks = nn.ModuleList(
            _Block(width, heads, 4 * width if mlp_width is None else mlp_width, layers, **attention)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(
            width, device=attention.get("device"), dtype=attention.get("dtype")
        )

    @classmethod
    def base(cls, **changes: object) -> LongNet:
        """The published base model: 12 layers of width 768 with 12 heads, segments 2048, 4096, 8192, 16384, 32768 with
        dilations 1, 2, 4, 6, 12. `changes` are arguments of the constructor."""
        return cls(**{**_BASE, **changes})

    # Kept by the layers, which can copy and store it.
    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks of the ring. Set it to the group of :func:`survivors` after a loss; this sets it for all layers."""
        return self.blocks[0].attention.attention.group

    @group.setter
    def group(self, group: dist.ProcessGroup | None) -> None:
        for block in self.blocks:
            block.attention.attention.group = group

    @property
    def placement(self) -> str:
        """Which rank holds which tokens."""
        return self.blocks[0].attention.attention.placement

    @property
    def _timeout(self) -> float | None:
        return self.blocks[0].attention.attention.timeout

    @collective(lambda self, *_, **__: (self.group, self._timeout))
    def forward(
        self,
        x: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        n_global: int | None = None,
    ) -> torch.Tensor:
        """Encodings of this rank's tokens, like x.

        Args:
            x: embeddings of this rank's tokens, [batch, local tokens, width].
            key_padding_mask: [batch, local tokens], as in :class:`RingMultiheadDilatedAttention`.
            n_global: tokens of the whole sequence, given on all ranks or none. Without it the ranks of a group exchange
                their numbers of tokens in every call, and contiguous shards may have any lengths.
        """
        if x.dim() != 3:
            raise ConfigError(
                f"LongNet: x has {x.dim()} axes, expected [batch, local tokens, width]"
            )
        where = own_positions("LongNet", x.shape[1], n_global, self.placement, self.group)
        head_dim = self.blocks[0].attention.head_dim
        rotary = rotary_table(where.to(x.device), head_dim, self.rotary_base)
        for block in self.blocks:
            if self.use_gradient_checkpointing and torch.is_grad_enabled():
                arguments = (x, key_padding_mask, n_global, rotary)
                x = checkpoint(block, *arguments, use_reentrant=False)
            else:
                x = block(x, key_padding_mask, n_global, rotary)
        return self.norm(x)


class LongNetLM(nn.Module):
    """A causal language model: token embeddings, a :class:`LongNet`, and logits of the next token.

    Args:
        vocabulary: number of different tokens; 256 for bytes.
        layers, width, heads: as in :class:`LongNet`.
        tie_embeddings: use the embeddings as weights of the logits, too.
        longnet: further arguments of :class:`LongNet`.
    """

    def __init__(
        self,
        vocabulary: int,
        layers: int,
        width: int,
        heads: int,
        *,
        tie_embeddings: bool = True,
        **longnet: object,
    ):
        super().__init__()
        _check(
            "LongNetLM",
            _size_complaint("vocabulary", vocabulary),
            _size_complaint("width", width),
            flag_complaint("tie_embeddings", tie_embeddings),
        )
        where = {"device": longnet.get("device"), "dtype": longnet.get("dtype")}
        self.tokens = nn.Embedding(vocabulary, width, **where)
        self.longnet = LongNet(layers, width, heads, **{"is_causal": True, **longnet})
        self.head = nn.Linear(width, vocabulary, bias=False, **where)
        nn.init.normal_(self.tokens.weight, std=_STD)
        nn.init.normal_(self.head.weight, std=_STD)
        if tie_embeddings:
            self.head.weight = self.tokens.weight

    @classmethod
    def base(cls, vocabulary: int = 256, **changes: object) -> LongNetLM:
        """:meth:`LongNet.base` as a language model. `changes` are arguments of the constructor."""
        return cls(vocabulary, **{**_BASE, **changes})

    @collective(lambda self, *_, **__: (self.longnet.group, self.longnet._timeout))
    def forward(self, tokens: torch.Tensor, n_global: int | None = None) -> torch.Tensor:
        """Logits of the token after each of this rank's tokens, [batch, local tokens, vocabulary].

        Args:
            tokens: this rank's tokens, integers [batch, local tokens].
            n_global: as in :meth:`LongNet.forward`.
        """
        return self.head(self.longnet(self.tokens(tokens), n_global=n_global))
