"""What a run is: frozen dataclasses. Imports no torch."""

from dataclasses import dataclass, field
from typing import Literal

Depth = Literal["all", "none"] | int
Activation = Literal["gelu", "gelu_tanh", "quick_gelu"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "auto"]


@dataclass(frozen=True, kw_only=True)
class ImageTower:
    """A timm model and the head that projects its pooled features into the embedding space."""

    name: str
    """Name of a timm model."""
    image_size: int = 224
    """Side of the square input in pixels, in stages that set no other."""
    head: Literal["linear", "mlp", "none"] = "linear"
    """Linear, open_clip's two-layer MLP, or none: pooled features are the embedding (SigLIP)."""
    head_bias: bool = False
    """Whether the head's last layer adds a bias, as EVA-CLIP's does."""
    pool: Literal["token", "avg", "map"] | None = None
    """Class token, mean of the patches, or attention; unset: as the weights say, else timm's."""
    activation: Activation | None = None
    """Of the MLPs; unset: as the weights say, else timm's for this model."""
    weights: str | None = None
    """A file, a folder, `package:NAME` (came inside a Python package) or `hub:org/name`."""
    drop_keys: tuple[str, ...] = ()
    """Keys of the weights file that may be left out; * stands for anything: "head.*"."""
    new_keys: tuple[str, ...] = ()
    """Parameters of the tower that may start from random although weights are loaded."""
    resample: Literal["timm", "eva"] = "timm"
    """How position embeddings and patch kernels change size: see `weights/resample.py`."""
    mean: tuple[float, float, float] | None = None
    """Mean of the input per channel, of 0..1; unset: as the weights say, else timm's."""
    std: tuple[float, float, float] | None = None
    """Its standard deviation per channel, of 0..1; unset: as the weights say, else timm's."""


@dataclass(frozen=True, kw_only=True)
class ClipText:
    """CLIP's own causal transformer over byte-pair tokens (Radford et al. 2021, section 2.4)."""

    kind: Literal["clip"] = "clip"
    family: Literal["clip", "siglip"] = "clip"
    """SigLIP's tower (Zhai et al. 2023) sees both ways and is fed padding up to its full length."""
    width: int = 512
    layers: int = 12
    heads: int = 8
    context_length: int = 77
    """Longest caption in tokens, start and end tokens included."""
    vocab_size: int = 49408
    activation: Activation | None = None
    """Of the MLPs; unset: as the weights say, else gelu."""
    pad_id: int | None = None
    """What SigLIP's captions are filled up with; unset: as the weights say, else 1 (SigLIP's)."""
    tokenizer: str | None = None
    """A folder with tokenizer.json, `package:NAME` or `hub:org/name`; unset: CLIP's own."""
    weights: str | None = None
    """A file, a folder or `hub:org/name` to take this tower from."""
    drop_keys: tuple[str, ...] = ()
    """Keys of the weights file that may be left out; * stands for anything."""
    new_keys: tuple[str, ...] = ()
    """Parameters of the tower that may start from random although weights are loaded."""


@dataclass(frozen=True, kw_only=True)
class TransformersText:
    """A transformers encoder, its pooled output projected into the embedding space."""

    kind: Literal["transformers"] = "transformers"
    name: str
    """A folder with config.json and tokenizer.json, `package:NAME` or `hub:org/name`."""
    pool: Literal["mean", "cls"] = "mean"
    """Mean over the real tokens, or the first token's state."""
    head: Literal["linear", "mlp"] = "linear"
    context_length: int = 77
    pretrained: bool = True
    """Start from the weights that lie in the folder; otherwise from random ones."""
    weights: str | None = None
    """A CLIP's file, folder or `hub:org/name` to take this tower from, instead of the folder's."""
    drop_keys: tuple[str, ...] = ()
    """Keys of the weights file that may be left out; * stands for anything."""
    new_keys: tuple[str, ...] = ()
    """Parameters of the tower that may start from random although weights are loaded."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Two towers and the embedding space that they share."""

    image: ImageTower
    text: ClipText | TransformersText = field(default_factory=ClipText)
    embed_dim: int = 512
    """Width of the shared embedding space."""
    head_dropout: float = 0.0
    """Share of the trunks' features that is dropped before the heads in training."""
    logit_bias: bool = False
    """Whether the model owns a bias of the logits; set by the loss (sigmoid)."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One part of a run. A run is a list of stages."""

    epochs: float | None = None
    """Length in passes over the training rows; give this or `samples`."""
    samples: int | None = None
    """Length in samples seen."""
    image_size: int | None = None
    """Image side in pixels in this stage, its evaluations and checkpoints; unset: the tower's."""
    text_length: int | None = None
    """Longest caption in tokens; unset: the tower's context length."""
    mask_ratio: float = 0.0
    """Share of the image patches that is dropped in training (FLIP, Li et al. 2023), below 1."""
    image_layers: Depth = "all"
    """What learns of the image tower's trunk: all, none, or the last N layer groups."""
    text_layers: Depth = "all"
    """What learns of the text tower's trunk: all, none, or the last N layers."""
    lr_factor: float = 1.0
    """Multiplies every learning rate during this stage."""


