"""The project's ServerApp; its results go into results/ beside this file."""

from pathlib import Path

from fedhet import make_server_app
from strategies import METHOD, SETTINGS
from tasks import Net, load_data

RESULTS = Path(__file__).with_name("results")
app = make_server_app(Net, load_data, METHOD, settings={**SETTINGS, "results_dir": str(RESULTS)})
