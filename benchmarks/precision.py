"""Does accuracy depend on the precision?

    python benchmarks/precision.py --folder FOLDER [--seeds 3] [--out benchmarks/results/NAME.txt]

On the openstax-pairs (in shared), from raw files: the recipe `frozen-lite0-minilm`, whose heads
learn from stored features; and a CLIP of 3.6 M parameters from random weights (a ViT of 6 blocks
and width 64 at 64 px, a text transformer of 2 blocks), 6 epochs. Each in float32, under autocast
in bf16 and fp16, and in pure-bf16 with float32 masters and without them, by stochastic rounding.
Recall at 10 on the val split, of the checkpoint that the dev split chooses.

A seed gives the same weights, batches and captions in every precision, so differences are taken
seed by seed: their mean, with the half width of its 95 % interval (Student's t). "Seed noise" is
the standard deviation of fp32 over the seeds. The last column says which differences exceed both.

Every finished run is written to FOLDER/runs.jsonl at once; called again, only the others are made.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from machine import processor, publish
from pennyclip.commands.evaluate import evaluate_retrieval
from pennyclip.config.file import load_recipe
from pennyclip.config.keys import ClipText, Config, Evaluation, ImageTower, Model, Optim, Stage
from pennyclip.data.prepare import prepare
from pennyclip.training.loop import train

SOURCE = Path(__file__).parents[2] / "shared/data/openstax-pairs"
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "pure-bf16": {"precision": "pure-bf16"},
    "pure-bf16-stochastic": {"precision": "pure-bf16", "stochastic_rounding": True},
}
SHOWN = ("image_to_text/R@10", "text_to_image/R@10")
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}
"""By seeds: Student's t at 5 %, two-sided, with n - 1 degrees of freedom."""


def scratch() -> Config:
    return Config(
        model=Model(
            image=ImageTower(name="test_vit", image_size=64),
            text=ClipText(width=64, layers=2, heads=2),
            embed_dim=128,
        ),
        stages=(Stage(epochs=6.0),),
        batch_size=64,
        optim=Optim(lr=1e-3, warmup_share=0.1),
        evaluate=Evaluation(every_epochs=2.0),
    )


def models() -> dict[str, Config]:
    return {"frozen start": load_recipe("frozen-lite0-minilm"), "from scratch": scratch()}


def measure(config: Config, run: Path) -> dict[str, float]:
    began = time.process_time()
    train(config, run, proceed=True, quiet=True)
    seconds = time.process_time() - began
    metrics = evaluate_retrieval(run, Path(config.data), "val", "best").metrics
    return {"cpu_seconds": seconds, **{name: 100 * metrics[name] for name in SHOWN}}


def table(name: str, runs: list[dict[str, Any]], seeds: int) -> list[str]:
    """Mean and standard deviation of a model's scores by precision, and how far from fp32."""
    lines = [
        "",
        f"{name:<22}{'i2t@10':>8}{'sd':>6}{'t2i@10':>8}{'sd':>6}{'CPU s':>7}"
        f"{'off fp32':>26}{'':20}   by seed",
    ]
    scores = {
        precision: [[r[way] for r in runs if r["precision"] == precision] for way in SHOWN]
        for precision in PRECISIONS
    }
    for precision, ways in scores.items():
        if min(map(len, ways + scores["fp32"])) < seeds:
            lines.append(f"{precision:<22} not all seeds have run yet")
            continue
        cells = "".join(f"{statistics.mean(w):8.1f}{_sd(w):6.1f}" for w in ways)
        seconds = statistics.mean(r["cpu_seconds"] for r in runs if r["precision"] == precision)
        off, verdict = [], "" if precision == "fp32" else "within seed noise"
        for way, exact in zip(ways, scores["fp32"], strict=True):
            if precision == "fp32" or seeds not in STUDENT:
                continue
            differences = [a - b for a, b in zip(way, exact, strict=True)]
            difference = statistics.mean(differences)
            half = STUDENT[seeds] * _sd(differences) / seeds**0.5
            off.append(f"{difference:+.1f} ± {half:.1f}")
            if abs(difference) > max(half, _sd(exact)):
                verdict = "DIFFERENT"
        seen = " ".join(f"{a:.1f}/{b:.1f}" for a, b in zip(*ways, strict=True))
        lines.append(
            f"{precision:<22}{cells}{seconds:7.0f}{'  '.join(off):>26}{verdict:>20}   {seen}"
        )
    return lines


def _sd(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="of the dataset and the runs")
    parser.add_argument("--source", type=Path, default=SOURCE)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, help="shorter runs, to try this file out")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    data, done = options.folder / "dataset", options.folder / "runs.jsonl"
    if not (data / "dataset.json").is_file():
        prepare([str(options.source)], data)
    done.touch()
    runs = [json.loads(line) for line in done.read_text(encoding="utf-8").splitlines()]
    for seed in range(options.seeds):
        for model, plain in models().items():
            for name, changed in PRECISIONS.items():
                key = {"model": model, "precision": name, "seed": seed}
                if any(key.items() <= run.items() for run in runs):
                    continue
                optim = replace(plain.optim, stochastic_rounding="stochastic_rounding" in changed)
                stages = plain.stages
                if options.epochs is not None:
                    stages = tuple(replace(s, epochs=options.epochs) for s in stages)
                config = replace(
                    plain,
                    data=str(data),
                    seed=seed,
                    precision=changed["precision"],
                    optim=optim,
                    stages=stages,
                )
                run = options.folder / f"{model} {name} {seed}".replace(" ", "-")
                runs.append(key | measure(config, run))
                print(runs[-1], flush=True)
                with done.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(runs[-1]) + "\n")
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {processor()}, {torch.get_num_threads()} threads, load "
        f"{os.getloadavg()[0]:.1f}; torch {torch.__version__}; {options.source.name}, "
        f"{options.seeds} seeds",
    ]
    for model in models():
        lines += table(model, [run for run in runs if run["model"] == model], options.seeds)
    publish(lines, options.out)


if __name__ == "__main__":
    main()
