"""A dataset's pictures on a page, small."""

import base64
import io
from collections.abc import Iterable, Sequence

from PIL import Image

from pennyclip.data.index import Dataset
from pennyclip.reporting.markup import Html, tag

SIDE, QUALITY = 240, 80  # pixels of the longer side, and JPEG. chosen: about 8 KB
CAPTIONS = 3  # shown of a picture. chosen: fits beside it


def thumbnail(jpeg: bytes) -> Html:
    """A picture as part of the page itself."""
    image = Image.open(io.BytesIO(jpeg))
    image.draft("RGB", (SIDE, SIDE))
    image.thumbnail((SIDE, SIDE))
    out = io.BytesIO()
    image.convert("RGB").save(out, "JPEG", quality=QUALITY)
    source = "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode("ascii")
    return tag("div", tag("img", src=source, alt=""), class_="picture")


def card(dataset: Dataset, row: int, heading: str, captions: Sequence[tuple[str, str]]) -> Html:
    """One picture with texts below it, each with what stands in front of it."""
    lines = [
        tag(
            "li",
            tag("span", label, class_="score") if label else None,
            tag("span", text, class_="caption", title=text),
        )
        for label, text in captions[:CAPTIONS]
    ]
    more = len(captions) - CAPTIONS
    return tag(
        "article",
        thumbnail(dataset.image_bytes(row)),
        tag("p", heading, class_="verdict") if heading else None,
        tag("ol", *lines, tag("li", f"and {more} more") if more > 0 else None),
    )


def grid(cards: Iterable[Html]) -> Html:
    return tag("div", *cards, class_="grid")
