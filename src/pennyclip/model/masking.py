"""Random masking of image patches: FLIP, Li et al. 2023 (arXiv 2212.00794), section 3.1.

Dropped patches leave the sequence after the position embedding and before the first block, so the
blocks do no work on them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float, Int64
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from pennyclip.base.errors import RequestError

PURPOSE = 1  # chosen: keeps this noise apart from other noise drawn for the same step


def keep_indices(
    batch: int, patches: int, ratio: float, *, seed: int, step: int, device: torch.device | str
) -> Int64[Tensor, "B K"]:
    """Which patches each image of a global batch keeps, ascending.

    A pure function of its arguments, so a rank or a micro-batch takes its rows of the result, and
    a replayed or resumed step sees the same patches. CPU and CUDA draw differently.

    Args:
        batch: images in the global batch, over all ranks and micro-batches.
        patches: patches of an image, `ImageTower.patches()`.
        ratio: share of the patches that is dropped, in [0, 1).
        seed: of the run.
        step: number of the update.
        device: where the noise is drawn.

    Returns:
        At least one patch an image; K = round(patches * (1 - ratio)).

    Raises:
        RequestError: the ratio lies outside [0, 1).
    """
    if not 0 <= ratio < 1:
        raise RequestError(f"the mask ratio must lie in [0, 1), found {ratio}")
    # SeedSequence mixes the three numbers; its output is fixed across numpy's versions (NEP 19).
    state = np.random.SeedSequence((seed, step, PURPOSE)).generate_state(1, np.uint64)
    generator = torch.Generator(device).manual_seed(int(state[0]))
    noise = torch.rand(batch, patches, generator=generator, device=device)
    count = max(1, round(patches * (1 - ratio)))
    return noise.argsort(dim=1)[:, :count].sort(dim=1).values


class PatchSelection(nn.Module):
    """Stands in the slot of timm's patch dropout, and keeps what it is told to keep.

    timm calls the slot between position embedding and blocks, and gives EVA's rotary embedding the
    kept rows. `keep` is set for the length of one forward pass; unset, every patch stays.
    """

    def __init__(self, prefix: int, returns_indices: bool) -> None:
        """
        Args:
            prefix: class and register tokens, which stand first and always stay.
            returns_indices: EVA's slot also returns the indices, for its rotary embedding.
        """
        super().__init__()
        self.prefix = prefix
        self.returns_indices = returns_indices
        self.keep: Int64[Tensor, "B K"] | None = None

    def forward(
        self, x: Float[Tensor, "B L W"]
    ) -> Float[Tensor, "B M W"] | tuple[Float[Tensor, "B M W"], Int64[Tensor, "B K"] | None]:
        if self.keep is not None:
            index = self.keep[:, :, None].expand(-1, -1, x.shape[2])
            kept = x[:, self.prefix :].gather(1, index)
            x = torch.cat([x[:, : self.prefix], kept], dim=1)
        return (x, self.keep) if self.returns_indices else x


def install_selection(trunk: nn.Module) -> PatchSelection | None:
    """Put a `PatchSelection` into a trunk; None where the trunk has no patch tokens to drop."""
    if not isinstance(trunk, VisionTransformer | Eva):
        return None
    selection = PatchSelection(trunk.num_prefix_tokens, isinstance(trunk, Eva))
    trunk.patch_drop = selection
    return selection


@contextmanager
def selecting(
    selection: PatchSelection | None, keep: Int64[Tensor, "B K"] | None
) -> Iterator[None]:
    """A forward pass inside keeps these patches of each image; None: all of them."""
    if selection is None or keep is None:
        yield
        return
    selection.keep = keep
    try:
        yield
    finally:
        selection.keep = None
