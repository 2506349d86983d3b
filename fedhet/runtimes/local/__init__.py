"""runtime=local and runtime=ray: Flower's Grid over warm workers, without a SuperLink."""
