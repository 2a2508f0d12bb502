"""One batch of a run again: every draw in an update is a function of the seed and the step."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pennyclip.answer import Answer
from pennyclip.checkpoint import checkpoints
from pennyclip.config_file import read_toml
from pennyclip.data.loader import Batch
from pennyclip.errors import RequestError
from pennyclip.features import silent
from pennyclip.loss import LOSSES, Features
from pennyclip.model.recompute import recompute
from pennyclip.precision import assign, choose
from pennyclip.run_folder import RunFolder
from pennyclip.session import Rows, enter_stage, open_rows
from pennyclip.stages import make_plan
from pennyclip.start import start
from pennyclip.state import TrainState
from pennyclip.telemetry.metrics import read_metrics
from pennyclip.train import step_seed
from pennyclip.update import update

SHOWN = 8  # rows, those with the largest loss
CHUNK = 1024  # rows of the matrix of logits at a time


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
    if not (run / "config.toml").is_file():
        raise RequestError(f"{run.absolute()} is not a run folder: it has no config.toml")
    config = read_toml(run / "config.toml")
    rows = open_rows(config)
    plan = make_plan(config, rows.epoch)
    if not 1 <= step <= plan.steps:
        raise RequestError(f"--replay {step}: the run has steps 1 to {plan.steps}")
    before = [c for c in checkpoints(run) if c.step < step]
    beginning = start(config, RunFolder(run, before[-1] if before else None))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = choose(
        config.precision, device, sum(p.numel() for p in beginning.model.parameters())
    ).precision
    state = TrainState.begin(beginning, config, precision, device, lambda *_, **__: None)
    assign(state.model, precision, config.precision_of)
    recompute(state.model, config.activation_checkpointing)  # after that, as in a run
    number = plan.stage(step - 1)
    setup = enter_stage(state.model, config, number, rows, state.optimizer, silent)
    batch = setup.loader.batch(step - 1).to(device)

    kept: list[Features] = []  # the last: `update` tries again where memory runs out
    loss = LOSSES[config.loss]

    def compute(features: Features) -> tuple[Tensor, dict[str, float | Tensor]]:
        # Copies: the embeddings themselves would hold the graph of an attempt that failed.
        image, text = features.image.detach(), features.text.detach()
        for embeddings, copy in ((features.image, image), (features.text, text)):
            embeddings.register_hook(partial(setattr, copy, "grad"))  # type: ignore[no-untyped-call]
        kept[:] = [replace(features, image=image, text=text, all_image=image, all_text=text)]
        return loss.compute(features)

    record = update(
        state.model,
        replace(loss, compute=compute),
        setup.optimizer,
        batch,
        keep=setup.keep(plan.mask_ratio(step - 1), step - 1, device),
        clip_norm=config.optim.clip_norm,
        precision=precision,
        stochastic_rounding=config.optim.stochastic_rounding,
        scaler=state.scaler,
        micro_batch=state.micro_batch,
        seed=step_seed(config.seed, step - 1),
    )
    (features,) = kept
    tree = {
        "step": step,
        "weights_of_step": beginning.step,
        "loss": record["loss"],
        "recorded_loss": _recorded(run, step),
        "grad_norm": record["grad_norm"],
        "not_finite": record["skipped"],
        "unreadable": [why for _, why in batch.unreadable],
        "rows": _worst(features, batch, rows),
    }
    return Answer(_text(tree), tree)


def row_losses(features: Features) -> Float[Tensor, " B"]:
    """Cross-entropy of each pair against its batch, both directions' mean, without own groups.

    For infonce, the loss by row; for the others a measure of the same kind.
    """
    f = features
    total = torch.zeros(len(f.image), device=f.image.device)
    for queries, candidates in ((f.image, f.text), (f.text, f.image)):
        for at in range(0, len(queries), CHUNK):
            part = slice(at, at + CHUNK)
            logits = f.scale * queries[part] @ candidates.T
            same = f.groups[part, None] == f.groups
            own = torch.arange(len(logits), device=logits.device)
            same[own, own + at] = False
            logits = logits.masked_fill(same, -torch.inf)
            total[part] += (logits.logsumexp(1) - logits[own, own + at]) / 2
    return total


def _worst(features: Features, batch: Batch, rows: Rows) -> list[dict[str, Any]]:
    """The rows with the largest loss; those whose embedding is not finite come first."""
    with torch.no_grad():
        bad = ~(torch.isfinite(features.image).all(1) & torch.isfinite(features.text).all(1))
        losses = row_losses(
            replace(features, image=features.image.nan_to_num(), text=features.text.nan_to_num())
        )
        norms = torch.zeros_like(losses)
        for embeddings in (features.image, features.text):
            if embeddings.grad is not None:
                norms += embeddings.grad.norm(dim=1).nan_to_num()
        shares = norms / norms.sum().clamp(min=torch.finfo(norms.dtype).tiny)
        order = torch.where(bad, torch.inf, losses).argsort(descending=True)[:SHOWN].tolist()
    entries = rows.dataset.keys(batch.rows[order].cpu().numpy())
    return [
        {
            "row": int(batch.rows[i]),
            "loss": float(losses[i]),
            "gradient_share": float(shares[i]),
            "finite": not bool(bad[i]),
            "origin": entry["origin"],
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
            f"{row['row']:>8} {loss:>8} {row['gradient_share']:>9.1%}  {row['origin']}  "
            f"{captions[:100]}"
        )
    return "\n".join(lines)
