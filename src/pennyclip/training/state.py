"""What a run carries from one update to the next. All of it is in every checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pennyclip.config.keys import Config
from pennyclip.model.clip import CLIP
from pennyclip.model.ema import Ema
from pennyclip.model.lora import adapter_state
from pennyclip.optim.state import State
from pennyclip.training.run import Ready
from pennyclip.training.update.compilation import Compilation
from pennyclip.training.update.scaling import LossScaler, make_scaler
from pennyclip.training.watch.watch import Log, RollBack, Watch
from pennyclip.weights.start import Start


@dataclass
class TrainState:
    """Where a run stands."""

    model: CLIP
    optimizer: State
    """Of every parameter by its name, as of the last save or stage's end."""
    step: int
    """Batches seen: the position in the data."""
    skipped: int
    """Those of them that left no update, and so don't move the learning rate along its course."""
    micro_batch: int | None
    """Pairs that go through the towers at a time."""
    scaler: LossScaler | None
    ema: Ema | None
    watch: Watch
    compilation: Compilation

    @classmethod
    def begin(cls, ready: Ready, log: Log) -> "TrainState":
        """Begin, or go on as the checkpoint says that `ready` was made from.

        Args:
            ready: the run.
            log: for events.

        Raises:
            RequestError: loss scaling is set to what cannot be.
        """
        config, start = ready.config, ready.start
        model = start.model.to(ready.device)
        state = cls(
            model=model,
            optimizer={},
            step=start.step,
            skipped=0,
            micro_batch=start.trainer.get("micro_batch", config.micro_batch),
            scaler=make_scaler(config, ready.precision),
            ema=Ema(config.ema_decay) if config.ema_decay else None,
            watch=Watch(config, ready.plan.steps, log, start.trainer.get("watch")),
            compilation=Compilation(config.compile, model, log),
        )
        state._load(start.trainer)
        state.compilation.kept = start.trainer.get("compiled", {})
        return state

    def _load(self, trainer: Mapping[str, Any]) -> None:
        self.optimizer, self.skipped = trainer["optimizer"], trainer["skipped"]
        if self.scaler and trainer["scaler"]:
            self.scaler.load(trainer["scaler"])
        if self.ema and trainer.get("ema"):
            self.ema.load(trainer["ema"], self.model)

    def trainer(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the weights."""
        return {
            "optimizer": self.optimizer,
            "skipped": self.skipped,
            "micro_batch": self.micro_batch,
            "scaler": self.scaler.state() if self.scaler else None,
            "ema": self.ema.state() if self.ema else None,
            "watch": self.watch.state(),
            "compiled": self.compilation.kept,
            "adapters": adapter_state(self.model),
        }

    def go_back(self, good: Start, back: RollBack, config: Config) -> None:
        """Take weights, optimizer, averages and loss scale from `good`; the data go on from here.

        The batches in between count as skipped: the rate goes on where `good` left its course.

        Raises:
            RunError: nothing was learnt since, so that this would change nothing.
        """
        made = good.step - good.trainer["skipped"]
        undone = self.step - self.skipped - made
        self.watch.rolled_back(self.step, back, good.step, undone, good.trainer.get("watch"))
        self.model.visual.set_image_size(good.model.visual.image_size)
        self.model.load_state_dict(good.model.state_dict())
        if self.ema:
            self.ema = Ema(self.ema.decay)
        if self.scaler:
            overflows, self.scaler = self.scaler.overflows, LossScaler(config.loss_scaling)
        self._load(good.trainer)
        if self.scaler:
            self.scaler.overflows = overflows
        self.skipped += self.step - good.step
