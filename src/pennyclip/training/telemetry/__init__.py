"""What a run writes about itself while it runs."""
