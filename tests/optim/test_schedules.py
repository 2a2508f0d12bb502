"""The courses that a rate can take, against their closed forms."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import Config, ImageTower, Model, Optim, PartRates, Stage, TrunkRates
from pennyclip.training.plan import Plan, make_plan

CONFIG = Config(model=Model(image=ImageTower(name="x")), stages=(Stage(epochs=2.0),), batch_size=10)


def plan(**optim: object) -> Plan:
    """20 updates."""
    return make_plan(replace(CONFIG, optim=Optim(**{"warmup_steps": 4} | optim)), rows=100)


def test_linear_and_constant() -> None:
    linear, constant = plan(schedule="linear", min_lr_share=0.1), plan(schedule="constant")
    for step in range(4, 20):
        assert linear.lr_factor(step) == pytest.approx(0.1 + 0.9 * (20 - step) / 16, abs=1e-12)
        assert constant.lr_factor(step) == 1.0
    assert [constant.lr_factor(s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_wsd_is_stable_and_then_falls_with_one_minus_the_root() -> None:
    found = plan(schedule="wsd", cooldown_share=0.25, min_lr_share=0.1)
    assert (found.cooldown_from, found.steps) == (15, 20)
    assert {found.lr_factor(s) for s in range(4, 16)} == {1.0}
    for step in range(15, 20):
        course = 0.1 + 0.9 * (1 - math.sqrt((step - 15) / 5))
        assert found.lr_factor(step) == pytest.approx(course, abs=1e-12)


@pytest.mark.parametrize(("at", "steps"), [(9, 12), (12, 16)])
def test_a_cooldown_can_begin_at_any_time_and_moves_the_end(at: int, steps: int) -> None:
    found = plan(schedule="wsd", cooldown_share=0.25, cooldown_from=at)
    assert found.steps == steps
    assert found.stage(steps - 1) == 0
    assert found.lr_factor(at) == 1.0
    last = 1 - math.sqrt((steps - 1 - at) / (steps - at))
    assert found.lr_factor(steps - 1) == pytest.approx(last, abs=1e-12)


def test_a_cooldown_ends_stages_that_had_not_begun() -> None:
    stages = (Stage(samples=100), Stage(samples=100))
    optim = Optim(schedule="wsd", cooldown_share=0.5, cooldown_from=4, warmup_steps=1)
    found = make_plan(replace(CONFIG, stages=stages, optim=optim), rows=100)
    assert (found.ends, found.stage(7)) == ((8, 8), 0)


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        ({"cooldown_from": 5}, "only 'wsd' has a cooldown"),
        ({"schedule": "wsd", "cooldown_share": 1.0}, "above 0 and below 1"),
        ({"schedule": "wsd", "cooldown_from": 4}, "never reach its peak"),
        ({"schedule": "wsd", "cooldown_from": 17}, "begins at update 16 already"),
        ({"betas": (0.9, 1.5)}, "optim.betas = 0.9 1.5"),
        ({"eps": 0.0}, "optim.eps = 0"),
        ({"min_lr_share": 3.0}, "optim.min_lr_share = 3"),
        ({"image": TrunkRates(lr=-1.0)}, "optim.image.lr = -1"),
        ({"text": TrunkRates(layer_decay=0.0)}, "optim.text.layer_decay = 0"),
        ({"heads": PartRates(betas=(1.0, 0.9))}, "optim.heads.betas = 1 0.9"),
        ({"text": TrunkRates(warmup_steps=20)}, r"warm-up \(20 updates\)"),
    ],
)
def test_schedules_that_contradict_themselves_are_refused(optim: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        plan(**optim)


def test_a_part_may_warm_up_longer_than_the_rest() -> None:
    text, other = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    groups = [
        {"params": [text], "base_lr": 2.0, "warmup": 8},
        {"params": [other], "base_lr": 1.0, "warmup": None},
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    plan().set_rates(optimizer, step=3)
    assert [g["lr"] for g in optimizer.param_groups] == [2.0 * 4 / 8, 1.0]


def test_a_mask_ratio_may_move_over_its_stage() -> None:
    stages = (Stage(samples=50, mask_ratio=0.25), Stage(samples=50, mask_ratio=(0.8, 0.0)))
    found = make_plan(replace(CONFIG, stages=stages), rows=100)
    assert [found.mask_ratio(s) for s in (0, 4)] == [0.25, 0.25]
    assert [found.mask_ratio(s) for s in range(5, 10)] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])


def test_a_stage_may_have_a_course_of_its_own() -> None:
    """FLIP's end: its own warm-up to a tenth of the peak, and its own cosine to 0."""
    stages = (Stage(samples=200), Stage(samples=100, lr_factor=0.1, warmup_steps=2))
    found = make_plan(
        replace(CONFIG, stages=stages, optim=Optim(warmup_steps=4, min_lr_share=0.0)), rows=100
    )
    alone = plan()
    assert [found.lr_factor(s) for s in range(20)] == [alone.lr_factor(s) for s in range(20)]
    assert [found.lr_factor(s) for s in (20, 21)] == pytest.approx([0.05, 0.1])
    for step in range(22, 30):
        course = 0.1 * 0.5 * (1 + math.cos(math.pi * (step - 22) / 8))
        assert found.lr_factor(step) == pytest.approx(course, abs=1e-12)


def test_a_cooldown_ends_with_the_data_whatever_was_skipped() -> None:
    found = plan(schedule="wsd", cooldown_share=0.25)
    assert found.lr_factor(14, skipped=6) == 1.0
    assert [found.lr_factor(s, skipped=6) for s in range(15, 20)] == pytest.approx(
        [found.lr_factor(s) for s in range(15, 20)]
    )
