"""The training run: one loop over updates, read from top to bottom."""

import platform
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch

from pennyclip.checkpoint import Checkpoint, best, checkpoints, load_model, load_trainer
from pennyclip.config import Config
from pennyclip.config_file import read_toml, to_tree
from pennyclip.data.augment import STEP
from pennyclip.data.order import draw
from pennyclip.errors import RequestError
from pennyclip.evaluate.retrieval import retrieval
from pennyclip.features import Stores, embed_rows
from pennyclip.interrupt import Interrupt, Interrupted, listening
from pennyclip.loss import LOSSES
from pennyclip.model.clip import CLIP
from pennyclip.model.freezing import evaluating
from pennyclip.optim.state import read_state
from pennyclip.precision import choose
from pennyclip.run_folder import RunFolder, claimed, find_run
from pennyclip.saver import Saver
from pennyclip.scaling import make_scaler
from pennyclip.session import Rows, check_stages, enter_stage, open_rows, table
from pennyclip.stages import Plan, make_plan
from pennyclip.telemetry.console import Console
from pennyclip.telemetry.meter import Meter
from pennyclip.telemetry.metrics import Metrics
from pennyclip.update import update
from pennyclip.weights.build import build
from pennyclip.weights.table import summary


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run: Path
    steps: int
    """Batches trained on; those that were skipped are counted in metrics.jsonl."""
    finished: bool
    best: Checkpoint | None
    """The checkpoint with the highest mean recall on the development split."""
    exit_code: int = 0
    already_done: bool = False
    """The run was finished before, and nothing was done now."""


@dataclass(frozen=True)
class Start:
    """What a run begins or goes on with."""

    model: CLIP
    trainer: dict[str, Any]
    step: int
    """Batches trained on before."""
    record: dict[str, Any]
    """What metrics.jsonl says about this start."""
    notes: list[str]
    """What people are told about it."""


def resume(run: Path, quiet: bool = False) -> Outcome:
    """Go on with an unfinished run, at the sample at which its last checkpoint stands."""
    if not (run / "config.toml").is_file():
        raise RequestError(f"{run.absolute()} is not a run folder: it has no config.toml")
    return train(read_toml(run / "config.toml"), run, proceed=True, quiet=quiet)


def train(config: Config, out: Path, *, proceed: bool = False, quiet: bool = False) -> Outcome:
    """Train a CLIP as `config` says, and write everything about it into `out`.

    Args:
        config: what to do; `config.data` names the prepared dataset.
        out: the run's folder.
        proceed: go on if `out` holds the same run, unfinished.
        quiet: nothing on the terminal.

    Raises:
        RequestError: the request cannot be carried out as it stands; nothing was trained.
        RunError: the run broke off; its checkpoints stay, and the message says how to go on.
    """
    config = replace(config, data=str(Path(config.data).absolute()) if config.data else "")
    if config.loss not in LOSSES:
        raise RequestError(f"loss '{config.loss}': known are {', '.join(LOSSES)}")
    has_bias = LOSSES[config.loss].initial_bias is not None
    config = replace(config, model=replace(config.model, logit_bias=has_bias))
    rows = open_rows(config)
    plan = make_plan(config, len(rows.train))
    run = find_run(config, out, proceed, plan.steps)
    if run.done(plan.steps):
        return Outcome(out, plan.steps, True, best(checkpoints(out)), already_done=True)
    if run.last is not None and run.last.meta["dataset"] != rows.dataset.fingerprint:
        raise RequestError(
            f"{config.data} is another dataset than the one that {out} began with: it was prepared "
            "anew. Start a new run with another --out, or bring the old dataset back."
        )
    start = _start(config, run)
    check_stages(start.model, config)
    with claimed(run, config):
        metrics = Metrics(run.metrics, resume_step=start.step)
        console = Console(plan.steps, start.step, quiet)
        try:
            # Interrupted: between stages, each of which ends with a save. Nothing is lost.
            with listening() as asked, suppress(Interrupted):
                _train(config, run, plan, rows, start, asked, metrics, console)
            found = checkpoints(out)
            step = found[-1].step if found else 0
            finished = step == plan.steps
            metrics.log("end", step, reason="finished" if finished else f"signal {asked.name}")
        finally:
            metrics.close()
            console.close()
    return Outcome(out, step, finished, best(found), 0 if finished else asked.exit_code)


