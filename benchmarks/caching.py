"""What does gradient caching cost in time, and what does it save in memory?

    python benchmarks/caching.py [--rounds 5] [--threads 2] [--small] [--out benchmarks/results/X]

Updates of a ViT-B/32 CLIP with its text tower on random pictures and captions, with AdamW, in
float32 on a CPU and in what `auto` chooses on a GPU. About 6 minutes on 2 cores; `--small` takes a
small ViT and small batches, for a look in less than one.

Every memory figure is a process of its own: its peak, less what it held before the model was built,
so weights, gradients and optimizer state are part of it. A first update, of two pairs, makes that
state; the peak is of the update after it. On a CPU the allocator is told to give freed blocks back
at once: otherwise the peak is that of what it keeps, and differs from run to run. Times are
interleaved in one process, ratios taken within a round.

Marks: memory of batch 1,024 at micro-batch 64 at most 1.1 times that of batch 64 plus the batch
itself and its embeddings; time at most 1.45 times an uncached update, at a batch where that fits.
"""

import argparse
import datetime
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from machine import processor, publish
from pennyclip.config.keys import ClipText, ImageTower, Model, Optim
from pennyclip.data.loader import Batch
from pennyclip.loss import LOSSES
from pennyclip.model.clip import CLIP
from pennyclip.optim import OPTIMIZERS
from pennyclip.optim.groups import parameter_groups
from pennyclip.training.update.precision import choose
from pennyclip.training.update.update import update

MEMORY_MARK, TIME_MARK = 1.1, 1.45
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PRECISION = choose("auto", DEVICE, 0).precision if DEVICE.type == "cuda" else "fp32"
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # glibc, bytes


@dataclass(frozen=True)
class Case:
    """What is trained, and in which batches."""

    image: str
    image_size: int
    text: ClipText
    micro: int
    large: int
    timed: int

    embed_dim: int = 512
    length: int = 32  # tokens


CASES = {
    False: Case("vit_base_patch32_clip_224", 224, ClipText(), 64, 1024, 256),
    True: Case("vit_small_patch32_224", 224, ClipText(width=256, heads=4, layers=6), 16, 256, 64),
}


def pairs(case: Case, count: int) -> Batch:
    torch.manual_seed(0)
    batch = Batch(
        rows=torch.arange(count),
        groups=torch.arange(count),
        images=torch.randint(256, (count, 3, case.image_size, case.image_size), dtype=torch.uint8),
        tokens=torch.randint(1, 49408, (count, case.length)),
        lengths=torch.full((count,), case.length),
        image_features=None,
        text_features=None,
    )
    return batch.to(DEVICE)


class Trainer:
    """A model and its optimizer."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        tower = ImageTower(name=case.image, image_size=case.image_size)
        self.model = CLIP(Model(image=tower, text=case.text, embed_dim=case.embed_dim))
        self.model.train().to(DEVICE)
        optim = Optim(lr=1e-7)  # small: the model stays what it is
        groups = parameter_groups(self.model.named_parameters(), {}, optim)
        self.optimizer = OPTIMIZERS["adamw"](groups, optim)

    def step(self, batch: Batch, micro_batch: int | None) -> float:
        """Seconds of one update."""
        start = time.perf_counter()
        update(
            self.model,
            LOSSES["infonce"],
            self.optimizer,
            batch,
            clip_norm=1.0,
            precision=PRECISION,
            micro_batch=micro_batch,
        )
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def peak() -> int:
    """Most bytes that this process has held so far."""
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated()
    # Not ru_maxrss: on Linux a new process inherits its parent's.
    status = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in status)
    return 1024 * int(fields["VmHWM"].split()[0])


def memory(case: Case, count: int, micro_batch: int | None) -> int:
    """Bytes that training with this batch takes, model and optimizer state included."""
    before = peak()
    trainer = Trainer(case)
    trainer.step(pairs(case, 2), None)
    trainer.step(pairs(case, count), micro_batch)
    return peak() - before


def in_a_process(small: bool, count: int, micro_batch: int | None) -> int:
    arguments = [sys.executable, __file__, "--threads", str(torch.get_num_threads())]
    arguments += ["--small"] * small + ["--memory", str(count), str(micro_batch or 0)]
    done = subprocess.run(
        arguments, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | GIVE_BACK
    )
    return int(done.stdout)


def table(small: bool, rounds: int) -> list[str]:
    case = CASES[small]
    alone = in_a_process(small, case.micro, None)
    whole = in_a_process(small, case.large, case.micro)
    more = case.large - case.micro
    # What a larger batch must hold whatever the method: pictures, ids, two embeddings with their
    # gradients, before and after normalisation.
    pair = 3 * case.image_size**2 + 8 * case.length + 2 * 2 * 2 * 4 * case.embed_dim
    share = whole / (alone + more * pair)
    trainer, batch = Trainer(case), pairs(case, case.timed)
    trainer.step(batch, case.micro)
    plain, ratios = [], []
    for _ in range(rounds):
        plain.append(trainer.step(batch, None))
        ratios.append(trainer.step(batch, case.micro) / plain[-1])
    ratio = statistics.median(ratios)
    verdict = ["MISSED", "met"]
    return [
        f"batch {case.micro}, whole: {alone / 2**20:,.0f} MiB",
        f"batch {case.large}, micro-batch {case.micro}: {whole / 2**20:,.0f} MiB, {share:.2f} "
        f"times batch {case.micro} plus {more * pair / 2**20:,.0f} MiB of inputs and embeddings "
        f"(mark {MEMORY_MARK}: {verdict[share <= MEMORY_MARK]})",
        f"batch {case.timed}, micro-batch {case.micro}: {ratio:.2f} times the time of an uncached "
        f"update ({statistics.median(plain):.2f} s), {min(ratios):.2f} to {max(ratios):.2f} "
        f"(mark {TIME_MARK}: {verdict[ratio <= TIME_MARK]})",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory:
        print(memory(CASES[args.small], args.memory[0], args.memory[1] or None))
        return
    machine = torch.cuda.get_device_name() if DEVICE.type == "cuda" else processor()
    lines = [
        f"{datetime.date.today()}  {machine}, {args.threads} of {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}",
        f"torch {torch.__version__}, {CASES[args.small].image}, {PRECISION}, {args.rounds} rounds",
        *table(args.small, args.rounds),
    ]
    publish(lines, args.out)


if __name__ == "__main__":
    main()
