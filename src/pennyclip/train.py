"""The training run: one loop over updates, read from top to bottom."""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch

from pennyclip.checkpoint import Checkpoint, best, checkpoints
from pennyclip.config import Config
from pennyclip.config_file import read_toml
from pennyclip.data.order import STEP, draw
from pennyclip.errors import RequestError, RunError
from pennyclip.evaluate.retrieval import retrieval
from pennyclip.features import Stores, embed_rows
from pennyclip.interrupt import Interrupt, Interrupted, listening
from pennyclip.loss import LOSSES
from pennyclip.model.freezing import evaluating
from pennyclip.model.recompute import recompute
from pennyclip.optim import step_metrics
from pennyclip.optim.state import read_state
from pennyclip.precision import assign, choose, lr_scale
from pennyclip.precision import check as check_precision
from pennyclip.run_folder import RunFolder, claimed, cooling, find_run
from pennyclip.saver import Saver, Scores
from pennyclip.session import Rows, check_stages, enter_stage, open_rows, table
from pennyclip.stages import Plan, make_plan
from pennyclip.start import Start, start
from pennyclip.state import TrainState
from pennyclip.telemetry.console import Console
from pennyclip.telemetry.meter import Meter
from pennyclip.telemetry.metrics import Metrics
from pennyclip.update import update


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


def resume(run: Path, *, cooldown: bool = False, quiet: bool = False) -> Outcome:
    """Go on with an unfinished run, at the sample at which its last checkpoint stands.

    Args:
        run: its folder.
        cooldown: begin the cooldown of its `wsd` schedule there.
        quiet: nothing on the terminal.
    """
    if not (run / "config.toml").is_file():
        raise RequestError(f"{run.absolute()} is not a run folder: it has no config.toml")
    config = read_toml(run / "config.toml")
    if not cooldown:
        return train(config, run, proceed=True, quiet=quiet)
    with cooling(run, config) as changed:
        return train(changed, run, proceed=True, quiet=quiet)


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
    config = replace(config, data=_absolute(config.data), init=_absolute(config.init))
    wordnet = _absolute(config.augment.wordnet)
    config = replace(config, augment=replace(config.augment, wordnet=wordnet))
    if config.loss not in LOSSES:
        raise RequestError(f"loss '{config.loss}': known are {', '.join(LOSSES)}")
    has_bias = LOSSES[config.loss].initial_bias is not None
    config = replace(config, model=replace(config.model, logit_bias=has_bias))
    rows = open_rows(config)
    plan = make_plan(config, rows.epoch)
    run = find_run(config, out, proceed, plan.steps)
    if run.done(plan.steps):
        return Outcome(out, plan.steps, True, best(checkpoints(out)), already_done=True)
    if run.last is not None and run.last.meta["dataset"] != rows.dataset.fingerprint:
        raise RequestError(
            f"{config.data} is another dataset than the one that {out} began with: it was prepared "
            "anew. Start a new run with another --out, or bring the old dataset back."
        )
    beginning = start(config, run)
    check_stages(beginning.model, config)
    check_precision(beginning.model, config)
    with claimed(run, config):
        metrics = Metrics(run.metrics, resume_step=beginning.step)
        console = Console(plan.steps, beginning.step, quiet)
        try:
            # Interrupted: between stages, each of which ends with a save. Nothing is lost.
            with listening() as asked, suppress(Interrupted):
                _train(config, run, plan, rows, beginning, asked, metrics, console)
            found = checkpoints(out)
            step = found[-1].step if found else 0
            finished = step == plan.steps
            metrics.log("end", step, reason="finished" if finished else f"signal {asked.name}")
        except (RequestError, RunError) as error:
            metrics.log("event", metrics.step, name="stopped", message=str(error))
            metrics.log("end", metrics.step, reason="error")
            raise
        finally:
            metrics.close()
            console.close()
    return Outcome(out, step, finished, best(found), 0 if finished else asked.exit_code)


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""