def _train(
    config: Config,
    run: RunFolder,
    plan: Plan,
    rows: Rows,
    start: Start,
    asked: Interrupt,
    metrics: Metrics,
    console: Console,
) -> None:
    """The loop.

    `step` counts batches: it is the position in the data. `skipped` counts those of them from
    which no update was made, and which therefore don't move the learning rate.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, step = start.model.to(device), start.step
    choice = choose(config.precision, device, sum(p.numel() for p in model.parameters()))
    for note in [*start.notes, *rows.notes, f"precision {choice.precision}: {choice.reason}"]:
        console.say(note)
    metrics.log("start", step, **start.record, device=str(device), precision=vars(choice))
    state, skipped = start.trainer["optimizer"], start.trainer["skipped"]
    scaler = make_scaler(config, choice.precision)
    if scaler and start.trainer["scaler"]:
        scaler.load(start.trainer["scaler"])
    saver = Saver(config, run, rows, metrics, console)

    def progress(what: str, done: int, total: int) -> None:
        console.progress(what, done, total)
        asked.check()

    while step < plan.steps and asked.signal is None:
        number = plan.stage(step)
        setup = enter_stage(model, config, plan.stages[number], rows, state, progress)
        console.say(table(setup, plan, number))
        meter = Meter(config.batch_size)
        for batch in meter.waiting(setup.loader.batches(step, plan.ends[number])):
            record = update(
                model,
                LOSSES[config.loss],
                setup.optimizer,
                batch.to(device),
                keep=setup.keep(step, device),
                lr_factor=plan.lr_factor(step, skipped),
                clip_norm=config.optim.clip_norm,
                precision=choice.precision,
                scaler=scaler,
                micro_batch=config.micro_batch,
                seed=step_seed(config.seed, step),
            )
            step += 1
            ending = step in plan.ends or asked.signal is not None
            meter.count(record, config.optim.clip_norm)
            if record["skipped"]:
                skipped += 1
                metrics.log("event", step, name="update skipped", message=record["skipped"])
            if step % config.log_every == 0 or ending:
                record = meter.read(record | {"skipped": skipped}, step, plan.rows)
                metrics.log("train", step, **record, rows=crc32(batch.rows.numpy().tobytes()))
                console.update(step, record)
            with meter.excluded():
                score = None
                if plan.evaluation_is_due(step) and rows.evaluation is not None:
                    score = evaluate(model, config, rows, setup.stores, step, metrics, console)
                if saver.is_due(step, score, ending):
                    last = step == plan.steps or asked.signal is not None
                    saver.save(step, score, model, setup.optimizer, skipped, scaler, last)
            if asked.signal is not None:
                break
        state = read_state(setup.optimizer, model)


def _start(config: Config, run: RunFolder) -> Start:
    """Build the model and load what it starts from: weights of others, or the last checkpoint."""
    notes: list[str] = []
    loss = LOSSES[config.loss]
    if run.last is None:
        model, matches = build(
            config.model, config.seed, loss.initial_scale, loss.initial_bias or 0.0
        )
        notes = [summary(match) for match in matches]
        trainer, step = {"optimizer": {}, "skipped": 0, "scaler": None}, 0
        weights = {"weights": [match.summary() for match in matches]}
    else:
        model, trainer, step = load_model(run.last), load_trainer(run.last), run.last.step
        weights = {}
    record = {
        "request": to_tree(config),
        "logits": {"initial_scale": loss.initial_scale, "max_scale": loss.max_scale},
        "machine": {
            "host": platform.node(),
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
        },
        "versions": {name: version(name) for name in ("pennyclip", "torch", "timm")},
        "parameters": {
            "image": sum(p.numel() for p in model.visual.parameters()),
            "text": sum(p.numel() for p in model.text.parameters()),
        },
        **weights,
    }
    return Start(model, trainer, step, record, notes)


def step_seed(seed: int, step: int) -> int:
    """Seeds everything random inside an update, so that any update can be had again."""
    return int(draw(seed, STEP, np.array([0]), np.array([step]))[0] >> np.uint64(1))


def evaluate(
    model: CLIP,
    config: Config,
    rows: Rows,
    stores: Stores,
    step: int,
    metrics: Metrics,
    console: Console,
) -> float:
    """Retrieval on the development split: its mean recall, which chooses the best checkpoint."""
    assert rows.evaluation is not None
    with evaluating(model):
        e = embed_rows(
            model, rows.dataset, rows.tokens, rows.evaluation, config.evaluate.chunk, stores
        )
    result = retrieval(e.image, e.text, e.owner)
    metrics.log("eval", step, split=config.evaluate.split, metrics=result.metrics)
    score = result.metrics["mean_recall"]
    console.say(f"step {step}: mean recall on '{config.evaluate.split}' {score:.1%}")
    return score
