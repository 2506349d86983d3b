"""The name of a job's folder says what its recipe is, so a resumed sweep finds it again.

``scaffold_digits_seed0_alpha0.1_3fa2b1c0`` has method, task, seed and the other values that the
sweep varies, and ends with a hash of the recipe. A resumed run may change some of its values, such
as ``rounds``: these are in the hash only where the sweep varies them.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from fedhet.conf import (
    FOLDER_KEYS,
    LONGER,
    NOTES,
    SITE_KEYS,
    method_name,
    resume_fingerprint,
    words_of,
)
from fedhet.sweep.progress import shortened
from fedhet.sweep.resume import key_of
from fedhet.sweep.sweep_folder import SweepFolder

_NOT_IN_FINGERPRINT = (*LONGER, *SITE_KEYS, *NOTES)
_ALWAYS_NAMED = ("strategy", "task", "seed")
_MOST_CHARACTERS = 120  # a file system allows 255


def job_folder(*, _root_: DictConfig) -> str:
    """Return the name of the folder of the job whose configuration this is, Hydra's included."""
    job = _root_.hydra
    varied = SweepFolder(Path(job.sweep.dir)).read().varied
    words = sorted(word for word in words_of(job.overrides.task) if key_of(word) in varied)
    recipe = OmegaConf.masked_copy(_root_, [str(key) for key in _root_ if key != "hydra"])
    others = [shortened(word) for word in words if key_of(word) not in _ALWAYS_NAMED]
    task = job.runtime.choices.get("task") or recipe.task.name
    parts = [method_name(recipe), str(task), f"seed{recipe.seed}", *others]
    readable = re.sub(r"[^\w.+-]+", "", "_".join(parts))[:_MOST_CHARACTERS]
    hashed = [resume_fingerprint(recipe), *filter(_adds_to_fingerprint, words)]
    return f"{readable}_{hashlib.sha256(' '.join(hashed).encode()).hexdigest()[:8]}"


def _adds_to_fingerprint(word: str) -> bool:
    key = key_of(word)
    return key.partition(".")[0] in _NOT_IN_FINGERPRINT or key in FOLDER_KEYS


OmegaConf.register_new_resolver("job_folder", job_folder, replace=True)
