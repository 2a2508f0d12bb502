"""What each command takes and does."""
