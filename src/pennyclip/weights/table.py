"""The match report for people: one table a tower, then what happened to the keys."""

import io
import re

from rich.console import Console
from rich.table import Table

from pennyclip.weights.match import Match

WIDTH = 100  # columns. chosen: reads the same in a terminal, a log and a report


def render(match: Match) -> str:
    """The report as plain text."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, highlight=False)
    console.print(
        f"{match.tower} <- {match.file}  ({match.layout}; trained: {match.trained})",
        soft_wrap=True,
        markup=False,
    )
    table = Table(box=None, pad_edge=False)
    for title in ("layer", "numbers", "loaded", "share"):
        table.add_column(title, justify="left" if title == "layer" else "right")
    for layer in match.layers:
        share = f"{layer.loaded / layer.values:.1%}" if layer.values else "-"
        table.add_row(layer.name, f"{layer.values:,}", f"{layer.loaded:,}", share)
    console.print(table)
    console.print(
        f"trunk {match.share:.1%} loaded; keys of the file: {len(match.matched)} matched, "
        f"{len(match.resampled)} resampled, {len(match.derived)} derived, {len(match.dropped)} "
        f"dropped, {len(match.left_over)} left over",
        soft_wrap=True,
    )
    for title, keys in (
        ("resampled", match.resampled),
        ("derived", match.derived),
        ("dropped", match.dropped),
        ("left over", match.left_over),
        ("new", dict.fromkeys(match.new, "starts from random")),
        ("missing", dict.fromkeys(match.missing, "not in the file")),
    ):
        for line in grouped(keys):
            console.print(f"  {title:<10} {line}", soft_wrap=True, markup=False)
    if match.architecture:
        facts = ", ".join(
            f"{name.replace('_', ' ')}: {value}"
            for name, value in match.architecture.tree().items()
        )
        console.print(f"the file: {facts}", soft_wrap=True, markup=False)
    for line in match.differences:
        console.print(f"  differs    {line}", soft_wrap=True, markup=False)
    if match.note:
        console.print(f"note: {match.note}", soft_wrap=True, markup=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()


def summary(match: Match) -> str:
    """The report in one line, for the start of a run."""
    return (
        f"{match.tower} <- {match.file}: trunk {match.share:.1%} loaded, {len(match.new)} "
        f"parameters start from random, {len(match.dropped)} keys dropped "
        "(more: pennyclip weights)" + (f"\nnote: {match.note}" if match.note else "")
    )


def grouped(keys: dict[str, str]) -> list[str]:
    """One line for all keys that differ in their numbers only and share their reason."""
    groups: dict[tuple[str, str], int] = {}
    for key, reason in keys.items():
        name = (re.sub(r"(?<=\.)\d+(?=\.)", "N", key), re.sub(r"(?<=\.)\d+(?=\.)", "N", reason))
        groups[name] = groups.get(name, 0) + 1
    return [
        f"{name}: {reason}" + (f"  ({count} keys)" if count > 1 else "")
        for (name, reason), count in groups.items()
    ]
