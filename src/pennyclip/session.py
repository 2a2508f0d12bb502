"""What a run works with: its rows, and for each stage the optimizer, the batches, the caches."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from pennyclip.caching import check_cacheable
from pennyclip.config import Config, Evaluation, Stage
from pennyclip.data.index import Dataset
from pennyclip.data.loader import Loader
from pennyclip.data.order import I64
from pennyclip.data.tokens import TokenStore
from pennyclip.encoder import make_tokenizer
from pennyclip.errors import RequestError
from pennyclip.features import Progress, Stores, image_features, text_features
from pennyclip.model.clip import CLIP
from pennyclip.model.freezing import evaluating, freeze
from pennyclip.model.masking import keep_indices
from pennyclip.optim import OPTIMIZERS
from pennyclip.optim.groups import parameter_groups
from pennyclip.optim.state import State, write_state
from pennyclip.stages import Plan
from pennyclip.weights.build import text_folder


@dataclass(frozen=True)
class Rows:
    """The dataset as a run uses it."""

    dataset: Dataset
    train: I64
    evaluation: I64 | None
    """The rows that choose the best checkpoint; None where the dataset has no such split."""
    tokens: TokenStore
    text_folder: Path | None
    notes: list[str]
    """What people should know about it before the run."""


def open_rows(config: Config) -> Rows:
    """Open the dataset and the token ids of its captions.

    Raises:
        RequestError: no dataset was given, it is unfinished, or it lacks the subset.
    """
    if not config.data:
        raise RequestError("no dataset was given: add --data DATASET")
    dataset = Dataset(config.data)
    split = config.evaluate.split
    evaluation = None
    if split in dataset.subsets() or split != Evaluation.split:
        evaluation = dataset.subset(split)
    notes = []
    if evaluation is None or len(evaluation) < 2:
        evaluation = None  # nothing to tell apart
        notes.append(
            f"warning: no split '{split}' of at least 2 rows, so nothing chooses the best "
            "checkpoint: the last one counts. Prepare more pairs, or a larger --dev-share."
        )
    train = dataset.subset(config.subset)
    _, sizes = np.unique(dataset.rows["group"][train], return_counts=True)
    if len(sizes) == 1 and len(train) > 1:
        raise RequestError(
            f"all {len(train)} rows of '{config.subset}' show the same (one picture or one "
            "caption), so there is nothing to tell apart. Give captions that differ."
        )
    if sizes.max(initial=0) > len(train) / 2:
        notes.append(
            f"warning: {sizes.max():,} of {len(train):,} rows share a picture or a caption, and "
            "are never each other's negatives: a poor start for a contrastive loss."
        )
    folder = text_folder(config.model)
    return Rows(
        dataset=dataset,
        train=train,
        evaluation=evaluation,
        tokens=TokenStore.open(dataset, make_tokenizer(config.model, folder)),
        text_folder=folder,
        notes=notes,
    )


def check_stages(model: CLIP, config: Config) -> None:
    """Find out before the first update what would fail in a later stage.

    Raises:
        RequestError: a stage asks for layers, a mask or an image size that the towers don't have,
            or there is no such optimizer.
    """
    if config.optim.name not in OPTIMIZERS:
        raise RequestError(f"optim.name '{config.optim.name}': known are {', '.join(OPTIMIZERS)}")
    for stage in config.stages:
        freeze(model, stage.image_layers, stage.text_layers)
        model.visual.check_image_size(stage.image_size or config.model.image.image_size)
        if stage.mask_ratio > 0:
            model.visual.patches()
            if stage.image_layers == "none":
                raise RequestError(
                    "mask_ratio is set, and the image trunk is frozen: its features are computed "
                    "once, from whole images. Set mask_ratio to 0, or let image layers learn."
                )


@dataclass(frozen=True)
class Setup:
    """What one stage works with."""

    optimizer: torch.optim.Optimizer
    loader: Loader
    stores: Stores
    mask_ratio: float
    patches: int
    """Patches of an image, where some are dropped."""

    def keep(self, step: int, device: torch.device) -> Int64[Tensor, "B K"] | None:
        """The patches that each image of update `step` keeps; None: all."""
        if self.mask_ratio == 0:
            return None
        return keep_indices(
            self.loader.batch_size,
            self.patches,
            self.mask_ratio,
            seed=self.loader.seed,
            step=step,
            device=device,
        )


def enter_stage(
    model: CLIP, config: Config, stage: Stage, rows: Rows, state: State, progress: Progress
) -> Setup:
    """Freeze what this stage freezes, regroup what learns, and set up its batches.

    A wholly frozen trunk is run once over the dataset; its stored features replace its input.

    Args:
        state: optimizer state by parameter name; parameters that go on learning keep theirs.
    """
    model.visual.set_image_size(stage.image_size or config.model.image.image_size)
    freeze(model, stage.image_layers, stage.text_layers)
    check_cacheable(model, config)
    patches = model.visual.patches() if stage.mask_ratio > 0 else 0
    trunks = {
        "image": [[f"visual.{n}" for n in names] for names in model.visual.layers()],
        "text": [[f"text.{n}" for n in names] for names in model.text.layers()],
    }
    groups = parameter_groups(model.named_parameters(), trunks, config.optim)
    optimizer = OPTIMIZERS[config.optim.name](groups, config.optim)
    write_state(optimizer, model, state)

    image_size, length = model.visual.image_size, model.text.context_length
    chunk = config.evaluate.chunk
    image_store = text_store = None
    with evaluating(model):
        if stage.image_layers == "none":
            image_store = image_features(model, rows.dataset, image_size, chunk, progress)
        if stage.text_layers == "none":
            text_store = text_features(model, rows.dataset, rows.tokens, length, chunk, progress)
    loader = Loader(
        dataset=rows.dataset,
        rows=rows.train,
        tokens=rows.tokens,
        batch_size=config.batch_size,
        seed=config.seed,
        image_size=image_size,
        text_length=min(stage.text_length or length, length),
        crop_scale=config.augment.crop_scale if image_store is None else (1.0, 1.0),
        workers=config.workers,
        image_features=image_store,
        text_features=text_store,
    )
    return Setup(optimizer, loader, Stores(image_store, text_store), stage.mask_ratio, patches)


def table(setup: Setup, plan: Plan, number: int) -> str:
    """What a stage does, and what learns in it with which rates: shown before its first update."""
    stage, loader = plan.stages[number], setup.loader
    lines = [
        f"stage {number + 1} of {len(plan.stages)}, to update {plan.ends[number]} of {plan.steps} "
        f"(warm-up {plan.warmup}): images {loader.image_size} px, mask {stage.mask_ratio:g}, text "
        f"up to {loader.text_length} tokens"
    ]
    if loader.image_features is not None:
        lines.append("  the image trunk is frozen: its features are stored, from uncropped images")
    for group in setup.optimizer.param_groups:
        count = sum(p.numel() for p in group["params"])
        lines.append(
            f"  {group['name']:<20} {count:>12,} parameters  peak rate "
            f"{group['base_lr'] * stage.lr_factor:.2e}  weight decay {group['weight_decay']:g}"
        )
    return "\n".join(lines)
