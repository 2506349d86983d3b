"""NIID-Bench (Li et al., ICDE 2022): its network, its README's CIFAR-10 rows, its SCAFFOLD of 2021."""
