"""What does it save to compute frozen layers once, and does training stay the same?

    python benchmarks/frozen.py --source ../shared/data/openstax-pairs [--epochs 3] [--threads 2]
        [--pairs 200] [--out benchmarks/results/NAME.txt]

From raw files: one prepare into a temporary folder. Then the towers of frozen-lite0-minilm with
their pretrained weights, in float32: wholly frozen as in the recipe, and with the last layers
learning. Each is trained twice from the same start on the same batches, once from what is stored of
the frozen layers, once with the layers run at each update (and images decoded for them). Epochs of
the two alternate, so that both see the same machine; ratios are taken epoch by epoch. The first
pass, which fills the store, is shown by itself. About 15 minutes on 2 cores; `--pairs` takes so
many of the source's, for a look.

Marks, for the wholly frozen stage: at least 20 times faster an epoch, and losses that never differ
by more than 1 %.
"""

import argparse
import copy
import datetime
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from machine import processor, publish
from pennyclip.config.file import load_recipe
from pennyclip.config.keys import Config, Depth, Stage
from pennyclip.data.loader import Loader
from pennyclip.data.prepare import prepare
from pennyclip.evaluation.features import silent
from pennyclip.loss import LOSSES
from pennyclip.model.freezing import frozen_layers
from pennyclip.training.plan import make_plan
from pennyclip.training.run import step_seed
from pennyclip.training.stage import Rows, Setup, enter_stage, open_rows
from pennyclip.training.update.update import update
from pennyclip.weights.build import build

RECIPE, SPEED_MARK, LOSS_MARK = "frozen-lite0-minilm", 20, 0.01
STAGES: list[tuple[str, Depth, Depth]] = [("all frozen", "none", "none"), ("last 4, 2 learn", 4, 2)]


@dataclass
class Side:
    """One of the two trainings."""

    model: torch.nn.Module
    setup: Setup
    loader: Loader
    seconds: list[float]
    """Of each epoch."""
    losses: list[float]
    """Of each update."""


def source(folder: Path, pairs: int | None, out: Path) -> Path:
    """The data, or its first pairs as a table of their own."""
    if pairs is None:
        return folder
    lines = (folder / "captions.jsonl").read_text(encoding="utf-8").splitlines()[:pairs]
    rows = [json.loads(line) for line in lines]
    for row in rows:
        row["image"] = str((folder / row["image"]).absolute())
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return out


def train_epoch(side: Side, config: Config, rows: Rows, number: int) -> None:
    plan = make_plan(config, len(rows.train))
    length = len(rows.train) // config.batch_size
    began = time.perf_counter()
    for step, batch in enumerate(
        side.loader.batches(number * length, (number + 1) * length), number * length
    ):
        plan.set_rates(side.setup.optimizer, step)
        record = update(
            side.model,
            LOSSES[config.loss],
            side.setup.optimizer,
            batch,
            clip_norm=config.optim.clip_norm,
            precision="fp32",
            seed=step_seed(config.seed, step),
        )
        side.losses.append(float(record["loss"]))
    side.seconds.append(time.perf_counter() - began)


def measure(name: str, config: Config, epochs: int) -> str:
    rows = open_rows(config)
    model, _ = build(config.model, config.seed)
    other = copy.deepcopy(model)
    began = time.perf_counter()
    setup = enter_stage(model, config, 0, rows, {}, silent)
    once = time.perf_counter() - began
    stores = setup.stores.image, setup.stores.text
    assert None not in stores, setup.stored
    plain = enter_stage(other, config, 0, rows, {}, silent)
    loader = replace(plain.loader, image_store=None, text_store=None)
    sides = [Side(model, setup, setup.loader, [], []), Side(other, plain, loader, [], [])]
    for number in range(epochs):
        for side in sides if number % 2 else reversed(sides):
            train_epoch(side, config, rows, number)
    cached, computed = sides
    ratios = [b / a for a, b in zip(cached.seconds, computed.seconds, strict=True)]
    differs = max(abs(a / b - 1) for a, b in zip(cached.losses, computed.losses, strict=True))
    verdict = ""
    if config.stages[0].image_layers == "none":
        met = min(ratios) >= SPEED_MARK and differs <= LOSS_MARK
        verdict = "  met" if met else "  MISSED"
    towers = (model.visual, model.text)
    layers = ", ".join(f"{frozen_layers(t)} of {len(t.layers())}" for t in towers)
    disk = sum(store.values.nbytes for store in stores if store) / 1e6
    return (
        f"{name:<17}{layers:>17}{once:9.1f}{disk:9.1f}{statistics.median(cached.seconds):11.2f}"
        f"{statistics.median(computed.seconds):13.1f}{statistics.median(ratios):8.1f}"
        f"{f'{min(ratios):.1f}-{max(ratios):.1f}':>14}{differs:13.3%}"
        f"{f'{computed.losses[0]:.3f} to {computed.losses[-1]:.3f}':>17}{verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="the folder of openstax-pairs")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, help="only the first of the source")
    parser.add_argument("--batch", type=int, help="unset: the recipe's")
    parser.add_argument("--out", type=Path, help="also write the table here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "dataset"
        chosen = source(args.source, args.pairs, Path(folder) / "captions.jsonl")
        summary = prepare([chosen], data, workers=args.threads, quiet=True)
        recipe = load_recipe(RECIPE)
        recipe = replace(recipe, data=str(data), batch_size=args.batch or recipe.batch_size)
        lines = [
            f"{datetime.date.today()}  {processor()}, {args.threads} of {os.cpu_count()} cores, "
            f"load {os.getloadavg()[0]:.1f}; torch {torch.__version__}; {RECIPE}, batch "
            f"{recipe.batch_size}, fp32, {summary.splits['train']} rows, {args.epochs} epochs",
            "",
            f"{'':<17}{'frozen layers':>17}{'once, s':>9}{'MB':>9}{'stored, s':>11}"
            f"{'computed, s':>13}{'ratio':>8}{'range':>14}{'losses':>13}{'from':>17}",
            f"{'stage':<17}{'(image, text)':>17}{'':>18}{'an epoch':>11}{'an epoch':>13}"
            f"{'':>22}{'differ by':>13}{'':>17}",
        ]
        for name, image, text in STAGES:
            stage = Stage(epochs=20.0, image_layers=image, text_layers=text)
            rate = recipe.optim.lr if image == "none" else 1e-4  # pretrained layers need a low one
            optim = replace(recipe.optim, lr=rate)
            config = replace(recipe, stages=(stage,), optim=optim)
            lines.append(measure(name, config, args.epochs))
    publish(lines, args.out)


if __name__ == "__main__":
    main()
