"""Measurements of a recipe on this machine and this data, before money is spent on a run."""
