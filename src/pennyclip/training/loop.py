"""The training run: one loop over updates, read from top to bottom."""

import shlex
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

from pennyclip.base.errors import RequestError, RunError
from pennyclip.config.keys import Config
from pennyclip.evaluation.features import Stores, embed_rows
from pennyclip.evaluation.retrieval import mean_chance, retrieval
from pennyclip.model.freezing import evaluating
from pennyclip.optim import step_metrics
from pennyclip.optim.state import read_state
from pennyclip.training.folder import RunFolder, claimed, cooling, find_run, read_run
from pennyclip.training.interrupt import Interrupt, Interrupted, listening
from pennyclip.training.run import Ready, make_ready, open_request, resolved
from pennyclip.training.saver import Saver
from pennyclip.training.stage import Rows, table
from pennyclip.training.state import TrainState
from pennyclip.training.telemetry.console import Console
from pennyclip.training.telemetry.meter import Meter
from pennyclip.training.telemetry.metrics import Metrics
from pennyclip.training.update.parallel import check_alone
from pennyclip.training.watch.symptoms import Symptom, no_better_than_guessing
from pennyclip.weights.checkpoint import Checkpoint, Scores, best, checkpoints
from pennyclip.weights.start import start


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
    chance: float | None = None
    """The mean recall of guessing on the development split; None: nothing was held out."""


def resume(run: Path, *, cooldown: bool = False, quiet: bool = False) -> Outcome:
    """Go on with an unfinished run, at the sample at which its last checkpoint stands.

    Args:
        run: its folder.
        cooldown: begin the cooldown of its `wsd` schedule there.
        quiet: nothing on the terminal.
    """
    check_alone()
    config = read_run(run)
    if not cooldown:
        return train(config, run, proceed=True, quiet=quiet)
    *_, plan = open_request(config)
    with cooling(run, config, plan) as changed:
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
    check_alone()
    config = resolved(config)
    run = find_run(config, out)
    config, rows, plan = open_request(config)
    if run.done(plan.steps):
        top = best(checkpoints(out))
        return Outcome(out, plan.steps, True, top, already_done=True, chance=_chance(rows))
    if run.last is not None and not proceed:
        raise RequestError(
            f"{out} holds this very run, unfinished at update {run.last.step} of {plan.steps}. Go "
            f"on with: pennyclip train --resume {out}"
        )
    if run.last is not None and run.last.meta["dataset"] != rows.dataset.fingerprint:
        raise RequestError(
            f"{config.data} is another dataset than the one that {out} began with: since then it "
            "was prepared anew, or appended to. Start a new run with another --out, or bring the "
            "old dataset back."
        )
    ready = make_ready(config, rows, plan, run.last)
    with claimed(run, config):
        metrics = Metrics(run.metrics, resume_step=ready.start.step)
        console = Console(plan.steps, ready.start.step, quiet)
        try:
            # Interrupted: between stages, each of which ends with a save. Nothing is lost.
            with listening() as asked, suppress(Interrupted):
                _train(ready, run, asked, metrics, console)
            found = checkpoints(out)
            step = found[-1].step if found else 0
            finished = step == plan.steps
            metrics.log("end", step, reason="finished" if finished else f"signal {asked.name}")
        except (RequestError, RunError) as error:
            error.args = (_for_run(str(error), out),)
            metrics.log("event", metrics.step, name="stopped", message=str(error))
            metrics.log("end", metrics.step, reason="error")
            raise
        finally:
            metrics.close()
            console.close()
    code = 0 if finished else asked.exit_code
    return Outcome(out, step, finished, best(found), code, chance=_chance(rows))


def _for_run(message: str, run: Path) -> str:
    """The message with a command that can be pasted."""
    return message.replace("pennyclip doctor RUN", f"pennyclip doctor {shlex.quote(str(run))}")


def _chance(rows: Rows) -> float | None:
    if rows.evaluation is None:
        return None
    captions = rows.dataset.rows["captions"][rows.evaluation].sum()
    return mean_chance(len(rows.evaluation), float(captions))


