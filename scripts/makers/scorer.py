"""Train, export and test the two image-text scorers ``assets/models/emoji-scorer`` and ``assets/models/emoji-judge``.

Each is a small ``CLIPModel``: a vision transformer from scratch (32x32, patch 8) and the distilled text encoder of
``text.py``, whose transformer stays frozen. The loss is the cross-entropy of an image's concept among *all* concepts,
so that the look-alikes of its own group are among the negatives of every step.

A reward model must not be pleased by fuzzy samples. Images are therefore shifted, scaled, turned, recoloured, noised,
blurred and passed through the VAE with noisy latents; and a share of each batch is ruined (coarse blur, shuffled
patches, two pictures mixed) and has the uniform distribution over concepts as its target.

``scorer`` learns from noto and twemoji, ``judge`` from fluent, emojione and fxemoji with another seed: no drawing is
common to both.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from common import (
    STYLES,
    Muon,
    Record,
    count_parameters,
    forget_local_paths,
    images_to_tensor,
    load_checkpoint,
    load_in_float32,
    read_shard,
    save_checkpoint,
    set_learning_rate,
    setup,
    step_generator,
    warmup_cosine,
)
from diffusers import AutoencoderKL, StableDiffusion3Pipeline
from torch import nn
from transformers import (
    AutoProcessor,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    CLIPVisionConfig,
)

TRAINING_STYLES = {"scorer": ("noto", "twemoji"), "judge": ("fluent", "emojione", "fxemoji")}
TEST_STYLES = {"scorer": "fluent", "judge": "twemoji"}
SEEDS = {"scorer": 1, "judge": 2}
PHRASES = ("{}", "a {}", "{} emoji", "a picture of a {}")
RUINED_SHARE = 0.15
LABEL_SMOOTHING = 0.05
IMAGE_MEAN = IMAGE_STD = [0.5, 0.5, 0.5]


def shard_path(style: str, arguments: argparse.Namespace) -> Path:
    folder = arguments.assets / "emoji" if style in STYLES else arguments.work / "emoji-extra"
    return folder / f"emoji-{style}.tar"


def new_model(text_encoder: CLIPTextModelWithProjection) -> CLIPModel:
    """A CLIPModel whose text tower is the distilled encoder."""
    vision = CLIPVisionConfig(
        image_size=32,
        patch_size=8,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=4,
        hidden_act="gelu",
    )
    config = CLIPConfig(
        text_config=text_encoder.config.to_dict(),
        vision_config=vision.to_dict(),
        projection_dim=text_encoder.config.projection_dim,
    )
    model = CLIPModel(config)
    model.text_model.load_state_dict(text_encoder.text_model.state_dict())
    model.text_projection.load_state_dict(text_encoder.text_projection.state_dict())
    for module in model.vision_model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    return model


# --- augmentation ---


class Random:
    """Uniform and normal draws from one generator, shaped for images."""

    def __init__(self, generator: torch.Generator, size: int) -> None:
        self.generator, self.size = generator, size

    def uniform(self, low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand((self.size, *(shape or (1, 1, 1))), generator=self.generator)

    def normal(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=self.generator)

    def chance(self, probability: float) -> torch.Tensor:
        return torch.rand((self.size, 1, 1, 1), generator=self.generator) < probability


def resample(images_BCHW: torch.Tensor, size: int) -> torch.Tensor:
    """Reduce to ``size`` pixels and enlarge again: a blur."""
    small = F.interpolate(images_BCHW, size=(size, size), mode="area")
    return F.interpolate(small, size=images_BCHW.shape[-2:], mode="bicubic", align_corners=False).clamp(-1, 1)


def warp(images_BCHW: torch.Tensor, random: Random, may_flip_B: torch.Tensor) -> torch.Tensor:
    """Rotation up to 15 degrees, scale 0.75 to 1.25, aspect, shift up to 4 pixels, flip where the caption allows it."""
    angle = random.uniform(-0.26, 0.26, 1).squeeze(-1)
    scale = random.uniform(0.8, 1.33, 1).squeeze(-1)
    aspect = random.uniform(0.9, 1.1, 1).squeeze(-1)
    flip = torch.where(may_flip_B & (random.uniform(0, 1, 1).squeeze(-1) < 0.5), -1.0, 1.0)
    shift = random.uniform(-0.25, 0.25, 2)
    cosine, sine = angle.cos() * scale, angle.sin() * scale
    matrix_B23 = torch.stack(
        [
            torch.stack([cosine * aspect * flip, -sine, shift[:, 0]], dim=-1),
            torch.stack([sine * flip, cosine / aspect, shift[:, 1]], dim=-1),
        ],
        dim=1,
    )
    grid = F.affine_grid(matrix_B23, list(images_BCHW.shape), align_corners=False)
    return F.grid_sample(images_BCHW - 1, grid, align_corners=False) + 1  # zero padding is white


def recolour(images_BCHW: torch.Tensor, random: Random) -> torch.Tensor:
    """Brightness, contrast, saturation and a slight tint per channel; hues stay, as captions name colours."""
    grey = images_BCHW.mean(1, keepdim=True)
    images_BCHW = grey + (images_BCHW - grey) * random.uniform(0.6, 1.4)
    return (images_BCHW * random.uniform(0.75, 1.1) + random.uniform(-0.15, 0.15)) * random.uniform(0.9, 1.1, 3, 1, 1)


@torch.no_grad()
def through_vae(images_BCHW: torch.Tensor, vae: AutoencoderKL, random: Random) -> torch.Tensor:
    """Decode noisy latents, with noise up to 0.35 of their standard deviation."""
    latents = vae.encode(images_BCHW).latent_dist.mean
    noise = torch.randn(latents.shape, generator=random.generator)
    strength = 0.35 * torch.rand((len(latents), 1, 1, 1), generator=random.generator)
    return vae.decode(latents + noise * strength / vae.config.scaling_factor).sample.clamp(-1, 1)


def erase(images_BCHW: torch.Tensor, random: Random) -> torch.Tensor:
    """Paint a rectangle of up to 12x12 pixels white in some images."""
    rows = torch.arange(images_BCHW.shape[-1])
    centre, half = random.uniform(0, 32, 2), random.uniform(2, 6, 2)
    inside_y = (rows - centre[:, :1]).abs() < half[:, :1]
    inside_x = (rows - centre[:, 1:]).abs() < half[:, 1:]
    mask = (inside_y[:, :, None] & inside_x[:, None, :])[:, None] & random.chance(0.25)
    return images_BCHW.masked_fill(mask, 1.0)


def augment(
    images_BCHW: torch.Tensor, may_flip_B: torch.Tensor, vae: AutoencoderKL, generator: torch.Generator
) -> torch.Tensor:
    """Everything that leaves the concept recognisable."""
    size = len(images_BCHW)
    random = Random(generator, size)
    images = recolour(warp(images_BCHW, random, may_flip_B), random)
    share = size // 16
    images = torch.cat([through_vae(images[:share].clamp(-1, 1), vae, random), images[share:]])
    blur = int(torch.randint(14, 29, (), generator=generator))
    images = torch.where(random.chance(0.3), resample(images, blur), images)
    images = images + random.normal(images) * random.uniform(0, 0.2) * random.chance(0.5)
    return erase(images, random).clamp(-1, 1)


def ruin(images_BCHW: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One third each: blurred to 3-6 pixels, 8x8 patches shuffled, two pictures mixed."""
    third = len(images_BCHW) // 3
    size = int(torch.randint(3, 7, (), generator=generator))
    blurred = resample(images_BCHW[:third], size)
    patches = images_BCHW[third : 2 * third].unfold(2, 8, 8).unfold(3, 8, 8).flatten(2, 3)  # [b, 3, 16, 8, 8]
    patches = patches[:, :, torch.randperm(16, generator=generator)].unflatten(2, (4, 4))
    shuffled = patches.permute(0, 1, 2, 4, 3, 5).flatten(4, 5).flatten(2, 3)
    rest = images_BCHW[2 * third :]
    mixed = 0.5 * rest + 0.5 * rest.roll(1, 0)
    return torch.cat([blurred, shuffled, mixed])


