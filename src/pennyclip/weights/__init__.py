"""Weights that others have trained, and ours for others."""
