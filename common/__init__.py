"""The ground floor, free of torch: errors, files, results and run events."""
