"""What a single batch shows of a run that is not well, though nothing has gone wrong yet."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

DRIFT = 4.0
"""How many times smaller than at the start of training the logits' scale has become when the
temperature is said to drift. Chosen: runs that came to good dipped to 1.6 times smaller."""
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
    return Symptom(
        "temperature",
        f"the temperature drifts toward 1, and is {1 / scale:.2f}: with {candidates:.0f} "
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


def logit_spread(record: Mapping[str, Any]) -> float:
    """Nats by which logits differ in a batch, at most: near 0, all embeddings have become one.

    Beside what depends on the row or the column alone, logits have at most this standard
    deviation (Cauchy-Schwarz; 1 - mean cosine is the variance of unit vectors).
    """
    image, text = (max(0.0, 1 - record[f"{tower}_cosine"]) for tower in ("image", "text"))
    return math.exp(record["logit_scale"]) * math.sqrt(image * text)
