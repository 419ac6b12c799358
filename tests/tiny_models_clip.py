"""Tiny CLIP models of random weights, in transformers' and open_clip's formats, and pictures for them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import open_clip
import PIL.Image
import torch
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTokenizer

from modalities.samples import Image

TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def tiny_clip(folder: Path) -> Path:
    """A CLIPModel with its processor and a tokenizer of single letters."""
    tokens = [*ALPHABET, *(letter + "</w>" for letter in ALPHABET), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={token: number for number, token in enumerate(tokens)}, merges=[])
    text = TOWER | {"vocab_size": len(tokens), "max_position_embeddings": 12, "eos_token_id": len(tokens) - 1}
    torch.manual_seed(0)
    model = CLIPModel(
        CLIPConfig(text_config=text, vision_config=TOWER | {"image_size": 32, "patch_size": 8}, projection_dim=8)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def tiny_open_clip(folder: Path) -> Path:
    """An open_clip model as its hub folders are: configuration with preprocessing, and weights."""
    text = {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2}
    model_cfg = {
        "embed_dim": 8,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 16, "head_width": 8, "patch_size": 8},
        "text_cfg": text,
    }
    preprocess_cfg = {"mean": [0.4, 0.5, 0.6], "std": [0.3, 0.25, 0.2]}
    torch.manual_seed(0)
    model = open_clip.CLIP(**model_cfg)
    torch.save(model.state_dict(), folder / "open_clip_pytorch_model.bin")
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": model_cfg, "preprocess_cfg": preprocess_cfg})
    )
    return folder


def picture(height: int, width: int, seed: int = 0) -> PIL.Image.Image:
    """Smooth shapes with some noise: what a resize has to get right."""
    generator = numpy.random.default_rng(seed)
    rows, columns = numpy.mgrid[0:height, 0:width]
    waves = numpy.stack([numpy.sin(rows / (3 + c)) * numpy.cos(columns / (5 - c)) for c in range(3)], axis=-1)
    pixels = 127 + 100 * waves + generator.normal(0, 10, (height, width, 3))
    return PIL.Image.fromarray(pixels.clip(0, 255).astype(numpy.uint8))


def as_image(one: PIL.Image.Image) -> Image:
    return Image(torch.from_numpy(numpy.asarray(one).copy()).permute(2, 0, 1))
