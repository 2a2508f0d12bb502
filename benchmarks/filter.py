"""Does filtering by score find wrong pairs?

    python benchmarks/filter.py --source FOLDER [--seeds 3] [--limit N] [--folder F] [--out FILE]

The training rows of a source with captions.jsonl are cut into two halves. In the second, a fifth of
the rows get the captions of another of them. A model is trained on the first half alone, scores the
second, and the best 80 % of it are kept. Prints what share of the wrong pairs that removes (at
random: a fifth), what share of the right ones, and the AUC: how likely a wrong pair scores lower
than a right one. Seeds are the training's; the halves and the wrong pairs stay. The seconds are of
two cuts with one model, each with loading it and drawing the page; the first computes embeddings
(from the trunks' features, which training has stored). The rows marked "seen" are of a model that
was trained on both halves, so on the wrong pairs, too.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from machine import processor, publish
from pennyclip.cli import parse
from pennyclip.commands.filter.score import Scorer
from pennyclip.commands.filter.subset import filter_dataset
from pennyclip.data.index import Dataset
from pennyclip.data.prepare import prepare

WRONG, KEEP = 0.2, 0.8
RECIPE = "frozen-lite0-minilm"


def corrupt(source: Path, out: Path, limit: int | None) -> set[str]:
    """Write a table in which one half is `train` and the other, partly wrong, is `test`.

    Returns:
        The pictures that have another's captions.
    """
    lines = (source / "captions.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = [pair for pair in map(json.loads, lines) if pair.get("split", "train") == "train"]
    generator = np.random.default_rng(0)
    pairs = [pairs[i] for i in generator.permutation(len(pairs))[:limit]]
    half = len(pairs) // 2
    second = list(range(half, len(pairs)))
    wrong = generator.permutation(second)[: round(WRONG * len(second))].tolist()
    given = [pairs[i]["captions"] for i in wrong]
    for place, i in enumerate(wrong):  # in a ring: nobody keeps its own
        pairs[i]["captions"] = given[place - 1]
    with out.open("w", encoding="utf-8") as table:
        for i, pair in enumerate(pairs):
            record = {
                "image": str((source / pair["image"]).resolve()),
                "captions": pair["captions"],
                "split": "train" if i < half else "test",
            }
            table.write(json.dumps(record) + "\n")
    return {str((source / pairs[i]["image"]).resolve()) for i in wrong}


def auc(scores: np.ndarray, wrong: np.ndarray) -> float:
    """The share of (wrong, right) couples in which the wrong one scores lower; ties count half."""
    low, high = scores[wrong][:, None], scores[~wrong][None]
    return float((low < high).mean() + 0.5 * (low == high).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, help="of rows: a first look")
    parser.add_argument("--folder", type=Path, help="where dataset and runs go; they are kept")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "captions.jsonl"
    pictures = corrupt(options.source, table, options.limit)
    prepare([table], folder / "dataset", val_share=0.0, dev_share=0.1)
    dataset = Dataset(folder / "dataset")
    rows = dataset.subset("test")
    wrong = np.array([entry["source_key"] in pictures for entry in dataset.keys(rows)])

    lines = [
        f"{time.strftime('%Y-%m-%d')}, {processor()} ({platform.machine()}), "
        f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}; "
        f"torch {torch.__version__}",
        f"{options.source.name}: {dataset.meta['splits']['train']:,} rows to train {RECIPE} on; "
        f"{len(rows):,} to filter, {wrong.sum()} of them wrong",
        f"{'':<12} {'removed, of 100':>23} {'':>6} {'first cut':>11} {'second':>8}",
        f"{'seed':<12} {'wrong':>11} {'right':>11} {'AUC':>6} {'CPU s':>11} {'CPU s':>8}",
    ]
    filter_dataset(dataset.path, "both", union=("train", "test"))
    lines += measure(dataset, folder, wrong, options.seeds, "train", "")
    lines += measure(dataset, folder, wrong, options.seeds, "both", "seen ")
    random = 100 * (1 - KEEP)
    lines.append(f"{'random':<12} {random:>11.1f} {random:>11.1f} {0.5:>6.3f}")
    publish(lines, options.out)


def measure(
    dataset: Dataset, folder: Path, wrong: np.ndarray, seeds: int, subset: str, label: str
) -> list[str]:
    """Train on a subset and score `test`, for each seed: its lines, and their mean."""
    rows, found, lines = dataset.subset("test"), [], []
    for seed in range(seeds):
        run, name = folder / f"run-{subset}-{seed}", f"best-{subset}-{seed}"
        arguments = ["--data", str(dataset.path), "--subset", subset, "--out", str(run)]
        parse(["train", RECIPE, *arguments, "--seed", str(seed), "--continue"]).run()
        times = []
        for target, keep in ((name, KEEP), (f"{name}-half", 0.5)):
            began = time.process_time()
            filter_dataset(dataset.path, target, union=("test",), score=str(run), keep=keep)
            times.append(time.process_time() - began)
        kept = np.isin(rows, dataset.subset(name))
        scores = Scorer.open(dataset, str(run), "best", lambda *_: None).rows()[rows]
        found.append(
            (100 * (~kept[wrong]).mean(), 100 * (~kept[~wrong]).mean(), auc(scores, wrong))
        )
        first, second, area = found[-1]
        lines.append(
            f"{f'{label}{seed}':<12} {first:>11.1f} {second:>11.1f} {area:>6.3f} {times[0]:>11.1f}"
            f" {times[1]:>8.1f}"
        )
    first, second, area = (statistics.mean(column) for column in zip(*found, strict=True))
    lines.append(f"{f'{label}mean':<12} {first:>11.1f} {second:>11.1f} {area:>6.3f}")
    return lines


if __name__ == "__main__":
    main()
