"""Train your own CLIP at a fraction of the usual cost.

    model = pennyclip.load("RUN")
    scores = model.encode_text(["a cat"]) @ model.encode_image(pictures).T

Importing the package is cheap; torch is imported by what needs it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pennyclip.data.prepare import prepare as prepare
    from pennyclip.evaluation.encoder import Encoder as Encoder
    from pennyclip.evaluation.encoder import load as load
    from pennyclip.training.loop import train as train

_WHERE = {
    "load": "evaluation.encoder",
    "Encoder": "evaluation.encoder",
    "prepare": "data.prepare",
    "train": "training.loop",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is first asked for."""
    if name not in _WHERE:
        raise AttributeError(f"module 'pennyclip' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"pennyclip.{_WHERE[name]}"), name)
