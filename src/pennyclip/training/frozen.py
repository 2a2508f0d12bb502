"""What a stage computes once: the frozen first layers of each tower, where that is correct.

A wholly frozen trunk's features are stored, and its images or captions are then not augmented. The
states behind frozen first layers are stored where every update would find the same ones, where
computing them for the whole dataset is less work than the stage has with them, and where the disk
has room. What is not stored runs at each update, without a graph.
"""

from collections.abc import Callable

from pennyclip.config.keys import Config, Stage
from pennyclip.data.index import Dataset
from pennyclip.data.stored import NotStored, Stored
from pennyclip.data.tokens import TokenStore
from pennyclip.evaluation.features import Progress, Stores, image_features, text_features
from pennyclip.model.clip import CLIP, TextTower
from pennyclip.model.freezing import evaluating, frozen_layers
from pennyclip.model.image import ImageTower


def store_frozen(
    model: CLIP,
    config: Config,
    stage: Stage,
    dataset: Dataset,
    tokens: TokenStore,
    samples: float,
    progress: Progress,
) -> tuple[Stores, list[str]]:
    """Store what the frozen layers of both towers make of a dataset.

    Args:
        model: what the stage freezes is frozen.
        samples: pairs that the stage sees.

    Returns:
        The stores, and a line about each tower with frozen layers.
    """
    chunk, size, full = config.evaluate.chunk, model.visual.image_size, model.text.context_length

    def image(layers: int | None) -> Stored:
        return image_features(model, dataset, size, chunk, progress, layers)

    def text(layers: int | None) -> Stored:
        length = min(stage.text_length or full, full)
        return text_features(model, dataset, tokens, length, chunk, progress, layers)

    varies = captions_vary = ""
    if config.augment.changes_captions:
        captions_vary = "captions differ each time (augment)"
    if config.augment.changes_images:
        varies = "images differ each time (augment)"
    elif stage.masks:
        varies = "patches are dropped (mask_ratio)"
    with evaluating(model):
        image_store, of_image = _store("image", model.visual, image, varies, len(dataset), samples)
        text_store, of_text = _store("text", model.text, text, captions_vary, len(tokens), samples)
    return Stores(image_store, text_store), of_image + of_text


def _store(
    name: str,
    tower: ImageTower | TextTower,
    compute: Callable[[int | None], Stored],
    varies: str,
    count: int,
    samples: float,
) -> tuple[Stored | None, list[str]]:
    """One tower's store, if there is to be one, and what to say of it.

    Args:
        varies: why its input is not the same at each update; empty: it is.
        count: entries of the store: images or captions of the dataset.
    """
    frozen, total = frozen_layers(tower), len(tower.layers())
    if frozen == total:
        what, layers, why = f"the {name} trunk is frozen: its features are", None, ""
    elif frozen < 2:
        return None, []  # at most the layer that takes the input in, whose output is larger
    else:
        what = f"the first {frozen} of {total} layers of the {name} trunk are frozen: their "
        what, layers, why = f"{what}output is", frozen, varies
        if not tower.enterable:
            why = "a trunk of this kind cannot be entered in the middle"
        elif not why and samples <= count:
            why = f"the stage sees {samples:,.0f} pairs, and all {count:,} would be stored"
    store = None
    if not why:
        try:
            store = compute(layers)
        except NotStored as error:
            why = str(error)
    if store is None:
        return None, [f"  {what} computed at each update, not stored: {why}"]
    of = ""
    if name == "image":
        of = ", from uncropped images"
    elif varies:
        of = ", from unchanged captions"
    return store, [f"  {what} stored{of} ({store.values.nbytes / 1e9:.2g} GB)"]
