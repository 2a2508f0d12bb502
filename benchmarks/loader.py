"""How many samples a second does one core turn into training batches, beside webdataset?

    python benchmarks/loader.py [--photographs FOLDER] [--count 192] [--rounds 7] [--out FILE]
    python benchmarks/loader.py --workers [--rounds 5]     threads beside processes

Both sides start from the same JPEGs with a caption each, and make batches for 224 px. The peer
reads tars of the originals by webdataset, with open_clip's own transforms and tokenizer: normalised
float images. Ours are prepared once and read by pennyclip's loader: uint8 images, which are
normalised on the device. Random resized crops keep 80 to 100 % of the area; centre crops are what
evaluation sees. Everything runs in one thread; in each round each takes one turn, in an order that
rotates, and ratios are taken within a round, by CPU seconds.

Marks: with the same random resized crop at least 3 times webdataset's samples (jpeg tier) and 10
times (raw tier); with the centre crop 40 times (raw tier).

--workers: the same batches from pennyclip's threads and from processes (torch's DataLoader), with
both cores' CPU seconds: what decided that the loader has threads.
"""

import argparse
import datetime
import io
import itertools
import json
import os
import resource
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
import webdataset
from open_clip.transform import AugmentationCfg

from machine import processor, publish
from pennyclip.config.keys import Augment
from pennyclip.data.index import Dataset
from pennyclip.data.loader import Loader
from pennyclip.data.prepare import prepare
from pennyclip.data.text import ClipTokenizer
from pennyclip.data.tokens import TokenStore
from photographs import HINT, find_photographs, photographs

PAIRS = Path(__file__).parents[2] / "shared/data/openstax-pairs"
SIZE, BATCH, SCALE = 224, 64, (0.8, 1.0)
MARKS = {("random", "jpeg"): 3, ("random", "raw"): 10, ("centre", "raw"): 40}

Pair = tuple[bytes, str]
Batches = Iterator[Any]


def captions() -> list[str]:
    if not (PAIRS / "captions.jsonl").is_file():
        return ["a photograph of something in front of something else, on a sunny day"]
    lines = (PAIRS / "captions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["captions"][0] for line in lines]


def pictures(kind: str, files: list[Path], count: int) -> list[Pair]:
    """JPEGs with a caption each."""
    if kind == "openstax-pairs":
        lines = (PAIRS / "captions.jsonl").read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines]
        jpegs = [one for one in found if one["image"].endswith((".jpg", ".jpeg"))]
        step = max(1, len(jpegs) // count)
        return [
            ((PAIRS / o["image"]).read_bytes(), o["captions"][0]) for o in jpegs[::step][:count]
        ]
    width, height = map(int, kind.split(" x "))
    made = photographs(files, width, height, count)
    return list(zip(made, itertools.cycle(captions()), strict=False))


def peer(tar: Path, crop: str) -> Batches:
    """open_clip's pipeline (open_clip_train/data.py) over one tar, again and again."""
    transform = open_clip.image_transform(
        SIZE,
        is_train=crop == "random",
        aug_cfg=AugmentationCfg(scale=SCALE),
    )
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    return iter(
        webdataset.DataPipeline(
            webdataset.ResampledShards([str(tar)]),
            webdataset.tarfile_to_samples(),
            webdataset.shuffle(100, initial=100),
            webdataset.decode("pilrgb"),
            webdataset.rename(image="jpg", text="txt"),
            webdataset.map_dict(image=transform, text=lambda text: tokenizer(text)[0]),
            webdataset.to_tuple("image", "text"),
            webdataset.batched(BATCH, partial=False),
        )
    )


def loader(dataset: Path, crop: str, **more: Any) -> Loader:
    opened, tokenizer = Dataset(dataset), ClipTokenizer()
    return Loader(
        dataset=opened,
        rows=np.arange(len(opened)),
        tokens=TokenStore.open(opened, tokenizer),
        tokenizer=tokenizer,
        batch_size=BATCH,
        seed=0,
        image_size=SIZE,
        text_length=77,
        augment=Augment(crop_scale=SCALE if crop == "random" else (1.0, 1.0)),
        **{"workers": 0, **more},
    )


def ours(dataset: Path, crop: str) -> Batches:
    return map(loader(dataset, crop).batch, itertools.count())


def made_ready(folder: Path, pairs: list[Pair]) -> dict[str, Path]:
    """The peer's tar, and our dataset in both tiers."""
    tar = folder / "0.tar"
    with tarfile.open(tar, "w") as file:
        for number, (jpeg, caption) in enumerate(pairs):
            for suffix, data in (("jpg", jpeg), ("txt", caption.encode())):
                member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))
    for name, raw in (("jpeg", None), ("raw", SIZE)):
        shares = {"val_share": 0.0, "dev_share": 0.0}
        prepare([str(tar)], folder / name, raw=raw, quiet=True, workers=1, **shares)
    return {"tar": tar, "jpeg": folder / "jpeg", "raw": folder / "raw"}


