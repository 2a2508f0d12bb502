"""What came out of a run: the headline and the table of evaluations."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from pennyclip.reporting.curves import WORDS, series
from pennyclip.reporting.markup import Html, join, note, section, table, tag
from pennyclip.reporting.run import CUTOFFS, DIRECTIONS, Run, chance, count, mean_recall, recall
from pennyclip.reporting.words import duration, number, percent, plain
from pennyclip.training.telemetry.metrics import Record

COUNTS = ("images", "captions", "classes")
MEASURES = {
    "top1": "top-1",
    "top5": "top-5",
    "mean_per_class": "top-1, each class counting the same",
    "unreadable": "pictures that could not be read",
}


def headline(run: Run) -> Html:
    """What was trained on what, how it ended, the final scores and the cost."""
    state, words = run.state
    return tag(
        "header",
        tag("p", "pennyclip run", class_="eyebrow"),
        tag("h1", run.name, tag("span", words, class_=f"state {state}")),
        tag("p", summary(run), class_="lead"),
        tag("div", *_cards(run), class_="cards"),
        tag("p", run.way_on, class_="problem") if state == "stopped" else None,
        *(tag("p", problem, class_="problem") for problem in run.problems),
    )


def summary(run: Run) -> str:
    """One sentence: the towers, the data, the length."""
    model = run.config.get("model", {})
    image = model.get("image", {}).get("name", "an unknown image tower")
    text = model.get("text", {})
    kind = "CLIP’s text transformer" if text.get("kind", "clip") == "clip" else "a text encoder"
    words = f"{image} (images) and {text.get('name', kind)} (captions)"
    source = f", trained on the dataset “{Path(run.data).name}”" if run.data else ", trained"
    last = run.last_train
    length = ""
    if "samples" in last:
        length = (
            f": {plain(last['samples'])} image-text pairs seen in {plain(last['step'])} updates"
        )
        if "epoch" in last:
            length += f", {number(last['epoch']):.3g} times through the data"
    return f"{words}{source}{length}."


def _cards(run: Run) -> list[Html]:
    cards = []
    final = run.final
    for direction in DIRECTIONS:
        value = recall(final, direction, 10)
        if math.isnan(value):
            continue
        guess = chance(run, final, 10, direction)
        small = f"chance {percent(guess)}, " if math.isfinite(guess) else ""
        small += f"split “{final.get('split')}”, step {final['step']:,}"
        cards.append(_card(f"Recall@10, {WORDS[direction]}", percent(value), small))
    if not cards:
        cards.append(_card("Recall@10", "none yet", "no retrieval evaluation recorded"))
    for record in run.others[-1:]:
        name = next((name for name in record["metrics"] if "top1" in name), None)
        if name:
            label = f"Zero-shot top-1, “{_data(record)}”"
            cards.append(_card(label, percent(record["metrics"][name]), _classes(record)))
    rates = sorted(series(run.kind("train"), "samples_per_second").values)
    pace = f"wall-clock; median {rates[len(rates) // 2]:,.0f} pairs / s" if rates else "wall-clock"
    cards.append(_card("Time", duration(run.seconds) if run.records else "none yet", pace))
    return cards


def _card(label: str, value: str, small: str) -> Html:
    return tag(
        "div",
        tag("span", label, class_="label"),
        tag("span", value, class_="value"),
        tag("span", small, class_="small"),
        class_="card",
    )


def _classes(record: Record) -> str:
    classes = count(record, "classes")
    return f"chance {percent(1 / classes)}, {classes:.0f} classes" if classes > 0 else "accuracy"


def results(run: Run) -> Html:
    """All evaluations by split, the best step marked."""
    if not run.evaluations:
        names = (shlex.quote(str(name)) for name in (run.path, run.data or "DATASET"))
        command = "pennyclip eval retrieval {} --data {}".format(*names)
        missing = f"No evaluation yet. Make one with: {command}"
        return section("results", "Results", note(missing))
    parts: list[Html | None] = []
    if run.retrievals:
        parts += [_explanation(run), *_retrieval_tables(run)]
    else:
        parts.append(note("No retrieval evaluation yet."))
    parts.append(_other_table(run.others))
    return section("results", "Results", *parts)


def _explanation(run: Run) -> Html:
    return note(
        "Retrieval: a caption ranks all pictures of the split (text → image), a picture ranks "
        "all captions (image → text). R@10 is the share for which a true partner is among the "
        "first ten. The checkpoint called best has the highest mean on "
        f"“{run.choosing_split}”; scores on a split that chose nothing are the ones to quote. "
        "Chance is what random guessing gives."
    )


def _retrieval_tables(run: Run) -> list[Html]:
    """Scores on splits that chose nothing, then the best and last that did; the rest folded."""
    held_out = [r for r in run.retrievals if not _chose(run, r)]
    ends = [r for r in run.choosing if r["step"] == run.best_step or r is run.choosing[-1]]
    tables = [_retrieval_table(run, held_out + ends)]
    if len(run.choosing) > len(ends):
        words = f"All {len(run.choosing)} evaluations on “{run.choosing_split}”"
        table = _retrieval_table(run, run.choosing)
        tables.append(tag("details", tag("summary", words), table))
    return tables


def _chose(run: Run, record: Record) -> bool:
    return record.get("split") == run.choosing_split and "checkpoint" not in record


def _retrieval_table(run: Run, records: Sequence[Record]) -> Html:
    columns = [(direction, k) for direction in DIRECTIONS for k in CUTOFFS]
    groups = tag(
        "tr",
        tag("th", colspan=2),
        *(tag("th", WORDS[d], colspan=len(CUTOFFS), class_="group") for d in DIRECTIONS),
        tag("th"),
    )
    names = tag(
        "tr",
        tag("th", "split"),
        tag("th", "step", class_="number"),
        *(tag("th", f"R@{k}", class_="number") for _, k in columns),
        tag("th", "mean", class_="number"),
    )
    body = []
    for split in dict.fromkeys(str(record.get("split")) for record in records):
        of_split = [record for record in records if str(record.get("split")) == split]
        for record in of_split:
            best = record["step"] == run.best_step
            values = [*(recall(record, d, k) for d, k in columns), mean_recall(record)]
            cells = [tag("td", _share(value), class_="number") for value in values]
            badge = tag("span", "best", class_="badge") if best else None
            body.append(
                tag(
                    "tr",
                    tag("td", split, badge),
                    tag("td", f"{record['step']:,}", class_="number"),
                    *cells,
                    class_="best" if best else None,
                )
            )
        guesses = [chance(run, of_split[-1], k, direction) for direction, k in columns]
        if not all(map(math.isnan, guesses)):
            guesses.append(sum(guesses) / len(guesses))
            cells = [tag("td", _share(guess), class_="number") for guess in guesses]
            row = (tag("td", f"chance on {split}"), tag("td"), *cells)
            body.append(tag("tr", *row, class_="chance"))
    whole = tag("table", tag("thead", groups, names), tag("tbody", *body))
    return tag("div", whole, class_="scroll")


def _share(value: float) -> str:
    return "–" if math.isnan(value) else percent(value)


def _other_table(records: Sequence[Record]) -> Html | None:
    if not records:
        return None
    rows = []
    for record in records:
        for name, value in record["metrics"].items():
            if name not in COUNTS and (name, value) != ("unreadable", 0):
                step = f"{record['step']:,}"
                shown = plain(value) if name == "unreadable" else percent(value)
                guess = _guess(record, name)
                rows.append((_data(record), MEASURES.get(name, name), step, guess, shown))
    explanation = note(
        "Zero-shot classification: each picture is given the class whose name, as a caption, fits "
        "it best; none of these classes was trained for. Top-1 is the share that is right, top-5 "
        "that with the right class among the first five."
    )
    header = ("data", "measure", "step", "chance", "value")
    return join(tag("h3", "Zero-shot"), explanation, table(header, rows, numbers=3))


def _data(record: Record) -> str:
    return str(record.get("split")).removeprefix("zero-shot ")


def _guess(record: Record, measure: str) -> str:
    """Chance level of a zero-shot measure."""
    hits = {"top1": 1, "top5": 5, "mean_per_class": 1}.get(measure, math.nan)
    return _share(hits / count(record, "classes"))
