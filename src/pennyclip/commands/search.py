"""Find a dataset's pictures by text."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pennyclip.base.errors import RequestError
from pennyclip.data.index import Dataset
from pennyclip.evaluation.embeddings import image_embeddings
from pennyclip.evaluation.encoder import CHUNK, load
from pennyclip.evaluation.features import Progress, silent


@dataclass(frozen=True)
class Hit:
    """A picture that was found."""

    row: int
    score: float
    """Cosine of the query's and the picture's embedding."""
    key: str
    origin: str
    """Where the picture came from when the dataset was prepared."""
    captions: list[str]
    image: str
    """The picture's file, where the source had one; else its name there."""


def search(
    run: Path,
    data: Path,
    query: str,
    *,
    subset: str | None = None,
    top: int = 5,
    checkpoint: str = "best",
    progress: Progress = silent,
) -> list[Hit]:
    """The pictures whose embeddings are closest to a text's, the closest first.

    Embeddings of the dataset are computed once for each model, and stored in the dataset.

    Raises:
        RequestError: an empty query, or no such run, dataset or subset.
    """
    if top < 1:
        raise RequestError(f"--top {top}: expected at least 1")
    if not query.strip():
        raise RequestError("the query is empty: say what to look for")
    dataset, encoder = Dataset(data), load(run, checkpoint)
    embeddings = image_embeddings(encoder.model, dataset, CHUNK, progress)
    rows = dataset.subset(subset) if subset else np.arange(len(dataset))
    text = encoder.encode_text([query])[0]
    scores = embeddings.take(rows) @ text
    order = scores.topk(min(top, len(rows))).indices.numpy()
    entries = dataset.keys(rows[order])
    return [
        Hit(
            row=int(rows[i]),
            score=float(scores[i]),
            key=entry["key"],
            origin=entry["origin"],
            captions=entry["captions"],
            image=dataset.picture(entry),
        )
        for i, entry in zip(order, entries, strict=True)
    ]
