"""The course of a run: lengths, rates, and what is refused before the first update."""

import math
from dataclasses import replace

import pytest

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import Augment, Config, Evaluation, ImageTower, Model, Optim, Stage
from pennyclip.training.plan import make_plan

CONFIG = Config(model=Model(image=ImageTower(name="x")), stages=(Stage(epochs=2.0),), batch_size=10)


def test_lengths_are_counted_in_updates() -> None:
    stages = (Stage(epochs=1.5), Stage(samples=31, lr_factor=0.5))
    plan = make_plan(replace(CONFIG, stages=stages), rows=100)
    assert plan.ends == (15, 19)
    assert [plan.stage(s) for s in (0, 14, 15, 18)] == [0, 0, 1, 1]


def test_the_rate_warms_up_and_follows_a_cosine() -> None:
    plan = make_plan(replace(CONFIG, optim=Optim(warmup_steps=4, min_lr_share=0.1)), rows=100)
    assert plan.steps == 20
    assert [plan.lr_factor(s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    for step in range(4, 20):
        course = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 4) / 16))
        assert plan.lr_factor(step) == pytest.approx(course, abs=1e-12)


def test_a_stage_lowers_its_own_rates() -> None:
    whole = make_plan(replace(CONFIG, stages=(Stage(epochs=2.0),)), rows=100)
    halves = (Stage(epochs=1.0, lr_factor=0.2), Stage(epochs=1.0))
    parted = make_plan(replace(CONFIG, stages=halves), rows=100)
    assert parted.lr_factor(9) == pytest.approx(0.2 * whole.lr_factor(9))
    assert parted.lr_factor(10) == whole.lr_factor(10)


def test_a_cooldown_begun_by_hand_changes_nothing_before_it() -> None:
    optim = Optim(schedule="wsd", warmup_share=0.1, cooldown_share=0.2)
    config = replace(CONFIG, stages=(Stage(epochs=10.0),), optim=optim)
    begun = make_plan(config, rows=100)
    cooled = make_plan(replace(config, optim=replace(optim, cooldown_from=20)), rows=100)
    assert (begun.steps, cooled.steps) == (100, 25)
    assert [cooled.lr_factor(s) for s in range(20)] == [begun.lr_factor(s) for s in range(20)]
    assert cooled.lr_factor(8) == 0.9
    with pytest.raises(RequestError, match="never reach its peak"):
        make_plan(replace(config, optim=replace(optim, cooldown_from=9)), rows=100)


@pytest.mark.parametrize(
    ("change", "rows", "message"),
    [
        ({"batch_size": 1}, 100, "batch of 1|batch_size = 1"),
        ({}, 9, "fewer than batch_size"),
        ({"stages": ()}, 100, "no stages"),
        ({"stages": (Stage(),)}, 100, "either epochs or samples"),
        ({"stages": (Stage(epochs=1.0, samples=5),)}, 100, "either epochs or samples"),
        ({"stages": (Stage(samples=0),)}, 100, "no update"),
        ({"stages": (Stage(epochs=math.nan),)}, 100, "epochs = nan: expected a finite number"),
        ({"evaluate": Evaluation(every_epochs=0)}, 100, "every_epochs = 0: expected a finite"),
        ({"optim": Optim(warmup_steps=20)}, 100, "never reach its peak"),
        ({"stages": (Stage(samples=50, mask_ratio=(0.5, 1.0)),)}, 100, "mask_ratio = 0.5 1: "),
        ({"ema_decay": 1.0}, 100, "ema_decay = 1"),
        (
            {
                "stages": (Stage(epochs=2.0, image_layers="none"),),
                "augment": Augment(crop_scale=(0.5, 1.0)),
            },
            100,
            "augment would have no effect: the image trunk",
        ),
        (
            {
                "stages": (Stage(epochs=2.0, text_layers="none"),),
                "augment": Augment(crop_scale=(0.5, 1.0), word_dropout=0.1),
            },
            100,
            "augment would have no effect: the text trunk.*word_dropout and synonyms",
        ),
        ({"augment": Augment(flip=1.5)}, 100, r"augment.flip = 1.5: expected a share"),
        ({"augment": Augment(synonyms=0.1)}, 100, "set augment.wordnet"),
        ({"shuffle_window": 1}, 100, "shuffle_window = 1: expected at least 2"),
    ],
)
def test_what_would_do_nothing_is_refused(change: dict, rows: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_plan(replace(CONFIG, **change), rows)
