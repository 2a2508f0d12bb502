"""The page of `pennyclip samples`: what training sees of some pairs, epoch after epoch."""

from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import torch

from pennyclip.base.errors import RequestError
from pennyclip.config.check import check_augment
from pennyclip.config.keys import Augment, Config
from pennyclip.data.augment import choose_captions
from pennyclip.data.images import encode_jpeg
from pennyclip.data.loader import Loader
from pennyclip.reporting.markup import Html, join, note, section, tag
from pennyclip.reporting.page import write_page
from pennyclip.reporting.pictures import thumbnail
from pennyclip.training.stage import open_rows


def write_samples(config: Config, out: Path, count: int, epochs: int) -> list[list[str]]:
    """Write the page: a strip a pair, what is stored first, then one picture an epoch.

    Args:
        count: pairs, at most as many as there are.
        epochs: shown of each.

    Returns:
        The captions shown: for each pair that of each epoch.

    Raises:
        RequestError: the recipe changes no pair, or asks for what cannot be.
    """
    for name, value in (("count", count), ("epochs", epochs)):
        if value < 1:
            raise RequestError(f"{name} = {value}: expected 1 or more.")
    check_augment(config)
    if not (config.augment.changes_images or config.augment.changes_captions):
        keys = ", ".join(f"--augment.{name.replace('_', '-')}" for name in vars(Augment()))
        raise RequestError(f"the recipe changes neither pictures nor captions. Set some of {keys}.")
    found = open_rows(config)
    count = min(count, len(found.train))
    rows = found.train[np.linspace(0, len(found.train) - 1, count).astype(np.int64)]
    stage = config.stages[-1]
    loader = Loader(
        dataset=found.dataset,
        rows=rows,
        tokens=found.tokens,
        tokenizer=found.tokenizer,
        batch_size=count,
        seed=config.seed,
        image_size=stage.image_size or config.model.image.image_size,
        text_length=config.model.text.context_length,
        augment=config.augment,
        synonyms=found.synonyms,
        workers=0,
    )
    strips = [
        [_figure("stored", image)] for image in _images(replace(loader, augment=Augment()), 0)
    ]
    told: list[list[str]] = [[] for _ in rows]
    for epoch in range(epochs):
        before, after = _captions(loader, epoch)
        for place, image in enumerate(_images(loader, epoch)):
            strips[place].append(_figure(f"epoch {epoch + 1}", image, before[place], after[place]))
            told[place].append(after[place])
    header = tag(
        "header",
        tag("p", "pennyclip samples", class_="eyebrow"),
        tag("h1", "What training sees"),
        tag("p", _settings(config.augment), class_="lead"),
    )
    intro = note(
        "Each row shows a pair of the training data: first as evaluation sees it, then as training "
        "does in its first epochs with this seed. Dropped words are struck out, new ones "
        "underlined. Where a tower is frozen, it is given what is stored."
    )
    body = (tag("div", *strip, class_="strip") for strip in strips)
    sheet = section("samples", "Samples", intro, tag("div", *body, class_="strips wide"))
    write_page("Samples: pennyclip", (header, sheet), out)
    return told


def _images(loader: Loader, epoch: int) -> list[Html]:
    """The pictures of all rows as the model is given them in an epoch."""
    batch = loader.samples(loader.rows, np.full_like(loader.rows, epoch)).to(torch.device("cpu"))
    assert batch.images is not None
    pixels = batch.images.permute(0, 2, 3, 1).contiguous().numpy()
    return [thumbnail(encode_jpeg(one)) for one in pixels]


def _captions(loader: Loader, epoch: int) -> tuple[list[str], list[str]]:
    """The caption of each row that is drawn in an epoch, and what becomes of it."""
    rows, epochs = loader.rows, np.full_like(loader.rows, epoch)
    counts = loader.dataset.rows["captions"][rows].astype(np.int64)
    drawn = choose_captions(loader.seed, epochs, rows, counts)
    before = [
        loader.dataset.captions(row)[choice]
        for row, choice in zip(rows.tolist(), drawn.tolist(), strict=True)
    ]
    return before, loader.changed_words(before, rows, epochs)


def _figure(label: str, picture: Html, before: str = "", after: str = "") -> Html:
    return tag("figure", picture, tag("figcaption", tag("b", label), " ", _marked(before, after)))


def _marked(before: str, after: str) -> Html:
    """A caption with the words struck out that it has lost, and those underlined that are new."""
    old, new = before.split(), after.split()
    parts: list[object] = []
    for kind, *spans in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        lost, came = " ".join(old[spans[0] : spans[1]]), " ".join(new[spans[2] : spans[3]])
        if kind == "equal":
            parts += [came, " "]
            continue
        parts += [tag("del", lost), " "] if lost else []
        parts += [tag("ins", came), " "] if came else []
    return join(*parts)


def _settings(augment: Augment) -> str:
    low, high = augment.crop_scale
    parts = [
        (augment.crop_scale != (1.0, 1.0), f"crops of {low:.0%} to {high:.0%} of the area"),
        (augment.flip, f"{augment.flip:.0%} mirrored"),
        (augment.color_jitter, f"colours within {augment.color_jitter:.0%}"),
        (augment.word_dropout, f"{augment.word_dropout:.1%} of the words dropped"),
        (augment.synonyms, f"{augment.synonyms:.1%} replaced by synonyms"),
    ]
    text = "; ".join(text for used, text in parts if used).replace("%", " %")
    return f"{text[:1].upper()}{text[1:]}."
