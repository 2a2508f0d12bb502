"""What every room uses: errors, files that are whole or not there, progress."""
