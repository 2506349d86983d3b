"""How a round differs: asynchronous, secure, private, compressed, robust, simulated."""
