"""One run, or several side by side, as a self-contained page."""

from pennyclip.report.comparison import write_comparison
from pennyclip.report.page import write_report

__all__ = ["write_comparison", "write_report"]
