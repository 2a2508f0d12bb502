"""CLIP's text tower: a causal transformer whose state at the end token describes the caption.

Radford et al. 2021, section 2.4. Parameters carry open_clip's names, so that its checkpoints and
ours are the same files.
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from pennyclip.config import ClipText


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x): what OpenAI trained CLIP with, close to GELU but not equal."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS = {"gelu": nn.GELU, "quick_gelu": QuickGELU}


class CausalAttention(nn.Module):
    """Multi-head self-attention in which a token sees itself and what stands before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "B L W"]) -> Float[Tensor, "B L W"]:
        batch, length, width = x.shape
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(out.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the stream."""

    def __init__(self, config: ClipText) -> None:
        super().__init__()
        width = config.width
        self.ln_1 = nn.LayerNorm(width)
        self.attn = CausalAttention(width, config.heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            OrderedDict(
                c_fc=nn.Linear(width, 4 * width),
                gelu=ACTIVATIONS[config.activation](),
                c_proj=nn.Linear(4 * width, width),
            )
        )

    def forward(self, x: Float[Tensor, "B L W"]) -> Float[Tensor, "B L W"]:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class ClipTextTower(nn.Module):
    """Token ids to embeddings; `forward` is `project` of `features`."""

    def __init__(self, config: ClipText, embed_dim: int) -> None:
        super().__init__()
        self.context_length = config.context_length
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.positional_embedding = nn.Parameter(torch.empty(config.context_length, config.width))
        self.transformer = nn.Module()
        self.transformer.resblocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_final = nn.LayerNorm(config.width)
        self.text_projection = nn.Parameter(torch.empty(config.width, embed_dim))
        self._initialise(config)

    def _initialise(self, config: ClipText) -> None:
        # Standard deviations as in OpenAI's released code; depth-scaled as in GPT-2.
        proj_std = config.width**-0.5 * (2 * config.layers) ** -0.5
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        nn.init.normal_(self.positional_embedding, std=0.01)
        for block in self.transformer.resblocks:
            nn.init.normal_(block.attn.in_proj_weight, std=config.width**-0.5)
            nn.init.normal_(block.attn.out_proj.weight, std=proj_std)
            nn.init.normal_(block.mlp.c_fc.weight, std=(2 * config.width) ** -0.5)
            nn.init.normal_(block.mlp.c_proj.weight, std=proj_std)
        nn.init.normal_(self.text_projection, std=config.width**-0.5)

    def features(
        self, tokens: Int64[Tensor, "B L"], lengths: Int64[Tensor, " B"]
    ) -> Float[Tensor, "B W"]:
        """The normed state at each caption's end token, its last real one."""
        x = self.token_embedding(tokens) + self.positional_embedding[: tokens.shape[1]]
        for block in self.transformer.resblocks:
            x = block(x)
        # Padding stands after the end token, where a causal caption cannot see it.
        x = x[torch.arange(len(x), device=x.device), lengths - 1]
        return self.ln_final(x)

    def project(self, features: Float[Tensor, "B W"]) -> Float[Tensor, "B D"]:
        return features @ self.text_projection

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
