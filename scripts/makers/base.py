"""Train and export ``assets/models/emoji-flow``, a tiny text-to-image flow model in Stable Diffusion 3's folder format.

Commands, in order (each resumes where a killed run stopped):

    vae       AutoencoderKL, f = 2: 32x32 RGB <-> 16x16x4
    flow      SD3Transformer2DModel by rectified flow on cached latents and text embeddings
    export    write the pipeline folder from the VAE, the text encoders and the flow's EMA weights
    sample    draw a contact sheet from an exported folder with the plain diffusers pipeline

Flow conventions: x_sigma = (1 - sigma) x0 + sigma eps, the model predicts v = eps - x0, its timestep is 1000 sigma.

This model has no use for Stable Diffusion 3's T5 encoder, but the pipeline class does not load without one. The folder
holds a placeholder that turns every prompt into ``max_sequence_length`` zero vectors (256 by default), as the pipeline
itself does where ``text_encoder_3`` is None. These are identical tokens, so in attention m of them equal one whose
logit is raised by log m. Training draws m per step in that cheap form; the model therefore draws alike for any
``max_sequence_length``, and 1 (the fastest, 33 tokens in all) is the one to use.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from common import (
    STYLES,
    Muon,
    Record,
    contact_sheet,
    count_parameters,
    forget_local_paths,
    images_to_tensor,
    load_checkpoint,
    load_in_float32,
    read_styles,
    save_checkpoint,
    set_learning_rate,
    setup,
    step_generator,
    tensor_to_uint8,
    warmup_cosine,
)
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from diffusers.models.attention_processor import Attention
from tokenizers import Regex, Tokenizer, normalizers, processors
from tokenizers.models import WordLevel
from torch import nn
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, PreTrainedTokenizerFast, T5Config, T5EncoderModel

LATENT_CHANNELS = 4
LATENT_SIZE = 16
PATCH_SIZE = 4
KL_WEIGHT = 1e-3
CAPTION_DROPOUT = 0.1
EMA_DECAY = 0.998
PHRASES = (("{caption}", 0.6), ("a {caption}", 0.15), ("{caption} emoji", 0.1), ("{caption} in {style} style", 0.15))
ZERO_TOKEN_COUNTS = (1, 1, 1, 1, 16, 77, 256)


# --- VAE ---


def new_vae() -> AutoencoderKL:
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(24, 48),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=32,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
    )
    return vae.to(memory_format=torch.channels_last)


def augment_for_vae(images_BCHW: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random flip, shift of up to 2 pixels (white border) and permutation of the colour channels, per batch."""
    if torch.rand((), generator=generator) < 0.5:
        images_BCHW = images_BCHW.flip(-1)
    if torch.rand((), generator=generator) < 0.3:
        images_BCHW = images_BCHW[:, torch.randperm(3, generator=generator)]
    top, left = torch.randint(0, 5, (2,), generator=generator).tolist()
    return F.pad(images_BCHW, (2, 2, 2, 2), value=1.0)[:, :, top : top + 32, left : left + 32]


