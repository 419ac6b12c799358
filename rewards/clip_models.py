"""CLIP models from transformers and open_clip behind one face: images and texts in, normalised features out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import modalities.clip
from modalities.clip import Preprocessing, torch_interpolation
from modalities.errors import UserError, did_you_mean
from rewards.model_files import read_settings


class ClipModel:
    """A frozen CLIP model in float32; `module` is the whole of it."""

    def __init__(
        self,
        module: nn.Module,
        image_tower: Callable[[Tensor], Tensor],
        text_tower: Callable[[Sequence[str]], Tensor],
        preprocessing: Preprocessing,
        device: str,
    ) -> None:
        self.module = module
        self._image_tower = image_tower
        self._text_tower = text_tower
        self.preprocessing = preprocessing
        self._device = device

    def image_features(self, images: Sequence[Tensor]) -> Tensor:
        """[B, D] float32 of norm 1 for B images [3, H, W] in [0, 1] of any sizes; differentiable in them."""
        inputs_BCHW = torch.stack([self.preprocessing(image.to(self._device)) for image in images])
        return torch.nn.functional.normalize(self._image_tower(inputs_BCHW).float(), dim=-1)

    @torch.no_grad()
    def text_features(self, texts: Sequence[str]) -> Tensor:
        """[B, D] float32 of norm 1; texts are cut at the model's length."""
        return torch.nn.functional.normalize(self._text_tower(texts).float(), dim=-1)


def load_clip(model: Path | str, device: str) -> ClipModel:
    """A folder or hub id in transformers' or open_clip's format, told apart by their configuration files."""
    model_type = (read_settings(model, "config.json") or {}).get("model_type")
    if model_type == "clip":
        return load_transformers_clip(model, device)
    if read_settings(model, "open_clip_config.json") is not None:
        return load_open_clip(f"{'local-dir' if isinstance(model, Path) else 'hf-hub'}:{model}", None, device)
    found = "neither" if model_type is None else f"a config.json with model_type {model_type!r}"
    raise UserError(
        f"{model} is not a CLIP model: expected a config.json with model_type 'clip' (transformers) or an "
        f"open_clip_config.json (open_clip), found {found}."
    )


def load_transformers_clip(folder: Path | str, device: str) -> ClipModel:
    """A `CLIPModel` folder or hub id with its processor."""
    clip = modalities.clip.load_transformers_clip(folder)
    clip.model.to(device).requires_grad_(False)
    return ClipModel(
        clip.model,
        clip.image_features,
        lambda texts: clip.text_features(*clip.tokenize(texts)),
        clip.preprocessing,
        device,
    )


def load_open_clip(name: str, pretrained: str | None, device: str) -> ClipModel:
    """An open_clip model by its name and weights' tag (or file), or `local-dir:FOLDER` without a tag."""
    import open_clip

    known = open_clip.list_models()
    if not name.startswith("local-dir:") and name not in known:
        raise UserError(f"open_clip has no model {name!r}{did_you_mean(name, known)}.")
    try:
        model = open_clip.create_model(name, pretrained=pretrained, device=device, require_pretrained=True)
        tokenizer = open_clip.get_tokenizer(name)
    except (OSError, RuntimeError, ValueError) as error:
        tags = "" if pretrained is None else f" with weights {pretrained!r}; open_clip knows {_tags(name)} for it"
        raise UserError(f"open_clip cannot load {name!r}{tags}: {error}") from error
    model.eval().requires_grad_(False)

    def text_tower(texts: Sequence[str]) -> Tensor:
        return model.encode_text(tokenizer(list(texts)).to(device))

    preprocessing = open_clip_preprocessing(model.visual.preprocess_cfg, name)
    return ClipModel(model, model.encode_image, text_tower, preprocessing, device)


def _tags(name: str) -> str:
    import open_clip

    return ", ".join(open_clip.list_pretrained_tags_by_model(name)) or "no weights"


def open_clip_preprocessing(settings: dict[str, Any], where: str) -> Preprocessing:
    """What open_clip's evaluation transform does, from its settings."""
    size = settings["size"]
    height, width = (size, size) if isinstance(size, int) else size
    mode = settings["resize_mode"]
    if mode not in ("shortest", "squash") or (mode == "shortest" and height != width):
        raise UserError(
            f"{where} resizes images by {mode!r} to {height}x{width}; allowed are 'squash', and 'shortest' to a square."
        )
    return Preprocessing(
        resize=height if mode == "shortest" else (height, width),
        interpolation=torch_interpolation(settings["interpolation"], where),
        crop=(height, width),
        mean=tuple(settings["mean"]),
        std=tuple(settings["std"]),
        rounds_offset=True,
    )
