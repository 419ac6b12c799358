"""Export: folders that plain transformers and diffusers load."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from modalities.base import Policy
from modalities.shards import require_finite


def export_policy(policy: Policy, folder: Path) -> None:
    """Writes the policy's plain model folder aside and renames it, replacing an earlier one only when it is whole.

    Raises FloatingPointError, and writes nothing, if weights are not finite.
    """
    require_finite(policy.weight_state())
    aside = folder.with_name(f".writing-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    policy.export(aside)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(aside, folder)
