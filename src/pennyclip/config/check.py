"""Values that cannot be, found before anything is opened: what each key may be by itself."""

import math

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import Config, PartRates, Stage

PARTS = ("image", "text", "heads", "temperature")
"""Of a model, each with rates of its own."""


def check_config(config: Config) -> None:
    """
    Raises:
        RequestError: a value under which a run would do nothing, or the opposite of learning.
    """
    batch = config.batch_size
    if batch < 2:
        raise RequestError(
            f"batch_size = {batch}: a contrastive loss compares at least 2 pairs; with 1 it is 0 "
            "whatever the model does. Raise batch_size."
        )
    for name, value in (
        ("log_every", config.log_every),
        ("checkpoint.keep", config.checkpoint.keep),
        ("evaluate.chunk", config.evaluate.chunk),
    ):
        if value < 1:
            raise RequestError(f"{name} = {value}: expected at least 1")
    if not 0 <= config.optim.warmup_share < 1:
        raise RequestError(
            f"optim.warmup_share = {config.optim.warmup_share:g}: expected a share of the run, at "
            "least 0 and below 1"
        )
    if not config.optim.clip_norm > 0:
        raise RequestError(
            f"optim.clip_norm = {config.optim.clip_norm:g}: expected a norm above 0; inf switches "
            "clipping off"
        )
    if not (config.optim.lr > 0 and math.isfinite(config.optim.lr)):
        raise RequestError(f"optim.lr = {config.optim.lr}: expected a finite number above 0")
    if config.ema_decay is not None and not 0 < config.ema_decay < 1:
        raise RequestError(
            f"ema_decay = {config.ema_decay:g}: expected a number between 0 and 1, such as 0.999, "
            "or none at all"
        )
    every = config.evaluate.every_epochs
    if not (every > 0 and math.isfinite(every)):
        raise RequestError(f"evaluate.every_epochs = {every:g}: expected a finite number above 0")
    stability = config.stability
    for wrong, rule in (
        (stability.rollbacks < 0, "rollbacks must be at least 0"),
        (not 0 < stability.rate_factor < 1, "rate_factor must lie between 0 and 1"),
        (stability.patience < 1, "patience must be at least 1 batch"),
    ):
        if wrong:
            raise RequestError(f"stability.{rule}; found {stability}")
    check_augment(config)
    _check_optim(config)
    for number, stage in enumerate(config.stages):
        _check_stage(stage, f"stages[{number}]", first=number == 0)


def _check_optim(config: Config) -> None:
    optim = config.optim
    _check_betas("optim.betas", optim.betas)
    if optim.name == "nvlamb" and optim.clip_norm > 1:
        raise RequestError(
            f"optim.clip_norm = {optim.clip_norm:g} would have no effect: nvlamb itself divides "
            "gradients by their norm where that exceeds 1. Set at most 1, or optim.name = lamb."
        )
    for name, value in (("eps", optim.eps), ("lr_scale", optim.lr_scale)):
        if not (value > 0 and math.isfinite(value)):
            raise RequestError(f"optim.{name} = {value:g}: expected a finite number above 0")
    if not 0 <= optim.min_lr_share <= 1:
        raise RequestError(
            f"optim.min_lr_share = {optim.min_lr_share:g}: expected a share of the peak, 0 to 1"
        )
    if not (optim.weight_decay >= 0 and math.isfinite(optim.weight_decay)):
        raise RequestError(f"optim.weight_decay = {optim.weight_decay:g}: expected at least 0")
    rates = {f"optim.{part}": getattr(optim, part) for part in PARTS}
    rates |= {f"optim.patterns[{i}]": pattern for i, pattern in enumerate(optim.patterns)}
    for where, own in rates.items():
        if own.lr is not None and not (own.lr >= 0 and math.isfinite(own.lr)):
            raise RequestError(f"{where}.lr = {own.lr:g}: expected a finite number, at least 0")
        if own.weight_decay is not None and not own.weight_decay >= 0:
            raise RequestError(f"{where}.weight_decay = {own.weight_decay:g}: expected at least 0")
        if own.betas is not None:
            _check_betas(f"{where}.betas", own.betas)
        if isinstance(own, PartRates) and own.warmup_steps is not None and own.warmup_steps < 0:
            raise RequestError(f"{where}.warmup_steps = {own.warmup_steps}: expected at least 0")
    for part in ("image", "text"):
        decay = getattr(optim, part).layer_decay
        if not 0 < decay <= 1:
            raise RequestError(
                f"optim.{part}.layer_decay = {decay:g}: expected a factor above 0 and at most 1"
            )


