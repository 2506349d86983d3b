"""MA-Echo's figures 4 to 6: generated images, neuron matching, fusion paths."""
