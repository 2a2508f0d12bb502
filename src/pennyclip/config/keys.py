"""What a run is: frozen dataclasses. Imports no torch."""

from dataclasses import dataclass, field
from typing import Literal

Depth = Literal["all", "none"] | int | tuple[str, ...]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu"]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "pure-bf16", "pure-fp16", "auto"]


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
    logit_bias: bool | None = None
    """Whether the model owns a bias of the logits; unset: as its loss needs (sigmoid: yes)."""


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
    mask_ratio: float | tuple[float, float] = 0.0
    """Share of the image patches that is dropped in training (FLIP, Li et al. 2023), below 1; two
    numbers: from the first to the second, in a straight line over the stage."""
    image_layers: Depth = "all"
    """What learns of the image tower's trunk: all, none, the last N layer groups, or the parameters
    that match patterns: ["trunk.blocks.1?.*", "trunk.norm.*"]."""
    text_layers: Depth = "all"
    """What learns of the text tower's trunk: all, none, the last N layers, or patterns."""
    lr_factor: float = 1.0
    """Multiplies every learning rate during this stage."""
    warmup_steps: int | None = None
    """Updates of warm-up with which this stage begins a course of the rates of its own (FLIP's and
    CLIPA's ends have one); unset: it goes on along the course before it."""
    new_lr_factor: float = 1.0
    """Multiplies the rates of what learns in this stage and in none before, during this stage."""

    @property
    def mask_range(self) -> tuple[float, float]:
        """Share of the patches that is dropped in its first and in its last update."""
        return self.mask_ratio if isinstance(self.mask_ratio, tuple) else (self.mask_ratio,) * 2

    @property
    def masks(self) -> bool:
        """Whether it ever drops patches."""
        return any(self.mask_range)

    def length(self, epoch: int) -> float:
        """Samples that it sees, where an epoch has so many. Its batches are whole: a few more."""
        return (self.epochs or 0) * epoch if self.samples is None else self.samples


@dataclass(frozen=True, kw_only=True)
class Augment:
    """What is done to a training sample before it is seen, drawn by (seed, epoch, row)."""

    crop_scale: tuple[float, float] = (1.0, 1.0)
    """Range of the area share that a random resized crop keeps; (1, 1): the centre crop."""
    flip: float = 0.0
    """Share of the pictures that is mirrored. Off: mirrored text reads wrongly, "left" is right."""
    color_jitter: float = 0.0
    """Brightness, contrast and saturation are each multiplied by a factor that far from 1."""
    word_dropout: float = 0.0
    """Share of a caption's words that is dropped; one always stays."""
    synonyms: float = 0.0
    """Share of a caption's words that is replaced, where WordNet knows a synonym (English)."""
    wordnet: str = ""
    """Folder with WordNet's database files, for `synonyms`."""

    @property
    def changes_images(self) -> bool:
        return self.crop_scale != (1.0, 1.0) or self.flip > 0 or self.color_jitter > 0

    @property
    def changes_captions(self) -> bool:
        return self.word_dropout > 0 or self.synonyms > 0


@dataclass(frozen=True, kw_only=True)
class PartRates:
    """What one part of the model learns with; unset: as the optimizer."""

    lr: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    warmup_steps: int | None = None
    """Updates of linear warm-up of this part's rates; unset: the run's."""


@dataclass(frozen=True, kw_only=True)
class TrunkRates(PartRates):
    """What a trunk learns with."""

    layer_decay: float = 1.0
    """Rate factor from one layer to the one below it (Clark et al. 2020, ELECTRA)."""


@dataclass(frozen=True, kw_only=True)
class PatternRates:
    """What the parameters whose names match a pattern learn with; unset: as their part."""

    match: str
    """Of names in the whole model; * stands for anything: "visual.trunk.patch_embed.*"."""
    lr: float | None = None
    """Peak rate, without layer decay."""
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None


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
    """Largest norm of the true (unscaled) gradient over all parameters; inf: it is not clipped."""
    stochastic_rounding: bool = False
    """In pure-bf16: no float32 masters; weights are rounded up or down by chance, to their mean."""
    lr_scale: float = 1.0
    """Multiplies every rate if the run computes in 16 bits. Off: 16 bits alone call for no other
    rate; where gradients suffer from them, a lower one may help."""
    warmup_steps: int | None = None
    """Updates of linear warm-up; unset: `warmup_share` of the run."""
    warmup_share: float = 0.05
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """The course of the rates after the warm-up: see `optim/schedules.py`."""
    min_lr_share: float = 0.0
    """The rate at the end, as a share of the peak."""
    cooldown_share: float = 0.2
    """The last part of a run under `wsd`, in which the rate falls (Haegele et al. 2024)."""
    cooldown_from: int | None = None
    """The update at which it begins; unset: as late as its share allows. A running run's is set by
    `pennyclip train --resume RUN --cooldown`."""
    image: TrunkRates = field(default_factory=TrunkRates)
    text: TrunkRates = field(default_factory=TrunkRates)
    heads: PartRates = field(default_factory=PartRates)
    temperature: PartRates = field(default_factory=PartRates)
    """Of the logits' scale and bias."""
    patterns: tuple[PatternRates, ...] = ()
    """For single parameters, the first that matches counts."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Adapters in the linear layers of a trunk, which itself stays as it is (Hu et al. 2021)."""

    rank: int | None = None
    """Of each adapter; unset: no adapters."""
    alpha: float | None = None
    """What an adapter adds is multiplied by alpha / rank; unset: by 1, as in peft's defaults."""
    targets: tuple[str, ...] = ()
    """Which layers, by the ends of their names: "query", "attn.qkv"; unset: every linear layer."""
    dropout: float = 0.0
    """Share of an adapter's input that is dropped in training."""


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """The adapters of either tower; merged into the weights in checkpoints and exports."""

    image: Lora = field(default_factory=Lora)
    text: Lora = field(default_factory=Lora)


