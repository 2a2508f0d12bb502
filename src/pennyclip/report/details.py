"""What a run was: its events, data, loaded weights, configuration, machine."""

import json
from typing import Any

from pennyclip.report.markup import Html, join, note, pairs, section, table, tag
from pennyclip.report.run import Run, timeline
from pennyclip.report.words import flat, number, percent, plain


def events(run: Run) -> Html:
    """Everything out of the ordinary, in order."""
    rows = []
    for step, name, message, evidence in timeline(run):
        facts = ", ".join(f"{key} {plain(value)}" for key, value in flat(evidence)) or None
        rows.append((f"{step:,}", name, join(message, facts and tag("small", facts))))
    explanation = note(
        "Resumes, stops, and whatever was noticed on the way (skipped updates, changed rates)."
    )
    body = table(("step", "event", "what happened"), rows) if rows else note("None.")
    return section("events", "Events", explanation, body)


def data(run: Run) -> Html:
    """How many pairs were kept, and what was refused why."""
    title = "Data"
    if not run.dataset:
        request = run.start.get("request") or {}
        where = request.get("data")
        missing = f"No dataset.json found at {where}." if where else "The dataset is not recorded."
        return section("data", title, note(missing))
    counts = run.dataset.get("counts") or {}
    rejected = counts.get("rejected") or {}
    kept = {name: value for name, value in counts.items() if name != "rejected"}
    parts: list[Html | None] = [
        note(
            f"Read from {(run.start.get('request') or {}).get('data')}. A row is one picture with "
            "all its captions."
        ),
        pairs((name.replace("_", " "), plain(value)) for name, value in flat(kept)),
    ]
    reasons = flat(rejected) if isinstance(rejected, dict) else [("refused", rejected)]
    reasons = sorted(reasons, key=lambda item: -number(item[1]))
    columns = [
        _counted("Splits and filters", "subset", list(run.subsets.items()), "No subsets."),
        _counted("Refused", "reason", reasons, "Nothing was refused."),
    ]
    parts.append(tag("div", *columns, class_="columns"))
    return section("data", title, *parts)


def _counted(title: str, what: str, items: list[tuple[str, Any]], none: str) -> Html:
    rows = [(name, plain(value)) for name, value in items]
    body = table((what, "pictures"), rows, numbers=1) if rows else note(none)
    return tag("div", tag("h3", title), body)


def weights(run: Run) -> Html:
    """What matched when pretrained weights were loaded."""
    title = "Loaded weights"
    entries = run.start.get("weights") or []
    if not entries:
        missing = "None recorded: both towers started from random weights, or from a resume."
        return section("weights", title, note(missing))
    rows = [
        (
            entry.get("tower"),
            tag("code", entry.get("file")),
            plain(entry.get("loaded")),
            plain(entry.get("new")),
            plain(entry.get("dropped")),
            percent(entry.get("share")),
        )
        for entry in entries
    ]
    header = ("tower", "file", "loaded", "new", "dropped", "share of the tower")
    explanation = note(
        "Tensors of the file that found their place, tensors of the tower that start at random "
        "because the file has none, and tensors of the file that are of no use here. The share is "
        "of the tower’s parameters."
    )
    return section("weights", title, explanation, table(header, rows, numbers=4))


def configuration(run: Run) -> Html:
    """config.toml in full, folded, and what was asked for."""
    title = "Configuration"
    command = run.start.get("request")
    asked = pairs((name, _value(value)) for name, value in flat(command)) if command else None
    if not run.config_text:
        return section("configuration", title, asked, note("config.toml is missing."))
    lines = run.config_text.count("\n")
    folded = tag(
        "details",
        tag("summary", f"config.toml, {lines} lines"),
        tag("pre", tag("code", run.config_text)),
    )
    explanation = note("All that decides the run; `pennyclip train config.toml` starts it again.")
    return section("configuration", title, explanation, asked, folded)


def machine(run: Run) -> Html:
    """Where it ran, with what, and how large the model is."""
    title = "Machine, versions, parameters"
    parts = []
    for key, name in (
        ("machine", "Machine"),
        ("versions", "Versions"),
        ("parameters", "Parameters (trained and stored numbers)"),
    ):
        value = run.start.get(key)
        if value:
            items = [
                (name.replace(".", ", ").replace("_", " "), _value(v)) for name, v in flat(value)
            ]
            parts.append(tag("div", tag("h3", name), pairs(items)))
    if not parts:
        return section("machine", title, note("Not recorded."))
    return section("machine", title, tag("div", *parts, class_="columns"))


def _value(value: Any) -> str:
    return (
        value if isinstance(value, str) else plain(value) if not value == [] else json.dumps(value)
    )
