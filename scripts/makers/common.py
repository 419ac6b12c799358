"""What the makers share: reading shards, resumable checkpoints, schedules, exporting weights in half precision."""

from __future__ import annotations

import io
import json
import math
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

STYLES = ("noto", "twemoji", "fluent")


@dataclass(frozen=True)
class Record:
    """One captioned image of a shard; ``image`` is uint8 [H, W, 3]."""

    image: np.ndarray
    caption: str
    concept: str
    style: str
    group: str
    tags: tuple[str, ...]


def read_shard(path: Path) -> Iterator[Record]:
    """Yield the records of a webdataset tar in their order."""
    if not path.exists():
        raise SystemExit(f"{path} does not exist; run scripts/makers/emoji.py first")
    with tarfile.open(path) as tar:
        files: dict[str, bytes] = {}
        for member in tar:
            _, _, extension = member.name.partition(".")
            stream = tar.extractfile(member)
            assert stream is not None
            files[extension] = stream.read()
            if files.keys() >= {"webp", "json"}:
                meta = json.loads(files["json"])
                image = np.asarray(Image.open(io.BytesIO(files["webp"])).convert("RGB"))
                yield Record(image, meta["caption"], meta["concept"], meta["style"], meta["group"], tuple(meta["tags"]))
                files = {}


def read_styles(paths: list[Path]) -> list[Record]:
    """The records of several shards, one after the other."""
    return [record for path in paths for record in read_shard(path)]


def images_to_tensor(records: list[Record]) -> torch.Tensor:
    """float32 [N, 3, H, W] in [-1, 1]."""
    images_NHWC = torch.from_numpy(np.stack([record.image for record in records]))
    return images_NHWC.permute(0, 3, 1, 2).float() / 127.5 - 1


def setup(seed: int, threads: int) -> None:
    """Seed torch and fix its number of threads, on which the last bits of a run depend."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)


def step_generator(seed: int, step: int) -> torch.Generator:
    """The random numbers of one training step: a function of (seed, step), so that a resumed run draws the same."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write beside, then rename: a killed run leaves the previous checkpoint whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    torch.save(state, beside)
    os.replace(beside, path)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """The checkpoint's state, or None where none has been written."""
    return torch.load(path, weights_only=True) if path.exists() else None


def warmup_cosine(step: int, total: int, warmup: int = 100, final: float = 0.05) -> float:
    """Factor on the learning rate: linear warm-up, then a cosine down to ``final``."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's learning rate to its ``base_lr`` times ``factor``."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


def orthogonalise(matrix: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Nearest semi-orthogonal matrix, approximately, by the quintic Newton-Schulz iteration of Muon, in float32."""
    transposed = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if transposed else matrix) / (matrix.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if transposed else x


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) for matrices: Nesterov momentum, orthogonalised; the update's RMS is ``0.2 lr``.

    ``torch.optim.Muon`` iterates in bfloat16, which processors without it run many times slower.
    """

    def __init__(self, params: Any, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": 0.0, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                direction = orthogonalise(parameter.grad.lerp(state["momentum"], group["momentum"]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(direction, alpha=-0.2 * group["lr"] * math.sqrt(max(parameter.shape)))


def count_parameters(module: nn.Module) -> int:
    """Number of elements of all parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def contact_sheet(images_NHWC: np.ndarray, columns: int, scale: int = 2) -> Image.Image:
    """uint8 images [N, H, W, 3] on one sheet, row by row."""
    count, height, width, _ = images_NHWC.shape
    rows = math.ceil(count / columns)
    sheet = Image.new("RGB", (columns * (width + 2), rows * (height + 2)), "grey")
    for index, image in enumerate(images_NHWC):
        sheet.paste(
            Image.fromarray(image), ((index % columns) * (width + 2) + 1, (index // columns) * (height + 2) + 1)
        )
    return sheet.resize((sheet.width * scale, sheet.height * scale), Image.Resampling.NEAREST)


def tensor_to_uint8(images: torch.Tensor) -> np.ndarray:
    """[N, 3, H, W] in [-1, 1] -> uint8 [N, H, W, 3]."""
    return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()


def load_in_float32(folder: Path) -> None:
    """Let transformers load this folder's float16 weights in float32 by default, as diffusers does with its own."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for part in (config, config.get("text_config", {}), config.get("vision_config", {})):
        if "dtype" in part:
            part["dtype"] = "float32"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def forget_local_paths(folder: Path) -> None:
    """Drop the `_name_or_path` lines from the configs of an exported folder: they name folders of this machine."""
    for path in folder.rglob("config.json"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"_name_or_path"' not in line))