def _train(
    config: Config,
    run: RunFolder,
    plan: Plan,
    rows: Rows,
    beginning: Start,
    asked: Interrupt,
    metrics: Metrics,
    console: Console,
) -> None:
    """The loop."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    choice = choose(config.precision, device, sum(p.numel() for p in beginning.model.parameters()))
    for note in [*beginning.notes, *rows.notes, f"precision {choice.precision}: {choice.reason}"]:
        console.say(note)
    metrics.log(
        "start", beginning.step, **beginning.record, device=str(device), precision=vars(choice)
    )

    def event(step: int, name: str, message: str, **evidence: Any) -> None:
        metrics.log("event", step, name=name, message=message, **evidence)
        console.say(f"step {step}: {name}: {message}")

    def progress(what: str, done: int, total: int) -> None:
        console.progress(what, done, total)
        asked.check()

    state = TrainState.begin(beginning, config, choice.precision, device, event)
    model, watch = state.model, state.watch
    assign(model, choice.precision, config.precision_of)
    # After that: it wraps what the modules' classes, which may just have changed, compute.
    recompute(model, config.activation_checkpointing)
    plan = replace(plan, lr_scale=lr_scale(config, choice.precision))
    saver = Saver(config, run, rows, metrics, console)

    while state.step < plan.steps and asked.signal is None:
        number = plan.stage(state.step)
        setup = enter_stage(model, config, number, rows, state.optimizer, progress)
        watch.enter_stage(number)
        state.compilation.enter_stage(number)
        console.say(table(setup, plan, number))
        meter = Meter(config.batch_size, device)
        back, stop = None, False
        for batch in meter.waiting(setup.loader.batches(state.step, plan.ends[number])):
            plan.set_rates(setup.optimizer, state.step, state.skipped, watch.lr_factor)
            record = state.compilation.run(
                state.step,
                partial(
                    update,
                    model,
                    LOSSES[config.loss],
                    setup.optimizer,
                    batch.to(device),
                    keep=setup.keep(plan.mask_ratio(state.step), state.step, device),
                    clip_norm=config.optim.clip_norm,
                    precision=choice.precision,
                    stochastic_rounding=config.optim.stochastic_rounding,
                    scaler=state.scaler,
                    micro_batch=state.micro_batch,
                    seed=step_seed(config.seed, state.step),
                ),
            )
            state.step += 1
            state.micro_batch = record["micro_batch"]
            state.skipped += record["skipped"] is not None
            if state.ema and not record["skipped"]:
                state.ema.update(model)
            if shortage := record.pop("shortage"):
                event(state.step, "out of memory", shortage)
            back = watch.judge(state.step, record, batch, model, setup.optimizer)
            meter.count(record, config.optim.clip_norm)
            stop = asked.signal is not None  # a later signal is for the next update
            last = stop or state.step == plan.steps
            ending = last or state.step in plan.ends
            if state.step % config.log_every == 0 or ending or back:
                record |= {"skipped": state.skipped} | step_metrics(setup.optimizer)
                record = meter.read(record, state.step, plan.rows)
                metrics.log("train", state.step, **record, rows=crc32(batch.rows.numpy().tobytes()))
                console.update(state.step, record)
            if back:
                break
            with meter.excluded():
                scores: Scores = (None, None)
                if plan.evaluation_is_due(state.step) and rows.evaluation is not None:
                    scores = evaluate(state, config, rows, setup.stores, metrics, console)
                if saver.is_due(state, scores, ending):
                    state.optimizer = read_state(setup.optimizer, model)
                    saver.save(state, scores, last)
            if stop:
                break
        state.optimizer = read_state(setup.optimizer, model)
        if back:
            state.go_back(start(config, saver.before(back.since)), back, config)
            saver.save(state, (None, None), last=stop or state.step == plan.steps)


def step_seed(seed: int, step: int) -> int:
    """Seeds everything random inside an update, so that any update can be had again."""
    return int(draw(seed, STEP, np.array([0]), np.array([step]))[0] >> np.uint64(1))


def evaluate(
    state: TrainState,
    config: Config,
    rows: Rows,
    stores: Stores,
    metrics: Metrics,
    console: Console,
) -> Scores:
    """Retrieval on the development split: its mean recall, which chooses the best checkpoint."""
    model, step = state.model, state.step

    def score(split: str) -> float:
        assert rows.evaluation is not None
        with evaluating(model):
            e = embed_rows(
                model, rows.dataset, rows.tokens, rows.evaluation, config.evaluate.chunk, stores
            )
        found = retrieval(e.image, e.text, e.owner).metrics
        metrics.log("eval", step, split=split, metrics=found)
        console.say(f"step {step}: mean recall on '{split}' {found['mean_recall']:.1%}")
        return found["mean_recall"]

    split = config.evaluate.split
    raw = score(split)
    if state.ema is None:
        return raw, None
    with state.ema.applied(model):
        return raw, score(f"{split}, averaged weights")
