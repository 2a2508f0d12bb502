"""A transformers encoder as text tower, under the names of open_clip's `HFTextEncoder`."""

from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from pennyclip.config import TransformersText
from pennyclip.errors import RequestError
from pennyclip.model.attention import attention_context


def transformers_projection(head: str, width: int, embed_dim: int) -> nn.Module:
    """The head that open_clip puts behind such an encoder, so that it can load ours."""
    if head == "linear":
        return nn.Linear(width, embed_dim, bias=False)
    hidden = (width + embed_dim) // 2
    return nn.Sequential(
        nn.Linear(width, hidden, bias=False), nn.GELU(), nn.Linear(hidden, embed_dim, bias=False)
    )


class TransformersTextTower(nn.Module):
    """Token ids to embeddings; `forward` is `project` of `features`."""

    def __init__(self, config: TransformersText, embed_dim: int, folder: Path) -> None:
        """Build the encoder with random weights from `folder`/config.json."""
        super().__init__()
        from transformers import AutoConfig, AutoModel

        self.encoder_config = AutoConfig.from_pretrained(folder)
        longest = getattr(self.encoder_config, "max_position_embeddings", config.context_length)
        if config.context_length > longest:
            raise RequestError(
                f"context_length {config.context_length} is longer than the {longest} positions "
                f"of the encoder in {folder}. Lower model.text.context_length."
            )
        self.context_length = config.context_length
        self.pool = config.pool
        self.transformer = AutoModel.from_config(self.encoder_config, add_pooling_layer=False)
        self.proj = transformers_projection(config.head, self.encoder_config.hidden_size, embed_dim)

    def features(
        self, tokens: Int64[Tensor, "B L"], lengths: Int64[Tensor, " B"]
    ) -> Float[Tensor, "B W"]:
        """The encoder's output, pooled over the real tokens."""
        lengths = lengths.to(tokens.device)
        real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        with attention_context(tokens):
            output = self.transformer(input_ids=tokens, attention_mask=real.long())
        states = output.last_hidden_state
        if self.pool == "cls":
            return states[:, 0]
        return (states * real[:, :, None]).sum(1) / lengths[:, None]

    def project(self, features: Float[Tensor, "B W"]) -> Float[Tensor, "B D"]:
        return self.proj(features)

    def forward(
        self, tokens: Int64[Tensor, "B L"], lengths: Int64[Tensor, " B"]
    ) -> Float[Tensor, "B D"]:
        return self.project(self.features(tokens, lengths))

    def layers(self) -> list[list[str]]:
        """Names of the trunk's parameters by layer, the input first; the head is not among them."""
        names = [name for name, _ in self.transformer.named_parameters()]
        depth = self.encoder_config.num_hidden_layers
        blocks: list[list[str]] = [[] for _ in range(depth + 1)]
        for name in names:
            parts = name.split(".")
            inside = "layer" in parts or "layers" in parts
            number = next((int(p) for p in parts if p.isdigit()), None) if inside else None
            blocks[0 if number is None else number + 1].append(f"transformer.{name}")
        return blocks
