"""Train your own CLIP at a fraction of the usual cost.

    model = pennyclip.load("RUN")
    scores = model.encode_text(["a cat"]) @ model.encode_image(pictures).T

Importing the package is cheap; torch is imported by what needs it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pennyclip.encoder import Encoder as Encoder
    from pennyclip.encoder import load as load
    from pennyclip.prepare import prepare as prepare
    from pennyclip.train import train as train

_WHERE = {"load": "encoder", "Encoder": "encoder", "prepare": "prepare", "train": "train"}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is first asked for."""
    if name not in _WHERE:
        raise AttributeError(f"module 'pennyclip' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"pennyclip.{_WHERE[name]}"), name)
