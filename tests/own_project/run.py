"""Runs the project's federation of two clients in Flower's simulation."""

from flwr.simulation import run_simulation

from client_app import app as client_app
from server_app import app as server_app

if __name__ == "__main__":
    run_simulation(server_app, client_app, num_supernodes=2)
