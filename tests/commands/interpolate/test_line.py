"""WiSE-FT: values on the line, exact ends, and what is refused."""

import pytest
import torch

from pennyclip.base.errors import RequestError
from pennyclip.commands.interpolate.line import Point, choose_point, interpolate, sweep
from pennyclip.config.keys import ClipText, ImageTower, Model
from pennyclip.model.clip import CLIP

SMALL = Model(
    image=ImageTower(name="test_efficientnet", image_size=32),
    text=ClipText(width=32, layers=1, heads=1, context_length=8, vocab_size=60),
    embed_dim=16,
)


def test_values_on_the_line() -> None:
    start = {"w": torch.tensor([0.0, 4.0]), "n": torch.tensor(3)}
    end = {"w": torch.tensor([8.0, -4.0]), "n": torch.tensor(7)}
    assert interpolate(start, end, 0.25)["w"].tolist() == [2.0, 2.0]
    assert interpolate(start, end, 0.75)["w"].tolist() == [6.0, -2.0]
    assert interpolate(start, end, 0.25)["n"].item() == 7
    assert end["w"].tolist() == [8.0, -4.0]  # left as it was


def test_the_ends_are_exact_in_every_dtype() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        start = {"w": (1e4 * torch.randn(1000)).to(dtype)}
        end = {"w": (1e-4 * torch.randn(1000)).to(dtype)}
        assert torch.equal(interpolate(start, end, 0)["w"], start["w"])
        assert torch.equal(interpolate(start, end, 1)["w"], end["w"])
        assert interpolate(start, end, 0.5)["w"].dtype == dtype


def test_unlike_models_are_refused_by_name() -> None:
    start = {"a": torch.zeros(2), "b": torch.zeros(3, 1), "c": torch.zeros(1)}
    end = {"a": torch.zeros(2), "b": torch.zeros(3, 2), "d": torch.zeros(1)}
    with pytest.raises(RequestError) as error:
        interpolate(start, end, 0.5)
    for part in (
        "differ in 3 parameters", "c (start only)", "d (end only)",
        "b ([3, 1] at the start, [3, 2] at the end)",
    ):  # fmt: skip
        assert part in str(error.value)
    with pytest.raises(RequestError, match=r"alpha must lie in \[0, 1\], found 1.5"):
        interpolate(start, start, 1.5)


def test_sweep_scores_every_model_on_both_tasks() -> None:
    torch.manual_seed(0)
    start, end = CLIP(SMALL), CLIP(SMALL)
    with torch.no_grad():
        start.logit_scale.fill_(1.0)
        end.logit_scale.fill_(3.0)

    def distance(model: CLIP, to: CLIP) -> float:
        mine, other = model.text.positional_embedding, to.text.positional_embedding
        return -(mine - other).abs().max().item()

    points = tuple(
        sweep(
            start,
            end,
            score_task=lambda model: (model.logit_scale.item(), 63),
            score_reference=lambda model: (distance(model, start), 58),
            alphas=(0.0, 0.5, 1.0),
        )
    )
    assert [p.alpha for p in points] == [0.0, 0.5, 1.0]
    assert [p.task for p in points] == pytest.approx([1.0, 2.0, 3.0])
    assert points[0].one_picture == pytest.approx(1 / 58 / 2)
    assert points[0].reference == 0
    assert points[1].reference == pytest.approx(points[2].reference / 2)
    assert points[2].reference == distance(end, start) < -0.01
    assert end.logit_scale.item() == 3.0  # left as it was


def test_what_one_picture_could_turn_decides_nothing() -> None:
    """On 63 and 58 pictures, 0.001 is no reason to take 0.8 instead of 0.1."""
    line = [(0.0, 0.600, 0.600), (0.1, 0.650, 0.600), (0.8, 0.662, 0.590), (1.0, 0.60, 0.50)]
    points = [Point(*p, one_picture=1 / 58 / 2) for p in line]
    assert points[2].mean > points[1].mean
    assert choose_point(points).alpha == 0.1


def test_the_largest_mean_is_chosen_and_the_smaller_alpha_among_equals() -> None:
    line = [(0.0, 0.2, 0.5), (0.3, 0.375, 0.5), (0.6, 0.5, 0.375), (1.0, 0.6, 0.1)]
    points = [Point(*p) for p in line]
    assert choose_point(points).alpha == choose_point(points[::-1]).alpha == 0.3
    assert choose_point(points[2:]).alpha == 0.6
    assert choose_point([Point(0.5, 0.0, 0.0)]).mean == 0
