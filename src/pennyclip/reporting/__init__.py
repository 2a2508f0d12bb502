"""One run, several side by side, or a dataset, as a self-contained page."""

from pennyclip.reporting.comparison import write_comparison
from pennyclip.reporting.dataset import write_dataset_page
from pennyclip.reporting.page import write_report

__all__ = ["write_comparison", "write_dataset_page", "write_report"]
