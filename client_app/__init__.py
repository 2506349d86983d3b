"""The client: a ClientApp, FederatedClient(NumPyClient), the local training loop, client state."""
