"""The page of a dataset: what was refused, what repeats, what the captions are like, what one sees.

Drawn from the dataset alone, so the same dataset gives the same page.
"""

import json
from collections import defaultdict
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from pennyclip.data.captions import UNUSUAL, caption_sizes, repeated, sample, tokens_per_word
from pennyclip.data.duplicates import near_pictures
from pennyclip.data.index import Dataset
from pennyclip.data.order import I64
from pennyclip.data.text import ClipTokenizer
from pennyclip.reporting.chance import chance
from pennyclip.reporting.markup import Html, join, note, section, table, tag
from pennyclip.reporting.page import write_page
from pennyclip.reporting.pictures import card, grid, thumbnail
from pennyclip.reporting.plots import histogram

EXAMPLES = 3  # refused inputs shown a reason
GROUPS, MEMBERS = 12, 4  # groups of near duplicates shown, and pictures of each
CROSSING = 6  # dropped rows shown
CAPTIONS = 10  # repeated captions listed
SHEET = 24  # pairs of the random sheet. chosen: fills a screen or two
BATCHES = (64, 256, 1024, 4096, 32768)
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
CONTEXT = 77  # CLIP's
MANY = 100  # repetitions of a caption from which a cap is suggested. chosen: as in docs/filter.md
WORDS, SIDE, ASPECT = 3, 200, 3  # DataComp's basic filter: see filter/rules.py


def write_dataset_page(path: Path, out: Path | None = None) -> Path:
    """Write the page of a finished dataset.

    Args:
        path: the dataset's folder.
        out: the file; unset: report.html in the dataset's folder.

    Raises:
        RequestError: there is no finished dataset.
    """
    dataset = Dataset(path)
    sections = (
        _headline(dataset),
        _sources(dataset),
        _rejects(dataset),
        _duplicates(dataset),
        _chance(dataset),
        _captions(dataset),
        _pictures(dataset),
        _sheet(dataset),
    )
    name = path.resolve().name
    footer = tag("footer", f"Drawn by pennyclip. Dataset {dataset.fingerprint[:16]}.")
    return write_page(f"{name}: pennyclip dataset", sections, out or path / "report.html", footer)


def _headline(dataset: Dataset) -> Html:
    counts = dataset.meta["counts"]
    refused = sum(counts["rejected"].values())
    splits = ", ".join(f"{name} {n:,}" for name, n in dataset.meta["splits"].items())
    values = [
        ("Pictures", f"{counts['kept']:,}", f"of {counts['inputs']:,} inputs"),
        ("Captions", f"{counts['captions']:,}", f"{counts['captions'] / counts['kept']:.2f} each"),
        ("Refused", f"{refused:,}", f"{refused / counts['inputs']:.2%}"),
        ("Groups", f"{counts['groups']:,}", f"the largest of {counts['largest_group']:,} rows"),
    ]
    cards = (
        tag(
            "div",
            tag("span", label, class_="label"),
            tag("span", value, class_="value"),
            tag("span", small, class_="small"),
            class_="card",
        )
        for label, value, small in values
    )
    crossing = counts["crossing"]
    dropped = (
        f" {crossing:,} training rows were dropped because val or test has the same."
        if crossing
        else ""
    )
    return tag(
        "header",
        tag("p", "Dataset", class_="eyebrow"),
        tag("h1", dataset.path.resolve().name),
        tag("p", f"Splits: {splits}.{dropped}", class_="lead"),
        tag("div", *cards, class_="cards"),
    )


def _sources(dataset: Dataset) -> Html:
    rows = [
        (
            Path(source["path"]).name,
            source["kind"],
            f"{source['inputs']:,}",
            f"{source['rows'][1] - source['rows'][0]:,}",
        )
        for source in dataset.meta.get("sources", [])  # older datasets say less
    ]
    return section("sources", "Sources", table(("name", "kind", "inputs", "kept"), rows, 2))


