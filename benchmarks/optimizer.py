"""How long does one LAMB update take, beside the peers, on the parameters of a ViT-B/16 CLIP?

    python benchmarks/optimizer.py [--rounds 15] [--threads 2] [--out benchmarks/results/NAME.txt]
    python benchmarks/optimizer.py --small --rounds 3    # whether it runs, not how fast it is

About 150 M parameters: timm's vit_base_patch16_224 with a 512-wide projection and CLIP's text
transformer (512 wide, 12 layers, 49,408 tokens, context 77). All optimizers update the same
parameters with the same gradients; in each round each takes one step, in an order that rotates, so
a slow moment of a shared machine meets them alike. Ratios are taken within a round.

On a machine that others use too, set OMP_WAIT_POLICY=PASSIVE: otherwise threads that spin for a
preempted one make every multi-threaded time meaningless (tens of seconds a step were seen).

Marks: pennyclip uncompiled at most 1.05 times timm's multi-tensor LAMB, compiled at most 0.5 times.
"""

import argparse
import datetime
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import timm
import timm.optim
import torch
from torch import nn

from machine import processor, publish
from pennyclip.optim.lamb import Lamb

TEXT_WIDTH, TEXT_LAYERS, VOCABULARY, CONTEXT = 512, 12, 49_408, 77
RATE = 1e-6  # small: the weights keep their size over the rounds
BETAS, EPS, DECAY = (0.9, 0.98), 1e-6, 0.05
REFERENCE = "timm LAMB multi-tensor"
MARKS = {"pennyclip LAMB": 1.05, "pennyclip LAMB compiled": 0.5}


def parameters(device: str, small: bool) -> list[nn.Parameter]:
    """Seeded values in the shapes of the two towers, with gradients."""
    with torch.device("meta"):
        name = "vit_tiny_patch16_224" if small else "vit_base_patch16_224"
        tower = timm.create_model(name, num_classes=TEXT_WIDTH)
    shapes = [tuple(p.shape) for p in tower.parameters()]
    d = TEXT_WIDTH
    shapes += [(1000 if small else VOCABULARY, d), (CONTEXT, d), (d,), (d,), (d, d), ()]
    block = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,)]
    block += [(d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    shapes += block * (1 if small else TEXT_LAYERS)
    generator = torch.Generator().manual_seed(0)
    out = []
    for shape in shapes:
        p = nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(device))
        p.grad = (torch.randn(shape, generator=generator) * 1e-3).to(device)
        out.append(p)
    return out


def contestants(params: list[nn.Parameter]) -> dict[str, torch.optim.Optimizer]:
    common = {"lr": RATE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    out: dict[str, torch.optim.Optimizer] = {
        REFERENCE: timm.optim.Lamb(params, **common, max_grad_norm=None, foreach=True),
        "pennyclip LAMB": Lamb(params, **common),
        "pennyclip LAMB compiled": Lamb(params, **common),
        "torch AdamW foreach": torch.optim.AdamW(params, **common, foreach=True),
        "torch AdamW fused": torch.optim.AdamW(params, **common, fused=True),
    }
    try:
        from pytorch_optimizer import Lamb as PeerLamb
    except ImportError:
        print("pytorch_optimizer is not installed: left out (pip install pytorch_optimizer)")
    else:
        out["pytorch_optimizer LAMB"] = PeerLamb(params, **common, max_grad_norm=0.0)
    return out


def seconds(step: Callable[[], object], device: str) -> tuple[float, float]:
    """Of the clock, and of processor time over all threads."""
    if device == "cuda":
        torch.cuda.synchronize()
    start, busy = time.perf_counter(), time.process_time()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, time.process_time() - busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--small", action="store_true", help="a tenth of a tower and less")
    parser.add_argument("--out", type=Path, help="also write the table here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    params = parameters(args.device, args.small)
    optimizers = contestants(params)
    compiled = optimizers["pennyclip LAMB compiled"]
    assert isinstance(compiled, Lamb)
    compiling, _ = seconds(compiled.compile, args.device)
    first = {}
    for name, optimizer in optimizers.items():  # states, page faults
        first[name] = seconds(optimizer.step, args.device)[0]
        optimizer.step()
    load = os.getloadavg()[0]
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    busy: dict[str, list[float]] = {name: [] for name in optimizers}
    names = list(optimizers)
    for i in range(args.rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            wall, cpu = seconds(optimizers[name].step, args.device)
            times[name].append(wall)
            busy[name].append(cpu)

    size = sum(p.numel() for p in params)
    machine = torch.cuda.get_device_name() if args.device == "cuda" else processor()
    lines = [
        f"{datetime.date.today()}  {machine}, {args.threads} of {os.cpu_count()} cores, load "
        f"{load:.1f} before and {os.getloadavg()[0]:.1f} after",
        f"torch {torch.__version__}, timm {timm.__version__}",
        f"{size / 1e6:.1f} M parameters in {len(params)} tensors, float32; {args.rounds} rounds",
        "",
        f"{'':26}{'seconds: median':>16}{'quartiles':>16}{'best':>8}"
        f"{'of timm: median':>18}{'quartiles':>16}"
        f"{'processor s':>13}{'of timm':>9}{'first step':>12}",
    ]
    medians = {}
    for name, own in times.items():
        ratios = [a / b for a, b in zip(own, times[REFERENCE], strict=True)]
        cpu_ratio = statistics.median(
            a / b for a, b in zip(busy[name], busy[REFERENCE], strict=True)
        )
        low, mid, high = statistics.quantiles(own)
        r_low, medians[name], r_high = statistics.quantiles(ratios)
        lines.append(
            f"{name:26}{mid:16.3f}{f'{low:.3f}-{high:.3f}':>16}{min(own):8.3f}"
            f"{medians[name]:18.2f}{f'{r_low:.2f}-{r_high:.2f}':>16}"
            f"{statistics.median(busy[name]):13.3f}{cpu_ratio:9.2f}{first[name]:11.1f}s"
        )
    lines += ["", f"compiling took {compiling:.1f} s before the first step"]
    for name, mark in [] if args.small else MARKS.items():
        verdict = "met" if medians[name] <= mark else "MISSED"
        lines.append(f"{name}: {medians[name]:.2f} of timm's, mark {mark}: {verdict}")
    publish(lines, args.out)


if __name__ == "__main__":
    main()
