"""Export: folders that plain transformers and diffusers load."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from modalities.base import Policy


def export_policy(policy: Policy, folder: Path) -> None:
    """Writes the policy's plain model folder aside and renames it, replacing an earlier one only when it is whole."""
    aside = folder.with_name(f".writing-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    policy.export(aside)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(aside, folder)
