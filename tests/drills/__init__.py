"""What is not run at every push: `make test-drills`."""
