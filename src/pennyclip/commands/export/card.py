"""The model card: what whoever finds the folder must know to use the model, and to trust it."""

import math
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path
from typing import Any

from pennyclip.base.errors import RequestError
from pennyclip.commands.export.written import Written
from pennyclip.config.file import from_tree
from pennyclip.config.keys import Config, Model, TransformersText
from pennyclip.reporting.run import Run
from pennyclip.reporting.words import duration, flat, plain
from pennyclip.weights.build import text_weights
from pennyclip.weights.packages import packaged

FILL = "TO FILL"
ALWAYS = ("batch_size", "loss", "precision", "seed", "name", "lr")
"""Keys that the card shows also where they are defaults. Chosen: what a recipe is known by."""


def card(title: str, model: Model, step: int, run: Run | None, written: Written) -> str:
    """The text of README.md.

    Args:
        title: of the model.
        model: its configuration.
        step: updates made.
        run: where it was trained; None: the checkpoint stood alone.
        written: what the export is.
    """
    request = run.config if run is not None else {}
    starts = [
        ("image tower", model.image.name, model.image.weights),
        ("text tower", _text_name(model), text_weights(model)),
    ]
    weights = [
        f"| {tower} | `{name}` | {_name(start) if start else 'random weights'} |"
        for tower, name, start in starts
    ]
    sections = [
        "---\n"
        f"license: {FILL}\n"
        "library_name: pennyclip\n"
        "pipeline_tag: zero-shot-image-classification\n"
        "tags: [clip, pennyclip]\n"
        "---",
        f"# {title}",
        f"A CLIP model (an image tower and a text tower with one embedding space of "
        f"{model.embed_dim} numbers), trained with pennyclip. Format: {written.layout}.",
        f"From inside this folder:\n\n```\n{written.load_line_inside}\n```",
        "\n".join(f"- {note}" for note in written.notes),
        "## Towers\n\n| tower | architecture | started from |\n|---|---|---|\n"
        + "\n".join(weights),
        "## Data\n\n" + _data(run),
        "## Scores\n\n" + _scores(run, step),
        "## Cost\n\n" + _cost(run, step),
        "## Recipe\n\n" + _recipe(request),
        f"## Licence\n\nFill these in before you hand the model on.\n\n"
        f"- Licence of this model: {FILL}\n"
        f"- Licence of the training data: {FILL}\n"
        + "".join(
            f"- Licence of {_name(s)} (the {t} started from it): {_licence(s)}\n"
            for t, _, s in starts
            if s
        )
        + f"- What the model is for, and what not: {FILL}",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _text_name(model: Model) -> str:
    text = model.text
    return _name(text.name) if isinstance(text, TransformersText) else f"{text.family} transformer"


def _name(reference: str) -> str:
    """A reference to weights without the folders of the machine."""
    known = reference.startswith(("package:", "hub:"))
    return reference if known else "/".join(Path(reference).parts[-2:]).lstrip("/")


def _licence(reference: str) -> str:
    """As the package of the weights states it."""
    try:
        package = packaged(reference)
        if package is None:
            return FILL
        about = metadata(package.distribution).json
    except (PackageNotFoundError, RequestError):  # removed since, or no longer known
        return FILL
    stated = str(about.get("license_expression") or about.get("license") or "")
    if "\n" in stated or stated.upper() in ("", "UNKNOWN"):
        return FILL
    return f"{stated} (stated by the package {package.distribution})"


def _data(run: Run | None) -> str:
    if run is None or not run.data:
        return "Not recorded."
    subset = str(run.config.get("subset", "train"))
    count = run.subsets.get(subset)
    lines = [f"- `{Path(run.data).name}`, subset `{subset}`"]
    lines[0] += f": {count:,} pictures" if count is not None else ""
    counts = run.dataset.get("counts") or {}
    lines += [f"- {key.replace('_', ' ')}: {plain(value)}" for key, value in flat(counts)]
    return "\n".join(lines)


def _scores(run: Run | None, step: int) -> str:
    measured = [r for r in run.evaluations if r["step"] == step] if run is not None else []
    rows = [
        f"| {record.get('split', '')} | {name} | {_score(value)} |"
        for record in measured
        for name, value in record["metrics"].items()
    ]
    if not rows:
        return "Not measured at this checkpoint."
    choosing = f"`{run.choosing_split}` chose the checkpoint" if run is not None else ""
    table = "| split | metric | value |\n|---|---|---|\n" + "\n".join(rows)
    return f"{table}\n\nMeasured after {step:,} updates; {choosing}."


def _score(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) and math.isfinite(value) else plain(value)


def _cost(run: Run | None, step: int) -> str:
    if run is None or not run.records:
        return "Not recorded."
    samples = run.last_train.get("samples")
    lines = [
        f"- {run.seconds:.0f} seconds ({duration(run.seconds)}) for the whole run, "
        f"{run.update_seconds:.0f} of them in updates; features of frozen layers that lay there "
        "already took none"
    ]
    lines += [f"- {step:,} updates up to this checkpoint, {run.steps:,} in the run"]
    lines += [f"- {plain(samples)} samples seen in the run"] if samples is not None else []
    about = {"device": run.start.get("device"), **(run.start.get("machine") or {})}
    about.pop("host", None)  # nobody's business
    lines += [f"- {name}: {plain(value)}" for name, value in flat(about) if value is not None]
    return "\n".join(lines)


def _recipe(request: dict[str, Any]) -> str:
    if not request:
        return "Not recorded."
    rows = [
        f"| {name} | {_name(value) if _is_path(value) else plain(value)} |"
        for name, value in flat(_changed(request))
        if name != "data"
    ]
    header = (
        "The main keys, and what differs from the defaults of pennyclip "
        f"{version('pennyclip')}:\n\n"
    )
    return header + "| key | value |\n|---|---|\n" + "\n".join(rows)


def _changed(request: dict[str, Any]) -> dict[str, Any]:
    """A request without what is a default; whole where it is of another version's keys."""
    try:
        return dict(_own(from_tree(Config, request, "config.toml")))
    except RequestError:
        return request


def _own(config: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values of a configuration that are no default, tables by their own keys."""
    for item in fields(config):
        value = getattr(config, item.name)
        default = item.default if item.default_factory is MISSING else item.default_factory()
        if is_dataclass(value):
            yield item.name, dict(_own(value))
        elif value is None or (value == default and item.name not in ALWAYS):
            continue
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            yield item.name, [dict(_own(part)) for part in value]
        else:
            yield item.name, value


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and Path(value).is_absolute()
