"""Whether a run is well, and what is done if not."""
