"""A run: the loop, its stages, its state and its folder."""
