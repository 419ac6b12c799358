"""The framework: command line, configuration, curriculum, the one trainer, algorithms, engines, checkpoints, data."""

import modalities
import rewards

__version__ = "0.1.0"

for _package in (modalities, rewards):
    if getattr(_package, "OWNER", None) != "uniml-rl":
        raise ImportError(
            f"`import {_package.__name__}` finds an unrelated distribution at {_package.__file__}; uninstall it with "
            f"`pip uninstall {_package.__name__}` and install uniml-rl again."
        )
