"""Does the image show what the text says? CLIPScore, and the bundled image-text scorer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from modalities.errors import UserError
from modalities.samples import Prompt
from modalities.sources import resolve_model
from rewards.base import Reward, RewardConfig
from rewards.clip_models import ClipModel, load_clip, load_open_clip

_OPEN_CLIP = "open_clip:"


class ClipScoreConfig(RewardConfig):
    """Cosine in [-1, 1] between the CLIP embeddings of image and text (Radford et al. 2021); differentiable.

    Hessel et al. 2021 (CLIPScore) clip it at 0 and multiply it by 2.5; torchmetrics multiplies by 100. Here it is raw.
    """

    type: Literal["clip_score"] = "clip_score"
    """Image and text agree."""
    model: str = "openai/clip-vit-base-patch32"
    """A folder, hub id or other source of a CLIP model in transformers' or open_clip's format; or a model that
    open_clip knows by name, as `open_clip:NAME/WEIGHTS`, such as `open_clip:ViT-B-32/laion2b_s34b_b79k`."""
    scale: float = Field(default=1.0, gt=0)
    """Factor on the cosine; 100 for torchmetrics' scale."""
    field: str | None = None
    """Field of the prompt's record with the text; None takes the prompt's text. A record without it is left out."""

    def build(self, device: str) -> ClipScore:
        """Raises UserError if the model cannot be found or is no CLIP model."""
        return ClipScore(clip_from_source(self.model, device), self.scale, self.field)


class ImageTextScorerConfig(ClipScoreConfig):
    """`clip_score` by the small scorer that comes with the project: 32x32 emoji and their names.

    It knows little else. `bundled:models/emoji-judge` is the second one, trained on other drawings with another seed:
    measure with it what is trained with the first.
    """

    type: Literal["image_text_scorer"] = "image_text_scorer"  # type: ignore[assignment]
    """Image and text agree, without a hub."""
    model: str = "bundled:models/emoji-scorer"
    """As for `clip_score`."""


def clip_from_source(source: str, device: str) -> ClipModel:
    """The model of a source string as `ClipScoreConfig.model` describes it."""
    if not source.startswith(_OPEN_CLIP):
        return load_clip(resolve_model(source, kind="any"), device)
    name, _, pretrained = source.removeprefix(_OPEN_CLIP).partition("/")
    if not pretrained:
        raise UserError(
            f"model: {source!r} names no weights; write open_clip:NAME/WEIGHTS, WEIGHTS being a tag or a file."
        )
    return load_open_clip(name, pretrained, device)


class ClipScore(Reward):
    """See `ClipScoreConfig`."""

    kinds = frozenset({"image"})
    differentiable = True

    def __init__(self, model: ClipModel, scale: float = 1.0, field: str | None = None) -> None:
        self._model = model
        self._scale = scale
        self._field = field
        self.fields = frozenset() if field is None else frozenset({field})

    def models(self) -> list[nn.Module]:
        """Both towers."""
        return [self._model.module]

    def score(self, samples: Sequence[Any], prompts: Sequence[Prompt]) -> Tensor:
        """[B] float32; NaN where the record has no text."""
        texts = [prompt.text if self._field is None else prompt.record.get(self._field) for prompt in prompts]
        rows = [row for row, text in enumerate(texts) if text is not None]
        if not rows:
            return torch.full((len(samples),), torch.nan)
        unique = sorted({str(texts[row]) for row in rows})
        text_BD = self._model.text_features(unique)[[unique.index(str(texts[row])) for row in rows]]
        image_BD = self._model.image_features([samples[row].unit() for row in rows])
        cosines_B = (image_BD * text_BD).sum(dim=-1)
        scores = torch.full((len(samples),), torch.nan, device=cosines_B.device)
        return scores.index_put((torch.tensor(rows, device=scores.device),), self._scale * cosines_B)
