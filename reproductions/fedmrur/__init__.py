"""FedMRUR (An et al. 2023): the network of its readings."""
