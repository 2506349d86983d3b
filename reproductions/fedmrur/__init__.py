"""FedMRUR's figures: how far the clients' updates agree."""
