"""Captions of different lengths as one stream of tokens, without work on padding.

Norms, projections and MLPs treat every token by itself, so they run on the stream of real tokens.
Attention alone needs to know where a caption starts: torch's variable-length attention does on
GPUs; elsewhere the stream is padded inside attention only.

Shapes: B captions, L padded length, T tokens in the stream, H heads, C channels of a head.
"""

import inspect
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

try:
    from torch.nn.attention import varlen

    # Older versions of torch know no window, and so no causal attention of this kind.
    HAS_VARLEN = "window_size" in inspect.signature(varlen.varlen_attn).parameters
except ImportError:
    HAS_VARLEN = False


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a stream stand in their captions."""

    captions: int
    """B."""
    length: int
    """L."""
    places: Int64[Tensor, " T"] | None
    """b * L + l of each token of the stream; None: the stream holds all B * L of them."""
    starts: Int32[Tensor, " B+1"]
    """Where each caption starts in the stream, and the stream's end."""
    ends: Int64[Tensor, " B"]
    """Where the end token of each caption stands in the stream."""

    @cached_property
    def real(self) -> Bool[Tensor, "B L"]:
        """Where there is a token."""
        lengths = self.ends + 1 - self.starts[:-1]
        return torch.arange(self.length, device=lengths.device) < lengths[:, None]

    def pack(self, x: Tensor) -> Tensor:
        """[B, L, ...] to the stream [T, ...]."""
        x = x.flatten(0, 1)
        return x if self.places is None else x.index_select(0, self.places)

    def pad(self, x: Tensor) -> Tensor:
        """The stream [T, ...] to [B, L, ...], zero where there is no token."""
        if self.places is not None:
            x = x.new_zeros(self.captions * self.length, *x.shape[1:]).index_copy(0, self.places, x)
        return x.view(self.captions, self.length, *x.shape[1:])


Padded = Int64[Tensor, "B L"] | Float[Tensor, "B L W"]
"""Tokens or their states."""


def packed(tokens: Padded, lengths: Int64[Tensor, " B"]) -> Layout:
    """The real tokens only. Waits for the device once, unless `lengths` are on the host."""
    captions, length = tokens.shape[:2]
    device, lengths = tokens.device, lengths.cpu()
    real = torch.arange(length) < lengths[:, None]
    after = lengths.cumsum(0)
    return Layout(
        captions,
        length,
        places=real.flatten().nonzero()[:, 0].to(device, non_blocking=True),
        starts=F.pad(after, (1, 0)).int().to(device, non_blocking=True),
        ends=(after - 1).to(device, non_blocking=True),
    )


def padded(tokens: Padded, lengths: Int64[Tensor, " B"]) -> Layout:
    """Every place, padding too: shapes that don't depend on the lengths."""
    lengths = lengths.to(tokens.device)
    captions, length = tokens.shape[:2]
    firsts = torch.arange(captions + 1, device=tokens.device) * length
    return Layout(captions, length, None, firsts.int(), firsts[:-1] + lengths - 1)


def causal_attention(qkv: Float[Tensor, "T 3 H C"], layout: Layout) -> Float[Tensor, "T H C"]:
    """Each token attends to itself and the earlier ones of its caption."""
    if _variable_length(qkv) and layout.places is not None:
        q, k, v = qkv.unbind(1)
        starts, longest = layout.starts, layout.length
        # The window: everything before, nothing after.
        result = varlen.varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0))
        assert isinstance(result, Tensor)
        return result
    q, k, v = layout.pad(qkv).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return layout.pack(out.transpose(1, 2))


def full_attention(
    q: Float[Tensor, "T H C"],
    k: Float[Tensor, "T H C"],
    v: Float[Tensor, "T H C"],
    layout: Layout,
    dropout: float = 0.0,
) -> Float[Tensor, "T H C"]:
    """Each token attends to all of its caption. `dropout`: the share of the weights left out."""
    if _variable_length(q) and layout.places is not None and dropout == 0:
        starts, longest = layout.starts, layout.length
        result = varlen.varlen_attn(q, k, v, starts, starts, longest, longest)
        assert isinstance(result, Tensor)
        return result
    q, k, v = (layout.pad(x).transpose(1, 2) for x in (q, k, v))
    mask = layout.real[:, None, None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    return layout.pack(out.transpose(1, 2))


def _variable_length(x: Tensor) -> bool:
    """Whether torch's kernel exists for it: on CUDA, 16 bits only."""
    return HAS_VARLEN and x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)
