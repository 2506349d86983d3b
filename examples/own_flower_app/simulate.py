"""Runs the app in Flower's simulation, without `flwr run`: python simulate.py"""

from digits_app.client_app import app as client_app
from digits_app.server_app import app as server_app
from flwr.simulation import run_simulation

if __name__ == "__main__":
    run_simulation(server_app=server_app, client_app=client_app, num_supernodes=5)
