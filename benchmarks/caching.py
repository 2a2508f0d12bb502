"""What does gradient caching cost in time, and what does it save in memory?

    python benchmarks/caching.py [--rounds 5] [--threads 2] [--out benchmarks/results/NAME.txt]

Updates of a ViT-B/32 CLIP with its text tower on random pictures and captions, in float32 on a CPU
and in what `auto` chooses on a GPU. Every memory figure is a process of its own: its peak over
three updates, less what it held before the model was built. (Between micro-batches the gradients of
the parameters stay, 4 bytes each; a whole batch at its peak has none yet.) Times are interleaved in
one process, ratios taken within a round.

Marks: memory of batch 1,024 at micro-batch 64 at most 1.1 times that of batch 64 plus the batch
itself and its embeddings; time at most 1.45 times an uncached update, at a batch where that fits.
"""

import argparse
import datetime
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from pennyclip.config import ImageTower, Model, Optim
from pennyclip.data.loader import Batch
from pennyclip.loss import LOSSES
from pennyclip.model.clip import CLIP
from pennyclip.optim import OPTIMIZERS
from pennyclip.optim.groups import parameter_groups
from pennyclip.precision import choose
from pennyclip.update import update

NAME, DIM, LENGTH, SIZE = "vit_base_patch32_clip_224", 512, 32, 224
MICRO, LARGE, TIMED = 64, 1024, 256
MEMORY_MARK, TIME_MARK = 1.1, 1.45
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PRECISION = choose("auto", DEVICE, 0).precision if DEVICE.type == "cuda" else "fp32"


def pairs(count: int) -> Batch:
    torch.manual_seed(0)
    batch = Batch(
        rows=torch.arange(count),
        groups=torch.arange(count),
        images=torch.randint(256, (count, 3, SIZE, SIZE), dtype=torch.uint8),
        tokens=torch.randint(1, 49408, (count, LENGTH)),
        lengths=torch.full((count,), LENGTH),
        image_features=None,
        text_features=None,
    )
    return batch.to(DEVICE)


class Trainer:
    """A model and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = CLIP(Model(image=ImageTower(name=NAME), embed_dim=DIM))
        self.model = model.train().to(DEVICE)
        groups = parameter_groups(self.model.named_parameters(), {}, Optim())
        self.optimizer = OPTIMIZERS["adamw"](groups, Optim())

    def step(self, batch: Batch, micro_batch: int | None) -> float:
        """Seconds of one update."""
        start = time.perf_counter()
        record = update(
            self.model,
            LOSSES["infonce"],
            self.optimizer,
            batch,
            lr_factor=1e-3,
            clip_norm=1.0,
            precision=PRECISION,
            micro_batch=micro_batch,
        )
        record["loss"].item()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def peak() -> int:
    """Most bytes that this process has held so far."""
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory(count: int, micro_batch: int | None) -> int:
    """Bytes that training with this batch takes, model and optimizer state included."""
    before = peak()
    trainer, batch = Trainer(), pairs(count)
    for _ in range(3):
        trainer.step(batch, micro_batch)
    return peak() - before


def in_a_process(count: int, micro_batch: int | None) -> int:
    threads = str(torch.get_num_threads())
    arguments = [sys.executable, __file__, "--threads", threads, "--memory"]
    arguments += [str(count), str(micro_batch or 0)]
    return int(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)


def table(rounds: int) -> list[str]:
    alone, whole = in_a_process(MICRO, None), in_a_process(LARGE, MICRO)
    more = LARGE - MICRO
    # What a larger batch must hold whatever the method: pictures, ids, two embeddings with their
    # gradients, before and after normalisation.
    needed = more * (3 * SIZE * SIZE + 8 * LENGTH + 2 * 2 * 2 * 4 * DIM)
    share = whole / (alone + needed)
    trainer, batch = Trainer(), pairs(TIMED)
    trainer.step(batch, MICRO)
    ratios = []
    for _ in range(rounds):
        plain = trainer.step(batch, None)
        ratios.append(trainer.step(batch, MICRO) / plain)
    ratio = statistics.median(ratios)
    low, high = min(ratios), max(ratios)
    return [
        f"batch {MICRO}, whole             {alone / 2**20:8.0f} MiB",
        f"batch {LARGE}, micro-batch {MICRO}  {whole / 2**20:8.0f} MiB, {share:.2f} times batch "
        f"{MICRO} plus {needed / 2**20:.0f} MiB of inputs and embeddings (mark {MEMORY_MARK})",
        f"time at batch {TIMED}            {ratio:8.2f} times an uncached update, "
        f"{low:.2f} to {high:.2f} (mark {TIME_MARK})",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory:
        print(memory(args.memory[0], args.memory[1] or None))
        return
    machine = torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.machine()
    lines = [
        f"{datetime.date.today()}, {machine}, {args.threads} threads, torch {torch.__version__}, "
        f"{NAME}, {PRECISION}, {args.rounds} rounds",
        *table(args.rounds),
    ]
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
