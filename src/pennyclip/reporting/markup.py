"""HTML from Python calls: what is not markup already is escaped when it enters an element.

    tag("p", "1 < 2, says ", tag("b", caption))

An f-string of markup is plain text again, so a forgotten escape shows as visible tags on the
page, never as an injection.
"""

import html
from collections.abc import Iterable, Sequence

VOID = {"br", "img", "link", "meta"}


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def join(*children: object) -> Html:
    """Children one after the other. None is left out; everything but Html is escaped."""
    return Html(
        "".join(
            child if isinstance(child, Html) else html.escape(str(child))
            for child in children
            if child is not None
        )
    )


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. Attributes that are None are left out; `class_` stands for `class`."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def table(header: Sequence[object], rows: Iterable[Sequence[object]], numbers: int = 0) -> Html:
    """A table that scrolls sideways where it is wider than the page.

    Args:
        header: one cell a column.
        rows: cells, or ready-made `<tr>` markup.
        numbers: how many of the last columns hold numbers, and so stand to the right.
    """
    first_number = len(header) - numbers

    def cells(kind: str, values: Sequence[object]) -> Html:
        return tag(
            "tr",
            *(
                tag(kind, value, class_="number" if column >= first_number else None)
                for column, value in enumerate(values)
            ),
        )

    body = [row if isinstance(row, Html) else cells("td", row) for row in rows]
    return tag(
        "div",
        tag("table", tag("thead", cells("th", header)), tag("tbody", *body)),
        class_="scroll",
    )


def pairs(items: Iterable[tuple[object, object]]) -> Html:
    """Names with their values, as a list."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in items))


def section(identity: str, title: str, *children: object) -> Html:
    return tag("section", tag("h2", title), *children, id=identity)


def note(*children: object) -> Html:
    """A short explanation, or a sentence that says what is missing."""
    return tag("p", *children, class_="note")
