"""The project's ClientApp."""

from fedhet import make_client_app
from strategies import METHOD, SETTINGS
from tasks import Net, load_data

app = make_client_app(Net, load_data, METHOD, settings=SETTINGS)
