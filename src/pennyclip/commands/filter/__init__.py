"""Named subsets of a dataset: by text, size, repetition, and by what a CLIP thinks of the pairs."""
