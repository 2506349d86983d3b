"""Federated learning when clients' data differ: methods as Flower strategies and clients.

In a Flower app of your own: :func:`make_client_app` and :func:`make_server_app` of your model, your
data and one of the methods (docs/own.md). The command ``fedhet`` runs recipes, and so does
:func:`run`, for notebooks. ``__init__.pyi`` lists the public names; torch is imported when one that
needs it is asked for.
"""

from pathlib import Path

import lazy_loader

_ROOT = Path(__file__).resolve().parent
if not (_ROOT / "strategies").is_dir():
    # Flower's app bundle has the packages beside this folder: it follows no link of a clone.
    __path__.append(str(_ROOT.parent))

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
