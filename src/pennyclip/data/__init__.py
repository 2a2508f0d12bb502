"""From a source's files to training batches."""