def cpu_seconds(batches: Batches, count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        next(batches)
    return time.process_time() - start


def compare(at: dict[str, Path], crop: str, count: int, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of `count` batches, a number a round, by side."""
    sides: dict[str, Batches] = {"webdataset": peer(at["tar"], crop)}
    sides |= {tier: ours(at[tier], crop) for tier in ("jpeg", "raw")}
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            # The fast ones are measured over more batches, for as long as a clock can tell.
            many = count * (1 if name == "webdataset" else 4)
            seconds = cpu_seconds(sides[name], many) / many * count
            if number:  # the first round warms up
                times[name].append(seconds)
    return times


def speed(args: argparse.Namespace) -> list[str]:
    files = find_photographs(args.photographs)
    kinds = ["640 x 480", "1024 x 768"] + ["openstax-pairs"] * PAIRS.is_dir()
    batches = max(1, args.count // BATCH)
    lines = [
        f"{'pictures':16}{'crop':8}{'side':12}{'samples/s':>10}{'ratio: median':>15}"
        f"{'quartiles':>14}{'mark':>6}",
    ]
    for kind in kinds:
        pairs = pictures(kind, files, args.count)
        if not pairs:
            lines.append(f"{kind}: no photographs of that size; {HINT}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            at = made_ready(Path(folder), pairs)
            for crop in ("random", "centre"):
                times = compare(at, crop, batches, args.rounds)
                for name, own in times.items():
                    ratios = [p / o for p, o in zip(times["webdataset"], own, strict=True)]
                    low, mid, high = statistics.quantiles(ratios)
                    mark = MARKS.get((crop, name))
                    verdict = "" if mark is None else "  met" if mid >= mark else "  MISSED"
                    lines.append(
                        f"{kind:16}{crop:8}{name:12}"
                        f"{batches * BATCH / statistics.median(own):10,.0f}{mid:15.1f}"
                        f"{f'{low:.1f}-{high:.1f}':>14}{mark or '':>6}{verdict}"
                    )
    return lines


class Numbered(torch.utils.data.Dataset[Any]):
    """Batches by number, for torch's DataLoader."""

    def __init__(self, loader: Loader, count: int) -> None:
        self.loader, self.count = loader, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        batch = self.loader.batch(number)
        return batch.images, batch.tokens, batch.lengths, batch.rows


def by_threads(dataset: Path, crop: str, workers: int, count: int) -> None:
    for _ in loader(dataset, crop, workers=workers).batches(0, count):
        pass


def by_processes(dataset: Path, crop: str, workers: int, count: int) -> None:
    numbered = Numbered(loader(dataset, crop), count)
    options = {"batch_size": None, "num_workers": workers, "prefetch_factor": 2}
    for _ in torch.utils.data.DataLoader(numbered, **options):
        pass


def spent(work: Callable[..., None], *arguments: Any) -> tuple[float, float]:
    """Seconds by the clock, and CPU seconds of this process and those that it started."""

    def used() -> float:
        both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(one.ru_utime + one.ru_stime for one in both)

    clock, cpu = time.perf_counter(), used()
    work(*arguments)
    return time.perf_counter() - clock, used() - cpu


def workers(args: argparse.Namespace) -> list[str]:
    pairs = pictures("640 x 480", find_photographs(args.photographs), args.count)
    if not pairs:
        raise SystemExit(HINT)
    cores = len(os.sched_getaffinity(0))
    lines = [f"{'tier':8}{'':12}{'samples/s':>10}{'CPU ms a sample':>17}"]
    count = 4 * max(1, args.count // BATCH)
    with tempfile.TemporaryDirectory() as folder:
        at = made_ready(Path(folder), pairs)
        for tier in ("jpeg", "raw"):
            found: dict[str, list[tuple[float, float]]] = {"threads": [], "processes": []}
            for _ in range(args.rounds):
                for name, work in (("threads", by_threads), ("processes", by_processes)):
                    found[name].append(spent(work, at[tier], "random", cores, count))
            for name, times in found.items():
                wall, cpu = (statistics.median(side) for side in zip(*times, strict=True))
                samples = count * BATCH
                lines.append(
                    f"{tier:8}{name:12}{samples / wall:10,.0f}{1000 * cpu / samples:17.2f}"
                )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photographs", type=Path)
    parser.add_argument("--count", type=int, default=192, help="pictures of each kind")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = [
        f"{datetime.date.today()}  {processor()}, load {os.getloadavg()[0]:.1f}; torch "
        f"{torch.__version__}, open_clip {open_clip.__version__}, webdataset "
        f"{version('webdataset')}; {args.count} pictures of each kind, batches of {BATCH}, "
        f"{args.rounds} rounds, one thread a side",
        "",
    ]
    publish(head + (workers(args) if args.workers else speed(args)), args.out)


if __name__ == "__main__":
    main()
