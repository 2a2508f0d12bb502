"""Validation pictures with the captions that the model finds most fitting.

The trainer writes `examples.json` into the run folder:

    {
      "split": "val",             the subset that the pictures are from
      "step": 500,                optional: updates done by the model that ranked them
      "candidates": 653,          optional: number of captions that each picture ranked
      "note": "...",              optional: one sentence shown above the grid
      "items": [                  one a picture, in the order in which they are shown
        {
          "image": "...",         base64 of a JPEG, without a "data:" prefix; about 256 px
          "rank": 1,              place of the picture's best own caption among all candidates,
                                  from 1; half places may occur where scores are tied
          "captions": [           the best-scored first, three to five
            {"text": "...",       the caption in full
             "score": 0.31,       cosine similarity, -1 to 1
             "own": true}         whether it belongs to this picture
          ]
        }
      ]
    }

Where no own caption is among the best, the best own one may follow as the last entry of
`captions`; its place is then `rank`.
"""

import base64
import binascii
from typing import Any

from pennyclip.reporting.markup import Html, note, section, tag
from pennyclip.reporting.run import Run
from pennyclip.reporting.words import number, plain

GOOD_RANK = 10  # as R@10


def examples(run: Run) -> Html:
    """The section with the grid."""
    data = run.examples
    items = data.get("items") or []
    title = "What the model sees"
    if not items:
        missing = (
            "No pictures yet: they are written by "
            f"pennyclip eval retrieval {run.path} --data {run.data or 'DATASET'}"
        )
        return section("examples", title, note(missing))
    first = sum(number(item.get("rank")) == 1 for item in items)
    near = sum(number(item.get("rank")) <= GOOD_RANK for item in items)
    among = f" among {plain(data['candidates'])} captions" if "candidates" in data else ""
    step = f", model of step {plain(data['step'])}" if "step" in data else ""
    intro = note(
        f"Pictures of the split “{data.get('split')}”{step}, each with "
        f"the captions that score highest for it{among} (cosine similarity; 1 would be a perfect "
        f"match). Of these {len(items)} pictures, {first} find a caption of their own first and "
        f"{near} within the first ten. "
        f"{data.get('note') or ''}"
    )
    return section("examples", title, intro, tag("div", *map(_card, items), class_="grid"))


def _card(item: dict[str, Any]) -> Html:
    rank = number(item.get("rank"))
    verdict = "right" if rank == 1 else "near" if rank <= GOOD_RANK else "wrong"
    words = "own caption first" if rank == 1 else f"own caption at place {rank:g}"
    lines = []
    for place, caption in enumerate(item.get("captions") or [], start=1):
        own, text = bool(caption.get("own")), caption.get("text", "")
        # The own caption that was appended after the best ones stands at its true place.
        shown = f"{rank:g}" if own and rank > place else str(place)
        lines.append(
            tag(
                "li",
                tag("span", shown, class_="place"),
                tag("span", text, class_="caption", title=text),
                tag("span", f"{number(caption.get('score')):.2f}", class_="score"),
                class_="own" if own else None,
            )
        )
    return tag(
        "article",
        _picture(item.get("image")),
        tag("p", "✓ " if rank == 1 else None, words, class_=f"verdict {verdict}"),
        tag("ol", *lines),
    )


def _picture(encoded: Any) -> Html:
    try:
        jpeg = base64.b64decode(encoded, validate=True)
    except (TypeError, ValueError, binascii.Error):
        jpeg = b""
    if not jpeg.startswith(b"\xff\xd8"):
        return tag("div", "picture not readable", class_="picture")
    source = "data:image/jpeg;base64," + base64.b64encode(jpeg).decode("ascii")
    return tag("div", tag("img", src=source, alt="validation picture"), class_="picture")