@dataclass(frozen=True, kw_only=True)
class Augment:
    """What is done to a training sample before it is seen, drawn by (seed, epoch, row)."""

    crop_scale: tuple[float, float] = (1.0, 1.0)
    """Range of the area share that a random resized crop keeps; (1, 1): the centre crop."""


@dataclass(frozen=True, kw_only=True)
class PartRates:
    """What one part of the model (a trunk, or the heads) learns with; unset: as the optimizer."""

    lr: float | None = None
    weight_decay: float | None = None
    layer_decay: float = 1.0
    """Rate factor from one layer to the one below it (Clark et al. 2020, ELECTRA)."""


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer, its rates, and their course over the run."""

    name: str = "adamw"
    lr: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.98)
    """CLIP's for ViTs (Radford et al. 2021, table 18)."""
    eps: float = 1e-6
    """CLIP's for ViTs (Radford et al. 2021, table 18)."""
    weight_decay: float = 0.2
    """Not applied to norms, biases, class token, position embeddings and temperature."""
    clip_norm: float = 1.0
    """Largest norm of the true (unscaled) gradient over all parameters."""
    warmup_steps: int | None = None
    """Updates of linear warm-up; unset: `warmup_share` of the run."""
    warmup_share: float = 0.05
    min_lr_share: float = 0.0
    """The rate at the end of the cosine, as a share of the peak."""
    image: PartRates = field(default_factory=PartRates)
    text: PartRates = field(default_factory=PartRates)
    heads: PartRates = field(default_factory=PartRates)


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """How the loss is scaled in fp16, so that small gradients do not become 0."""

    start: float = 65536.0
    """The factor at first. This and the next three are torch's own."""
    growth: float = 2.0
    """Multiplies it after `interval` updates without an overflow."""
    backoff: float = 0.5
    """Multiplies it after a batch that overflowed; no update is made from that."""
    interval: int = 2000
    floor: float = 1.0
    """The factor never falls below."""
    patience: int = 17
    """Overflows in a row that stop the run. Chosen: 16 bring the factor from `start` to `floor`."""


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """When the run is saved, and how many saves are kept."""

    every_steps: int | None = None
    every_minutes: float = 10.0
    keep: int = 2
    """Newest checkpoints kept; the best one by the development split is kept besides."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Retrieval on a held-out split during the run; the best checkpoint is chosen by it."""

    split: str = "dev"
    """Subset of the dataset that chooses; a report's own numbers come from another."""
    every_epochs: float = 1.0
    chunk: int = 32
    """Images or captions encoded at a time. On CPUs, small chunks stay in the cache."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides a run, apart from where it writes."""

    data: str = ""
    """Folder of the prepared dataset; a recipe leaves it to the command line."""
    subset: str = "train"
    """Which of the dataset's rows are trained on."""
    model: Model
    stages: tuple[Stage, ...]
    batch_size: int = 256
    """Pairs in one contrastive batch; every pair's negatives are the rest of it."""
    micro_batch: int | None = None
    """Pairs that go through the towers at a time: what fits into memory; unset: the batch."""
    seed: int = 0
    precision: Precision = "fp32"
    """Of the towers. auto: bf16 where the hardware has it, else fp16 on GPUs and fp32 on CPUs."""
    loss: str = "infonce"
    workers: int = 2
    """Threads that read and decode images; 0: the training thread does it."""
    log_every: int = 10
    """Updates between two lines of metrics."""
    optim: Optim = field(default_factory=Optim)
    loss_scaling: LossScaling = field(default_factory=LossScaling)
    augment: Augment = field(default_factory=Augment)
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    evaluate: Evaluation = field(default_factory=Evaluation)
