"""Federated learning when clients' data differ: methods as Flower strategies and clients."""

from pathlib import Path

_ROOT = Path(__file__).resolve().parent
if not (_ROOT / "strategies").is_dir():
    # Flower's app bundle has the packages beside this folder: it follows no link of a clone.
    __path__.append(str(_ROOT.parent))