# --- training ---


def may_flip(record: Record) -> bool:
    """Mirror images keep their caption unless it names a side or the drawing holds writing."""
    words = set(record.caption.split()) | {record.group}
    return not words & {"left", "right", "first", "last", "waxing", "waning", "1st", "2nd", "3rd", "8", "hundred"}


@torch.no_grad()
def text_hidden(model: CLIPModel, tokenizer: CLIPTokenizer, captions: list[str]) -> torch.Tensor:
    """Pooled output of the frozen text transformer for every phrase and caption, [phrases, concepts, D]."""
    prompts = [phrase.format(caption) for phrase in PHRASES for caption in captions]
    token_ids = tokenizer(prompts, padding="max_length", truncation=True, return_tensors="pt").input_ids
    pooled = torch.cat([model.text_model(ids).pooler_output for ids in token_ids.split(256)])
    return pooled.unflatten(0, (len(PHRASES), len(captions)))


def new_optimizers(model: CLIPModel, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the vision transformer, AdamW for the rest; the text transformer is frozen."""
    hidden, other = [], []
    for name, parameter in model.named_parameters():
        if name.startswith("text_model."):
            parameter.requires_grad_(False)
        elif parameter.ndim == 2 and ".layers." in name:
            hidden.append(parameter)
        else:
            other.append(parameter)
    return [
        Muon([{"params": hidden, "base_lr": muon_lr}], weight_decay=0.1),
        torch.optim.AdamW([{"params": other, "base_lr": adam_lr}], weight_decay=0.05, betas=(0.9, 0.98)),
    ]


def concept_logits(model: CLIPModel, pixels_BCHW: torch.Tensor, pooled_KD: torch.Tensor) -> torch.Tensor:
    """Scaled cosine between each image and each concept, [B, K]."""
    image = F.normalize(model.visual_projection(model.vision_model(pixels_BCHW).pooler_output), dim=-1)
    text = F.normalize(model.text_projection(pooled_KD), dim=-1)
    return model.logit_scale.exp().clamp(max=100) * image @ text.T


@dataclass
class ScorerData:
    """Images [N, 3, 32, 32], their concepts [N], which may be mirrored [N], text features [phrases, K, D], the VAE."""

    images: torch.Tensor
    labels: torch.Tensor
    may_flip: torch.Tensor
    pooled: torch.Tensor
    vae: AutoencoderKL

    def batch(self, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Pixels [B, 3, 32, 32] and labels of the first, recognisable ones; the rest is ruined."""
        rows = torch.randint(0, len(self.images), (size,), generator=generator)
        good = rows[: size - round(size * RUINED_SHARE)]
        bad = rows[len(good) :]
        pixels = augment(self.images[good], self.may_flip[good], self.vae, generator)
        return torch.cat([pixels, ruin(self.images[bad], generator)]), self.labels[good]


def scorer_loss(model: CLIPModel, data: ScorerData, size: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Loss, its classification part, the rejection of ruined images, and the accuracy."""
    pixels, labels = data.batch(size, generator)
    phrase = int(torch.randint(0, len(PHRASES), (), generator=generator))
    logits = concept_logits(model, pixels, data.pooled[phrase])
    good = logits[: len(labels)]
    classification = F.cross_entropy(good, labels, label_smoothing=LABEL_SMOOTHING)
    rejection = -logits[len(labels) :].log_softmax(-1).mean() - math.log(logits.shape[-1])  # KL(uniform || model)
    accuracy = (good.argmax(-1) == labels).float().mean()
    return classification + RUINED_SHARE * rejection, classification, rejection, accuracy


def train(arguments: argparse.Namespace) -> None:
    seed = SEEDS[arguments.which]
    concepts = [record.caption for record in read_shard(shard_path("noto", arguments))]
    index = {caption: number for number, caption in enumerate(concepts)}
    styles = TRAINING_STYLES[arguments.which]
    records = [record for style in styles for record in read_shard(shard_path(style, arguments))]
    images = images_to_tensor(records)
    labels = torch.tensor([index[record.caption] for record in records])
    flips = torch.tensor([may_flip(record) for record in records])

    setup(seed, arguments.threads)
    tokenizer = CLIPTokenizer.from_pretrained(arguments.work / "text" / "tokenizer")
    text_encoder = CLIPTextModelWithProjection.from_pretrained(arguments.work / "text" / "large")
    vae = AutoencoderKL.from_pretrained(arguments.work / "vae").eval()
    torch.manual_seed(seed)
    model = new_model(text_encoder)
    pooled = text_hidden(model.eval(), tokenizer, concepts)
    print(
        f"{arguments.which}: {count_parameters(model) / 1e6:.2f}M parameters, {len(records)} images of {styles}",
        flush=True,
    )
    optimizers = new_optimizers(model, arguments.muon_lr, arguments.adam_lr)
    path = arguments.work / f"{arguments.which}.pt"
    step, mean_loss = 0, 0.0
    if (state := load_checkpoint(path)) is not None:
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, mean_loss = state["step"], state["mean_loss"]
        print(f"resumed at step {step}", flush=True)
    data = ScorerData(images, labels, flips, pooled, vae)
    first, started, mean_accuracy = step, time.time(), 0.0
    while step < arguments.steps:
        generator = step_generator(seed, step)
        loss, classification, rejection, accuracy = scorer_loss(model, data, arguments.batch_size, generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = warmup_cosine(step, arguments.steps, warmup=50, final=0.02)
        for optimizer in optimizers:
            set_learning_rate(optimizer, factor)
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        mean_loss += (classification.item() - mean_loss) * max(0.05, 1 / step)
        mean_accuracy += (accuracy.item() - mean_accuracy) * max(0.05, 1 / (step - first))
        if step % 50 == 0 or step == arguments.steps:
            rate = (time.time() - started) / (step - first)
            print(
                f"step {step} loss {mean_loss:.3f} accuracy {mean_accuracy:.3f} rejection {rejection.item():.2f} "
                f"{rate:.2f} s/step",
                flush=True,
            )
            state = {
                "model": model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "step": step,
                "mean_loss": mean_loss,
            }
            save_checkpoint(path, state)


# --- export and test ---


def export(arguments: argparse.Namespace) -> None:
    """Write the folder that ``CLIPModel`` and ``AutoProcessor`` load, weights in float16."""
    state = load_checkpoint(arguments.work / f"{arguments.which}.pt")
    if state is None:
        raise SystemExit(f"no checkpoint {arguments.which}.pt in {arguments.work}; run `scorer.py train` first")
    model = new_model(CLIPTextModelWithProjection.from_pretrained(arguments.work / "text" / "large"))
    model.load_state_dict(state["model"])
    target = arguments.assets / "models" / f"emoji-{arguments.which}"
    model.half().save_pretrained(target)
    load_in_float32(target)
    forget_local_paths(target)
    image_processor = CLIPImageProcessor(
        size={"shortest_edge": 32},
        crop_size={"height": 32, "width": 32},
        image_mean=IMAGE_MEAN,
        image_std=IMAGE_STD,
    )
    tokenizer = CLIPTokenizer.from_pretrained(arguments.work / "text" / "tokenizer")
    CLIPProcessor(image_processor=image_processor, tokenizer=tokenizer).save_pretrained(target)
    print(f"exported step {state['step']} to {target}")


@torch.no_grad()
def evaluate(arguments: argparse.Namespace) -> None:
    """Retrieval among all concepts, and cosines of matched, shuffled and ruined pairs, by the exported folder."""
    folder = arguments.assets / "models" / f"emoji-{arguments.which}"
    model = CLIPModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    concepts = [record.caption for record in read_shard(shard_path("noto", arguments))]
    index = {caption: number for number, caption in enumerate(concepts)}
    tokens = tokenizer(concepts, padding="max_length", truncation=True, return_tensors="pt")
    text = F.normalize(model.get_text_features(**tokens).pooler_output, dim=-1)

    def cosines(images: torch.Tensor) -> torch.Tensor:
        features = [model.get_image_features(part).pooler_output for part in images.split(128)]
        return F.normalize(torch.cat(features), dim=-1) @ text.T

    heldout = set((arguments.assets / "prompts" / "image_heldout.txt").read_text().splitlines())
    figures = {}
    for style in (*STYLES, "emojione", "fxemoji"):
        records = list(read_shard(shard_path(style, arguments)))
        images = images_to_tensor(records)
        labels = torch.tensor([index[record.caption] for record in records])
        similarity = cosines(images)
        own = similarity.gather(1, labels[:, None])
        rank = (similarity > own).sum(1)
        generator = torch.Generator().manual_seed(0)
        shuffled = similarity.gather(1, labels[torch.randperm(len(labels), generator=generator)][:, None])
        is_heldout = torch.tensor([record.caption in heldout for record in records])
        blurred = cosines(resample(images, 8)).gather(1, labels[:, None])
        coarse = cosines(resample(images, 4)).gather(1, labels[:, None])
        figures[style] = {
            "trained_on": style in TRAINING_STYLES[arguments.which],
            "images": len(records),
            **{f"R@{k}": round((rank < k).float().mean().item(), 3) for k in (1, 5, 10)},
            "R@1 heldout prompts": round((rank[is_heldout] < 1).float().mean().item(), 3),
            "cosine matched": round(own.mean().item(), 3),
            "cosine shuffled": round(shuffled.mean().item(), 3),
            "cosine blurred to 8": round(blurred.mean().item(), 3),
            "cosine blurred to 4": round(coarse.mean().item(), 3),
        }
        print(style, figures[style], flush=True)
    (arguments.work / f"{arguments.which}-figures.json").write_text(json.dumps(figures, indent=1))


@torch.no_grad()
def score_samples(arguments: argparse.Namespace) -> None:
    """Cosine of the flow model's samples for the held-out prompts, beside real pictures: what RL has to gain."""
    folder = arguments.assets / "models" / f"emoji-{arguments.which}"
    model = CLIPModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    prompts = (arguments.assets / "prompts" / "image_heldout.txt").read_text().splitlines()
    tokens = tokenizer(prompts, padding="max_length", truncation=True, return_tensors="pt")
    text = F.normalize(model.get_text_features(**tokens).pooler_output, dim=-1)
    pipeline = StableDiffusion3Pipeline.from_pretrained(arguments.assets / "models" / "emoji-flow", dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(
        [prompt for prompt in prompts for _ in range(arguments.samples)],
        num_inference_steps=arguments.inference_steps,
        guidance_scale=arguments.guidance_scale,
        generator=torch.Generator().manual_seed(0),
        max_sequence_length=1,
        height=32,
        width=32,
        output_type="pt",
    ).images
    features = F.normalize(model.get_image_features(images * 2 - 1).pooler_output, dim=-1)
    similarity = (features @ text.T).unflatten(0, (len(prompts), arguments.samples))  # [P, S, P]
    own = similarity.diagonal(dim1=0, dim2=2)  # [S, P]
    figures = {
        "mean": own.mean().item(),
        "other prompts": similarity.mean().item(),
        "std within a prompt": own.std(0, correction=0).mean().item(),
        "best of the samples": own.max(0).values.mean().item(),
        "R@1 among these prompts": (similarity.argmax(2) == torch.arange(len(prompts))[:, None]).float().mean().item(),
    }
    print({name: round(value, 3) for name, value in figures.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, function, help_text in (
        ("train", train, "train one of the two"),
        ("export", export, "write its folder"),
        ("evaluate", evaluate, "test the exported folder"),
        ("score-samples", score_samples, "score the exported flow model's samples"),
    ):
        command = commands.add_parser(name, help=help_text, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.set_defaults(function=function)
        command.add_argument("which", choices=sorted(TRAINING_STYLES))
        command.add_argument("--assets", type=Path, default=Path("assets"), help="folder that holds emoji/ and models/")
        if name == "score-samples":
            command.add_argument("--samples", type=int, default=4, help="samples per prompt")
            command.add_argument("--inference-steps", type=int, default=12)
            command.add_argument("--guidance-scale", type=float, default=3.0)
            continue
        command.add_argument(
            "--work", type=Path, required=True, help="folder of checkpoints and the other makers' results"
        )
        if name == "train":
            command.add_argument("--steps", type=int, default=1300)
            command.add_argument("--batch-size", type=int, default=128)
            command.add_argument("--muon-lr", type=float, default=5e-3)
            command.add_argument("--adam-lr", type=float, default=2e-3)
            command.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
