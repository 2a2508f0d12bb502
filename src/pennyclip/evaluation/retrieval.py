"""Retrieval in both directions, with any number of captions an image."""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from pennyclip.base.errors import RequestError
from pennyclip.evaluation.result import TIE, Result, mean_rank, require_finite

RECALLS = (1, 5, 10)  # the literature's, since Karpathy and Fei-Fei 2015


def retrieval(
    image: Float[Tensor, "I D"],
    text: Float[Tensor, "T D"],
    owner: Int64[Tensor, " T"],
    chunk: int = 2048,
) -> Result:
    """How early each image finds one of its captions, and each caption its image.

    A caption ranks all images. An image ranks all captions; the first of its own counts, and its
    own are not ranked against each other. What is tied takes its mean rank over all orders, so
    features that are all the same score as chance, not as 100 %. A hit at k is a rank of at
    most k. Scores are dot products in float64.

    Args:
        image: unit-norm embeddings.
        text: unit-norm embeddings.
        owner: which image each caption belongs to, 0 <= owner < I.
        chunk: images and captions compared at a time; the result does not depend on it.
            (chosen: 2048 needs about 100 MB.)

    Returns:
        metrics `image_to_text/R@1`, `/R@5`, `/R@10` and `/median_rank`, the same for
        `text_to_image`, `mean_recall` over the six, and the counts `images` and `captions`.
        Recalls are shares, 0 to 1.

    Raises:
        RunError: a feature is NaN or infinite.
        RequestError: fewer than two images, an image without a caption, or a caption without
            an image.
    """
    require_finite(image, "image features")
    require_finite(text, "text features")
    _require_pairs(image, text, owner)
    image, text, owner = image.double(), text.double(), owner.to(image.device)

    # The score that has to be beaten: of each caption with its image, and of each image with the
    # best of its captions.
    own = (image[owner] * text).sum(dim=1)
    best = own.new_full((len(image),), -torch.inf).scatter_reduce(0, owner, own, "amax")
    own_tied = torch.zeros_like(best).index_add(0, owner, (own >= best[owner] - TIE).double())

    image_better, image_tied = torch.zeros_like(best), torch.zeros_like(best)
    text_better, text_tied = torch.zeros_like(own), torch.zeros_like(own)
    indices = torch.arange(len(image), device=image.device)
    for i in (slice(start, start + chunk) for start in range(0, len(image), chunk)):
        for t in (slice(start, start + chunk) for start in range(0, len(text), chunk)):
            scores = image[i] @ text[t].T
            scores[indices[i, None] == owner[t]] = -torch.inf  # its own are not rivals
            above = scores - best[i, None]
            image_better[i] += (above > TIE).sum(dim=1)
            image_tied[i] += (above.abs() <= TIE).sum(dim=1)
            above = scores - own[t]
            text_better[t] += (above > TIE).sum(dim=0)
            text_tied[t] += (above.abs() <= TIE).sum(dim=0)

    ranks = {
        "image_to_text": mean_rank(image_better, image_tied, own_tied),
        "text_to_image": mean_rank(text_better, text_tied),
    }
    metrics, recalls = {}, []
    for direction, rank in ranks.items():
        for k in RECALLS:
            metrics[f"{direction}/R@{k}"] = (rank <= k).double().mean().item()
            recalls.append(metrics[f"{direction}/R@{k}"])
        metrics[f"{direction}/median_rank"] = rank.quantile(0.5).item()
    metrics |= {"images": float(len(image)), "captions": float(len(text))}
    metrics["mean_recall"] = sum(recalls) / len(recalls)
    counts = len(image), len(text)
    guesses = {f"{d}/R@{k}": chance(*counts, k, d) for d in ranks for k in RECALLS}
    return Result(metrics, chance=guesses | {"mean_recall": mean_chance(*counts)})


def chance(images: float, captions: float, k: int, direction: str = "text_to_image") -> float:
    """Expected recall at k of random guessing; nan where nothing says how many images there are.

    A caption finds its one image with k / images. An image misses all its m = captions / images
    captions with the product of (captions - m - j) / (captions - j) over the k guesses j.
    """
    if not images > 0:
        return math.nan
    if k >= images:
        return 1.0
    if direction == "text_to_image" or not captions >= images:
        return k / images
    m = captions / images
    return 1 - math.prod((captions - m - j) / (captions - j) for j in range(k))


def mean_chance(images: float, captions: float) -> float:
    """The `mean_recall` of random guessing."""
    directions = ("image_to_text", "text_to_image")
    values = [chance(images, captions, k, d) for d in directions for k in RECALLS]
    return sum(values) / len(values)


def ceiling(owner: Sequence[int], texts: Sequence[str]) -> tuple[int, dict[str, float]]:
    """The most that any model can score where several images have the same caption.

    A model can't tell equal captions apart, so they are tied. An image finds that of its captions
    first which fewest others have: own copies among t of others come at rank 1 + t / (own + 1).
    The images of one caption, none equal to another, can't all come first for it: k of them are
    among the first k.

    Args:
        owner: [T] the image of each caption; every image from 0 has one.
        texts: [T] the captions.

    Returns:
        how many images have a caption that others have too, and the largest value of each recall
        and of `mean_recall`, 0 to 1.
    """
    copies, owned = Counter(texts), Counter(zip(texts, owner, strict=True))
    shares: dict[str, list[int]] = {}  # of each caption, how often each of its images has it
    best: dict[int, float] = {}
    for (text, image), own in owned.items():
        shares.setdefault(text, []).append(own)
        rank = 1 + (copies[text] - own) / (own + 1)
        best[image] = min(rank, best.get(image, rank))
    most = {
        f"image_to_text/R@{k}": sum(rank <= k for rank in best.values()) / len(best)
        for k in RECALLS
    }
    for k in RECALLS:
        found = sum(sum(sorted(own, reverse=True)[:k]) for own in shares.values())
        most[f"text_to_image/R@{k}"] = found / len(texts)
    most["mean_recall"] = sum(most.values()) / len(most)
    return len({image for text, image in owned if len(shares[text]) > 1}), most


def _require_pairs(image: Tensor, text: Tensor, owner: Tensor) -> None:
    if len(image) < 2:
        raise RequestError(
            f"retrieval needs at least 2 images to choose from, found {len(image)}. Evaluate on "
            "a larger split."
        )
    if owner.shape != (len(text),) or ((owner < 0) | (owner >= len(image))).any():
        raise RequestError(
            f"expected one owner for each of {len(text)} captions, each below the number of "
            f"images, {len(image)}; found {list(owner.shape)} owners up to "
            f"{int(owner.max()) if len(owner) else 'none'}."
        )
    captions = torch.bincount(owner, minlength=len(image))
    if not captions.all():
        raise RequestError(
            f"every image needs a caption to find, and {int((captions == 0).sum())} of "
            f"{len(image)} have none (first: image {int((captions == 0).nonzero()[0])}). Leave "
            "them out."
        )