def _rejects(dataset: Dataset) -> Html:
    by_reason: dict[str, list[dict[str, str]]] = defaultdict(list)
    counts = dataset.meta["counts"]["rejected"]
    if not counts:
        return section("refused", "Refused", note("Nothing was refused."))
    with (dataset.path / "rejects.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            reject = json.loads(line)
            found = by_reason[reject["reason"].partition(":")[0]]
            if len(found) < EXAMPLES:
                found.append(reject)
    rows = [
        (
            reason,
            join(*(tag("div", _place(r), tag("small", r["reason"])) for r in by_reason[reason])),
            f"{count:,}",
        )
        for reason, count in counts.items()
    ]
    intro = note("One line each in rejects.jsonl; the first of each reason:")
    return section(
        "refused", "Refused", intro, table(("reason", "for instance", "inputs"), rows, 1)
    )


def _place(reject: dict[str, str]) -> str:
    """Where it stands, and what it is called there; in folders that is the same."""
    return ", ".join(dict.fromkeys(filter(None, (reject["origin"], reject["key"]))))


def _duplicates(dataset: Dataset) -> Html:
    counts = dataset.meta["counts"]
    captions = pc.list_flatten(dataset.table("captions")["captions"])
    most = repeated(captions, CAPTIONS)
    intro = note(
        "Rows with the same picture, a nearly equal one, or the same caption are one group: they "
        "stand in one split, and are never each other's negatives. "
        f"{counts.get('equal_pictures', 0):,} pictures equal another one, "
        f"{counts.get('near_pictures', 0):,} nearly do."
    )
    parts = [intro]
    if groups := _near_groups(dataset):
        parts.append(tag("h3", f"Nearly equal pictures, {_shown(len(groups))}"))
        shown = (_group(dataset, rows) for rows in groups[:GROUPS])
        parts.append(tag("div", *shown, class_="strips"))
    if crossing := _crossing(dataset):
        parts.append(tag("h3", "Dropped, because another split has the same"))
        shown = (_group(dataset, np.array(rows)) for rows in crossing)
        parts.append(tag("div", *shown, class_="strips"))
    if most:
        rows = [(shorten(text, 160), f"{count:,}") for text, count in most]
        parts.append(tag("h3", "The captions that occur most often"))
        parts.append(table(("caption", "times"), rows, 1))
        if most[0][1] > MANY:
            parts.append(
                note(
                    "A cap on repetitions: ",
                    tag("code", f"pennyclip filter {dataset.path.name} --name capped "
                        f"--max-repeats {MANY}"),
                )
            )  # fmt: skip
    return section("duplicates", "Duplicates", *parts)


def _crossing(dataset: Dataset) -> list[tuple[int, int]]:
    """The first rows that no split has, each with the row that it repeats."""
    file = dataset.path / "crossing.jsonl"
    if not file.is_file():
        return []
    with file.open(encoding="utf-8") as lines:
        found = [json.loads(line) for line in islice(lines, CROSSING)]
    return [(one["row"], one["repeats"]["row"]) for one in found]


def _shown(count: int) -> str:
    return f"{count:,} groups" if count <= GROUPS else f"the largest {GROUPS} of {count:,} groups"


def _near_groups(dataset: Dataset) -> list[I64]:
    """Rows of pictures that are nearly equal, the largest sets first. Only rows that share a group
    can be; so hardly any need comparing."""
    near_bits = dataset.meta["request"].get("near_bits", 0)
    groups = dataset.rows["group"].astype(np.int64)
    _, which, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    rows = np.flatnonzero(sizes[which] > 1)
    if not near_bits or not len(rows):
        return []
    columns = dataset.table("pixel_hash", "phash", "fine_hash").take(rows)
    same, equal = near_pictures(columns, near_bits), near_pictures(columns, 0)
    found = [np.flatnonzero(same == first) for first in np.unique(same)]
    near = [members for members in found if len(np.unique(equal[members])) > 1]
    return [rows[members] for members in sorted(near, key=lambda m: (-len(m), m[0]))]


def _group(dataset: Dataset, rows: I64) -> Html:
    more = f", {len(rows)} in all" if len(rows) > MEMBERS else ""
    pictures = [
        tag(
            "figure",
            thumbnail(dataset.image_bytes(row)),
            tag(
                "figcaption",
                f"row {row}: {shorten(dataset.captions(row)[0], 80)}{more * (place == 0)}",
            ),
        )
        for place, row in enumerate(rows[:MEMBERS].tolist())
    ]
    return tag("div", *pictures, class_="strip")


def _chance(dataset: Dataset) -> Html:
    if "train" not in dataset.subsets():
        return join()
    groups = dataset.rows["group"][dataset.subset("train")].astype(np.int64)
    rows = []
    for size in (b for b in BATCHES if b <= len(groups)):
        c = chance(groups, size)
        values = (c.plain, c.masked, c.multi_positive, c.floor)
        rows.append((f"{size:,}", *(f"{value:.4f}" for value in values)))
    if not rows:
        return join()
    intro = note(
        "What a contrastive loss shows on the training rows, in nats. A model that knows nothing "
        "starts at chance: ln(batch) where everything else is a negative; less where rows of one "
        "group are left out (loss infonce), or are positives (multi_positive). The floor is what "
        "repeats would cost at best a trainer that takes them for negatives; here it is 0."
    )
    header = ("batch", "chance", "repeats left out", "repeats positive", "floor, repeats negative")
    return section("chance", "The loss by chance", intro, table(header, rows, 5))


def _captions(dataset: Dataset) -> Html:
    sizes = caption_sizes(dataset)
    tokenizer = ClipTokenizer(CONTEXT)
    some = sample(dataset, np.arange(len(dataset)))
    ratio = tokens_per_word(some, tokenizer)
    longer = np.mean([len(tokenizer.encode(text)) > CONTEXT for text in some])
    problem = None
    if ratio > UNUSUAL:
        problem = tag(
            "p",
            f"CLIP's own tokenizer makes {ratio:.1f} tokens of a word; of English it makes 1.3. "
            "These captions are in another language, or no sentences. A multilingual text tower "
            "may suit them better (recipe multilingual-text).",
            class_="problem",
        )
    rows = [
        (f"{q:.0%}", *(f"{np.quantile(v, q):,.0f}" for v in (sizes.words, sizes.characters)))
        for q in QUANTILES
    ]
    intro = note(
        f"By CLIP's own tokenizer {ratio:.2f} tokens a word, and {longer:.1%} of the captions are "
        f"longer than its {CONTEXT} tokens ({len(some):,} looked at). "
        f"{(sizes.words < WORDS).mean():.1%} of all have fewer than {WORDS} words."
    )
    quantiles = table(("quantile", "words", "characters"), rows, 2)
    unit = "words (the longest 1 % at the end)"
    figures = _figures(sizes.words, unit, "captions", quantiles)
    return section("captions", "Captions", problem, intro, figures)


def _pictures(dataset: Dataset) -> Html:
    columns = dataset.table("width", "height")
    width, height = (columns[name].to_numpy() for name in ("width", "height"))
    short, aspect = np.minimum(width, height), np.maximum(width, height) / np.minimum(width, height)
    rows = [
        (f"{q:.0%}", f"{np.quantile(short, q):,.0f}", f"{np.quantile(aspect, q):.2f}")
        for q in QUANTILES
    ]
    intro = note(
        f"As they came. {(short < SIDE).mean():.1%} have a shorter side below {SIDE} pixels, "
        f"{(aspect > ASPECT).mean():.1%} a longer side above {ASPECT} times the shorter."
    )
    header = ("quantile", "shorter side, pixels", "longer / shorter")
    unit = "shorter side, pixels (the largest 1 % at the end)"
    figures = _figures(short, unit, "pictures", table(header, rows, 2))
    return section("pictures", "Pictures", intro, figures)


def _figures(values: npt.NDArray[Any], unit: str, counted: str, quantiles: Html) -> Html:
    """A histogram whose last bar stands for the largest 1 %, beside a table."""
    shown = np.minimum(values, np.quantile(values, 0.99, method="higher"))
    figure = tag("figure", histogram(shown, unit, counted))
    return tag("div", figure, tag("div", quantiles), class_="figures")


def _sheet(dataset: Dataset) -> Html:
    chosen = np.random.default_rng(0).permutation(len(dataset))[:SHEET]
    cards = (
        card(dataset, row, "", [("", text) for text in dataset.captions(row)])
        for row in chosen.tolist()
    )
    return section("sheet", "Pairs drawn at random", grid(cards))
