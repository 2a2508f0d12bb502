"""Published settings by model, batch, precision and start, each with where it was read.

Only what the authors' own code or documentation says; what is not said there is left out. A rate
belongs to its batch: AdamW's and Lion's is scaled in proportion to it (FLIP and CLIPA give theirs
per 256 pairs; Goyal et al. 2017, arXiv 1706.02677), LAMB's with its square root (You et al. 2020,
arXiv 1904.00962). `pennyclip bench rate` measures instead.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from pennyclip.config.keys import Config, Precision, Stage, TransformersText

FAR = 8
"""Batches that differ by more than this factor tell nothing of each other's rates. Chosen."""
Beginning = Literal["scratch", "pretrained", "frozen"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """What a published model was trained with."""

    model: str
    fits: tuple[str, ...] = ("*",)
    """Of timm's models, which are that; * stands for anything."""
    start: Beginning
    """Random towers, pretrained towers that learn, or pretrained trunks that don't."""
    batch: int
    precision: Precision | None = None
    """As recipes name it; None: the source does not say."""
    optimizer: str
    """As recipes name it."""
    lr: float
    """Peak rate at that batch: the image trunk's where the parts differ."""
    rest: str
    """What else belongs to it."""
    source: str
    """The paper; and the repository with the file that says it."""

    def scaled(self, batch: int) -> float | None:
        """Its peak rate for another batch; None where that is too far off to say."""
        share = batch / self.batch
        if not 1 / FAR <= share <= FAR:
            return None
        return self.lr * (share**0.5 if "lamb" in self.optimizer else share)

    def __str__(self) -> str:
        precision = f" in {self.precision}" if self.precision else ""
        return (
            f"{self.start}: {self.model}, {self.optimizer} {self.lr:g} at batch "
            f"{self.batch:,}{precision}; {self.rest} ({self.source})"
        )


FLIP = "FLIP, arXiv 2212.00794; facebookresearch/flip, configs/default.py and README.md"
CLIPA = "CLIPA, arXiv 2305.07017; UCSC-VLAA/CLIPA, clipa_torch/scripts/exp/gpu/vit_b16/"
EVA_CLIP = "EVA-CLIP, arXiv 2303.15389; baaivision/EVA, EVA-CLIP/README.md"
EVA_REST = "weight decay 0.05, heads and temperature 5e-4, warm-up 2,000 updates, clip 5"
DATACOMP = "DataComp, arXiv 2304.14108; mlfoundations/datacomp, scale_configs.py and train.py"

PRESETS: dict[str, Preset] = {
    "flip": Preset(
        model="ViT-B/16 to H/14",
        fits=("vit_base_patch16_*", "vit_large_patch16_*", "vit_huge_patch14_*"),
        start="scratch",
        batch=65_536,
        optimizer="adamw",
        lr=1.024e-3,
        rest="mask 0.5 or 0.75, 32 tokens, betas 0.9 0.95, weight decay 0.2, warm-up 51 M samples",
        source=FLIP,
    ),
    "flip-unmasked": Preset(
        model="ViT-B/16 to H/14, the last 128 M samples",
        fits=("vit_base_patch16_*", "vit_large_patch16_*", "vit_huge_patch14_*"),
        start="pretrained",
        batch=65_536,
        optimizer="adamw",
        lr=1.024e-5,
        rest="no mask",
        source=FLIP,
    ),
    "clipa-b16": Preset(
        model="ViT-B/16 at 112 px",
        fits=("vit_base_patch16_*",),
        start="scratch",
        batch=65_536,
        precision="bf16",
        optimizer="adamw",
        lr=2.048e-3,
        rest="16 tokens, 6 epochs, betas 0.9 0.95, weight decay 0.2",
        source=f"{CLIPA}i50_t16_pretrain.sh",
    ),
    "clipa-b16-tuning": Preset(
        model="ViT-B/16 at full size, the last 131 M samples",
        fits=("vit_base_patch16_*",),
        start="pretrained",
        batch=8_192,
        precision="bf16",
        optimizer="adamw",
        lr=2.56e-5,
        rest="betas 0.9 0.95, weight decay 0.2",
        source=f"{CLIPA}i50_t16_finetune.sh",
    ),
    "clipav2-h14": Preset(
        model="ViT-H/14 at 84 px",
        fits=("vit_huge_patch14_*",),
        start="scratch",
        batch=65_536,
        optimizer="adamw",
        lr=2.048e-3,
        rest="8 tokens, betas 0.9 0.95, weight decay 0.2, warm-up 3,200 updates",
        source="CLIPA-v2, arXiv 2306.15658; UCSC-VLAA/CLIPA, "
        "clipa_jax/configs/model_h/84_8_pre_training.py",
    ),
    "eva02-clip-b16": Preset(
        model="EVA-02 B/16, masked-image weights and CLIP's text tower",
        fits=("eva02_base_*",),
        start="pretrained",
        batch=131_072,
        precision="fp16",
        optimizer="eva-lamb",
        lr=2e-4,
        rest=f"text 2e-5, layer decay 0.75 in both, {EVA_REST}",
        source=EVA_CLIP,
    ),
    "eva02-clip-l14": Preset(
        model="EVA-02 L/14, masked-image weights and CLIP's text tower",
        fits=("eva02_large_*",),
        start="pretrained",
        batch=131_072,
        precision="fp16",
        optimizer="eva-lamb",
        lr=4e-4,
        rest=f"text 4e-5, layer decay 0.85 and 0.75, {EVA_REST}",
        source=EVA_CLIP,
    ),
    "datacomp-b32": Preset(
        model="ViT-B/32, on the pools small and medium",
        fits=("vit_base_patch32_*",),
        start="scratch",
        batch=4_096,
        precision="fp16",
        optimizer="adamw",
        lr=5e-4,
        rest="12.8 or 128 M samples, warm-up 500 updates",
        source=DATACOMP,
    ),
    "fastclip-b16": Preset(
        model="ViT-B/16",
        fits=("vit_base_patch16_*",),
        start="scratch",
        batch=5_120,
        optimizer="adamw",
        lr=3e-4,
        rest="weight decay 0.2, 1.28 B samples",
        source="FastCLIP, arXiv 2407.01445; Optimization-AI/fast_clip, its largest setting",
    ),
    "mobileclip-b": Preset(
        model="ViT-B/16 (MobileCLIP-B), with stored teacher embeddings",
        fits=("vit_base_patch16_*", "vit_base_mci_*"),
        start="scratch",
        batch=8_192,
        precision="fp16",
        optimizer="adamw",
        lr=1e-3,
        rest="beta2 0.95, weight decay 0.2, clip 1",
        source="MobileCLIP, arXiv 2311.17049; apple/ml-mobileclip, "
        "training/configs/run_datacompdr12m.sh",
    ),
    "sail": Preset(
        model="two frozen towers, sigmoid loss",
        start="frozen",
        batch=32_768,
        optimizer="lion",
        lr=1e-5,
        rest="23 M pairs",
        source="SAIL, arXiv 2412.04616; lezhang7/SAIL, README.md and scripts/sail_train.sh",
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
    """Of the presets with the same kind of start and the same optimizer, the one that fits best:
    the same image tower, else any, and of these the nearest batch."""
    image, batch = config.model.image.name, config.batch_size
    alike = [
        (
            not any(fnmatchcase(image, pattern) for pattern in preset.fits),
            max(preset.batch / batch, batch / preset.batch),
            name,
        )
        for name, preset in PRESETS.items()
        if preset.start == beginning(config, stage) and preset.optimizer == config.optim.name
    ]
    if not alike:
        return None
    *_, name = min(alike)
    return name, PRESETS[name]
