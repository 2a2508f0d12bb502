"""What a run was: its events, data, loaded weights, configuration, machine."""

import shlex
from typing import Any

from pennyclip.reporting.markup import Html, join, note, pairs, section, table, tag
from pennyclip.reporting.run import Run, timeline
from pennyclip.reporting.words import flat, number, percent, plain
from pennyclip.training.telemetry.events import remedy

COUNTS = {
    "inputs": "pictures found",
    "kept": "pictures kept",
    "captions": "captions",
    "groups": "groups",
    "largest_group": "pictures in the largest group",
    "crossing": "left out of train: also in val or test",
}


def events(run: Run) -> Html:
    """Everything out of the ordinary, in order."""
    rows, told = [], set[str]()
    for step, name, message, evidence, past in timeline(run):
        facts = ", ".join(f"{key} {plain(value)}" for key, value in flat(evidence)) or None
        do = None
        if not past and name not in told:
            do = remedy({"name": name, "step": step, **evidence}, run.path)
            told.add(name)
        rows.append(
            (
                f"{step:,}",
                name,
                join(message, facts and tag("small", facts), do and tag("small", f"To do: {do}")),
            )
        )
    explanation = note(
        "Resumes, stops, and whatever was noticed on the way (skipped updates, changed rates); at "
        "the first of each kind that a resume has not undone, what to do."
    )
    body = table(("step", "event", "what happened"), rows) if rows else note("None.")
    return section("events", "Events", explanation, body)


def data(run: Run) -> Html:
    """How many pairs were kept, and what was refused why."""
    title = "Data"
    if not run.dataset:
        missing = f"No dataset.json found in {run.data}." if run.data else "Not recorded."
        return section("data", title, note(missing))
    counts = run.dataset.get("counts") or {}
    rejected = counts.get("rejected") or {}
    kept = {COUNTS.get(name, name): n for name, n in counts.items() if name != "rejected"}
    explanation = note(
        f"Read from {run.data}. Pictures with the same content or caption form a group and are "
        "never told apart in training."
    )
    reasons = sorted(flat(rejected), key=lambda item: -number(item[1]))
    columns = (
        tag("div", tag("h3", "Counts"), pairs((name, plain(n)) for name, n in flat(kept))),
        _counted("Splits and filters", "subset", list(run.subsets.items()), "No subsets."),
        _counted("Refused", "reason", reasons, "Nothing was refused."),
    )
    return section("data", title, explanation, tag("div", *columns, class_="columns"))


def _counted(title: str, what: str, items: list[tuple[str, Any]], none: str) -> Html:
    rows = [(name, plain(value)) for name, value in items]
    body = table((what, "pictures"), rows, numbers=1) if rows else note(none)
    return tag("div", tag("h3", title), body)


def weights(run: Run) -> Html:
    """What matched when pretrained weights were loaded."""
    title = "Loaded weights"
    # A resume loads a checkpoint, and records no match: the run's beginning has it.
    recorded = [start["weights"] for start in run.kind("start") if start.get("weights")]
    entries = recorded[0] if recorded else []
    if not entries:
        missing = "None recorded: both towers started from random weights."
        return section("weights", title, note(missing))
    rows = [
        (
            entry.get("tower"),
            join(tag("code", entry.get("file")), _origin(entry)),
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
        "of the tower’s parameters, without its head."
    )
    layers = tag("div", *map(_layers, entries), class_="columns")
    return section("weights", title, explanation, table(header, rows, numbers=4), layers)


def _origin(entry: dict[str, Any]) -> Html | None:
    """What the file was trained for and how its keys are named, as far as it was recorded."""
    told = [f"trained: {entry['trained']}"] if "trained" in entry else []
    told += [f"names: {entry['layout']}"] if "layout" in entry else []
    return tag("small", "; ".join(told)) if told else None


def _layers(entry: dict[str, Any]) -> Html | None:
    """How much of each layer of a tower was loaded, and what became of other keys; folded."""
    layers = [layer for layer in entry.get("layers") or [] if layer["values"]]
    if not layers:
        return None
    random = [layer["name"] for layer in layers if layer["loaded"] < layer["values"]]
    rows = [
        (layer["name"], _bar(share := layer["loaded"] / layer["values"]),
         plain(layer["values"]), percent(share))
        for layer in layers
    ]  # fmt: skip
    told = [(key, method) for key, method in (entry.get("resampled") or {}).items()]
    told += [(f"{n} keys", reason) for reason, n in (entry.get("reasons") or {}).items()]
    state = f"not whole: {', '.join(random)}" if random else "all of them whole"
    return tag(
        "div",
        tag(
            "details",
            tag("summary", f"{entry.get('tower')}, {len(layers)} parts, {state}"),
            table(("layer", "", "numbers", "loaded"), rows, numbers=2),
            pairs(told) if told else None,
        ),
    )


def _bar(share: float) -> Html:
    return tag("div", tag("i", style=f"width:{100 * share:.1f}%"), class_="bar")


def configuration(run: Run) -> Html:
    """config.toml in full, folded."""
    title = "Configuration"
    if not run.config_text:
        return section("configuration", title, note("config.toml is missing."))
    lines = run.config_text.count("\n")
    folded = tag(
        "details",
        tag("summary", f"config.toml, {lines} lines"),
        tag("pre", tag("code", run.config_text)),
    )
    file = shlex.quote(str(run.path / "config.toml"))
    command = tag("code", f"pennyclip train {file} --out NEW")
    explanation = note("All that decides the run, defaults included. ", command, " repeats it.")
    return section("configuration", title, explanation, folded)


def machine(run: Run) -> Html:
    """Where it ran, with what, and how large the model is."""
    start = run.start
    device = {"device": start["device"]} if "device" in start else {}
    groups = {
        "Machine": device | (start.get("machine") or {}),
        "Versions": start.get("versions"),
        "Parameters (numbers in the model)": start.get("parameters"),
    }
    parts = [
        tag("div", tag("h3", title), pairs((name, plain(value)) for name, value in flat(group)))
        for title, group in groups.items()
        if group
    ]
    body = tag("div", *parts, class_="columns") if parts else note("Not recorded.")
    return section("machine", "Machine, versions, parameters", body)
