"""The events that a run may write, and what to do about each. Imports no torch."""

import shlex
from pathlib import Path

from pennyclip.training.telemetry.metrics import Record

REPLAY = "look at the batch: pennyclip doctor RUN --replay STEP"

REMEDIES = {
    "update skipped": "Now and then it is nothing. If it comes again, "
    + REPLAY
    + ". In fp16: bf16, "
    "or fp32 for the module that is named (precision_of).",
    "rows unreadable": "Files of the dataset were damaged after it was prepared: compare the shard "
    "with a copy, check the disk, prepare again.",
    "loss spike": "If it comes again: a lower optim.lr, a lower second number of optim.betas, or "
    "optim.name = stable-adamw; clipping, where it is off; and " + REPLAY + ".",
    "update RMS": "A lower second number of optim.betas, or optim.name = stable-adamw.",
    "temperature": "A lower optim.lr, if it is above the recipe's, or a lower "
    "optim.temperature.lr. Check that captions belong to their pictures and that nothing else "
    "scales the logits.",
    "no gradient": "Find where the tower's graph is cut or multiplied by 0; if it is meant to stay "
    "as it is, freeze it in the recipe.",
    "embeddings alike": "A lower optim.lr, or a longer optim.warmup_share; a smaller batch wants a "
    "lower rate than its recipe's.",
    "no better than guessing": "Use no checkpoint of this run. Where embeddings were alike or the "
    "rate was reduced: a lower optim.lr (pennyclip bench rate finds one). Otherwise more updates, "
    "more pairs, or a pretrained start (pennyclip list recipes). Check that captions belong to "
    "their pictures: pennyclip report DATASET shows some.",
    "rate reduced": "The next run: a lower optim.lr (pennyclip bench rate finds one), or a longer "
    "warm-up.",
    "rolled back": "Batch STEP was the first that was not well: " + REPLAY + ".",
    "stopped": "Where the run was rolled back before, its rate or its rows broke it: a new run "
    "with a lower optim.lr, a longer warm-up or without the rows that are named, from the same "
    "start; --init RUN only if a checkpoint of RUN is a good one (--init RUN/checkpoints/step_N "
    "names one). Where something else in the request is the cause: the same with the changed key. "
    "Where it lies outside (disk, data) and is mended: pennyclip train --resume RUN.",
    "out of memory": "Set micro_batch to what it came down to, or measure it: bench batch-size.",
    "checkpoint failed": "Make room on the disk before the next save.",
    "compiled": "Nothing.",
    "not compiled": "Nothing; without compile, the next run saves the trial.",
    "unreadable record": "Check the disk: a line of metrics.jsonl was damaged.",
}
"""By the event's name, for any RUN and STEP."""


def remedy(event: Record, run: Path) -> str:
    """What to do about an event, with commands that can be pasted; empty for an unknown one."""
    step = str(event.get("since", event["step"]))
    text = REMEDIES.get(str(event.get("name")), "")
    return text.replace("STEP", step).replace("RUN", shlex.quote(str(run)))
