"""Numbers in words for people."""

import math
from typing import Any


def number(value: Any) -> float:
    """A number of metrics.jsonl, where "nan" and "inf" are strings; nan for what is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def percent(share: Any) -> str:
    """0.532 -> "53.2 %"."""
    value = number(share)
    return f"{100 * value:.1f} %" if math.isfinite(value) else "not a number"


def plain(value: Any) -> str:
    """Any value for a table: whole numbers with separators, others to four digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        whole = math.isfinite(value) and value == int(value) and abs(value) < 1e15
        return f"{int(value):,}" if whole else f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    return "none" if value is None else str(value)


def duration(seconds: float) -> str:
    """75 -> "1 min 15 s"; the two largest units."""
    if not math.isfinite(seconds):
        return "unknown"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole // 60 % 60} min"
    return f"{whole // 86400} d {whole // 3600 % 24} h"


def flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Nested dictionaries and lists of them as (dotted name, value)."""
    if isinstance(tree, dict):
        items: list[tuple[Any, Any]] = list(tree.items())
    elif isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        items = list(enumerate(tree))
    else:
        return [(prefix, tree)]
    return [leaf for key, item in items for leaf in flat(item, f"{prefix}.{key}".lstrip("."))]
