"""When a loss deviates, when that is a spike, and when it lasts."""

import math
import random
from dataclasses import asdict
from statistics import fmean, pstdev

import pytest

from pennyclip.training.watch.course import ENOUGH, LONG, SETTLED, SIGMAS, LossCourse

GUESSING = math.log(256)


def falling(count: int) -> list[float]:
    """From guessing to 1, with noise: a healthy start."""
    noise = random.Random(0)
    return [1 + (GUESSING - 1) * math.exp(-n / 30) + noise.gauss(0, 0.1) for n in range(count)]


def seen(losses: list[float]) -> tuple[LossCourse, list[int]]:
    """The course, and the batches at which a spike first showed."""
    course = LossCourse()
    spikes = [n for n, loss in enumerate(losses, 1) if course.see(n, loss, GUESSING)]
    return course, spikes


def test_a_healthy_course_has_no_spike() -> None:
    course, spikes = seen(falling(2000))
    assert spikes == []
    assert not course.lasting
    assert course.normal == pytest.approx(fmean(course.calm))
    assert len(course.calm) == LONG


@pytest.mark.parametrize("sigmas", [SIGMAS - 0.05, SIGMAS + 0.05])
def test_a_loss_deviates_from_3_2_standard_deviations_on(sigmas: float) -> None:
    losses = falling(300)
    calm = losses[-LONG:]
    course, _ = seen([*losses, fmean(calm) + sigmas * pstdev(calm)])
    assert course.deviating[-1] == (sigmas > SIGMAS)
    assert course.since == (301 if sigmas > SIGMAS else None)


def test_three_deviations_among_ten_are_a_spike_that_may_mend() -> None:
    losses = falling(300)
    for number in (4, 7, 9):
        losses[200 + number] = 1.9
    course, spikes = seen(losses[:208])
    assert spikes == []
    assert course.since == 205
    course, spikes = seen(losses[:215])
    assert spikes == [210]
    assert course.spike
    assert not course.lasting
    course, spikes = seen(losses)
    assert spikes == [210]
    assert not course.spike
    assert course.since is None
    assert 1.9 not in course.calm


@pytest.mark.parametrize(("level", "lasts"), [(1.4, False), (3.0, True)])
def test_a_spike_lasts_if_it_stays_and_undoes_much(level: float, lasts: bool) -> None:
    """Of the 4.5 nats learnt, 0.4 or 2 are lost."""
    losses = [*falling(300), *[level] * 6]
    course, spikes = seen(losses)
    assert spikes == [303]
    assert course.lasting == lasts
    assert not seen(losses[:-1])[0].lasting
    course.forget_spike()
    assert (course.spike, course.lasting, course.deviating) == (False, False, [])
    assert course.normal == pytest.approx(fmean(falling(300)[-LONG:]))


@pytest.mark.parametrize("sigma", [0.0, 0.04])
def test_a_level_that_stays_is_learnt_with_one_event(sigma: float) -> None:
    """Too low to undo much, so that nothing is rolled back: then saves must go on."""
    noise = random.Random(1)
    losses = [2 + noise.gauss(0, sigma) for _ in range(200)]
    losses += [2.3 + noise.gauss(0, sigma) for _ in range(500)]
    course, fresh = LossCourse(), []
    spikes = []
    for number, loss in enumerate(losses, 1):
        if course.see(number, loss, GUESSING):
            spikes.append(number)
        fresh.append(course.fresh)
        assert not course.lasting
    assert spikes == [203]
    assert [n for n, held in enumerate(fresh, 1) if held] == list(range(203, 201 + SETTLED))
    assert not course.spike
    assert course.since is None or course.since > 650
    assert course.normal == pytest.approx(2.3, abs=0.02)


def test_what_is_learnt_hides_no_rise_that_lasts() -> None:
    """A level becomes normal while a second, far higher one begins."""
    for settled in (SETTLED - 2, SETTLED + 1, SETTLED + 30):
        course, _ = seen([*falling(300), *[1.5] * settled, *[4.0] * 6])
        assert course.lasting


def test_early_on_only_what_is_worse_than_guessing_lasts() -> None:
    for level, lasts in ((1.2 * GUESSING, False), (1.6 * GUESSING, True)):
        course, spikes = seen([*falling(5), *[level] * (ENOUGH - 6)])
        assert spikes == []
        assert course.lasting == lasts


def test_it_goes_on_from_what_was_saved() -> None:
    losses = [*falling(100), *[3.0] * 20]
    whole, _ = seen(losses)
    half, _ = seen(losses[:103])
    again = LossCourse(**asdict(half))
    for number, loss in enumerate(losses[103:], 104):
        again.see(number, loss, GUESSING)
    assert again == whole


def test_a_start_at_too_high_a_rate_is_rough() -> None:
    """The first losses of `frozen-lite0-minilm` on `examples/clipart`, at its rate and at 100."""
    for losses, expected in (
        ([5.63, 5.62, 5.49, 5.28, 4.85, 4.55], []),
        ([5.63, 5.20, 8.90, 6.72, 5.66, 5.45], [3]),
    ):
        course, rough = LossCourse(), []
        for number, loss in enumerate(losses, 1):
            course.see(number, loss, GUESSING)
            rough += [number] * course.rough
        assert rough == expected
    course, _ = seen(falling(100))  # what is normal is known: a later rise is a spike or none
    course.see(101, 2 * GUESSING, GUESSING)
    assert not course.rough
