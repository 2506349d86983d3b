"""What every package may import, without torch: errors, files, results and run events."""