def _check_betas(where: str, betas: tuple[float, float]) -> None:
    if not all(0 <= beta < 1 for beta in betas):
        raise RequestError(
            f"{where} = {betas[0]:g} {betas[1]:g}: expected two numbers, at least 0 and below 1"
        )


def _check_stage(stage: Stage, where: str, first: bool) -> None:
    if stage.text_length is not None and stage.text_layers == "none":
        raise RequestError(
            f"{where}: text_length would have no effect: the text trunk is frozen, "
            "its features are computed once, from whole captions. Leave it out."
        )
    if stage.text_length is not None and stage.text_length < 3:
        raise RequestError(
            f"{where}: text_length = {stage.text_length} leaves no room for a word "
            "between the start and end tokens. Take at least 3, usually 16 or more."
        )
    if not all(0 <= ratio < 1 for ratio in stage.mask_range):
        ratios = " ".join(dict.fromkeys(f"{ratio:g}" for ratio in stage.mask_range))
        raise RequestError(
            f"{where}: mask_ratio = {ratios}: expected shares of the patches, at least 0 and "
            "below 1"
        )
    if stage.image_size is not None and stage.image_size < 1:
        raise RequestError(f"{where}: image_size = {stage.image_size}: expected pixels, at least 1")
    for name, factor in (
        ("lr_factor", stage.lr_factor),
        ("new_lr_factor", stage.new_lr_factor),
        ("epochs", 1 if stage.epochs is None else stage.epochs),
    ):
        if not (factor > 0 and math.isfinite(factor)):
            raise RequestError(f"{where}: {name} = {factor:g}: expected a finite number above 0")
    if first and stage.new_lr_factor != 1:
        raise RequestError(
            f"{where}: new_lr_factor = {stage.new_lr_factor:g} would have no effect: in the first "
            "stage everything is new. Set lr_factor."
        )
    if first and stage.warmup_steps is not None:
        raise RequestError(
            f"{where}: warmup_steps: the first stage has the run's warm-up. Set optim.warmup_steps."
        )
    if stage.warmup_steps is not None and stage.warmup_steps < 0:
        raise RequestError(f"{where}: warmup_steps = {stage.warmup_steps}: expected at least 0")


def check_augment(config: Config) -> None:
    """Refuse augmentation that cannot be, or that nothing would see.

    Raises:
        RequestError: a share lies outside 0 to 1, WordNet's folder is missing, or the trunk that
            would see it is frozen in every stage.
    """
    augment = config.augment
    low, high = augment.crop_scale
    if not 0 < low <= high <= 1:
        raise RequestError(
            f"augment.crop_scale = {low:g} {high:g}: expected shares of the image's area, the "
            "smaller first, above 0 and at most 1"
        )
    for name in ("flip", "color_jitter", "word_dropout", "synonyms"):
        if not 0 <= getattr(augment, name) <= 1:
            raise RequestError(
                f"augment.{name} = {getattr(augment, name):g}: expected a share from 0 to 1"
            )
    if augment.synonyms and not augment.wordnet:
        raise RequestError(
            "augment.synonyms needs WordNet's database files: set augment.wordnet to their folder "
            "(Debian's package wordnet-base brings /usr/share/wordnet)."
        )
    for tower, keys, asked, depths in (
        (
            "image",
            "crop_scale, flip and color_jitter",
            augment.changes_images,
            {stage.image_layers for stage in config.stages},
        ),
        (
            "text",
            "word_dropout and synonyms",
            augment.changes_captions,
            {stage.text_layers for stage in config.stages},
        ),
    ):
        if asked and depths == {"none"}:
            raise RequestError(
                f"augment would have no effect: the {tower} trunk is frozen in every stage, so its "
                f"features are computed once, from what is stored. Leave {keys} of [augment] out, "
                f"or let {tower} layers learn."
            )
    if config.shuffle_window is not None and config.shuffle_window < 2:
        raise RequestError(
            f"shuffle_window = {config.shuffle_window}: expected at least 2 rows, usually those of "
            "several shards (some thousand); unset, the whole epoch is shuffled"
        )
