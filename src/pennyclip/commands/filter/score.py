"""What a CLIP thinks of a dataset's pairs: embeddings computed once, and cosines made from them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from pennyclip.base.atomic import replacing
from pennyclip.config.file import read_toml
from pennyclip.data.index import Dataset
from pennyclip.data.order import I64
from pennyclip.data.tokens import TokenStore
from pennyclip.evaluation.embeddings import Embeddings, image_embeddings, text_embeddings
from pennyclip.evaluation.encoder import CHUNK, load
from pennyclip.evaluation.features import Progress
from pennyclip.weights.checkpoint import Checkpoint

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Scorer:
    """One model's embeddings of a dataset."""

    dataset: Dataset
    images: Embeddings
    texts: Embeddings
    device: torch.device
    checkpoint: Checkpoint

    @classmethod
    def open(cls, dataset: Dataset, model: str, checkpoint: str, progress: Progress) -> "Scorer":
        """Find a model's embeddings of every picture and caption, and compute what is missing."""
        encoder = load(model, checkpoint)
        tokens = TokenStore.open(dataset, encoder.tokenizer)
        return cls(
            dataset,
            image_embeddings(encoder.model, dataset, CHUNK, progress),
            text_embeddings(encoder.model, dataset, tokens, CHUNK, progress),
            encoder.device,
            encoder.checkpoint,
        )

    @property
    def fingerprint(self) -> str:
        return f"{self.images.fingerprint}-{self.texts.fingerprint}"

    def captions(self) -> F32:
        """[captions] the cosine of each caption with its picture; stored beside the embeddings."""
        name = f"scores-{self.texts.fingerprint}-{self.dataset.fingerprint[:16]}.npy"
        file = self.dataset.path / "embeddings" / self.images.fingerprint / name
        if not file.is_file():
            parts = []
            starts = self.dataset.caption_starts
            for shard in range(len(self.images.parts)):
                first, last = self.images.starts[shard], self.images.starts[shard + 1]
                owner = np.repeat(np.arange(first, last), np.diff(starts[first : last + 1]))
                texts = self.texts.take(np.arange(starts[first], starts[last]))
                cosine = F.cosine_similarity(self.images.take(owner), texts)
                parts.append(cosine.numpy())
            with replacing(file) as partial, partial.open("wb") as out:
                np.save(out, np.concatenate(parts).astype(np.float32))
        return np.load(file)

    def rows(self) -> F32:
        """[rows] the mean over a row's captions: what a step that draws one of them can expect."""
        starts = self.dataset.caption_starts
        means = np.add.reduceat(self.captions(), starts[:-1]) / np.diff(starts)
        return means.astype(np.float32)

    def seen(self) -> I64:
        """The dataset's rows that the model was trained on, as far as its run's folder says.

        Rows keep their numbers when sources are appended, so the dataset is known by its place
        as well as by its fingerprint.
        """
        none = np.empty(0, np.int64)
        meta = self.checkpoint.path / "meta.json"
        config = self.checkpoint.path.parents[1] / "config.toml"
        if not meta.is_file() or not config.is_file():
            return none
        request = read_toml(config)
        same = self.checkpoint.meta.get("dataset") == self.dataset.fingerprint
        if not same and Path(request.data or "").resolve() != self.dataset.path.resolve():
            return none
        there = request.subset in self.dataset.subsets()
        return self.dataset.subset(request.subset) if there else none
