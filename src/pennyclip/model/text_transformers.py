"""A transformers encoder as text tower, under the names of open_clip's `HFTextEncoder`."""

import inspect
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import TransformersText
from pennyclip.model.attention import attention_context
from pennyclip.model.packing import Layout, full_attention, packed
from pennyclip.model.weight_dtype import weight_dtype


def transformers_projection(head: str, width: int, embed_dim: int) -> nn.Module:
    """The head that open_clip puts behind such an encoder, so that it can load ours."""
    if head == "linear":
        return nn.Linear(width, embed_dim, bias=False)
    hidden = (width + embed_dim) // 2
    return nn.Sequential(
        nn.Linear(width, hidden, bias=False), nn.GELU(), nn.Linear(hidden, embed_dim, bias=False)
    )


PACKABLE = ("bert", "roberta", "xlm-roberta", "camembert")
"""Encoders whose forward pass is: embeddings, then each layer on the states and one mask."""
ATTENTION = "pennyclip"  # its name among transformers' own


def _attention(
    module: nn.Module,
    query: Float[Tensor, "B H L C"],
    key: Float[Tensor, "B H L C"],
    value: Float[Tensor, "B H L C"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    **more: Any,
) -> tuple[Float[Tensor, "B L H C"], None]:
    """What transformers calls for attention: its own, or that of a stream where a layout comes.

    The layout is an argument on the way through every layer, so that a layer that is computed
    again in the backward pass (activation checkpointing) has it too.
    """
    if layout is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        args = (module, query, key, value, attention_mask)
        return sdpa_attention_forward(*args, dropout=dropout, **more)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return full_attention(q, k, v, layout, dropout)[None], None


def _make_packable(transformer: Any) -> bool:
    """Have an encoder call `_attention`; False where its layers, or an old transformers, don't."""
    if transformer.config.model_type not in PACKABLE:
        return False
    layer = inspect.signature(transformer.encoder.layer[0].forward).parameters.values()
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in layer):
        return False  # transformers 4: what a layer is given does not reach its attention
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    transformer.set_attn_implementation(ATTENTION)
    return True


def _real(
    x: Int64[Tensor, "B L"] | Float[Tensor, "B L W"], lengths: Int64[Tensor, " B"]
) -> Bool[Tensor, "B L"]:
    return torch.arange(x.shape[1], device=x.device) < lengths.to(x.device)[:, None]


class TransformersTextTower(nn.Module):
    """Token ids to embeddings; `forward` is `project` of `features`."""

    head_names: ClassVar[tuple[str, ...]] = ("proj.",)
    """How the names of the head's parameters begin; all others are the trunk's."""
    packed: bool = True
    """Compute real tokens only. Exports switch it off: their shapes must not depend on lengths."""

    def __init__(self, config: TransformersText, embed_dim: int, folder: Path) -> None:
        """Build the encoder with random weights from `folder`/config.json."""
        super().__init__()
        from transformers import AutoConfig, AutoModel

        self.encoder_config = AutoConfig.from_pretrained(folder)
        kind = self.encoder_config.model_type
        # RoBERTa's positions begin behind its padding id.
        padding = self.encoder_config.pad_token_id if kind in PACKABLE and kind != "bert" else -1
        self.first_position = padding + 1
        longest = getattr(self.encoder_config, "max_position_embeddings", config.context_length)
        longest -= self.first_position
        if config.context_length > longest:
            raise RequestError(
                f"context_length {config.context_length} is longer than the {longest} positions "
                f"of the encoder in {folder}. Lower model.text.context_length."
            )
        self.context_length = config.context_length
        self.pool = config.pool
        self.transformer = AutoModel.from_config(self.encoder_config, add_pooling_layer=False)
        self.enterable = _make_packable(self.transformer)
        """Whether `prefix` and `suffix` exist for this encoder."""
        self.proj = transformers_projection(config.head, self.encoder_config.hidden_size, embed_dim)

    def features(
        self, tokens: Int64[Tensor, "B L"], lengths: Int64[Tensor, " B"]
    ) -> Float[Tensor, "B W"]:
        """The encoder's output, pooled over the real tokens."""
        with attention_context(tokens, weight_dtype(self.transformer)):
            if self.enterable and self.packed:
                states = self._run(self._embedded(tokens), lengths, slice(None))
            else:
                known = {"position_ids": self._positions(tokens)} if self.enterable else {}
                mask = _real(tokens, lengths).long()
                output = self.transformer(input_ids=tokens, attention_mask=mask, **known)
                states = output.last_hidden_state
        return self._pooled(states, lengths)

    def _pooled(
        self, states: Float[Tensor, "B L W"], lengths: Int64[Tensor, " B"]
    ) -> Float[Tensor, "B W"]:
        if self.pool == "cls":
            return states[:, 0]
        real = _real(states, lengths)
        return (states * real[:, :, None]).sum(1) / lengths.to(states.device)[:, None]

    def visible(self, lengths: Int64[Tensor, " B"]) -> Int64[Tensor, " B"]:
        """How many states of each caption count."""
        return lengths

    def prefix(
        self, tokens: Int64[Tensor, "B L"], lengths: Int64[Tensor, " B"], layers: int
    ) -> Float[Tensor, "B L W"]:
        """The states behind the first of `layers()`; without meaning where there is no token."""
        with attention_context(tokens, weight_dtype(self.transformer)):
            return self._run(self._embedded(tokens), lengths, slice(0, layers - 1))

    def suffix(
        self, states: Float[Tensor, "B L W"], lengths: Int64[Tensor, " B"], layers: int
    ) -> Float[Tensor, "B W"]:
        """`features`, from what `prefix` made of the same captions."""
        dtype = weight_dtype(self.transformer)
        with attention_context(states, dtype):
            states = self._run(states.to(dtype), lengths, slice(layers - 1, None))
        return self._pooled(states, lengths)

    def _positions(self, tokens: Int64[Tensor, "B L"]) -> Int64[Tensor, "1 L"]:
        """Counted by place: RoBERTa itself would skip what has its padding's id."""
        return self.first_position + torch.arange(tokens.shape[1], device=tokens.device)[None]

    def _embedded(self, tokens: Int64[Tensor, "B L"]) -> Float[Tensor, "B L W"]:
        return self.transformer.embeddings(input_ids=tokens, position_ids=self._positions(tokens))

    def _run(
        self, states: Float[Tensor, "B L W"], lengths: Int64[Tensor, " B"], which: slice
    ) -> Float[Tensor, "B L W"]:
        """Some of the layers, on the real tokens only; zero elsewhere."""
        layout = packed(states, lengths)
        stream = layout.pack(states)[None]
        for layer in self.transformer.encoder.layer[which]:
            stream = layer(stream, layout=layout)
        return layout.pad(stream[0])

    def project(self, features: Float[Tensor, "B W"]) -> Float[Tensor, "B D"]:
        return self.proj(features.to(weight_dtype(self.proj)))

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
