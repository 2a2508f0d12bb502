"""What does a loss with its backward cost at large batches, in memory and time, beside open_clip's?

    python benchmarks/loss.py [--rounds 5] [--threads 2] [--out benchmarks/results/NAME.txt]

Memory: each loss runs once in a process of its own; its peak is the growth of that process's
largest resident set (Linux: VmHWM; `ru_maxrss` would start at the parent's) over forward and
backward, features excluded, gradients included. The plain loss is measured at 8,192 rows and
counted 16-fold for 32,768, where a matrix of logits has 16 times the elements; the tiled one is
measured at both.

Time: at 8,192 rows; in each round every loss runs once, in an order that rotates, so a slow moment
of a shared machine meets them alike. Ratios are taken within a round, of wall-clock time and of
processor time (all threads).

open_clip's losses mask no groups; ours do. All groups differ here, so the results must agree.
"""

import argparse
import datetime
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import open_clip.loss
import torch
from torch import Tensor

from machine import processor, publish
from pennyclip.loss import LOSSES, Features

DIM, PLAIN_ROWS, ROWS = 512, 8_192, 32_768
MEMORY_MARK, TIME_MARK, GRADIENT_MARK = 0.04, 1.0, 1e-5
PEERS = {"infonce": "open_clip ClipLoss", "sigmoid": "open_clip SigLipLoss"}
PLAIN = {
    "open_clip ClipLoss": lambda f: open_clip.loss.ClipLoss()(f.image, f.text, f.scale),
    "open_clip SigLipLoss": lambda f: open_clip.loss.SigLipLoss()(
        f.image, f.text, f.scale, f.bias
    ),
}  # fmt: skip
CONTESTANTS: dict[str, Callable[[Features], Tensor]] = PLAIN | {
    f"pennyclip {name}": lambda f, compute=loss.compute: compute(f)[0]
    for name, loss in LOSSES.items()
}


def features(n: int) -> Features:
    """Seeded unit vectors, texts leaning towards their images; nothing larger is ever allocated."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(n, DIM, generator=generator)
    text = torch.randn(n, DIM, generator=generator).add_(image)
    for x in (image, text):
        x.div_(torch.linalg.vector_norm(x, dim=1, keepdim=True)).requires_grad_()
    scale, bias = (
        torch.tensor(1 / 0.07, requires_grad=True),
        torch.tensor(-10.0, requires_grad=True),
    )
    return Features(
        image=image, text=text, all_image=image, all_text=text, offset=0, scale=scale, bias=bias,
        groups=torch.arange(n),
    )  # fmt: skip


def run(name: str, f: Features) -> list[Tensor]:
    """The loss and its gradients."""
    leaves = (f.image, f.text, f.scale, f.bias)
    for x in leaves:
        x.grad = None
    value = CONTESTANTS[name](f)
    value.backward()
    return [value.detach(), *(x.grad for x in leaves if x.grad is not None)]


def peak(name: str, n: int) -> float:
    """MiB that one forward and backward add to this process; call it in a fresh one."""
    f = features(n)
    run(name, features(64))  # libraries and thread pools are not the loss's
    before = largest_resident_set()
    run(name, f)
    return largest_resident_set() - before


def largest_resident_set() -> float:
    """Of this process so far, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024  # given in KiB
    raise SystemExit("no VmHWM in /proc/self/status: this benchmark needs Linux")


def peak_elsewhere(name: str, n: int, threads: int) -> float:
    command = [sys.executable, __file__, "--peak", name, str(n), "--threads", str(threads)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(f"{name} at {n:,}: {float(out):,.0f} MiB", file=sys.stderr)
    return float(out)


def verdict(what: str, found: float, mark: float) -> str:
    return f"{what}: {found:.2g}, mark {mark:g}: {'met' if found <= mark else 'MISSED'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="also write the table here")
    parser.add_argument("--peak", nargs=2, metavar=("NAME", "ROWS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak:
        print(peak(args.peak[0], int(args.peak[1])))
        return

    memory = {name: peak_elsewhere(name, PLAIN_ROWS, args.threads) for name in CONTESTANTS}
    memory_at_rows = {
        name: 16 * memory[name] if name in PLAIN else peak_elsewhere(name, ROWS, args.threads)
        for name in CONTESTANTS
    }

    f = features(PLAIN_ROWS)
    wall: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    busy: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    results, names = {}, list(CONTESTANTS)
    for i in range(args.rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start, start_busy = time.perf_counter(), time.process_time()
            results[name] = run(name, f)
            wall[name].append(time.perf_counter() - start)
            busy[name].append(time.process_time() - start_busy)
        print(f"round {i + 1} of {args.rounds}", file=sys.stderr)

    def of_peer(name: str, times: dict[str, list[float]]) -> float:
        peer = PEERS.get(name.removeprefix("pennyclip "), "open_clip ClipLoss")
        peer = name if name in PLAIN else peer
        return statistics.median(a / b for a, b in zip(times[name], times[peer], strict=True))

    lines = [
        f"{datetime.date.today()}  {processor()}, {args.threads} of {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}; torch {torch.__version__}, open_clip {open_clip.__version__}",
        f"forward and backward, width {DIM}, float32; {args.rounds} rounds; of peer: the same kind "
        "of loss in open_clip (multi_positive: ClipLoss)",
        "",
        f"{'':26}{f'peak MiB at {PLAIN_ROWS:,}':>20}{f'at {ROWS:,}':>14}{'seconds':>10}{'best':>8}"
        f"{'of peer: wall':>15}{'processor':>11}",
    ]
    for name in names:
        at_rows = f"{memory_at_rows[name]:,.0f}"
        at_rows = f"({at_rows})" if name in PLAIN else at_rows
        lines.append(
            f"{name:26}{memory[name]:20,.0f}{at_rows:>14}{statistics.median(wall[name]):10.2f}"
            f"{min(wall[name]):8.2f}{of_peer(name, wall):15.2f}{of_peer(name, busy):11.2f}"
        )
    lines.append("(in brackets: 16 times the peak at 8,192)")
    lines.append("")
    for ours, peer in PEERS.items():
        name = f"pennyclip {ours}"
        errors = [
            float((a - b).abs().max() / b.abs().max())
            for a, b in zip(results[name][1:], results[peer][1:], strict=True)
        ]
        share = memory_at_rows[name] / memory_at_rows[peer]
        lines.append(verdict(f"{ours}, share of the plain memory at 32,768", share, MEMORY_MARK))
        lines.append(verdict(f"{ours}, share of the plain time", of_peer(name, wall), TIME_MARK))
        lines.append(verdict(f"{ours}, gradients' relative error", max(errors), GRADIENT_MARK))
    publish(lines, args.out)


if __name__ == "__main__":
    main()
