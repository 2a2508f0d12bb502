"""What `pennyclip eval` does: load a run, evaluate it, and write the result into the run."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pennyclip.base.atomic import write_text
from pennyclip.data.index import Dataset
from pennyclip.data.order import I64
from pennyclip.data.tokens import TokenStore
from pennyclip.evaluation.encoder import CHUNK, load
from pennyclip.evaluation.features import Embedded, embed_rows
from pennyclip.evaluation.result import Result
from pennyclip.evaluation.retrieval import RECALLS, ceiling, retrieval
from pennyclip.evaluation.zeroshot import read_names, zeroshot
from pennyclip.training.telemetry.metrics import Metrics
from pennyclip.weights.checkpoint import Checkpoint

EXAMPLES = 24  # pictures in the report's grid. chosen: fills a page
SHOWN = 3  # captions beside each


def evaluate_retrieval(run: Path, data: Path, split: str, checkpoint: str) -> Result:
    """Retrieval on a split of a dataset, both directions, with a sheet of examples."""
    dataset, encoder = Dataset(data), load(run, checkpoint)
    rows = dataset.subset(split)
    tokens = TokenStore.open(dataset, encoder.tokenizer)
    embedded = embed_rows(encoder.model, dataset, tokens, rows, CHUNK)
    result = retrieval(embedded.image, embedded.text, embedded.owner)
    texts = [caption for entry in dataset.keys(rows) for caption in entry["captions"]]
    result = _with_ceiling(result, embedded.owner.tolist(), texts)
    _record(run, encoder.checkpoint, checkpoint, split, result)
    if (run / "metrics.jsonl").is_file():
        sheet = {
            "split": split,
            "step": encoder.checkpoint.step,
            "candidates": len(embedded.text),
            "items": examples(dataset, rows, embedded, texts),
        }
        write_text(run / "examples.json", json.dumps(sheet))
    return result


def evaluate_zeroshot(run: Path, images: Path, checkpoint: str, classes: Path | None) -> Result:
    """Zero-shot classification of a folder with one folder a class."""
    names = read_names(classes) if classes is not None else None
    encoder = load(run, checkpoint)
    result = zeroshot(encoder, images, names)
    _record(run, encoder.checkpoint, checkpoint, f"zero-shot {images.name}", result)
    return result


def _with_ceiling(result: Result, owner: list[int], texts: list[str]) -> Result:
    """The result beside what can be had at most, and a note where that is not everything."""
    shared, most = ceiling(owner, texts)
    if not shared:
        return result
    images, lines = int(result.metrics["images"]), []
    for direction in ("image_to_text", "text_to_image"):
        recalls = (f"R@{k} {most[f'{direction}/R@{k}']:.1%}" for k in RECALLS)
        lines.append(f"{direction.replace('_', '-')} {', '.join(recalls)}")
    note = (
        f"{shared:,} of {images:,} images share a caption with others, which count as wrong. At "
        f"most: {'; '.join(lines)}. Where captions name classes: pennyclip eval zeroshot"
    )
    return replace(result, ceiling=most, notes=[note])


def _record(run: Path, chosen: Checkpoint, asked: str, split: str, result: Result) -> None:
    """Append the result to the run's metrics, if `run` is a run and not a lone checkpoint."""
    if (run / "metrics.jsonl").is_file():
        metrics = Metrics(run / "metrics.jsonl")
        metrics.log("eval", chosen.step, split=split, metrics=result.metrics, checkpoint=asked)
        metrics.close()


def examples(
    dataset: Dataset, rows: I64, embedded: Embedded, texts: list[str]
) -> list[dict[str, Any]]:
    """Pictures spread evenly over the rows, each with its closest captions of the whole split."""
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(EXAMPLES, len(rows))).astype(int))
    items = []
    for i in chosen.tolist():
        scores = embedded.text @ embedded.image[i]
        own = embedded.owner == i
        best = scores.topk(min(SHOWN, len(scores))).indices.tolist()
        best_own = int(scores.masked_fill(~own, -torch.inf).argmax())
        best += [] if best_own in best else [best_own]
        items.append(
            {
                "image": base64.b64encode(dataset.image_bytes(int(rows[i]))).decode(),
                "captions": [
                    {"text": texts[j], "score": float(scores[j]), "own": bool(own[j])} for j in best
                ],
                "rank": int((scores > scores[best_own]).sum()) + 1,
            }
        )
    return items
