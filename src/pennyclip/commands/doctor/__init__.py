"""What is wrong with a run, by its own records; and one of its batches again."""
