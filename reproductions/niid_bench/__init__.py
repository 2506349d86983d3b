"""NIID-Bench (Li et al., ICDE 2022): its network, and its README's CIFAR-10 rows as experiments."""
