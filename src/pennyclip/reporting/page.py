"""report.html of one run: self-contained, no script, nothing fetched."""

from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pennyclip.base.atomic import write_text
from pennyclip.reporting import details
from pennyclip.reporting.curves import curves
from pennyclip.reporting.examples import examples
from pennyclip.reporting.markup import Html, join, tag
from pennyclip.reporting.results import headline, results
from pennyclip.reporting.run import read_run

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""The browser itself refuses scripts and requests, should one slip in."""


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write the report of a run folder, finished or not; what is missing is said on the page.

    Args:
        run: folder written by `pennyclip train`.
        out: the file; unset: report.html in the run folder.

    Raises:
        RequestError: `run` is no run folder.
    """
    read = read_run(run)
    sections = (
        headline(read),
        results(read),
        examples(read),
        curves(read),
        details.events(read),
        details.data(read),
        details.weights(read),
        details.configuration(read),
        details.machine(read),
    )
    return write_page(f"{read.name}: pennyclip report", sections, out or run / "report.html")


def write_page(
    title: str, sections: tuple[Html, ...], out: Path, footer: Html | None = None
) -> Path:
    """Write a whole document; unset, the footer says when it was drawn from a run's metrics."""
    css = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    document = join(
        Html("<!doctype html>\n"),
        tag(
            "html",
            tag(
                "head",
                tag("meta", charset="utf-8"),
                tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
                tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
                tag("title", title),
                tag("style", Html(css)),
            ),
            tag("body", tag("main", *sections), footer or _footer()),
            lang="en",
        ),
    )
    # A file name that is not valid Unicode shows its bytes rather than stopping the page.
    write_text(out, document.encode("utf-8", "backslashreplace").decode("utf-8"))
    return out


def _footer() -> Html:
    try:
        made_by = f"pennyclip {version('pennyclip')}"
    except PackageNotFoundError:  # run from a source tree
        made_by = "pennyclip"
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return tag("footer", f"Drawn by {made_by} on {now} from metrics.jsonl.")
