"""What an event names: rows that lose most, layers whose gradient left its own course."""

import math
import random
from dataclasses import asdict
from statistics import median

import pytest
import torch
import torch.nn.functional as F

from pennyclip.loss import Features
from pennyclip.training.watch.evidence import (
    JUMP,
    LAYERS,
    NORMAL,
    RECENT,
    ROWS,
    Evidence,
    worst_rows,
)
from pennyclip.training.watch.symptoms import no_gradient
from update_batches import pairs

LAYER = "visual.trunk.blocks.0"


def noisy(count: int, level: float = 1.0, seed: int = 0) -> list[float]:
    noise = random.Random(seed)
    return [level * math.exp(noise.gauss(0, 0.15)) for _ in range(count)]


def seen(courses: dict[str, list[float]]) -> Evidence:
    evidence = Evidence()
    for norms in zip(*courses.values(), strict=True):
        evidence.see_norms(dict(zip(courses, norms, strict=True)))
    return evidence


def test_a_healthy_layer_is_not_named() -> None:
    """Whether large or small, and however it drifts."""
    for seed in range(20):
        course = [level * 0.999**n for n, level in enumerate(noisy(500, 0.01, seed))]
        evidence = seen({LAYER: course})
        assert evidence.jumps(500) == {}
        assert len(evidence.norms[LAYER]) == RECENT + NORMAL


def test_a_jump_is_measured_against_the_layers_own_course() -> None:
    large, small = noisy(100, 50.0), noisy(100, 0.01, seed=1)
    small[94:] = [0.1, 0.2, 0.4, 0.3, 0.2, 0.1]
    found = seen({"text.a": large, "text.b": small}).jumps(200)["gradient_jumps"]
    assert list(found) == ["text.b"]
    normal = median(small[-RECENT - NORMAL : -RECENT])
    assert found["text.b"] == {"times": pytest.approx(0.4 / normal), "batch": 195}
    almost = noisy(100, 1.0)
    almost[-1] = 0.99 * JUMP * median(almost[-RECENT - NORMAL : -RECENT])
    assert seen({LAYER: almost}).jumps(100) == {}


def test_what_jumped_first_comes_first_and_few_are_named() -> None:
    courses = {}
    for number in range(6):
        course = noisy(60, 1.0, number)
        course[50 + number :] = [10.0 + number] * (10 - number)
        courses[f"layer {5 - number}"] = course
    courses["not finite"] = [*noisy(59), math.nan]
    found = seen(courses).jumps(60)["gradient_jumps"]
    assert list(found) == [f"layer {n}" for n in (5, 4, 3)]
    assert len(found) == LAYERS
    assert [jump["batch"] for jump in found.values()] == [51, 52, 53]
    assert seen({"not finite": courses["not finite"]}).jumps(60) == {}


def test_going_back_forgets_the_jump_and_keeps_what_is_normal() -> None:
    evidence = seen({LAYER: [*noisy(60), *[20.0] * RECENT]})
    assert evidence.jumps(70)
    evidence.forget()
    assert evidence.jumps(70) == {}
    assert max(evidence.norms[LAYER]) < JUMP
    assert Evidence(**asdict(evidence)) == evidence


def test_too_little_is_known_at_first() -> None:
    course = [*noisy(2 * RECENT - 2), 100.0]
    assert seen({LAYER: course}).jumps(0) == {}
    assert seen({LAYER: [1.0, *course]}).jumps(0) != {}


def features(image: torch.Tensor, text: torch.Tensor) -> Features:
    scale = torch.tensor(20.0)
    groups = torch.arange(len(image))
    return Features(image, text, image, text, 0, scale, None, groups)


def test_the_rows_that_lose_most_are_named() -> None:
    """Of 64 pairs that fit, three have got another caption; one embedding is not finite."""
    generator = torch.Generator().manual_seed(0)
    image = F.normalize(torch.randn(64, 32, generator=generator), dim=1)
    text = image.clone()
    for row in (7, 30, 51):
        text[row] = -image[row]
    batch = pairs(64, rows=torch.arange(100, 164))
    found = worst_rows(batch, features(image, text))
    assert len(found) == ROWS
    assert {row for _, row in found[:3]} == {107, 130, 151}
    assert found[2][0] > 20 > 1 > found[3][0]
    text[12] = math.nan
    assert worst_rows(batch, features(image, text))[0] == (math.inf, 112)
    assert {row for _, row in worst_rows(batch, features(image, text))[1:4]} == {107, 130, 151}


def test_over_several_batches_the_worst_are_kept() -> None:
    evidence, first = Evidence(), F.normalize(torch.eye(4) + 0.1, dim=1)
    worse = first.flip(0)
    evidence.see_rows(8, pairs(4), features(first, first))
    evidence.see_rows(9, pairs(4, rows=torch.arange(50, 54)), features(first, worse))
    evidence.see_rows(11, pairs(4, rows=torch.arange(70, 74)), features(first, worse))
    found = evidence.suspects(11)
    assert len(found["rows"]) == ROWS
    assert set(found["rows"]) == {*range(50, 54), *range(70, 74)}
    assert found["row_losses"] == sorted(found["row_losses"], reverse=True)
    assert found["batches"] == [9 if row < 60 else 11 for row in found["rows"]]
    assert Evidence().suspects(3) == {}


def test_a_layer_that_stays_without_gradient_is_named() -> None:
    still = {"text.a": [0.0] * RECENT, "text.b": [*[0.0] * (RECENT - 1), 1.0]}
    evidence = seen({**still, "visual.a": noisy(RECENT)})
    assert evidence.silent() == ["text.a"]
    last = {layer: norms[-1] for layer, norms in evidence.norms.items()}
    (symptom,) = no_gradient(last, evidence.silent())
    assert symptom.message == "the gradient of 1 of 2 layers of the text tower stays zero: text.a"
    assert symptom.evidence == {"tower": "text", "layers": ["text.a"]}
    (tower,) = no_gradient({"visual.a": 0.0, "visual.b": 0.0, "text.a": 1.0}, [])
    assert (tower.message, tower.evidence) == (
        "the gradient of the image tower is zero throughout",
        {"tower": "image"},
    )
    assert no_gradient({"visual.a": 0.0, "visual.b": 1.0}, []) == []
