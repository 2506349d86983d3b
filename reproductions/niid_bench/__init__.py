"""NIID-Bench (Li et al., ICDE 2022): its network, its CIFAR-10 rows, and its SCAFFOLD of 2021."""
