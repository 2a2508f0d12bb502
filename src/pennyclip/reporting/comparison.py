"""Several runs side by side: one table, their curves over each other, and where they differ."""

import math
from collections.abc import Sequence
from pathlib import Path

from pennyclip.base.errors import RequestError
from pennyclip.reporting.curves import LOG_ABOVE, WORDS, figure, series
from pennyclip.reporting.markup import Html, note, section, table, tag
from pennyclip.reporting.page import write_page
from pennyclip.reporting.plots import Series, chart, spread
from pennyclip.reporting.run import DIRECTIONS, Run, mean_recall, read_run, recall
from pennyclip.reporting.words import duration, flat, percent, plain


def write_comparison(runs: Sequence[Path], out: Path) -> Path:
    """Write a page that compares two or more run folders.

    Raises:
        RequestError: fewer than two runs, or a folder that is no run.
    """
    if len(runs) < 2:
        raise RequestError(f"a comparison needs at least two runs, found {len(runs)}")
    read = [read_run(path) for path in runs]
    names = [run.name for run in read]
    if len(set(names)) < len(names):  # a/run and b/run
        names = [str(path) for path in runs]
    title = f"{len(read)} runs side by side"
    header = tag(
        "header",
        tag("p", "pennyclip comparison", class_="eyebrow"),
        tag("h1", title),
        tag("p", ", ".join(names), class_="lead"),
    )
    sections = (header, _table(names, read), _curves(names, read), _differences(names, read))
    return write_page(f"{title}: pennyclip", sections, out)


def _table(names: list[str], runs: list[Run]) -> Html:
    rows = []
    shared = _shared_split(runs)
    for name, run in zip(names, runs, strict=True):
        final = run.on(shared) if shared else run.final
        scores = [recall(final, direction, k) for direction in DIRECTIONS for k in (1, 10)]
        rows.append(
            (
                name,
                run.state[1],
                final.get("split", "none yet"),
                f"{final['step']:,}" if final else "–",
                *("–" if math.isnan(score) else percent(score) for score in scores),
                f"{run.steps:,}",
                plain(run.last_train.get("samples", "–")),
                duration(run.update_seconds),
                duration(run.seconds),
            )
        )
    recalls = [f"{WORDS[direction]} R@{k}" for direction in DIRECTIONS for k in (1, 10)]
    header = (
        "run",
        "state",
        "split",
        "best step",
        *recalls,
        "steps",
        "pairs seen",
        "updates",
        "in all",
    )
    explanation = note(
        f"Recall of each run’s best checkpoint on “{shared}”, which all were evaluated on. "
        if shared
        else "No split is common to all of them, so recalls of different rows must not be "
        "compared. Evaluate all on one: pennyclip eval retrieval RUN --data DATASET --split val. ",
        "Time: “updates” is training alone, “in all” also evaluations, saves and the features of "
        "frozen layers, which are computed once for a dataset: a run that found those of another "
        "spent none.",
    )
    return section("results", "Results", explanation, table(header, rows, numbers=9))


def _shared_split(runs: Sequence[Run]) -> str | None:
    """The split that all runs were evaluated on; rather one that chose no checkpoint."""
    order = dict.fromkeys(str(r.get("split")) for run in runs for r in run.retrievals)
    shared = [split for split in order if all(run.on(split) for run in runs)]
    chose = {run.choosing_split for run in runs}
    return min(shared, key=lambda split: split in chose, default=None)


def _curves(names: list[str], runs: list[Run]) -> Html:
    figures = []
    losses = [
        series(run.kind("train"), "loss", name, i)
        for i, (name, run) in enumerate(zip(names, runs, strict=True))
    ]
    if any(curve.values for curve in losses):
        log = spread([value for curve in losses for value in curve.values]) >= LOG_ABOVE
        figures.append(
            figure(
                "Loss",
                chart(losses, "loss (nats)", log=log),
                "Lower is better; runs with different batch sizes cannot be compared by it.",
            )
        )
    recalls = [
        Series(name, [r["step"] for r in run.choosing], list(map(mean_recall, run.choosing)), i)
        for i, (name, run) in enumerate(zip(names, runs, strict=True))
    ]
    if any(curve.values for curve in recalls):
        drawing = chart(recalls, "mean recall", percent=True, points=True)
        caption = (
            "Mean of R@1, R@5 and R@10 in both directions, on the split by which each run chooses "
            "its best checkpoint; higher is better."
        )
        figures.append(figure("Recall", drawing, caption))
    body = tag("div", *figures, class_="figures") if figures else note("Nothing to draw yet.")
    return section("curves", "Curves", body)


def _differences(names: list[str], runs: list[Run]) -> Html:
    settings = [dict(flat(run.config)) for run in runs]
    keys = list(dict.fromkeys(key for one in settings for key in one))
    rows = [
        (tag("code", key), *(plain(one.get(key, "unset")) for one in settings))
        for key in keys
        if len({plain(one.get(key, "unset")) for one in settings}) > 1
    ]
    body = table(("setting", *names), rows) if rows else note("Their configurations are equal.")
    return section("configuration", "Where they differ", body)
