"""CLIP models in transformers' format: their processor with a gradient, and the features of both towers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modalities.errors import UserError
from modalities.sources import loading
from modalities.whole_models import load_model, load_tokenizer

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


class TransformersClip:
    """A `CLIPModel` with its tokenizer and its image processor, dropout off."""

    def __init__(self, model: Any, tokenizer: Any, processor: Any, where: str) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.processor = processor
        self.preprocessing = processor_preprocessing(processor, where)

    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """([B, L] int64 tokens, [B, L] int64 mask), texts cut at the model's length."""
        longest = self.model.config.text_config.max_position_embeddings
        found = self.tokenizer(list(texts), padding=True, truncation=True, max_length=longest, return_tensors="pt")
        return found["input_ids"], found["attention_mask"]

    def text_features(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """[B, D] float32 of norm 1."""
        found = self.model.get_text_features(tokens.to(self.model.device), mask.to(self.model.device))
        return nn.functional.normalize(_features(found).float(), dim=-1)

    def image_features(self, pixels_BCHW: Tensor) -> Tensor:
        """[B, D] float32 of norm 1 from preprocessed pixels; differentiable in them."""
        found = self.model.get_image_features(pixels_BCHW.to(self.model.device, self.model.dtype))
        return nn.functional.normalize(_features(found).float(), dim=-1)


def _features(output: Any) -> Tensor:
    """transformers 5 returns an output object whose pooled output is projected; earlier versions the tensor."""
    return output if isinstance(output, Tensor) else output.pooler_output


def load_transformers_clip(
    source: Path | str, dtype: torch.dtype = torch.float32, *, meta: bool = False
) -> TransformersClip:
    """A `CLIPModel` folder or hub id with its tokenizer and its processor; `meta` as in `load_model`.

    Raises UserError if one of them is missing or lacks weights.
    """
    from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

    model = load_model(CLIPModel, source, str(source), meta=meta, dtype=dtype)
    tokenizer = load_tokenizer(AutoTokenizer, source, str(source))
    with loading(str(source)):
        processor = AutoImageProcessor.from_pretrained(source)
    return TransformersClip(model, tokenizer, processor, str(source))


def processor_preprocessing(processor: Any, where: str) -> Preprocessing:
    """What a transformers CLIP image processor does, from its settings."""
    size, crop = processor.size, processor.crop_size
    resize: int | tuple[int, int] | None = None
    if processor.do_resize:
        resize = size["shortest_edge"] if size.get("shortest_edge") else (size["height"], size["width"])
    return Preprocessing(
        resize=resize,
        interpolation=torch_interpolation(int(processor.resample), where),
        crop=(crop["height"], crop["width"]) if processor.do_center_crop else None,
        mean=tuple(processor.image_mean) if processor.do_normalize else (0.0, 0.0, 0.0),
        std=tuple(processor.image_std) if processor.do_normalize else (1.0, 1.0, 1.0),
    )


def torch_interpolation(name: int | str, where: str) -> str:
    """torch's name of a resampling filter. Raises UserError for one that it has not."""
    if name not in _INTERPOLATION:
        raise UserError(f"{where} resizes images with the filter {name!r}; allowed are bilinear and bicubic.")
    return _INTERPOLATION[name]
