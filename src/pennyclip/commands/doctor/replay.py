"""One batch of a run again: every draw in an update is a function of the seed and the step.

The weights that the run had before it come from the last checkpoint before it, by the updates that
the run made in between. What the run's watch decided about them is in its records, and is not
decided again: from which step on the rates were lower, and what a rollback undid.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pennyclip.base.errors import RequestError
from pennyclip.base.progress import Counter
from pennyclip.commands.answer import Answer
from pennyclip.data.loader import Batch
from pennyclip.loss import Features
from pennyclip.loss.row_losses import row_losses
from pennyclip.optim.state import read_state
from pennyclip.reporting.run import Run
from pennyclip.reporting.run import read_run as read_records
from pennyclip.training.folder import read_run
from pennyclip.training.run import Ready, make_ready, open_request
from pennyclip.training.saver import leading_to, undone
from pennyclip.training.stage import Rows
from pennyclip.training.state import TrainState
from pennyclip.training.telemetry.metrics import plain
from pennyclip.training.update.not_finite import NORM
from pennyclip.weights.checkpoint import checkpoints

SHOWN = 8  # rows, those with the largest loss


def replay(run: Path, step: int) -> Answer:
    """Compute the update of a step again, and say what of it is not finite, and whose loss it is.

    Where there is no checkpoint before it, it begins with the run's first weights. Nothing of the
    run is changed.

    Args:
        run: its folder.
        step: counted from 1, as in metrics.jsonl.

    Raises:
        RequestError: there is no such run, or it has not come to this step.
    """
    config, rows, plan = open_request(read_run(run))
    records = read_records(run)
    if not 1 <= step <= records.steps:
        raise RequestError(_out_of_reach(step, records, plan.steps))
    gone = undone(records.records)
    found = leading_to(step, checkpoints(run), gone)
    ready = make_ready(config, rows, plan, found[-1] if found else None)
    state = TrainState.begin(ready, lambda *_, **__: None)
    kept: list[Features] = []  # the last: `update` tries again where memory runs out

    def compute(features: Features) -> tuple[Tensor, dict[str, float | Tensor]]:
        # Copies: the embeddings themselves would hold the graph of an attempt that failed.
        image, text = features.image.detach(), features.text.detach()
        for embeddings, copy in ((features.image, image), (features.text, text)):
            embeddings.register_hook(partial(setattr, copy, "grad"))  # type: ignore[no-untyped-call]
        kept[:] = [replace(features, image=image, text=text, all_image=image, all_text=text)]
        return ready.loss.compute(features)

    watched = replace(ready, loss=replace(ready.loss, compute=compute))
    course = _course(gone, state.step, step)
    updates = sum(end - begin for begin, end in course) - 1
    told = records.kind("event") + records.kind("train")
    logged = {r["step"]: r["loss"] for r in told if "loss" in r}
    compared: dict[int, bool] = {}
    pairs = config.batch_size
    with Counter("pairs again", (updates + 1) * pairs, quiet=not updates) as progress:
        for made in _updates(watched, state, course, records):
            progress.add(pairs)
            if state.step in logged:
                compared[state.step] = plain(made[1]["loss"]) == logged[state.step]
    (features,), (batch, record) = kept, made
    tree = {
        "step": step,
        "from_step": ready.start.step,
        "updates_before": updates,
        "loss": record["loss"],
        "recorded_loss": float(logged[step]) if step in logged else None,
        "compared": len(compared),
        "differs_from": next((s for s, same in compared.items() if not same), None),
        "elsewhere": _elsewhere(ready, records, step),
        "grad_norm": record["grad_norm"],
        "not_finite": record["skipped"],
        "even_share": 1 / len(batch.rows),
        "unreadable": [why for _, why in batch.unreadable],
        "rows": _worst(features, batch, rows),
    }
    return Answer(_text(tree), tree)


def _out_of_reach(step: int, records: Run, planned: int) -> str:
    there, (state, words) = records.steps, records.state
    if state == "done":
        return f"--replay {step}: the run has steps 1 to {there}"
    so_far = f"the run has steps 1 to {there} of {planned} so far" if there else "no step was made"
    return f"--replay {step}: {so_far} ({words.partition(': ')[0]})"  # the doctor says why


def _course(gone: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """The batches that led to the weights of batch `end`, itself included, from `begin` on.

    Args:
        gone: rollbacks, as `undone` gives them.

    Returns:
        (first, end) counted from 0, in order: what was undone lies between them.
    """
    course, seen = [], end - 1
    for to, at in reversed(gone):
        if begin < at <= seen:
            course.append((at, end))
            seen = end = to
    return [(begin, end), *reversed(course)]


def _updates(
    ready: Ready, state: TrainState, course: list[tuple[int, int]], records: Run
) -> Iterator[tuple[Batch, dict[str, Any]]]:
    """Make updates as the training loop made them: each batch, and what `update` returned."""
    plan, model = ready.plan, state.model
    reduced = [r for r in records.kind("event") if r["name"] == "rate reduced"]
    factors = [(r["step"], r["lr_factor"]) for r in reduced if not r.get("abandoned")]
    for begin, end in course:
        state.skipped += begin - state.step  # as `TrainState.go_back` counts them
        state.step = begin
        while state.step < end:
            number = plan.stage(state.step)
            setup = ready.enter_stage(number, state.optimizer)
            for batch in setup.loader.batches(state.step, min(end, plan.ends[number])):
                factor = next((f for s, f in reversed(factors) if s <= state.step), 1.0)
                plan.set_rates(setup.optimizer, state.step, state.skipped, factor)
                record = ready.update(setup, batch, state.step, state.scaler, state.micro_batch)
                state.step += 1
                state.micro_batch = record["micro_batch"]
                state.skipped += record["skipped"] is not None
                yield batch, record
            state.optimizer = read_state(setup.optimizer, model)


def _elsewhere(ready: Ready, records: Run, step: int) -> list[str]:
    """In what the machine that made a step differed from this one, which rounds otherwise."""
    starts = [r for r in records.kind("start") if r["step"] < step and not r.get("abandoned")]
    made, here = starts[-1] if starts else {}, ready.start.record
    there = {**made.get("machine", {}), **made.get("versions", {}), "device": made.get("device")}
    now = {**here["machine"], **here["versions"], "device": str(ready.device)}
    found = [
        f"{name} {there.get(name)} there, {value} here"
        for name, value in now.items()
        if there.get(name) != value
    ]
    return found + ["compiled there, not here"] * ready.config.compile


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


def _text(tree: dict[str, Any]) -> str:
    begin, updates = tree["from_step"], tree["updates_before"]
    lines = [
        f"batch {tree['step']}: from {f'checkpoint {begin}' if begin else 'the first weights'}"
        + (f", {updates} update{'s' * (updates > 1)} made again" if updates else "")
        + f"; loss {tree['loss']:.4f}, {_comparison(tree)}",
        f"gradient norm {tree['grad_norm']:.4g}",
    ]
    if tree["not_finite"]:
        lines.append(f"not finite: {_named(tree['not_finite'])}")
    lines += [f"unreadable: {why}" for why in tree["unreadable"]]
    lines += ["", f"{'row':>8} {'loss':>8} {'gradient':>9}  where it came from, captions"]
    for row in tree["rows"]:
        loss = f"{row['loss']:.3f}" if row["finite"] else "not finite"
        captions = " | ".join(row["captions"])
        lines.append(
            f"{row['row']:>8} {loss:>8} {row['gradient_share']:>9.1%}  {row['image']}  "
            f"({row['origin']})  {captions[:100]}"
        )
    even = f"An even share of the gradient is {tree['even_share']:.1%}"
    lines += ["", f"{even}: a row is only worth taking out where its own stands out."]
    return "\n".join(lines)


def _named(found: dict[str, Any]) -> str:
    if found["tensor"] != NORM:
        return str(found["tensor"])
    return (
        f"{NORM}. Every layer's gradient is finite, up to {found['largest']:.2g} in "
        f"{found['parameter']}, and only their norm overflows: the rate is too high or weights "
        "have grown. A row is to blame only if its share of the gradient stands out"
    )


def _comparison(tree: dict[str, Any]) -> str:
    """Of losses now with those that the run wrote down."""
    recorded, first = tree["recorded_loss"], tree["differs_from"]
    if first is None and recorded is not None:
        return "as in the run"
    if first is None:
        before = f"; {tree['compared']} losses before it as in the run" if tree["compared"] else ""
        return f"not recorded in the run{before}"
    said = "not recorded in the run" if recorded is None else f"in the run {recorded:.4f}"
    why = "; ".join(tree["elsewhere"]) or "data or first weights may have changed"
    return f"{said}. Losses differ from batch {first} on, so these weights are others ({why})"
