"""CLIP's text tower: a causal transformer whose state at the end token describes the caption.

Radford et al. 2021, section 2.4. Parameters carry open_clip's names, so that its checkpoints and
ours are the same files.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from pennyclip.config.keys import ClipText
from pennyclip.model.attention import attention_context
from pennyclip.model.packing import Layout, causal_attention, packed, padded
from pennyclip.model.weight_dtype import weight_dtype


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x): what OpenAI trained CLIP with, close to GELU but not equal."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "quick_gelu": QuickGELU,
}
NORM_EPS = {"clip": 1e-5, "siglip": 1e-6}  # as released: OpenAI's CLIP, Google's big_vision
SIGLIP_PAD_ID = 1  # of the tokenizer released with SigLIP


class CausalAttention(nn.Module):
    """Multi-head self-attention in which a token sees itself and what stands before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "T W"], layout: Layout) -> Float[Tensor, "T W"]:
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        out = causal_attention(qkv.view(*x.shape[:1], 3, self.heads, -1), layout)
        return self.out_proj(out.flatten(1))


class FullAttention(CausalAttention):
    """Multi-head self-attention in which a token sees its whole caption, padding too (SigLIP)."""

    def forward(self, x: Float[Tensor, "T W"], layout: Layout) -> Float[Tensor, "T W"]:
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        qkv = qkv.view(*x.shape[:1], 3, self.heads, -1)
        q, k, v = layout.pad(qkv).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(layout.pack(out.transpose(1, 2)).flatten(1))


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the stream."""

    def __init__(self, config: ClipText) -> None:
        super().__init__()
        width, eps = config.width, NORM_EPS[config.family]
        attention = CausalAttention if config.family == "clip" else FullAttention
        self.ln_1 = nn.LayerNorm(width, eps)
        self.attn = attention(width, config.heads)
        self.ln_2 = nn.LayerNorm(width, eps)
        self.mlp = nn.Sequential(
            OrderedDict(
                c_fc=nn.Linear(width, 4 * width),
                gelu=ACTIVATIONS[config.activation or "gelu"](),
                c_proj=nn.Linear(4 * width, width),
            )
        )

    def forward(self, x: Float[Tensor, "T W"], layout: Layout) -> Float[Tensor, "T W"]:
        x = x + self.attn(self.ln_1(x), layout)
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """The blocks, one after the other."""

    def __init__(self, config: ClipText) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(Block(config) for _ in range(config.layers))

    def forward(
        self, x: Float[Tensor, "T W"], layout: Layout, which: slice = slice(None)
    ) -> Float[Tensor, "T W"]:
        for block in self.resblocks[which]:
            x = block(x, layout)
        return x


class ClipTextTower(nn.Module):
    """Token ids to embeddings; `forward` is `project` of `features`."""

    head_names: ClassVar[tuple[str, ...]] = ("text_projection",)
    """How the names of the head's parameters begin; all others are the trunk's."""
    enterable: ClassVar[bool] = True
    """Whether `prefix` and `suffix` exist for this tower."""
    packed: bool = True
    """Compute real tokens only. Exports switch it off: their shapes must not depend on lengths."""

    def __init__(self, config: ClipText, embed_dim: int) -> None:
        super().__init__()
        self.context_length = config.context_length
        self.pad_id = None
        if config.family == "siglip":
            self.pad_id = SIGLIP_PAD_ID if config.pad_id is None else config.pad_id
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.positional_embedding = nn.Parameter(torch.empty(config.context_length, config.width))
        self.transformer = Transformer(config)
        self.ln_final = nn.LayerNorm(config.width, NORM_EPS[config.family])
        self.text_projection: nn.Parameter | nn.Linear
        if config.family == "clip":
            self.text_projection = nn.Parameter(torch.empty(config.width, embed_dim))
        else:
            self.text_projection = nn.Linear(config.width, embed_dim)
        self._initialise(config)

    def _initialise(self, config: ClipText) -> None:
        # Standard deviations as in OpenAI's released code; depth-scaled as in GPT-2.
        proj_std = config.width**-0.5 * (2 * config.layers) ** -0.5
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        nn.init.normal_(self.positional_embedding, std=0.01)
        stds = {
            "attn.in_proj_weight": config.width**-0.5,
            "attn.out_proj.weight": proj_std,
            "mlp.c_fc.weight": (2 * config.width) ** -0.5,
            "mlp.c_proj.weight": proj_std,
        }
        for block in self.transformer.resblocks:
            for name, std in stds.items():
                nn.init.normal_(block.get_parameter(name), std=std)
        head = self.text_projection
        matrix = head.weight if isinstance(head, nn.Linear) else head
        nn.init.normal_(matrix, std=config.width**-0.5)

    def features(
        self, tokens: Int64[Tensor, "B L"], lengths: Int64[Tensor, " B"]
    ) -> Float[Tensor, "B W"]:
        """The normed state at each caption's end token, its last real one.

        Padding stands behind the end token, where a causal caption cannot see it: whether it is
        computed changes nothing.
        """
        x, layout = self._embedded(tokens, lengths)
        with attention_context(tokens, weight_dtype(self.transformer)):
            x = self.transformer(x, layout)
        return self.ln_final(x[layout.ends])

    def _embedded(
        self, tokens: Int64[Tensor, "B L"], lengths: Int64[Tensor, " B"]
    ) -> tuple[Float[Tensor, "T W"], Layout]:
        """What goes into the blocks."""
        if self.pad_id is not None:
            tokens, lengths = self._fill_up(tokens, lengths, self.pad_id)
        layout = packed(tokens, lengths) if self.packed else padded(tokens, lengths)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.token_embedding(layout.pack(tokens))
        return x + F.embedding(layout.pack(positions), self.positional_embedding), layout

    def visible(self, lengths: Int64[Tensor, " B"]) -> Int64[Tensor, " B"]:
        """How many states of each caption count: SigLIP's tower sees padding too."""
        return lengths if self.pad_id is None else torch.full_like(lengths, self.context_length)

    def prefix(
        self, tokens: Int64[Tensor, "B L"], lengths: Int64[Tensor, " B"], layers: int
    ) -> Float[Tensor, "B S W"]:
        """The states behind the first of `layers()`; without meaning where there is no token.

        S is L, or the full context length where padding is seen.
        """
        x, layout = self._embedded(tokens, lengths)
        with attention_context(tokens, weight_dtype(self.transformer)):
            return layout.pad(self.transformer(x, layout, slice(0, layers - 1)))

    def suffix(
        self, states: Float[Tensor, "B S W"], lengths: Int64[Tensor, " B"], layers: int
    ) -> Float[Tensor, "B W"]:
        """`features`, from what `prefix` made of the same captions, and their `visible` lengths."""
        layout = packed(states, lengths) if self.packed else padded(states, lengths)
        dtype = weight_dtype(self.transformer)
        with attention_context(states, dtype):
            x = self.transformer(layout.pack(states).to(dtype), layout, slice(layers - 1, None))
        return self.ln_final(x[layout.ends])

    def _fill_up(
        self, tokens: Int64[Tensor, "B L"], lengths: Int64[Tensor, " B"], pad_id: int
    ) -> tuple[Int64[Tensor, "B C"], Int64[Tensor, " B"]]:
        """Captions as SigLIP was trained on them: padding up to the context length counts as text.

        With shorter padding its zero-shot scores collapse.
        """
        lengths = lengths.to(tokens.device)
        real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        tokens = tokens.masked_fill(~real, pad_id)
        missing = self.context_length - tokens.shape[1]
        return F.pad(tokens, (0, missing), value=pad_id), self.visible(lengths)

    def project(self, features: Float[Tensor, "B W"]) -> Float[Tensor, "B D"]:
        head = self.text_projection
        if isinstance(head, nn.Linear):
            return head(features.to(head.weight.dtype))
        return features.to(head.dtype) @ head

    def forward(
        self, tokens: Int64[Tensor, "B L"], lengths: Int64[Tensor, " B"]
    ) -> Float[Tensor, "B D"]:
        return self.project(self.features(tokens, lengths))

    def layers(self) -> list[list[str]]:
        """Names of the trunk's parameters by layer, the input first; the head is not among them."""
        blocks = [
            [f"transformer.resblocks.{i}.{name}" for name, _ in block.named_parameters()]
            for i, block in enumerate(self.transformer.resblocks)
        ]
        blocks[-1] += ["ln_final.weight", "ln_final.bias"]
        return [["token_embedding.weight", "positional_embedding"], *blocks]
