"""CLIP models from transformers and open_clip behind one face: images and texts in, normalised features out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modalities.errors import UserError, did_you_mean
from modalities.sources import loading
from rewards.model_files import read_settings

# PIL's resampling filters and open_clip's names to torch's; both reduce with antialiasing.
_INTERPOLATION = {2: "bilinear", 3: "bicubic", "bilinear": "bilinear", "bicubic": "bicubic"}


@dataclass(frozen=True)
class Preprocessing:
    """An image processor's resize, centre crop and normalisation in float32, which keeps the gradient.

    It differs from the processors themselves in that the resize does not round to 8 bits after each of its two passes:
    by a third of a grey level on average and one at most, or little more.
    """

    resize: int | tuple[int, int] | None
    """Length of the shorter edge (the aspect ratio is kept), or (height, width), or None."""
    interpolation: str
    crop: tuple[int, int] | None
    """(height, width) cut from the centre; smaller images are padded with black."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rounds_offset: bool = False
    """The crop's offset where the margin is odd: torchvision rounds it half to even, transformers rounds it down."""

    def __call__(self, pixels_CHW: Tensor) -> Tensor:
        """[3, H, W] float32 in [0, 1] to the model's input [3, h, w]."""
        size = self._size(*pixels_CHW.shape[-2:])
        if size != tuple(pixels_CHW.shape[-2:]):
            pixels_CHW = torch.nn.functional.interpolate(
                pixels_CHW[None], size=size, mode=self.interpolation, antialias=True
            )[0].clamp(0, 1)
        if self.crop is not None:
            pixels_CHW = self._centre_crop(pixels_CHW, *self.crop)
        mean_C11, std_C11 = (pixels_CHW.new_tensor(values).view(3, 1, 1) for values in (self.mean, self.std))
        return (pixels_CHW - mean_C11) / std_C11

    def _size(self, height: int, width: int) -> tuple[int, int]:
        if self.resize is None:
            return height, width
        if isinstance(self.resize, tuple):
            return self.resize
        short, long = self.resize, int(self.resize * max(height, width) / min(height, width))
        return (short, long) if height <= width else (long, short)

    def _centre_crop(self, pixels_CHW: Tensor, height: int, width: int) -> Tensor:
        more_height, more_width = max(0, height - pixels_CHW.shape[-2]), max(0, width - pixels_CHW.shape[-1])
        top, left = more_height // 2, more_width // 2
        pixels_CHW = torch.nn.functional.pad(pixels_CHW, (left, more_width - left, top, more_height - top))
        margins = ((pixels_CHW.shape[-2] - height) / 2, (pixels_CHW.shape[-1] - width) / 2)
        top, left = (round(margin) if self.rounds_offset else int(margin) for margin in margins)
        return pixels_CHW[:, top : top + height, left : left + width]


class ClipModel:
    """A frozen CLIP model in float32."""

    def __init__(
        self,
        image_tower: Callable[[Tensor], Tensor],
        text_tower: Callable[[Sequence[str]], Tensor],
        preprocessing: Preprocessing,
        device: str,
    ) -> None:
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
    from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

    with loading(str(folder)):
        loaded: Any = CLIPModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        processor = AutoImageProcessor.from_pretrained(folder)
    model, report = loaded
    if report["missing_keys"]:  # transformers would go on with random numbers
        raise UserError(
            f"{folder} lacks weights of its CLIP model: {', '.join(sorted(report['missing_keys'])[:3])} ..."
        )
    model = model.to(device).eval().requires_grad_(False)
    max_tokens = model.config.text_config.max_position_embeddings

    def text_tower(texts: Sequence[str]) -> Tensor:
        inputs = tokenizer(list(texts), padding=True, truncation=True, max_length=max_tokens, return_tensors="pt")
        return _features(model.get_text_features(inputs["input_ids"].to(device), inputs["attention_mask"].to(device)))

    def image_tower(inputs_BCHW: Tensor) -> Tensor:
        return _features(model.get_image_features(inputs_BCHW))

    return ClipModel(image_tower, text_tower, processor_preprocessing(processor, str(folder)), device)


def _features(output: Any) -> Tensor:
    """transformers 5 returns an output object whose pooled output is projected; earlier versions the tensor."""
    return output if isinstance(output, Tensor) else output.pooler_output


def processor_preprocessing(processor: Any, where: str) -> Preprocessing:
    """What a transformers CLIP image processor does, from its settings."""
    size, crop = processor.size, processor.crop_size
    resize: int | tuple[int, int] | None = None
    if processor.do_resize:
        resize = size["shortest_edge"] if size.get("shortest_edge") else (size["height"], size["width"])
    return Preprocessing(
        resize=resize,
        interpolation=_torch_interpolation(int(processor.resample), where),
        crop=(crop["height"], crop["width"]) if processor.do_center_crop else None,
        mean=tuple(processor.image_mean) if processor.do_normalize else (0.0, 0.0, 0.0),
        std=tuple(processor.image_std) if processor.do_normalize else (1.0, 1.0, 1.0),
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

    return ClipModel(model.encode_image, text_tower, open_clip_preprocessing(model.visual.preprocess_cfg, name), device)


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
        interpolation=_torch_interpolation(settings["interpolation"], where),
        crop=(height, width),
        mean=tuple(settings["mean"]),
        std=tuple(settings["std"]),
        rounds_offset=True,
    )


def _torch_interpolation(name: int | str, where: str) -> str:
    if name not in _INTERPOLATION:
        raise UserError(f"{where} resizes images with the filter {name!r}; allowed are bilinear and bicubic.")
    return _INTERPOLATION[name]
