"""Handwritten digits, federated with FedPVR."""
