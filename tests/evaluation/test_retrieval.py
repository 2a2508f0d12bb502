"""Retrieval against a brute-force reference, ties enumerated, and open_clip's own numbers."""

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from open_clip_train.train import get_clip_metrics
from torch import Tensor

from pennyclip.base.errors import RequestError, RunError
from pennyclip.evaluation.result import mean_rank
from pennyclip.evaluation.retrieval import ceiling, retrieval

F64 = npt.NDArray[np.float64]


def features(rows: int, width: int = 16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(rows, width, generator=generator), dim=1)


def reference(image: Tensor, text: Tensor, owner: Tensor) -> dict[str, float]:
    """One image and one caption at a time, in float64, without ties."""
    scores: F64 = image.double().numpy() @ text.double().numpy().T
    owners = owner.numpy()
    images = np.array(
        [1 + sum(scores[i, owners != i] > scores[i, owners == i].max()) for i in range(len(scores))]
    )
    texts = np.array([1 + sum(scores[:, t] > scores[o, t]) for t, o in enumerate(owners)])
    found: dict[str, float] = {}
    for name, ranks in (("image_to_text", images), ("text_to_image", texts)):
        found |= {f"{name}/R@{k}": float(np.mean(ranks <= k)) for k in (1, 5, 10)}
        found[f"{name}/median_rank"] = float(np.median(ranks))
    found["mean_recall"] = float(np.mean([v for k, v in found.items() if "R@" in k]))
    return found


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_equals_brute_force(chunk: int) -> None:
    owner = torch.tensor([*range(40), *range(0, 40, 2), 7, 7, 7])[features(63)[:, 0].argsort()]
    image = features(40)
    text = F.normalize(image[owner] + 2 * features(63, seed=1), dim=1)
    found = retrieval(image, text, owner, chunk).metrics
    counts = {"images": 40.0, "captions": 63.0}
    assert found == pytest.approx(reference(image, text, owner) | counts, abs=1e-12)
    assert 0.1 < found["mean_recall"] < 0.9, "the case decides nothing"


def test_equals_open_clip_with_one_caption_an_image() -> None:
    image = features(60)
    text = F.normalize(image + 1.5 * features(60, seed=1), dim=1)
    found = retrieval(image, text, torch.arange(60)).metrics
    theirs = get_clip_metrics(image, text, torch.tensor(100.0))
    for direction in ("image_to_text", "text_to_image"):
        for k in (1, 5, 10):
            assert found[f"{direction}/R@{k}"] == pytest.approx(theirs[f"{direction}_R@{k}"])
        # Theirs rounds the median of an even number of ranks down.
        assert int(found[f"{direction}/median_rank"]) == theirs[f"{direction}_median_rank"]
    assert 0.1 < found["image_to_text/R@1"] < 0.9


@pytest.mark.parametrize("chunk", [1, 4096])
def test_perfect_features(chunk: int) -> None:
    """Case 10 of the ten with known answers: 3 images x 2 captions."""
    owner = torch.tensor([0, 0, 1, 1, 2, 2])
    metrics = retrieval(torch.eye(3), torch.eye(3)[owner], owner, chunk).metrics
    for direction in ("image_to_text", "text_to_image"):
        assert metrics[f"{direction}/R@1"] == 1.0
        assert metrics[f"{direction}/median_rank"] == 1.0
    assert metrics["mean_recall"] == 1.0


def test_own_captions_do_not_compete() -> None:
    """The second caption of image 0 fits it as badly as can be; its first one still counts."""
    image = torch.eye(3)
    text = torch.stack([image[0], -image[0], image[1], image[2]])
    metrics = retrieval(image, text, torch.tensor([0, 0, 1, 2])).metrics
    assert metrics["image_to_text/R@1"] == 1.0
    assert metrics["text_to_image/R@1"] == 0.75


def test_constant_features_score_as_chance() -> None:
    constant = features(1, 512)
    owner = torch.arange(100).repeat(2)
    image, text = constant.expand(100, -1), constant.expand(200, -1)
    for chunk in (7, 30, 4096):
        metrics = retrieval(image, text, owner, chunk).metrics
        assert metrics["mean_recall"] == 0.0
        assert metrics["text_to_image/median_rank"] == 50.5
        assert metrics["image_to_text/median_rank"] == 1 + 198 / 3


