"""How good is what a recipe trains, and what does it cost?

    python benchmarks/recall.py RECIPE [RECIPE ...] --source FOLDER [--seeds 3] [--out FILE]

From raw files: one prepare, then for each recipe and seed one train and one retrieval evaluation
of its best checkpoint (chosen on the dev split) on the val split. Prints each seed, the mean, and
the processor seconds of the training, features included in the first seed of each frozen trunk.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from machine import publish
from pennyclip.commands.evaluate import evaluate_retrieval
from pennyclip.config.file import load_recipe
from pennyclip.data.prepare import prepare

SHOWN = ("image_to_text/R@1", "text_to_image/R@1", "image_to_text/R@10", "text_to_image/R@10")


def processor_seconds(arguments: list[str]) -> float:
    """Of a pennyclip command run as its own process."""
    before = os.times()
    subprocess.run([sys.executable, "-m", "pennyclip.cli", *arguments], check=True)
    after = os.times()
    return (
        after.children_user - before.children_user + after.children_system - before.children_system
    )


def measure(recipe: str, seeds: int, data: Path, runs: Path) -> list[str]:
    rows, lines = [], []
    for seed in range(seeds):
        run = runs / f"{Path(recipe).stem}-{seed}"
        arguments = ["train", recipe, "--data", str(data), "--out", str(run), "--seed", str(seed)]
        seconds = processor_seconds(arguments)
        metrics = evaluate_retrieval(run, data, "val", "best").metrics
        rows.append([100 * metrics[name] for name in SHOWN])
        lines.append(f"{recipe:<24} seed {seed}  {cells(rows[-1])}  {seconds:7.0f}")
    columns = list(zip(*rows, strict=True))
    lines.append(f"{recipe:<24} mean    {cells([statistics.mean(c) for c in columns])}")
    if seeds > 1:
        lines.append(f"{'':<24} sd      {cells([statistics.stdev(c) for c in columns])}")
    return lines


def cells(values: list[float]) -> str:
    return "  ".join(f"{value:6.1f}" for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--source", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dev-share", type=float, default=0.05, help="as prepare's")
    parser.add_argument("--folder", type=Path, help="where datasets and runs go; they are kept")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for recipe in options.recipes:
        load_recipe(recipe)  # refuses a misspelled one before the first is trained
    folder = options.folder or Path(tempfile.mkdtemp())
    began = time.monotonic()
    summary = prepare([options.source], folder / "dataset", dev_share=options.dev_share)
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {torch.get_num_threads()} threads, "
        f"load {os.getloadavg()[0]:.1f}; torch {torch.__version__}",
        f"{Path(options.source).name}: {summary.splits}",
        f"{'recipe':<24} {'':<7}   i2t@1   t2i@1  i2t@10  t2i@10  CPU s",
    ]
    for recipe in options.recipes:
        lines += measure(recipe, options.seeds, folder / "dataset", folder)
    lines.append(f"{time.monotonic() - began:.0f} s in all")
    publish(lines, options.out)


if __name__ == "__main__":
    main()