def _train(
    ready: Ready, run: RunFolder, asked: Interrupt, metrics: Metrics, console: Console
) -> None:
    """The loop."""
    config, rows, plan, beginning = ready.config, ready.rows, ready.plan, ready.start
    device, choice = ready.device, ready.choice
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

    state = TrainState.begin(ready, event)
    model, watch = state.model, state.watch
    saver = Saver(config, run, rows, metrics, console)
    # The rates of a stage are shown once in a run: not after a resume inside it, or a way back.
    inside = beginning.step not in (0, *plan.ends)
    shown = {plan.stage(beginning.step)} if inside else set[int]()

    while state.step < plan.steps and asked.signal is None:
        number = plan.stage(state.step)
        setup = ready.enter_stage(number, state.optimizer, progress)
        watch.enter_stage(number)
        state.compilation.enter_stage(number, state.step, setup.optimizer)
        console.say(table(setup, plan, number, groups=number not in shown))
        shown.add(number)
        console.enter_stage(number, plan.ends)
        meter = Meter(config.batch_size, device)
        back, stop = None, False
        for batch in meter.waiting(setup.loader.batches(state.step, plan.ends[number])):
            plan.set_rates(setup.optimizer, state.step, state.skipped, watch.lr_factor)
            attempt = partial(
                ready.update, setup, batch, state.step, state.scaler, state.micro_batch
            )
            record = state.compilation.run(state.step, attempt)
            state.step += 1
            state.micro_batch = record["micro_batch"]
            skipped = record["skipped"] is not None
            state.skipped += skipped
            if skipped:  # for the event: the watch may end the run before its record
                record["skipped"]["loss"] = record["loss"]
            if state.ema and not skipped:
                state.ema.update(model)
            if shortage := record.pop("shortage"):
                event(state.step, "out of memory", shortage)
            back = watch.judge(state.step, record, batch, model, setup.optimizer)
            meter.count(record, config.optim.clip_norm)
            stop = asked.signal is not None  # a later signal is for the next update
            last = stop or state.step == plan.steps
            ending = last or state.step in plan.ends
            due = state.step % config.log_every == 0 or ending or back
            if due or skipped:
                record |= setup.layers.metrics(record, config.optim.clip_norm)
                record |= {"skipped": state.skipped} | step_metrics(setup.optimizer)
                record = meter.read(record, state.step, plan.rows)
                fingerprint = crc32(batch.rows.numpy().tobytes())
                metrics.log("train", state.step, **record, rows_fingerprint=fingerprint)
            console.update(state.step, record if due else None)
            if back:
                break
            with meter.excluded():
                scores = Scores()
                if plan.evaluation_is_due(state.step) and rows.evaluation is not None:
                    scores = evaluate(state, ready, setup.stores, metrics, console)
                if saver.is_due(state, scores, ending):
                    state.optimizer = read_state(setup.optimizer, model)
                    saver.save(state, scores, last)
            if stop:
                break
        state.optimizer = read_state(setup.optimizer, model)
        if back:
            state.go_back(start(config, saver.before(back.since)), back, config)
            saver.save(state, Scores(), last=stop or state.step == plan.steps)
    if state.step == plan.steps and (symptom := _verdict(run, rows, watch.alike)):
        event(state.step, symptom.name, symptom.message, **symptom.evidence)


def _verdict(run: RunFolder, rows: Rows, alike: bool) -> Symptom | None:
    """What is to be said of a run that has made all its updates and knows nothing."""
    found, chance = checkpoints(run.path), _chance(rows)
    scores = [s for c in found for s in (c.score, c.ema_score) if s is not None]
    images = 0 if rows.evaluation is None else len(rows.evaluation)
    return no_better_than_guessing(max(scores, default=None), chance or 0.0, images, alike)


def evaluate(
    state: TrainState, ready: Ready, stores: Stores, metrics: Metrics, console: Console
) -> Scores:
    """Retrieval on the development split: its mean recall, which chooses the best checkpoint."""
    model, step, rows, settings = state.model, state.step, ready.rows, ready.config.evaluate

    def score(split: str) -> float:
        assert rows.evaluation is not None
        with evaluating(model):
            e = embed_rows(
                model, rows.dataset, rows.tokens, rows.evaluation, settings.chunk, stores
            )
        found = retrieval(e.image, e.text, e.owner).metrics
        metrics.log("eval", step, split=split, metrics=found)
        by_chance = mean_chance(found["images"], found["captions"])
        console.say(
            f"step {step}: mean recall on '{split}' {found['mean_recall']:.1%} "
            f"(chance {by_chance:.1%})"
        )
        return found["mean_recall"]

    raw = score(settings.split)
    if state.ema is None:
        return Scores(raw)
    with state.ema.applied(model):
        return Scores(raw, score(f"{settings.split}, averaged weights"))
