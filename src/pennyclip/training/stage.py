"""What a run works with: its rows, and for each stage the optimizer, the batches, the caches."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import Config, Evaluation
from pennyclip.data.captions import sample, token_notes
from pennyclip.data.index import Dataset
from pennyclip.data.loader import Loader
from pennyclip.data.order import I64, Mixture, mixture
from pennyclip.data.synonyms import Synonyms
from pennyclip.data.text import Tokenizer
from pennyclip.data.tokens import TokenStore
from pennyclip.evaluation.encoder import make_tokenizer
from pennyclip.evaluation.features import Progress, Stores
from pennyclip.model.clip import CLIP
from pennyclip.model.freezing import freeze
from pennyclip.model.masking import keep_indices
from pennyclip.optim import OPTIMIZERS
from pennyclip.optim.groups import parameter_groups
from pennyclip.optim.state import State, write_state
from pennyclip.training.frozen import store_frozen
from pennyclip.training.plan import Plan
from pennyclip.training.telemetry.gradients import LayerGradients
from pennyclip.training.update.caching import check_cacheable
from pennyclip.weights.build import text_folder, text_weights


@dataclass(frozen=True)
class Rows:
    """The dataset as a run uses it."""

    dataset: Dataset
    train: I64
    evaluation: I64 | None
    """The rows that choose the best checkpoint; None where the dataset has no such split."""
    tokens: TokenStore
    tokenizer: Tokenizer
    synonyms: Synonyms | None
    text_folder: Path | None
    mixture: Mixture | None
    """The order of training, where sources have weights."""
    notes: list[str]
    """What people should know about it before the run."""

    @property
    def epoch(self) -> int:
        """Samples of an epoch."""
        return len(self.train) if self.mixture is None else self.mixture.size


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
    tokenizer = make_tokenizer(config.model, folder)
    tokens = TokenStore.open(dataset, tokenizer)
    length = config.model.text.context_length
    notes += token_notes(tokens, tokenizer, length, sample(dataset, train))
    return Rows(
        dataset=dataset,
        train=train,
        evaluation=evaluation,
        tokens=tokens,
        tokenizer=tokenizer,
        synonyms=Synonyms(config.augment.wordnet) if config.augment.synonyms else None,
        text_folder=folder,
        mixture=_mixture(config, dataset, train) if config.weights else None,
        notes=notes,
    )


def _mixture(config: Config, dataset: Dataset, train: I64) -> Mixture:
    """How the training rows of each source are mixed.

    Raises:
        RequestError: the weights are not one a source, or make no sense.
    """
    sources = dataset.meta.get("sources", [])
    if len(config.weights) != len(sources):
        names = "".join(f"\n  {source['path']} ({source['kind']})" for source in sources)
        raise RequestError(
            f"weights has {len(config.weights)} numbers, expected one for each of the "
            f"{len(sources)} sources of {config.data}:{names}"
        )
    if config.shuffle_window is not None:
        raise RequestError(
            "weights and shuffle_window can't be combined: several sources are read at a time, so "
            "nothing stays in one window. Leave one of them out."
        )
    if not all(0 <= weight < 1000 for weight in config.weights):
        raise RequestError(f"weights = {config.weights}: expected numbers from 0 to 1000")
    ends = np.searchsorted(train, [source["rows"][1] for source in sources])
    mixed = mixture(config.seed, np.diff(ends, prepend=0), config.weights)
    if mixed.size == 0:
        raise RequestError(f"weights = {config.weights} leave nothing to train on.")
    return mixed


def check_stages(model: CLIP, config: Config) -> None:
    """Find out before the first update what would fail in a later stage.

    Raises:
        RequestError: a stage asks for layers, a mask or an image size that the towers don't have,
            or there is no such optimizer.
    """
    if config.optim.name not in OPTIMIZERS:
        raise RequestError(f"optim.name '{config.optim.name}': known are {', '.join(OPTIMIZERS)}")
    _check_adapters(config)
    for stage in config.stages:
        freeze(model, stage.image_layers, stage.text_layers)
        model.visual.check_image_size(stage.image_size or config.model.image.image_size)
        if stage.text_length is not None and stage.text_length > model.text.context_length:
            raise RequestError(
                f"text_length = {stage.text_length} is longer than the text tower's "
                f"{model.text.context_length} places. Lower it, or raise model.text.context_length."
            )
        check_cacheable(model, config)
        parameter_groups(model.named_parameters(), _trunks(model), config.optim)
        if stage.masks:
            model.visual.patches()
            if stage.image_layers == "none":
                raise RequestError(
                    "mask_ratio is set, and the image trunk is frozen: its features are computed "
                    "once, from whole images. Set mask_ratio to 0, or let image layers learn."
                )


def _check_adapters(config: Config) -> None:
    """Refuse adapters that could never learn, or that sit in a trunk that can do nothing."""
    for tower, start, depths in (
        ("image", config.model.image.weights, {s.image_layers for s in config.stages}),
        ("text", text_weights(config.model), {s.text_layers for s in config.stages}),
    ):
        if getattr(config.lora, tower).rank is None:
            continue
        if depths == {"none"}:
            raise RequestError(
                f"lora.{tower} would have no effect: the {tower} trunk is frozen in every stage, "
                f"adapters too. Set {tower}_layers of a stage to all, or leave lora.{tower} out."
            )
        if start is None and not config.init:
            raise RequestError(
                f"lora.{tower}: the {tower} trunk starts from random weights, and with adapters it "
                f"stays there. Set model.{tower}.weights, or leave lora.{tower} out."
            )


@dataclass(frozen=True)
class Setup:
    """What one stage works with."""

    optimizer: torch.optim.Optimizer
    loader: Loader
    stores: Stores
    stored: list[str]
    """What people are told of them, a line a tower."""
    patches: int
    """Patches of an image, where some are dropped."""
    layers: LayerGradients
    """Of what learns."""

    def keep(self, ratio: float, step: int, device: torch.device) -> Int64[Tensor, "B K"] | None:
        """The patches that each image of update `step` keeps if it drops a share; None: all."""
        if ratio == 0:
            return None
        return keep_indices(
            self.loader.batch_size,
            self.patches,
            ratio,
            seed=self.loader.seed,
            step=step,
            device=device,
        )


def enter_stage(
    model: CLIP, config: Config, number: int, rows: Rows, state: State, progress: Progress
) -> Setup:
    """Freeze what a stage freezes, regroup what learns, and set up its batches.

    Frozen first layers are run once over the dataset, where that is correct: see `frozen.py`.

    Args:
        number: of the stage.
        state: optimizer state by parameter name; parameters that go on learning keep theirs.
    """
    stage = config.stages[number]
    learned = _learned_before(model, config, number)
    model.visual.set_image_size(stage.image_size or config.model.image.image_size)
    freeze(model, stage.image_layers, stage.text_layers)
    patches = model.visual.patches() if stage.masks else 0
    named = dict(model.named_parameters())
    new = named.keys() - learned if number else ()
    groups = parameter_groups(named.items(), _trunks(model), config.optim, new, stage.new_lr_factor)
    optimizer = OPTIMIZERS[config.optim.name](groups, config.optim)
    write_state(optimizer, model, state)

    length = model.text.context_length
    stores, stored = store_frozen(
        model, config, stage, rows.dataset, rows.tokens, stage.length(rows.epoch), progress
    )
    loader = Loader(
        dataset=rows.dataset,
        rows=rows.train,
        tokens=rows.tokens,
        tokenizer=rows.tokenizer,
        batch_size=config.batch_size,
        seed=config.seed,
        image_size=model.visual.image_size,
        text_length=min(stage.text_length or length, length),
        augment=config.augment,
        synonyms=rows.synonyms,
        workers=config.workers,
        shuffle_window=config.shuffle_window,
        mixture=rows.mixture,
        pin_memory=model.logit_scale.is_cuda,
        image_store=stores.image,
        text_store=stores.text,
    )
    return Setup(optimizer, loader, stores, stored, patches, LayerGradients(model, optimizer))


def _learned_before(model: CLIP, config: Config, number: int) -> set[str]:
    """Names of the parameters that learned in a stage before."""
    learned = set()
    for stage in config.stages[:number]:
        freeze(model, stage.image_layers, stage.text_layers)
        learned |= {name for name, p in model.named_parameters() if p.requires_grad}
    return learned


def _trunks(model: CLIP) -> dict[str, list[list[str]]]:
    """Parameter names of each trunk by layer, the input first."""
    return {
        "image": [[f"visual.{n}" for n in names] for names in model.visual.layers()],
        "text": [[f"text.{n}" for n in names] for names in model.text.layers()],
    }


def table(setup: Setup, plan: Plan, number: int, *, groups: bool = True) -> str:
    """What a stage does, and what learns in it with which rates: shown before its first update.

    Args:
        groups: list the rates; they are the same after a resume.
    """
    stage, loader = plan.stages[number], setup.loader
    masks = dict.fromkeys(f"{ratio:g}" for ratio in stage.mask_range)
    lines = [
        f"stage {number + 1} of {len(plan.stages)}, to update {plan.ends[number]} of {plan.steps} "
        f"(warm-up {plan.warmup}): images {loader.image_size} px, mask {' to '.join(masks)}, text "
        f"up to {loader.text_length} tokens"
    ]
    lines += setup.stored
    betas = setup.optimizer.defaults["betas"]
    for group in setup.optimizer.param_groups if groups else ():
        count = sum(p.numel() for p in group["params"])
        lines.append(
            f"  {group['name']:<20} {count:>12,} {'parameters' if count > 1 else 'parameter ':}  "
            f"peak rate {group['base_lr'] * stage.lr_factor * plan.lr_scale:.2e}  "
            f"weight decay {group['weight_decay']:g}"
            + f"  betas {group['betas']}" * (group["betas"] != betas)
            + f"  warm-up {group['warmup']}" * (group["warmup"] is not None)
        )
    return "\n".join(lines)
