"""A trained model in the formats that other tools load. A new format is one file and one entry."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

from pennyclip.base.atomic import replacing
from pennyclip.base.errors import RequestError
from pennyclip.commands.export import hf, onnx, open_clip
from pennyclip.commands.export.card import card
from pennyclip.commands.export.written import Source, Written
from pennyclip.reporting.run import Run, read_run
from pennyclip.weights.checkpoint import Checkpoint, choose, load_model, write_json

EXPORTS: dict[str, Callable[[Source, Path], Written]] = {
    "open_clip": open_clip.write,
    "hf": hf.write,
    "onnx": onnx.write,
}
RECORD = "export.json"


@dataclass(frozen=True)
class Exported:
    """A finished export."""

    path: Path
    files: tuple[str, ...]
    """Relative to `path`."""
    layout: str
    """What was written, in words."""
    load_line: str
    """The command that loads it."""
    notes: tuple[str, ...]
    """What whoever loads it must know."""


def export(run: Path, to: str, out: Path, checkpoint: str = "best") -> Exported:
    """Write a trained model for another tool, with a model card.

    Args:
        run: a run's folder, or a checkpoint's.
        to: one of EXPORTS.
        out: the folder to make. One that holds this very export is left as it is.
        checkpoint: of a run: `best`, `last` or a step.

    Raises:
        RequestError: an unknown format, no such checkpoint, a model that the format cannot hold,
            or a folder that holds something else.
        RunError: the export gives other embeddings than the model.
    """
    if to not in EXPORTS:
        raise RequestError(f"export --to '{to}': expected {', '.join(EXPORTS)}")
    chosen = choose(run, checkpoint)
    request = {"to": to, "weights": _fingerprint(chosen), "pennyclip": version("pennyclip")}
    if out.is_dir() and any(out.iterdir()):
        return _finished(out, request)
    model = load_model(chosen)
    with replacing(out) as folder:
        folder.mkdir()
        parents = chosen.path.absolute().parents
        home = parents[1] if (parents[1] / "metrics.jsonl").is_file() else None
        run_read = read_run(home) if home is not None else None
        written = EXPORTS[to](Source(model, chosen.path), folder)
        written = replace(written, notes=(*_warnings(run_read, chosen.step), *written.notes))
        text = card(
            home.name if home is not None else chosen.path.name,
            model.config,
            chosen.step,
            run_read,
            written,
        )
        (folder / "README.md").write_text(text, encoding="utf-8")
        write_json(folder / RECORD, {"request": request, "written": asdict(written)})
    return _finished(out, request)


def _warnings(run: Run | None, step: int) -> list[str]:
    """What makes a checkpoint less than a finished, measured model."""
    if run is None:
        return []
    state, words = run.state
    found = [] if state == "done" else [f"warning: the run is not finished: {words}"]
    if not any(record["step"] == step for record in run.evaluations):
        found.append(
            f"warning: the checkpoint of step {step} was never evaluated: pennyclip eval "
            "retrieval RUN --data DATASET"
        )
    return found


def _fingerprint(checkpoint: Checkpoint) -> str:
    with checkpoint.weights.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=12)).hexdigest()


def _finished(out: Path, request: dict[str, str]) -> Exported:
    """The export that lies in a folder.

    Raises:
        RequestError: it is of another request, or no export.
    """
    record = {}
    if (out / RECORD).is_file():
        record = json.loads((out / RECORD).read_text(encoding="utf-8"))
    if record.get("request") != request:
        what = "another export" if record else "something that is no export of pennyclip"
        raise RequestError(f"{out} holds {what}. Choose another --out, or remove the folder.")
    written = Written(**record["written"])
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    return Exported(
        path=out,
        files=tuple(files),
        layout=written.layout,
        load_line=written.load_line(out),
        notes=tuple(written.notes),
    )
