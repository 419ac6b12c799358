"""Real diffusers pipelines at tiny size, random weights, made on the spot: no downloads."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def clip_tokenizer() -> CLIPTokenizer:
    pieces = ["<|startoftext|>", "<|endoftext|>", *LETTERS, *(letter + "</w>" for letter in LETTERS)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=12)


def t5_tokenizer() -> T5Tokenizer:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -2.0), *((letter, -3.0) for letter in LETTERS)]
    return T5Tokenizer(vocab=pieces, extra_ids=10)


def clip_text_config(hidden: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=54,
        hidden_size=hidden,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=12,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        projection_dim=hidden,
    )


def t5_sizes() -> dict[str, int]:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4}
    return {"vocab_size": len(t5_tokenizer()), **sizes}


def image_vae(latent_channels: int) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8),
        norm_num_groups=4,
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=latent_channels,
        use_quant_conv=latent_channels == 4,
        use_post_quant_conv=latent_channels == 4,
        shift_factor=0.06 if latent_channels == 16 else None,
        scaling_factor=1.5 if latent_channels == 16 else 0.18215,
    )


def tiny_stable_diffusion(folder: Path, prediction_type: str = "epsilon", seed: int = 0, **scheduler: object) -> Path:
    """Saves a `StableDiffusionPipeline` (8 x 8 latents of 4 channels, 16 x 16 pixels, DDIM) and returns `folder`."""
    torch.manual_seed(seed)
    settings = {
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "clip_sample": False,
        "set_alpha_to_one": False,
        "steps_offset": 1,
        "prediction_type": prediction_type,
    }
    pipeline = StableDiffusionPipeline(
        unet=UNet2DConditionModel(
            block_out_channels=(8, 16),
            layers_per_block=1,
            sample_size=8,
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=32,
            attention_head_dim=4,
        ),
        scheduler=DDIMScheduler(**settings | scheduler),
        vae=image_vae(4),
        text_encoder=CLIPTextModel(clip_text_config(32)),
        tokenizer=clip_tokenizer(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder)
    return folder


def tiny_stable_diffusion_3(folder: Path, with_t5: bool = True, seed: int = 0, **scheduler: object) -> Path:
    """Saves a `StableDiffusion3Pipeline` (8 x 8 latents of 16 channels, 16 x 16 pixels) and returns `folder`."""
    torch.manual_seed(seed)
    pipeline = StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=16,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            out_channels=16,
            pos_embed_max_size=16,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(**{"shift": 3.0} | scheduler),
        vae=image_vae(16),
        text_encoder=CLIPTextModelWithProjection(clip_text_config(16)),
        tokenizer=clip_tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(clip_text_config(16)),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=T5EncoderModel(T5Config(**t5_sizes())) if with_t5 else None,
        tokenizer_3=t5_tokenizer() if with_t5 else None,
    )
    pipeline.save_pretrained(folder)
    return folder


def tiny_wan(folder: Path, seed: int = 0) -> Path:
    """Saves a `WanPipeline` (latents [16, F, 4, 4], 32 x 32 pixels) and returns `folder`."""
    torch.manual_seed(seed)
    pipeline = WanPipeline(
        transformer=WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=16,
            out_channels=16,
            text_dim=32,
            freq_dim=32,
            ffn_dim=32,
            num_layers=2,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        vae=AutoencoderKLWan(
            base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
        ),
        text_encoder=UMT5EncoderModel(UMT5Config(**t5_sizes())),
        tokenizer=t5_tokenizer(),
    )
    pipeline.save_pretrained(folder)
    return folder
