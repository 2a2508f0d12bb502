"""What came out of a run: the headline and the table of evaluations."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pennyclip.report.curves import WORDS
from pennyclip.report.markup import Html, join, note, section, table, tag
from pennyclip.report.run import CUTOFFS, DIRECTIONS, Run, chance, count, recall
from pennyclip.report.words import duration, number, percent, plain
from pennyclip.telemetry.metrics import Record

SHOWN = 12  # chosen: rows of the table before the rest is folded away
SHARES = ("accuracy", "top", "R@", "recall", "share")


def headline(run: Run) -> Html:
    """What was trained on what, how it ended, the final scores and the cost."""
    state, words = run.state
    return tag(
        "header",
        tag("p", "pennyclip run", class_="eyebrow"),
        tag("h1", run.name, tag("span", words, class_=f"state {state}")),
        tag("p", summary(run), class_="lead"),
        tag("div", *_cards(run), class_="cards"),
        *(tag("p", problem, class_="problem") for problem in run.problems),
    )


def summary(run: Run) -> str:
    """One sentence: the towers, the data, the length."""
    model = run.config.get("model", {})
    image = model.get("image", {}).get("name", "an unknown image tower")
    text = model.get("text", {})
    kind = "CLIP’s text transformer" if text.get("kind", "clip") == "clip" else "a text encoder"
    words = f"{image} (images) and {text.get('name', kind)} (captions)"
    data = (run.start.get("request") or {}).get("data")
    source = f", trained on the dataset “{Path(data).name}”" if data else ", trained"
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
        guess = chance(run, final, 10)
        small = f"chance {percent(guess)}, " if math.isfinite(guess) else ""
        small += f"split “{final.get('split')}”, step {final['step']:,}"
        cards.append(_card(f"Recall@10, {WORDS[direction]}", percent(value), small))
    if not cards:
        cards.append(_card("Recall@10", "none yet", "no retrieval evaluation recorded"))
    for record in run.others[-1:]:
        name = next((name for name in record["metrics"] if "top1" in name), None)
        if name:
            label = f"Zero-shot top-1, “{record.get('split')}”"
            cards.append(_card(label, percent(record["metrics"][name]), _classes(record)))
    rate = number(run.last_train.get("samples_per_second"))
    pace = f"{rate:,.0f} pairs a second at the end" if math.isfinite(rate) else "wall-clock time"
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
        missing = "No evaluation yet. Make one with: pennyclip eval RUN retrieval"
        return section("results", "Results", note(missing))
    parts: list[Html] = []
    if run.retrievals:
        parts += [_explanation(run), *_retrieval_tables(run)]
    else:
        parts.append(note("No retrieval evaluation yet."))
    parts.append(_other_table(run.others))
    return section("results", "Results", *parts)


def _explanation(run: Run) -> Html:
    return note(
        "Retrieval: a caption ranks all pictures of the split (text → image), a picture ranks all "
        "captions (image → text). R@10 is the share for which a true partner is among the first "
        f"ten. The checkpoint called best is chosen on “{run.choosing_split}”; a score on another "
        "split is the honest one. Chance is what random guessing gives."
    )


def _retrieval_tables(run: Run) -> list[Html]:
    held_out = [r for r in run.retrievals if not _chose(run, r)]
    choosing = [r for r in run.retrievals if _chose(run, r)]
    folded = [r for r in choosing[:-SHOWN] if r["step"] != run.best_step]
    shown = [r for r in choosing if r not in folded]
    tables = [_retrieval_table(run, held_out + shown)]
    if folded:
        summary = tag("summary", f"{len(folded)} earlier evaluations on “{run.choosing_split}”")
        tables.append(tag("details", summary, _retrieval_table(run, folded)))
    return tables


def _chose(run: Run, record: Record) -> bool:
    return record.get("split") == run.choosing_split and "checkpoint" not in record


def _retrieval_table(run: Run, records: Sequence[Record]) -> Html:
    columns = [(direction, k) for direction in DIRECTIONS for k in CUTOFFS]
    groups = tag(
        "tr",
        tag("th", colspan=2),
        *(tag("th", WORDS[d], colspan=len(CUTOFFS), class_="group") for d in DIRECTIONS),
    )
    names = tag(
        "tr",
        tag("th", "split"),
        tag("th", "step", class_="number"),
        *(tag("th", f"R@{k}", class_="number") for _, k in columns),
    )
    body = []
    for split in dict.fromkeys(str(record.get("split")) for record in records):
        of_split = [record for record in records if str(record.get("split")) == split]
        for record in of_split:
            best = record["step"] == run.best_step
            where = f" ({record['checkpoint']})" if "checkpoint" in record else ""
            cells = [tag("td", _share(recall(record, d, k)), class_="number") for d, k in columns]
            step = f"{record['step']:,}{where}"
            badge = tag("span", "best", class_="badge") if best and not where else None
            body.append(
                tag(
                    "tr",
                    tag("td", split, badge),
                    tag("td", step, class_="number"),
                    *cells,
                    class_="best" if best else None,
                )
            )
        guesses = [chance(run, of_split[-1], k) for _, k in columns]
        if not all(map(math.isnan, guesses)):
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
            if name not in ("images", "captions", "classes"):
                which = f"{record['step']:,} ({record.get('checkpoint', 'during the run')})"
                share = any(word in name for word in SHARES)
                shown = percent(value) if share else plain(value)
                rows.append((record.get("split"), name, which, _classes_of(record), shown))
    explanation = note(
        "Zero-shot classification: each picture is given the class whose name, as a caption, fits "
        "it best; none of these classes was trained for. Top-1 is the share that is right, top-5 "
        "that with the right class among the first five."
    )
    header = ("data", "measure", "step", "chance", "value")
    return join(tag("h3", "Zero-shot"), explanation, table(header, rows, numbers=3))


def _classes_of(record: Record) -> Any:
    classes = count(record, "classes")
    return percent(1 / classes) if classes > 0 else "–"
