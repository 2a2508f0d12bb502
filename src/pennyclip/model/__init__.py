"""The two towers and the space they share."""
