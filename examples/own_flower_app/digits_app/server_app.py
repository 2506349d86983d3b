"""The ServerApp."""

from digits_app.task import SETTINGS, Net, load_data
from fedhet import FedPVR, make_server_app

app = make_server_app(Net, load_data, FedPVR(), settings=SETTINGS)