def train_vae(arguments: argparse.Namespace) -> None:
    """Reconstruction (L1 + MSE) with a KL term per latent element; then measure shift, scale and PSNR on all images."""
    images = images_to_tensor(load_records(arguments))
    setup(arguments.seed, arguments.threads)
    vae = new_vae()
    print(f"VAE: {count_parameters(vae) / 1e6:.3f}M parameters, {len(images)} images", flush=True)
    optimizer = torch.optim.AdamW([{"params": vae.parameters(), "base_lr": 2e-3}], weight_decay=0.0, betas=(0.9, 0.98))
    path = arguments.work / "vae.pt"
    step, started = 0, time.time()
    if (state := load_checkpoint(path)) is not None:
        vae.load_state_dict(state["vae"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while step < arguments.steps:
        generator = step_generator(arguments.seed, step)
        rows = torch.randint(0, len(images), (arguments.batch_size,), generator=generator)
        batch = augment_for_vae(images[rows], generator).contiguous(memory_format=torch.channels_last)
        posterior = vae.encode(batch).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator)
        output = vae.decode(posterior.mean + posterior.std * noise).sample
        reconstruction = F.l1_loss(output, batch) + F.mse_loss(output, batch)
        loss = reconstruction + KL_WEIGHT * posterior.kl().mean() / posterior.mean[0].numel()
        set_learning_rate(optimizer, warmup_cosine(step, arguments.steps))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0 or step == arguments.steps:
            psnr = -10 * math.log10(F.mse_loss(output, batch).item() / 4)
            print(f"step {step} loss {loss.item():.4f} PSNR {psnr:.2f} dB {time.time() - started:.0f} s", flush=True)
            save_checkpoint(path, {"vae": vae.state_dict(), "optimizer": optimizer.state_dict(), "step": step})

    vae.eval()
    with torch.no_grad():
        latents = encode_images(vae, images)
        errors = torch.cat(
            [
                (vae.decode(latents[i : i + 64]).sample.clamp(-1, 1) - images[i : i + 64]).square().mean((1, 2, 3))
                for i in range(0, len(images), 64)
            ]
        )
    psnr = (-10 * torch.log10(errors / 4)).mean().item()
    vae.register_to_config(
        scaling_factor=round(1 / latents.std().item(), 5), shift_factor=round(latents.mean().item(), 5)
    )
    vae.save_pretrained(arguments.work / "vae")
    figures = {"psnr": psnr, "latent_std": latents.std().item(), "channel_std": latents.std((0, 2, 3)).tolist()}
    (arguments.work / "vae" / "figures.json").write_text(json.dumps(figures))
    print(figures)


@torch.no_grad()
def encode_images(vae: AutoencoderKL, images_NCHW: torch.Tensor) -> torch.Tensor:
    """Posterior means, unscaled, [N, 4, 16, 16]."""
    return torch.cat([vae.encode(images_NCHW[i : i + 64]).latent_dist.mean for i in range(0, len(images_NCHW), 64)])


# --- text ---


def load_text(work: Path) -> tuple[CLIPTokenizer, list[CLIPTextModelWithProjection]]:
    """The shared tokenizer and the two distilled encoders."""
    folder = work / "text"
    if not (folder / "figures.json").exists():
        raise SystemExit(f"{folder} is not complete; run scripts/makers/text.py first")
    encoders = [CLIPTextModelWithProjection.from_pretrained(folder / name).eval() for name in ("large", "small")]
    return CLIPTokenizer.from_pretrained(folder / "tokenizer"), encoders


@torch.no_grad()
def embed_prompts(
    tokenizer: CLIPTokenizer, encoders: list[CLIPTextModelWithProjection], prompts: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the pipeline does: penultimate hidden states [N, 16, D] and pooled embeddings [N, P] of both, side by side."""
    token_ids = tokenizer(prompts, padding="max_length", truncation=True, return_tensors="pt").input_ids
    hidden, pooled = [], []
    for encoder in encoders:
        outputs = [encoder(ids, output_hidden_states=True) for ids in token_ids.split(256)]
        hidden.append(torch.cat([output.hidden_states[-2] for output in outputs]))
        pooled.append(torch.cat([output.text_embeds for output in outputs]))
    return torch.cat(hidden, dim=-1), torch.cat(pooled, dim=-1)


# --- flow ---


class WeightedPaddingProcessor:
    """SD3's joint attention whose last text token counts as ``m`` equal tokens: its logits are raised by log m."""

    def __init__(self) -> None:
        self.logit_bias: torch.Tensor | None = None  # [1, 1, 1, image tokens + text tokens]

    def __call__(
        self, attn: Attention, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        image_tokens = hidden_states.shape[1]

        def heads(image_BND: torch.Tensor, text_BND: torch.Tensor) -> torch.Tensor:
            return torch.cat([image_BND, text_BND], dim=1).unflatten(-1, (attn.heads, -1)).transpose(1, 2)

        query = heads(attn.to_q(hidden_states), attn.add_q_proj(encoder_hidden_states))
        key = heads(attn.to_k(hidden_states), attn.add_k_proj(encoder_hidden_states))
        value = heads(attn.to_v(hidden_states), attn.add_v_proj(encoder_hidden_states))
        joint = F.scaled_dot_product_attention(query, key, value, attn_mask=self.logit_bias)
        joint_BND = joint.transpose(1, 2).flatten(2)
        image, text = joint_BND[:, :image_tokens], joint_BND[:, image_tokens:]
        return attn.to_out[0](image), text if attn.context_pre_only else attn.to_add_out(text)


def new_transformer(joint_attention_dim: int, pooled_projection_dim: int) -> SD3Transformer2DModel:
    """Adaptive layer norms and the output projection start at zero (as in DiT), other block matrices by Xavier."""
    transformer = SD3Transformer2DModel(
        sample_size=LATENT_SIZE,
        patch_size=PATCH_SIZE,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=4,
        attention_head_dim=40,
        num_attention_heads=4,
        joint_attention_dim=joint_attention_dim,
        caption_projection_dim=160,
        pooled_projection_dim=pooled_projection_dim,
        pos_embed_max_size=LATENT_SIZE // PATCH_SIZE,
    )
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and name.startswith("transformer_blocks"):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
        if name.endswith((".norm1.linear", ".norm1_context.linear")) or name in ("norm_out.linear", "proj_out"):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    return transformer


def new_optimizers(transformer: SD3Transformer2DModel, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of attention and feed-forward, AdamW for everything else."""
    hidden, other = [], []
    for name, parameter in transformer.named_parameters():
        is_hidden = parameter.ndim == 2 and (".attn." in name or ".ff" in name)
        (hidden if is_hidden else other).append(parameter)
    return [
        Muon([{"params": hidden, "base_lr": muon_lr}], weight_decay=0.01),
        torch.optim.AdamW([{"params": other, "base_lr": adam_lr}], weight_decay=0.0, betas=(0.9, 0.98)),
    ]


def learning_rate_factor(step: int, steps: int, decay_steps: int, warmup: int = 100) -> float:
    """Warm-up, constant, then linear to zero over the last ``decay_steps``."""
    return min(1.0, (step + 1) / warmup, max(0.0, (steps - step) / decay_steps))


class FlowData:
    """Scaled latents and, per record and phrase, text embeddings; all in memory."""

    def __init__(self, work: Path, records: list[Record]) -> None:
        vae = AutoencoderKL.from_pretrained(work / "vae").eval()
        shift, scale = vae.config.shift_factor, vae.config.scaling_factor
        self.latents = (encode_images(vae, images_to_tensor(records)) - shift) * scale
        tokenizer, encoders = load_text(work)
        prompts = [p.format(caption=r.caption, style=r.style) for p, _ in PHRASES for r in records]
        tokens, pooled = embed_prompts(tokenizer, encoders, prompts)
        self.tokens = tokens.unflatten(0, (len(PHRASES), len(records)))  # [phrases, N, 16, D]
        self.pooled = pooled.unflatten(0, (len(PHRASES), len(records)))
        empty_tokens, empty_pooled = embed_prompts(tokenizer, encoders, [""])
        self.empty_tokens, self.empty_pooled = empty_tokens[0], empty_pooled[0]
        self.phrase_weights = torch.tensor([weight for _, weight in PHRASES])

    def batch(self, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Latents [B, 4, 16, 16], text tokens with one zero token appended [B, 17, D], pooled [B, P]."""
        rows = torch.randint(0, len(self.latents), (size,), generator=generator)
        phrases = torch.multinomial(self.phrase_weights, size, replacement=True, generator=generator)
        dropped = torch.rand(size, generator=generator) < CAPTION_DROPOUT
        tokens = torch.where(dropped[:, None, None], self.empty_tokens, self.tokens[phrases, rows])
        pooled = torch.where(dropped[:, None], self.empty_pooled, self.pooled[phrases, rows])
        return self.latents[rows], F.pad(tokens, (0, 0, 0, 1)), pooled


def zero_token_bias(generator: torch.Generator, image_tokens: int, text_tokens: int) -> torch.Tensor:
    """Logit bias that makes the last token count as a random number of tokens."""
    count = ZERO_TOKEN_COUNTS[int(torch.randint(0, len(ZERO_TOKEN_COUNTS), (), generator=generator))]
    bias = torch.zeros(1, 1, 1, image_tokens + text_tokens)
    bias[..., -1] = math.log(count)
    return bias


def flow_loss(
    transformer: nn.Module, data: FlowData, processor: WeightedPaddingProcessor, size: int, generator: torch.Generator
) -> torch.Tensor:
    """Mean squared error of the velocity; sigma is logit-normal (0, 1)."""
    latents, tokens, pooled = data.batch(size, generator)
    sigma = torch.sigmoid(torch.randn(size, generator=generator))
    noise = torch.randn(latents.shape, generator=generator)
    sigma_B111 = sigma[:, None, None, None]
    noisy = (1 - sigma_B111) * latents + sigma_B111 * noise
    processor.logit_bias = zero_token_bias(generator, (LATENT_SIZE // PATCH_SIZE) ** 2, tokens.shape[1])
    velocity = transformer(noisy, tokens, pooled, 1000 * sigma, return_dict=False)[0]
    return F.mse_loss(velocity, noise - latents)


def train_flow(arguments: argparse.Namespace) -> None:
    records = load_records(arguments)
    setup(arguments.seed, arguments.threads)
    data = FlowData(arguments.work, records)
    torch.manual_seed(arguments.seed)
    transformer = new_transformer(data.tokens.shape[-1], data.pooled.shape[-1])
    print(f"transformer: {count_parameters(transformer) / 1e6:.2f}M parameters, {len(records)} images", flush=True)
    optimizers = new_optimizers(transformer, arguments.muon_lr, arguments.adam_lr)
    ema = {name: value.clone() for name, value in transformer.state_dict().items()}
    path = arguments.work / f"{arguments.run}.pt"
    step, mean_loss = 0, 0.0
    if (state := load_checkpoint(path)) is not None:
        transformer.load_state_dict(state["transformer"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        ema, step, mean_loss = state["ema"], state["step"], state["mean_loss"]
        print(f"resumed at step {step}", flush=True)
    processor = WeightedPaddingProcessor()
    transformer.set_attn_processor(processor)
    first, started = step, time.time()
    while step < arguments.steps:
        generator = step_generator(arguments.seed, step)
        loss = flow_loss(transformer, data, processor, arguments.batch_size, generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        factor = learning_rate_factor(step, arguments.steps, arguments.decay_steps)
        for optimizer in optimizers:
            set_learning_rate(optimizer, factor)
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        mean_loss += (loss.item() - mean_loss) * max(0.01, 1 / step)
        decay = min(EMA_DECAY, step / (step + 10))
        with torch.no_grad():
            for name, value in transformer.state_dict().items():
                ema[name].lerp_(value, 1 - decay)
        if step % 100 == 0 or step == arguments.steps:
            rate = (time.time() - started) / (step - first)
            print(f"step {step} loss {mean_loss:.4f} lr x {factor:.2f} {rate:.2f} s/step", flush=True)
            state = {
                "transformer": transformer.state_dict(),
                "ema": ema,
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "step": step,
                "mean_loss": mean_loss,
            }
            save_checkpoint(path, state)


# --- export and sampling ---


def zero_text_encoder(dimension: int) -> tuple[T5EncoderModel, PreTrainedTokenizerFast]:
    """A T5 whose final norm has weight 0, so that it returns zeros, and a tokenizer that drops all text."""
    config = T5Config(vocab_size=2, d_model=dimension, d_kv=1, d_ff=1, num_layers=1, num_heads=1)
    encoder = T5EncoderModel(config).eval()
    nn.init.zeros_(encoder.encoder.final_layer_norm.weight)
    tokenizer = Tokenizer(WordLevel({"<pad>": 0, "</s>": 1}, unk_token="<pad>"))
    tokenizer.normalizer = normalizers.Replace(Regex(r"[\s\S]"), "")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return encoder, PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def export(arguments: argparse.Namespace) -> None:
    """Write the pipeline folder in float16 from the flow checkpoint's EMA weights."""
    state = load_checkpoint(arguments.work / f"{arguments.run}.pt")
    if state is None:
        raise SystemExit(f"no checkpoint {arguments.run}.pt in {arguments.work}; run `base.py flow` first")
    tokenizer, encoders = load_text(arguments.work)
    transformer = new_transformer(
        sum(encoder.config.hidden_size for encoder in encoders),
        sum(encoder.config.projection_dim for encoder in encoders),
    )
    transformer.load_state_dict(state["ema"])
    text_encoder_3, tokenizer_3 = zero_text_encoder(transformer.config.joint_attention_dim)
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=AutoencoderKL.from_pretrained(arguments.work / "vae"),
        text_encoder=encoders[0],
        tokenizer=tokenizer,
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizer,
        text_encoder_3=text_encoder_3,
        tokenizer_3=tokenizer_3,
    )
    target = arguments.assets / "models" / "emoji-flow"
    pipeline.to(torch.float16).save_pretrained(target)
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        load_in_float32(target / name)
    forget_local_paths(target)
    print(f"exported step {state['step']} (loss {state['mean_loss']:.4f}) to {target}")


@torch.no_grad()
def sample(arguments: argparse.Namespace) -> None:
    """A contact sheet: one row per prompt, one column per seed."""
    setup(arguments.seed, arguments.threads)
    pipeline = StableDiffusion3Pipeline.from_pretrained(arguments.assets / "models" / "emoji-flow", dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    prompts = arguments.prompts or (arguments.assets / "prompts" / "image_heldout.txt").read_text().splitlines()
    prompts = prompts[: arguments.count]
    repeated = [prompt for prompt in prompts for _ in range(arguments.columns)]
    started = time.time()
    images = pipeline(
        repeated,
        num_inference_steps=arguments.inference_steps,
        guidance_scale=arguments.guidance_scale,
        generator=torch.Generator().manual_seed(arguments.seed),
        max_sequence_length=arguments.max_sequence_length,
        height=32,
        width=32,
        output_type="pt",
    ).images
    print(f"{len(repeated)} images in {time.time() - started:.1f} s")
    contact_sheet(tensor_to_uint8(images * 2 - 1), arguments.columns * arguments.prompts_per_row, 3).save(
        arguments.output
    )
    for start in range(0, len(prompts), arguments.prompts_per_row):
        print(" | ".join(prompts[start : start + arguments.prompts_per_row]))


def load_records(arguments: argparse.Namespace) -> list[Record]:
    """The records of the chosen styles."""
    return read_styles([arguments.assets / "emoji" / f"emoji-{style}.tar" for style in arguments.styles])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, function, help_text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help_text, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        command.set_defaults(function=function)
        command.add_argument("--assets", type=Path, default=Path("assets"), help="folder that holds emoji/ and models/")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--threads", type=int, default=1)
        return command

    vae = add("vae", train_vae, "train the autoencoder")
    vae.add_argument("--steps", type=int, default=1500)
    vae.add_argument("--batch-size", type=int, default=32)
    flow = add("flow", train_flow, "train the flow transformer")
    flow.add_argument("--steps", type=int, default=2500)
    flow.add_argument("--decay-steps", type=int, default=700, help="last steps, in which the learning rate falls to 0")
    flow.add_argument("--batch-size", type=int, default=96)
    flow.add_argument("--muon-lr", type=float, default=5e-3)
    flow.add_argument("--adam-lr", type=float, default=2e-3)
    vae.add_argument("--styles", nargs="+", choices=STYLES, default=STYLES)
    flow.add_argument(
        "--styles", nargs="+", choices=STYLES, default=("twemoji", "fluent"), help="drawing styles to learn"
    )
    export_command = add("export", export, "write the pipeline folder")
    for command in (vae, flow, export_command):
        command.add_argument("--work", type=Path, required=True, help="folder of checkpoints, and of text.py's results")
    for command in (flow, export_command):
        command.add_argument("--run", default="flow", help="name of the flow checkpoint")
    draw = add("sample", sample, "draw a contact sheet")
    draw.add_argument("--output", type=Path, required=True, help="PNG file")
    draw.add_argument("--prompts", nargs="*", help="default: the held-out prompts")
    draw.add_argument("--count", type=int, default=32, help="number of prompts")
    draw.add_argument("--columns", type=int, default=4, help="samples per prompt")
    draw.add_argument("--prompts-per-row", type=int, default=4)
    draw.add_argument("--inference-steps", type=int, default=20)
    draw.add_argument("--guidance-scale", type=float, default=3.0)
    draw.add_argument("--max-sequence-length", type=int, default=1, help="number of zero text tokens")
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
