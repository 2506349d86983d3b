"""Federated learning when clients' data differ: methods as Flower strategies and clients.

In a Flower app of your own: :func:`make_client_app` and :func:`make_server_app` of your model, your
data and one of the methods below (docs/own.md). The command ``fedhet`` runs recipes, and so
does :func:`run`, for notebooks.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedhet.common.errors import ConfigError as ConfigError
    from fedhet.flower_apps import load_weights as load_weights
    from fedhet.flower_apps import make_client_app as make_client_app
    from fedhet.flower_apps import make_server_app as make_server_app
    from fedhet.runs import RunResult as RunResult
    from fedhet.runs import partition as partition
    from fedhet.runs import run as run
    from fedhet.runtimes.flower_install import LaunchError as LaunchError
    from fedhet.strategies.apfl import APFL as APFL
    from fedhet.strategies.average import Average as Average
    from fedhet.strategies.dense import DENSE as DENSE
    from fedhet.strategies.ditto import Ditto as Ditto
    from fedhet.strategies.ensemble import Ensemble as Ensemble
    from fedhet.strategies.fedala import FedALA as FedALA
    from fedhet.strategies.fedavg import Centralised as Centralised
    from fedhet.strategies.fedavg import FedAdagrad as FedAdagrad
    from fedhet.strategies.fedavg import FedAdam as FedAdam
    from fedhet.strategies.fedavg import FedAvg as FedAvg
    from fedhet.strategies.fedavg import FedAvgM as FedAvgM
    from fedhet.strategies.fedavg import FedYogi as FedYogi
    from fedhet.strategies.fedavg import Local as Local
    from fedhet.strategies.fedbabu import FedBABU as FedBABU
    from fedhet.strategies.fedbuff import FedAsync as FedAsync
    from fedhet.strategies.fedbuff import FedBuff as FedBuff
    from fedhet.strategies.fedcm import FedCM as FedCM
    from fedhet.strategies.feddistill import FedDistill as FedDistill
    from fedhet.strategies.feddw import FedDW as FedDW
    from fedhet.strategies.feddyn import FedDyn as FedDyn
    from fedhet.strategies.fedexp import FedExP as FedExP
    from fedhet.strategies.fedma import FedMA as FedMA
    from fedhet.strategies.fedmrur import FedMRUR as FedMRUR
    from fedhet.strategies.fednova import FedNova as FedNova
    from fedhet.strategies.fedper import FedPer as FedPer
    from fedhet.strategies.fedproto import FedProto as FedProto
    from fedhet.strategies.fedprox import FedProx as FedProx
    from fedhet.strategies.fedpvr import FedPVR as FedPVR
    from fedhet.strategies.fedrep import FedRep as FedRep
    from fedhet.strategies.fedrod import FedRoD as FedRoD
    from fedhet.strategies.fedsam import FedSAM as FedSAM
    from fedhet.strategies.fedsam import MoFedSAM as MoFedSAM
    from fedhet.strategies.feduv import FedUV as FedUV
    from fedhet.strategies.lg_fedavg import LGFedAvg as LGFedAvg
    from fedhet.strategies.maecho import MAEcho as MAEcho
    from fedhet.strategies.moon import MOON as MOON
    from fedhet.strategies.otfusion import OTFusion as OTFusion
    from fedhet.strategies.per_fedavg import PerFedAvg as PerFedAvg
    from fedhet.strategies.pfedme import PFedMe as PFedMe
    from fedhet.strategies.pfnm import PFNM as PFNM
    from fedhet.strategies.regmean import RegMean as RegMean
    from fedhet.strategies.scaffold import SCAFFOLD as SCAFFOLD

_ROOT = Path(__file__).resolve().parent
if not (_ROOT / "strategies").is_dir():
    # Flower's app bundle has the packages beside this folder: it follows no link of a clone.
    __path__.append(str(_ROOT.parent))

# Where each public name is; torch is imported when one is asked for.
_PUBLIC = {
    "ConfigError": "common.errors",
    "LaunchError": "runtimes.flower_install",
    "load_weights": "flower_apps",
    "make_client_app": "flower_apps",
    "make_server_app": "flower_apps",
    "RunResult": "runs",
    "partition": "runs",
    "run": "runs",
    "APFL": "strategies.apfl",
    "Average": "strategies.average",
    "DENSE": "strategies.dense",
    "Ditto": "strategies.ditto",
    "Ensemble": "strategies.ensemble",
    "FedALA": "strategies.fedala",
    "FedAvg": "strategies.fedavg",
    "FedAvgM": "strategies.fedavg",
    "FedAdagrad": "strategies.fedavg",
    "FedAdam": "strategies.fedavg",
    "FedYogi": "strategies.fedavg",
    "Local": "strategies.fedavg",
    "Centralised": "strategies.fedavg",
    "FedAsync": "strategies.fedbuff",
    "FedBABU": "strategies.fedbabu",
    "FedBuff": "strategies.fedbuff",
    "FedCM": "strategies.fedcm",
    "FedDistill": "strategies.feddistill",
    "FedDW": "strategies.feddw",
    "FedDyn": "strategies.feddyn",
    "FedExP": "strategies.fedexp",
    "FedMA": "strategies.fedma",
    "FedMRUR": "strategies.fedmrur",
    "FedNova": "strategies.fednova",
    "FedPer": "strategies.fedper",
    "FedProto": "strategies.fedproto",
    "FedProx": "strategies.fedprox",
    "FedPVR": "strategies.fedpvr",
    "FedRep": "strategies.fedrep",
    "FedRoD": "strategies.fedrod",
    "FedSAM": "strategies.fedsam",
    "MoFedSAM": "strategies.fedsam",
    "FedUV": "strategies.feduv",
    "LGFedAvg": "strategies.lg_fedavg",
    "MAEcho": "strategies.maecho",
    "MOON": "strategies.moon",
    "OTFusion": "strategies.otfusion",
    "PerFedAvg": "strategies.per_fedavg",
    "PFedMe": "strategies.pfedme",
    "PFNM": "strategies.pfnm",
    "RegMean": "strategies.regmean",
    "SCAFFOLD": "strategies.scaffold",
}
__all__ = [
    "APFL",
    "DENSE",
    "MOON",
    "PFNM",
    "SCAFFOLD",
    "Average",
    "Centralised",
    "ConfigError",
    "Ditto",
    "Ensemble",
    "FedALA",
    "FedAdagrad",
    "FedAdam",
    "FedAsync",
    "FedAvg",
    "FedAvgM",
    "FedBABU",
    "FedBuff",
    "FedCM",
    "FedDW",
    "FedDistill",
    "FedDyn",
    "FedExP",
    "FedMA",
    "FedMRUR",
    "FedNova",
    "FedPVR",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedSAM",
    "FedUV",
    "FedYogi",
    "LGFedAvg",
    "LaunchError",
    "Local",
    "MAEcho",
    "MoFedSAM",
    "OTFusion",
    "PFedMe",
    "PerFedAvg",
    "RegMean",
    "RunResult",
    "load_weights",
    "make_client_app",
    "make_server_app",
    "partition",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"fedhet.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
