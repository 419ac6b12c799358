"""What must be so before DeepSpeed runs: its version, its accelerator, and nothing that compiles or waits in silence.

DeepSpeed is an optional package: it is imported only in functions.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from modalities.errors import UserError
from uniml_rl.engines.groups import at_end, lent_group

KNOWN = ((0, 19, 8), (0, 20))
"""Versions from the first to below the second: the engine uses much that DeepSpeed does not promise to keep."""
_log = logging.getLogger(__name__)


def require_deepspeed() -> None:
    """Raises UserError if DeepSpeed is missing, or of a version that the engine was not written for."""
    try:
        version = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        raise UserError(
            "type: deepspeed needs the package deepspeed, which is not installed: `pip install 'uniml-rl[deepspeed]'`, "
            "or use type: torch with shard: fsdp."
        ) from None
    if not KNOWN[0] <= tuple(int(number) for number in re.findall(r"\d+", version)[:3]) < KNOWN[1]:
        known = " and ".join(
            f"{sign} {'.'.join(map(str, bound))}" for sign, bound in zip(("from", "below"), KNOWN, strict=True)
        )
        raise UserError(
            f"type: deepspeed was written for versions {known}, and deepspeed {version} is installed: "
            "`pip install 'uniml-rl[deepspeed]'`, or use type: torch with shard: fsdp."
        )


def start(device: str) -> Any:
    """DeepSpeed, ready to work in torch's process group, which exists already, on `device`."""
    os.environ.setdefault("DS_ACCELERATOR", device)  # read when it is first imported, which other libraries may have
    os.environ.setdefault("LOCAL_RANK", "0")
    warnings.filterwarnings(
        "ignore", message=".*(all_gather_into|reduce_scatter)_tensor.* is deprecated", category=FutureWarning
    )
    deepspeed: Any = import_module("deepspeed")
    accelerators: Any = import_module("deepspeed.accelerator")
    if device == "cpu" and accelerators.get_accelerator().device_name() != "cpu":
        cpu: Any = import_module("deepspeed.accelerator.cpu_accelerator")
        accelerators.set_accelerator(cpu.CPU_Accelerator())
    import_module("deepspeed.utils").logger.setLevel(logging.WARNING)
    if device == "cpu":
        _compile_no_shared_memory()
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    kept: Any = import_module("deepspeed.utils.groups")
    if kept._WORLD_GROUP is None:
        kept._WORLD_GROUP = lent_group()
        at_end(kept._release_process_group_references)
    return deepspeed


def _compile_no_shared_memory() -> None:
    """DeepSpeed compiles an all-reduce of its own for processes on CPUs, which takes minutes; gloo does without."""
    backend: Any = sys.modules["deepspeed.comm.torch"]  # as an attribute of deepspeed.comm, `torch` is PyTorch
    if hasattr(backend, "build_shm_op"):
        backend.build_shm_op = lambda: None
    else:
        announce_compiling(["deepspeed_shm_comm"])


def announce_compiling(operators: Iterable[str]) -> None:
    """Says of operators that are not there yet that DeepSpeed is about to compile them.

    Raises UserError if a build that was killed has left its lock, for which PyTorch before 2.14 would wait for ever, in
    silence; later ones have locks that end with their process.
    """
    extensions: Any = import_module("torch.utils.cpp_extension")
    for operator in operators:
        folder = Path(extensions._get_build_directory(operator, verbose=False))
        lock = folder / "lock"
        if hasattr(extensions, "FileBaton") and lock.exists() and not _is_held(lock):
            raise UserError(
                f"{lock} was left behind by a build of DeepSpeed's operator {operator} that was killed, and PyTorch "
                f"would wait for it without end. If no other machine that shares this folder is building it: rm {lock}"
            )
        if not (folder / f"{operator}.so").exists():
            _log.warning(
                "DeepSpeed compiles its operator %s once, into %s; this takes minutes, and nothing is said meanwhile.",
                *(operator, folder),
            )


def _is_held(lock: Path) -> bool:
    """Whether a process of this machine has the file open, as a living builder does.

    True where that cannot be seen: on systems without /proc, and for processes of other users.
    """
    if not Path("/proc/self/fd").is_dir() or lock.stat().st_uid != os.getuid():
        return True
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.path.samefile(descriptor, lock):
                return True
        except OSError:  # it was closed, or is another user's
            continue
    return False
