"""The ClientApp."""

from digits_app.task import SETTINGS, Net, load_data
from fedhet import FedPVR, make_client_app

app = make_client_app(Net, load_data, FedPVR(), settings=SETTINGS)
