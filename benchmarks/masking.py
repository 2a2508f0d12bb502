"""Does dropping patches save the time that it saves in FLOPs?

    python benchmarks/masking.py [--rounds 7] [--threads 2] [--out benchmarks/results/NAME.txt]

Forward and backward of a ViT-B/16 image tower on uint8 images, batch 32, float32, with no, half and
three quarters of the patches dropped. FLOPs are counted by torch (with plain attention: its counter
does not know the CPU's fused one). Ratios are taken within a round.

Mark: time at most 1.15 times the ratio of FLOPs.
"""

import argparse
import datetime
import os
import statistics
import time
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from machine import processor, publish
from pennyclip.config.keys import ImageTower as ImageConfig
from pennyclip.model.image import ImageTower
from pennyclip.model.masking import keep_indices

NAME, RATIOS, MARK = "vit_base_patch16_224", (0.0, 0.5, 0.75), 1.15


def forward_backward(
    tower: ImageTower, images: torch.Tensor, ratio: float, step: int, precision: str
) -> None:
    keep = None
    if ratio:
        keep = keep_indices(
            len(images), tower.patches(), ratio, seed=0, step=step, device=images.device
        )
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        out = tower(images, keep)
    tower.zero_grad(set_to_none=True)
    out.float().square().mean().backward()


def flops(tower: ImageTower, images: torch.Tensor, ratio: float) -> int:
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        forward_backward(tower, images[:1], ratio, 0, "fp32")
    return counter.get_total_flops()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--out", type=Path, help="also write the table here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    torch.manual_seed(0)
    tower = ImageTower(ImageConfig(name=NAME), embed_dim=512).train()
    images = torch.randint(256, (args.batch, 3, 224, 224), dtype=torch.uint8)
    work = {ratio: flops(tower, images, ratio) for ratio in RATIOS}
    times: dict[float, list[tuple[float, float]]] = {ratio: [] for ratio in RATIOS}
    for number in range(args.rounds + 1):
        turn = number % len(RATIOS)
        for ratio in RATIOS[turn:] + RATIOS[:turn]:
            wall, cpu = time.perf_counter(), time.process_time()
            forward_backward(tower, images, ratio, number, args.precision)
            if number:  # the first round warms up
                spent = time.perf_counter() - wall, time.process_time() - cpu
                times[ratio].append(spent)

    lines = [
        f"{datetime.date.today()}  {processor()}, {args.threads} of {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}; torch {torch.__version__}; {NAME}, batch {args.batch}, "
        f"{args.precision}, {args.rounds} rounds",
        "",
        f"{'dropped':8}{'GFLOPs an image':>16}{'of all':>8}{'seconds':>9}{'of all: median':>16}"
        f"{'quartiles':>13}{'by CPU s':>10}{'time / FLOPs':>14}",
    ]
    for ratio, own in times.items():
        share = work[ratio] / work[0.0]
        pairs = list(zip(own, times[0.0], strict=True))
        low, mid, high = statistics.quantiles([a[0] / b[0] for a, b in pairs])
        by_cpu = statistics.median(a[1] / b[1] for a, b in pairs)
        wall = statistics.median(seconds for seconds, _ in own)
        verdict = "" if not ratio else "  met" if mid / share <= MARK else "  MISSED"
        lines.append(
            f"{ratio:<8}{work[ratio] / 1e9:16.1f}{share:8.3f}{wall:9.2f}{mid:16.3f}"
            f"{f'{low:.3f}-{high:.3f}':>13}{by_cpu:10.3f}{mid / share:14.2f}{verdict}"
        )
    publish(lines, args.out)


if __name__ == "__main__":
    main()