@dataclass(frozen=True, kw_only=True)
class ModulePrecision:
    """What the modules whose names match a pattern compute in, with all that is inside them."""

    modules: str
    """* stands for anything: "visual.trunk.blocks.0.*"."""
    precision: Literal["fp32", "bf16", "fp16"]


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
    """Overflows in a row after which the run is rolled back. Chosen: 16 bring the factor from
    `start` to `floor`."""


@dataclass(frozen=True, kw_only=True)
class Stability:
    """What is done about a run that is not well: see `training/watch`."""

    rollbacks: int = 3
    """How often a run may go back to an earlier checkpoint before it is stopped; 0: never. After
    2,000 updates without (`stability.REFILL`) it may as often again."""
    rate_factor: float = 0.3
    """Multiplies every rate where the rate may be to blame. Chosen: half a power of ten."""
    patience: int = 5
    """Batches in a row whose loss or gradient is not finite, after which the run is rolled back; in
    fp16 it is `loss_scaling.patience`. Chosen: one is an accident."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """Blocks whose activations are computed again in the backward pass, to save memory."""

    image: Literal["all", "none"] | int = "none"
    """All blocks of the image trunk, none, or the first N."""
    text: Literal["all", "none"] | int = "none"
    """The same of the text trunk."""


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """When the run is saved, and how many saves are kept."""

    every_steps: int | None = None
    every_minutes: float = 10.0
    keep: int = 2
    """Newest checkpoints kept. The best one by the development split is kept besides; and, for
    `doctor --replay`, those before the run's first trouble, its latest, and what may become one."""


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
    init: str = ""
    """A run or a checkpoint whose weights this run starts from, in place of the towers' own."""
    stages: tuple[Stage, ...]
    batch_size: int = 256
    """Pairs in one contrastive batch; every pair's negatives are the rest of it."""
    micro_batch: int | None = None
    """Pairs that go through the towers at a time: what fits into memory; unset: the batch."""
    seed: int = 0
    precision: Precision = "fp32"
    """Of the towers. auto: bf16 where the hardware has it, else fp16 on GPUs and fp32 on CPUs."""
    precision_of: tuple[ModulePrecision, ...] = ()
    """Modules with a precision of their own; the first that matches counts."""
    loss: str = "infonce"
    compile: bool = False
    """Try torch.compile on the first updates of each stage, for the towers and for LAMB's step, and
    keep either where it is faster. Which way it goes depends on the machine; apart from rounding,
    the result does not."""
    ema_decay: float | None = None
    """Of an average of the weights, evaluated and saved beside them; unset: none is kept."""
    workers: int = 2
    """Threads that read and decode images; 0: the training thread does it."""
    weights: tuple[float, ...] = ()
    """How often an epoch shows the rows of each of the dataset's sources, in the order in which
    they were prepared: 2 0.5 is twice and every other; unset: all once."""
    shuffle_window: int | None = None
    """Rows are shuffled among so many neighbours, over shuffled shards, for storage that is slow at
    random reads; unset: over the whole epoch."""
    log_every: int = 10
    """Updates between two lines of metrics."""
    optim: Optim = field(default_factory=Optim)
    lora: Adapters = field(default_factory=Adapters)
    loss_scaling: LossScaling = field(default_factory=LossScaling)
    stability: Stability = field(default_factory=Stability)
    activation_checkpointing: ActivationCheckpointing = field(
        default_factory=ActivationCheckpointing
    )
    augment: Augment = field(default_factory=Augment)
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    evaluate: Evaluation = field(default_factory=Evaluation)
