"""What shows that a run is not well, though nothing has gone wrong: in a batch, or at the end."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

DRIFT = 4.0
"""How many times smaller than at the start of training the logits' scale has become when the
temperature is said to drift. Chosen: runs that came to good dipped to 1.6 times smaller."""
FEW = 0.2
"""Mean recall of guessing above which a split has too few images to judge a run by. Chosen: below
27 images."""
TOWERS = {"visual.": "image", "text.": "text"}


@dataclass(frozen=True)
class Symptom:
    """What is to be told."""

    name: str
    """Of the event."""
    message: str
    evidence: dict[str, Any] = field(default_factory=dict)


def drifting_temperature(record: Mapping[str, Any], initial_scale: float) -> Symptom | None:
    """With unrelated pairs at cosine 0, no loss is below ln(1 + (N - 1) e^-scale).

    Args:
        record: what `update` returned.
        initial_scale: of the logits, where training from nothing starts.
    """
    scale, candidates = math.exp(record["logit_scale"]), record.get("candidates", 0.0)
    if candidates <= 1 or scale >= initial_scale / DRIFT:
        return None
    floor = math.log1p((candidates - 1) * math.exp(-scale))
    temperature = math.exp(min(-record["logit_scale"], 50.0))  # it may have left every range
    return Symptom(
        "temperature",
        f"the temperature drifts toward 1, and is {temperature:.2f}: with {candidates:.0f} "
        f"candidates the loss can hardly fall below {floor:.2f}, and guessing costs "
        f"{math.log(candidates):.2f}",
        {"scale": scale},
    )


def no_gradient(norms: Mapping[str, float], silent: Collection[str]) -> list[Symptom]:
    """What has no gradient learns nothing, whatever it is shown.

    Args:
        norms: of a batch, by layer.
        silent: layers whose gradient has been zero for some time.
    """
    found = []
    for prefix, tower in TOWERS.items():
        layers = [layer for layer in norms if layer.startswith(prefix)]
        if layers and not any(norms[layer] for layer in layers):
            message = f"the gradient of the {tower} tower is zero throughout"
            found.append(Symptom("no gradient", message, {"tower": tower}))
        elif still := [layer for layer in layers if layer in silent]:
            message = (
                f"the gradient of {len(still)} of {len(layers)} layers of the {tower} tower stays "
                f"zero: {', '.join(still[:3])}{', and so on' * (len(still) > 3)}"
            )
            evidence = {"tower": tower, "layers": still}
            found.append(Symptom("no gradient", message, evidence))
    return found


def no_better_than_guessing(
    recall: float | None, chance: float, images: int, alike: bool
) -> Symptom | None:
    """Whether a run that has made all its updates knows no more than one that guesses.

    It is told from guessing where it lies two standard errors of a share, sqrt(p (1 - p) / images),
    above it. That of a mean over recalls at 1, 5 and 10, both ways, is smaller, by 1.3 at least.

    Args:
        recall: the best mean recall on the development split; None: there is none.
        chance: the mean recall of guessing there.
        images: of the split; 0: there is none.
        alike: whether the embeddings of the last batches were all alike.
    """
    found = []
    told_apart = chance + 2 * math.sqrt(chance * (1 - chance) / images) if images else 1.0
    if recall is not None and chance <= FEW and recall <= told_apart:
        found.append(
            f"the best mean recall, {recall:.1%} of {images:,} images, can't be told from guessing "
            f"({chance:.1%})"
        )
    if alike:
        found.append("the embeddings of different pairs are alike")
    if not found:
        return None
    evidence = {"recall": recall, "chance": chance}
    return Symptom("no better than guessing", f"at the end {' and '.join(found)}", evidence)
