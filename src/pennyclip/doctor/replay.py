"""One batch of a run again: every draw in an update is a function of the seed and the step."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pennyclip.answer import Answer
from pennyclip.checkpoint import checkpoints
from pennyclip.data.loader import Batch
from pennyclip.errors import RequestError
from pennyclip.loss import Features
from pennyclip.loss.row_losses import row_losses
from pennyclip.ready import make_ready, open_request
from pennyclip.run_folder import read_run
from pennyclip.session import Rows
from pennyclip.state import TrainState
from pennyclip.telemetry.metrics import read_metrics

SHOWN = 8  # rows, those with the largest loss


def replay(run: Path, step: int) -> Answer:
    """Compute the update of a step again, and say what of it is not finite, and whose loss it is.

    The weights are those of the last checkpoint before the step, or the run's first where there is
    none; updates in between are not made. Nothing of the run is changed.

    Args:
        run: its folder.
        step: counted from 1, as in metrics.jsonl.

    Raises:
        RequestError: there is no such run or step.
    """
    config, rows, plan = open_request(read_run(run))
    if not 1 <= step <= plan.steps:
        raise RequestError(f"--replay {step}: the run has steps 1 to {plan.steps}")
    before = [c for c in checkpoints(run) if c.step < step]
    ready = make_ready(config, rows, plan, before[-1] if before else None)
    state = TrainState.begin(
        ready.start, config, ready.precision, ready.device, lambda *_, **__: None
    )
    setup = ready.enter_stage(plan.stage(step - 1), state.optimizer)
    batch = setup.loader.batch(step - 1)

    kept: list[Features] = []  # the last: `update` tries again where memory runs out

    def compute(features: Features) -> tuple[Tensor, dict[str, float | Tensor]]:
        # Copies: the embeddings themselves would hold the graph of an attempt that failed.
        image, text = features.image.detach(), features.text.detach()
        for embeddings, copy in ((features.image, image), (features.text, text)):
            embeddings.register_hook(partial(setattr, copy, "grad"))  # type: ignore[no-untyped-call]
        kept[:] = [replace(features, image=image, text=text, all_image=image, all_text=text)]
        return ready.loss.compute(features)

    record = replace(ready, loss=replace(ready.loss, compute=compute)).update(
        setup, batch, step - 1, state.scaler, state.micro_batch
    )
    (features,) = kept
    tree = {
        "step": step,
        "weights_of_step": ready.start.step,
        "loss": record["loss"],
        "recorded_loss": _recorded(run, step),
        "grad_norm": record["grad_norm"],
        "not_finite": record["skipped"],
        "unreadable": [why for _, why in batch.unreadable],
        "rows": _worst(features, batch, rows),
    }
    return Answer(_text(tree), tree)


def _worst(features: Features, batch: Batch, rows: Rows) -> list[dict[str, Any]]:
    """The rows with the largest loss; those whose embedding is not finite come first."""
    with torch.no_grad():
        losses = row_losses(features)
        norms = torch.zeros_like(losses)
        for embeddings in (features.image, features.text):
            if embeddings.grad is not None:
                norms += embeddings.grad.norm(dim=1).nan_to_num()
        shares = norms / norms.sum().clamp(min=torch.finfo(norms.dtype).tiny)
        order = losses.argsort(descending=True)[:SHOWN].tolist()
    entries = rows.dataset.keys(batch.rows[order].cpu().numpy())
    return [
        {
            "row": int(batch.rows[i]),
            "loss": float(losses[i]),
            "gradient_share": float(shares[i]),
            "finite": bool(losses[i].isfinite()),
            "origin": entry["origin"],
            "image": rows.dataset.picture(entry),
            "captions": entry["captions"],
        }
        for i, entry in zip(order, entries, strict=True)
    ]


def _recorded(run: Path, step: int) -> float | None:
    records = read_metrics(run / "metrics.jsonl")
    found = [r["loss"] for r in records if r["kind"] == "train" and r["step"] == step]
    return float(found[-1]) if found else None


def _text(tree: dict[str, Any]) -> str:
    between = tree["step"] - 1 - tree["weights_of_step"]
    lines = [
        f"batch {tree['step']} with the weights of step {tree['weights_of_step']}"
        + (f", {between} updates before" if between else ", as it was"),
        f"loss {tree['loss']:.4f}"
        + (f", in the run {tree['recorded_loss']:.4f}" if tree["recorded_loss"] is not None else "")
        + f", gradient norm {tree['grad_norm']:.4g}",
    ]
    if tree["not_finite"]:
        lines.append(f"not finite: {tree['not_finite']['tensor']}")
    lines += [f"unreadable: {why}" for why in tree["unreadable"]]
    lines += ["", f"{'row':>8} {'loss':>8} {'gradient':>9}  where it came from, captions"]
    for row in tree["rows"]:
        loss = f"{row['loss']:.3f}" if row["finite"] else "not finite"
        captions = " | ".join(row["captions"])
        lines.append(
            f"{row['row']:>8} {loss:>8} {row['gradient_share']:>9.1%}  {row['image']}  "
            f"({row['origin']})  {captions[:100]}"
        )
    return "\n".join(lines)
