"""The precisions of `bench precision` as a page of its own, made of the report's parts."""

from pathlib import Path

from pennyclip.commands.bench.precision import Precisions
from pennyclip.reporting.curves import figure
from pennyclip.reporting.markup import note, section, table, tag
from pennyclip.reporting.page import write_page
from pennyclip.reporting.plots import Series, chart


def write_precision_page(found: Precisions, out: Path) -> Path:
    """Write the table, and the course of each precision's recall over the pairs seen."""
    title = f"{len(found.rows)} precisions side by side"
    header = tag(
        "header",
        tag("p", "pennyclip bench precision", class_="eyebrow"),
        tag("h1", title),
        tag("p", found.notes[0], class_="lead"),
    )
    rows = found.cells()
    results = section(
        "results",
        "Results",
        *(note(line) for line in found.notes[1:]),
        table(found.HEADER, rows, numbers=len(found.HEADER) - 1),
    )
    curves = [
        Series(
            row.name, [n // found.batch_size for n, _ in row.course], [s for _, s in row.course], i
        )
        for i, row in enumerate(found.rows)
    ]
    body = note("There is no development split, so no course of the recall.")
    if any(curve.values for curve in curves):
        drawing = chart(curves, "mean recall", percent=True, points=True)
        body = figure("Recall", drawing, "On the development split; higher is better.")
    return write_page(
        f"{title}: pennyclip", (header, results, section("course", "Course", body)), out
    )
