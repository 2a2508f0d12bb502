"""Published settings by model, batch, precision and start, each with where it was read.

Only what the authors' own code or documentation says; what is not said there is left out. A rate
belongs to its batch: AdamW's and Lion's is scaled in proportion to it (FLIP and CLIPA give theirs
per 256 pairs; Goyal et al. 2017, arXiv 1706.02677), LAMB's with its square root (You et al. 2020,
arXiv 1904.00962). `pennyclip bench rate` measures instead.
"""

from dataclasses import dataclass
from typing import Literal

from pennyclip.config import Config, Stage, TransformersText

FAR = 8
"""Batches that differ by more than this factor tell nothing of each other's rates. Chosen."""
Beginning = Literal["scratch", "pretrained", "frozen"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """What a published model was trained with."""

    model: str
    start: Beginning
    """Random towers, pretrained towers that learn, or pretrained trunks that don't."""
    batch: int
    optimizer: str
    """As recipes name it."""
    lr: float
    """Peak rate at that batch: the image trunk's where the parts differ."""
    rest: str
    """What else belongs to it."""
    source: str

    def scaled(self, batch: int) -> float | None:
        """Its peak rate for another batch; None where that is too far off to say."""
        share = batch / self.batch
        if not 1 / FAR <= share <= FAR:
            return None
        return self.lr * (share**0.5 if "lamb" in self.optimizer else share)

    def __str__(self) -> str:
        return (
            f"{self.start}: {self.model}, {self.optimizer} {self.lr:g} at batch {self.batch:,}; "
            f"{self.rest} ({self.source})"
        )


PRESETS: dict[str, Preset] = {
    "flip": Preset(
        model="ViT-B/16 to H/14",
        start="scratch",
        batch=65_536,
        optimizer="adamw",
        lr=1.024e-3,
        rest="mask 0.5 or 0.75, 32 tokens, betas 0.9 0.95, weight decay 0.2, warm-up 51 M samples",
        source="FLIP, Li et al. 2023: code and documentation",
    ),
    "flip-unmasked": Preset(
        model="ViT-B/16 to H/14, the last 128 M samples",
        start="pretrained",
        batch=65_536,
        optimizer="adamw",
        lr=1.024e-5,
        rest="no mask",
        source="FLIP, Li et al. 2023: code and documentation",
    ),
    "clipa-b16": Preset(
        model="ViT-B/16 at 112 px",
        start="scratch",
        batch=65_536,
        optimizer="adamw",
        lr=2.048e-3,
        rest="bf16, 16 tokens, 6 epochs, betas 0.9 0.95, weight decay 0.2",
        source="CLIPA, Li et al. 2023: code",
    ),
    "clipa-b16-tuning": Preset(
        model="ViT-B/16 at full size, the last 131 M samples",
        start="pretrained",
        batch=8_192,
        optimizer="adamw",
        lr=2.56e-5,
        rest="bf16, betas 0.9 0.95, weight decay 0.2",
        source="CLIPA, Li et al. 2023: code",
    ),
    "clipav2-h14": Preset(
        model="ViT-H/14 at 84 px",
        start="scratch",
        batch=65_536,
        optimizer="adamw",
        lr=2.048e-3,
        rest="8 tokens, warm-up 3,200 updates",
        source="CLIPA-v2, Li et al. 2023: code",
    ),
    "eva02-clip-b16": Preset(
        model="EVA-02 B/16, masked-image weights and CLIP's text tower",
        start="pretrained",
        batch=131_072,
        optimizer="eva-lamb",
        lr=2e-4,
        rest="fp16, text 2e-5, heads and temperature 5e-4, layer decay 0.75, weight decay 0.05, "
        "warm-up 2,000 updates, clip 5",
        source="EVA-CLIP, Sun et al. 2023: documentation",
    ),
    "fastclip-b16": Preset(
        model="ViT-B/16",
        start="scratch",
        batch=5_120,
        optimizer="adamw",
        lr=3e-4,
        rest="weight decay 0.2, 1.28 B samples",
        source="FastCLIP, Wei et al. 2024: code",
    ),
    "mobileclip": Preset(
        model="MobileCLIP, with stored teacher embeddings",
        start="scratch",
        batch=8_192,
        optimizer="adamw",
        lr=1e-3,
        rest="beta2 0.95, weight decay 0.2, clip 1",
        source="MobileCLIP, Vasu et al. 2024: code",
    ),
    "sail": Preset(
        model="two frozen towers, sigmoid loss",
        start="frozen",
        batch=32_768,
        optimizer="lion",
        lr=1e-5,
        rest="23 M pairs",
        source="SAIL, Zhang et al. 2025: code",
    ),
}
"""By a name for `pennyclip list presets`."""


def beginning(config: Config, stage: Stage) -> Beginning:
    """How a stage of a recipe begins, as presets tell it."""
    text = config.model.text
    if stage.image_layers == stage.text_layers == "none":
        return "frozen"
    loaded = isinstance(text, TransformersText) and text.pretrained
    if config.init or config.model.image.weights or text.weights or loaded:
        return "pretrained"
    return "scratch"


def nearest(config: Config, stage: Stage) -> tuple[str, Preset] | None:
    """The preset with the same kind of start and the same optimizer whose batch is the nearest."""
    alike = [
        (max(preset.batch / config.batch_size, config.batch_size / preset.batch), name)
        for name, preset in PRESETS.items()
        if preset.start == beginning(config, stage) and preset.optimizer == config.optim.name
    ]
    return (min(alike)[1], PRESETS[min(alike)[1]]) if alike else None
