"""Evaluators: each gives a Result(metrics, tables) for features, or for a model and data."""