def test_doubled_images_share_their_rank() -> None:
    """Every image is there twice: the right one comes first or second, so at 1.5."""
    image = features(30, 512).repeat(2, 1)
    for chunk in (1, 7, 4096):
        metrics = retrieval(image, image, torch.arange(60), chunk).metrics
        assert metrics["text_to_image/R@1"] == metrics["image_to_text/R@1"] == 0.0
        assert metrics["text_to_image/R@5"] == metrics["image_to_text/R@5"] == 1.0
        assert metrics["text_to_image/median_rank"] == 1.5


@pytest.mark.parametrize(("better", "wrong", "own"), [(0, 2, 1), (1, 3, 1), (0, 2, 2), (2, 4, 3)])
def test_mean_rank_is_the_mean_over_all_orders(better: int, wrong: int, own: int) -> None:
    tied = [False] * wrong + [True] * own
    ranks = [better + 1 + order.index(True) for order in itertools.permutations(tied)]
    one = torch.ones(1, dtype=torch.float64)
    assert mean_rank(better * one, wrong * one, own * one).item() == pytest.approx(np.mean(ranks))


@pytest.mark.parametrize(
    ("texts", "owner"),
    [
        ([*"aaaaab", *"ccc", *"defgh"], range(14)),  # groups of 5, 1, 3 and five of 1
        ([*"aabacadee"], [0, 0, 1, 2, 2, 3, 4, 5, 6]),  # some have a caption of their own besides
        (
            [f"{i % 2}, template {t}" for i in range(24) for t in (0, 1)],
            [i // 2 for i in range(48)],
        ),
    ],
)
def test_a_perfect_model_reaches_the_ceiling(texts: list[str], owner: Sequence[int]) -> None:
    """Equal captions have one embedding; a picture is closest to the one that fewest others have,
    and next to all of its own; no two pictures are equally close to anything."""
    shared, most = ceiling(list(owner), texts)
    distinct, images = sorted(set(texts)), max(owner) + 1
    image = torch.zeros(images, len(distinct) + images, dtype=torch.float64)
    for i in range(images):
        own = {text for text, of in zip(texts, owner, strict=True) if of == i}
        for text in own:
            image[i, distinct.index(text)] = 1 - 1e-6 * i
        rarest = min(own, key=lambda text: (texts.count(text), text))
        image[i, distinct.index(rarest)] += 1e-3
        image[i, len(distinct) + i] = (100 - image[i].square().sum()).sqrt()  # all of one norm
    text = torch.eye(image.shape[1], dtype=torch.float64)[[distinct.index(t) for t in texts]]
    found = retrieval(image / 10, text, torch.tensor(owner)).metrics
    assert {name: found[name] for name in most} == pytest.approx(most, abs=1e-12)
    owners = {t: {o for u, o in zip(texts, owner, strict=True) if u == t} for t in distinct}
    assert shared == len({o for of in owners.values() if len(of) > 1 for o in of})
    assert most["image_to_text/R@1"] < 1


def test_the_ceiling_of_known_groups() -> None:
    """5 of 8 pictures with one caption: at rank 1 + 4 / 2 each; of 5 captions 1 is right first."""
    assert ceiling(range(3), ["a", "b", "c"]) == (0, dict.fromkeys(ceiling(range(1), "a")[1], 1.0))
    shared, most = ceiling(range(8), "aaaaabcd")
    assert shared == 5
    assert (most["image_to_text/R@1"], most["image_to_text/R@5"]) == (3 / 8, 1.0)
    assert (most["text_to_image/R@1"], most["text_to_image/R@5"]) == (0.5, 1.0)
    assert most["mean_recall"] == pytest.approx((3 / 8 + 0.5 + 4) / 6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_features_that_are_not_finite(value: float) -> None:
    good, bad = features(20), features(20)
    bad[7, 3] = value
    with pytest.raises(RunError, match=r"1 of 20 of the image features.*number 7"):
        retrieval(bad, good, torch.arange(20))
    with pytest.raises(RunError, match=r"1 of 20 of the text features.*number 7"):
        retrieval(good, bad, torch.arange(20))


def test_half_precision_features_are_compared_wider() -> None:
    image = features(50).bfloat16()
    text = F.normalize(image.float() + features(50, seed=1), dim=1).bfloat16()
    owner = torch.arange(50)
    assert retrieval(image, text, owner) == retrieval(image.float(), text.float(), owner)


def test_requests_without_an_answer() -> None:
    with pytest.raises(RequestError, match="at least 2 images"):
        retrieval(features(1), features(3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(RequestError, match=r"1 of 3 have none \(first: image 1\)"):
        retrieval(features(3), features(2), torch.tensor([0, 2]))
    with pytest.raises(RequestError, match="up to 3"):
        retrieval(features(3), features(3), torch.tensor([0, 1, 3]))
