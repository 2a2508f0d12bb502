"""The page of a filter: what each rule dropped, the scores, and pairs to look at."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pennyclip.data.index import Dataset
from pennyclip.data.order import I64
from pennyclip.reporting.markup import Html, join, note, section, table, tag
from pennyclip.reporting.page import write_page
from pennyclip.reporting.pictures import card, grid
from pennyclip.reporting.plots import histogram

QUANTILES = (0.0, 0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
EACH = 4  # pairs at each place. chosen: a line of the page
TWINS = 12  # pictures shown beside the closer one that was kept


@dataclass(frozen=True)
class Drawn:
    """What a page about scores needs."""

    rows: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    """[N] rows that were scored, the best first."""
    scores: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    """[N] theirs."""
    kept: int = 0
    """How many of them, from the first, stay by score."""
    twins: list[tuple[int, int, float]] = field(default_factory=list)
    """Rows dropped because of another one, that one, and their cosine."""


def write_filter_page(
    dataset: Dataset,
    name: str,
    steps: list[dict[str, Any]],
    drawn: Drawn,
    out: Path,
    notes: Sequence[str] = (),
    sources: Sequence[dict[str, Any]] = (),
) -> Path:
    """Write the page of one filter.

    Args:
        steps: each rule in words, how many rows it dropped (None: it is the start) and left.
        notes: warnings, shown first.
        sources: path of each source, its rows at first, and those left.
    """
    first, last = steps[0]["left"], steps[-1]["left"]
    head = tag(
        "header",
        tag("p", "Filter", class_="eyebrow"),
        tag("h1", f"{dataset.path.resolve().name}: {name}"),
        tag("p", f"{last:,} of {first:,} rows stay ({last / first:.1%}).", class_="lead"),
    )
    rows = [
        (step["rule"], "" if step["dropped"] is None else f"{step['dropped']:,}",
         f"{step['left']:,}", f"{step['left'] / first:.1%}")
        for step in steps
    ]  # fmt: skip
    rules = section("rules", "Rules", table(("rule", "dropped", "left", "share"), rows, 3))
    sections = [head, *map(note, notes), rules]
    if len(sources) > 1:
        sections.append(_sources(sources))
    if len(drawn.rows):
        sections += [_scores(drawn), *_pairs(dataset, drawn)]
    if drawn.twins:
        sections.append(_twins(dataset, drawn))
    footer = tag("footer", "Drawn by pennyclip filter. Scores are cosines of the scoring model.")
    return write_page(f"{name}: pennyclip filter", tuple(sections), out, footer)


def _sources(sources: Sequence[dict[str, Any]]) -> Html:
    rows = [
        (Path(one["path"]).name, f"{one['first']:,}", f"{one['left']:,}",
         f"{one['left'] / one['first']:.1%}" if one["first"] else "")
        for one in sources
    ]  # fmt: skip
    intro = note(
        "One limit falls on sources differently: scores depend on the kind of picture and on the "
        "style of its captions, too. Where a source nearly goes, look at what went."
    )
    return section("sources", "Sources", intro, table(("source", "rows", "left", "share"), rows, 3))


def _scores(drawn: Drawn) -> Html:
    cut = None
    if 0 < drawn.kept < len(drawn.rows):
        value = float(drawn.scores[drawn.kept - 1])
        cut = (value, f"lowest that stays, {value:.3f}")
    intro = note(
        "A row's score is the mean cosine of its picture with its captions. Scores of different "
        "models are not comparable; where to cut is best judged by the pairs below."
    )
    figure = tag("figure", histogram(drawn.scores, "score", "rows", cut))
    quantiles = [(f"{share:.0%}", f"{np.quantile(drawn.scores, share):.3f}") for share in QUANTILES]
    listed = tag("div", table(("quantile", "score"), quantiles, 1))
    return section("scores", "Scores", intro, tag("div", figure, listed, class_="figures"))


def _pairs(dataset: Dataset, drawn: Drawn) -> list[Html]:
    """Pairs around the cut, and at quantiles of the score, the worst first."""
    count = len(drawn.rows)
    sections = []
    if 0 < drawn.kept < count:
        around = section(
            "cut",
            "Around the cut",
            tag("h3", "The last that stay"),
            _cards(dataset, drawn, range(max(0, drawn.kept - EACH), drawn.kept)),
            tag("h3", "The first that go"),
            _cards(dataset, drawn, range(drawn.kept, min(count, drawn.kept + EACH))),
        )
        sections.append(around)
    parts = []
    for share in QUANTILES:
        middle = (1 - share) * (count - 1)
        start = min(max(0, round(middle - EACH / 2)), max(0, count - EACH))
        parts.append(tag("h3", _place(share)))
        parts.append(_cards(dataset, drawn, range(start, min(count, start + EACH))))
    sections.append(section("quantiles", "From the worst to the best", join(*parts)))
    return sections


def _place(share: float) -> str:
    if share in (0.0, 1.0):
        return "the best" if share else "the worst"
    return f"{share:.0%} score lower"


def _cards(dataset: Dataset, drawn: Drawn, places: range) -> Html:
    return grid(
        card(
            dataset,
            int(drawn.rows[place]),
            f"{drawn.scores[place]:.3f}, {'stays' if place < drawn.kept else 'goes'}",
            [("", text) for text in dataset.captions(int(drawn.rows[place]))],
        )
        for place in places
    )


def _twins(dataset: Dataset, drawn: Drawn) -> Html:
    """The least alike of the pairs of which one went: those that tell whether the limit is sane."""
    chosen = sorted(drawn.twins, key=lambda twin: twin[2])[: TWINS // 2]
    cards = []
    for dropped, kept, cosine in chosen:
        for row, what in ((kept, "stays"), (dropped, f"goes: {cosine:.3f} to the one before")):
            cards.append(card(dataset, row, what, [("", t) for t in dataset.captions(row)]))
    intro = note(
        f"{len(drawn.twins):,} pictures went because a better scored one is as close. The pairs "
        "with the smallest such cosine:"
    )
    return section("similar", "Similar pictures", intro, grid(cards))
