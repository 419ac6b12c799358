"""A real MusicGen at tiny size, random weights, made on the spot: no downloads."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_models_diffusion import t5_sizes, t5_tokenizer
from transformers import (
    EncodecConfig,
    MusicgenConfig,
    MusicgenDecoderConfig,
    MusicgenForConditionalGeneration,
    T5Config,
)


def tiny_musicgen(folder: Path, channels: int = 1, seed: int = 0) -> Path:
    """Saves a MusicGen with 4 codebooks (per channel) of 32 tokens, 16 samples per frame, and returns `folder`."""
    torch.manual_seed(seed)
    config = MusicgenConfig(
        text_encoder=T5Config(**t5_sizes()),
        audio_encoder=EncodecConfig(
            target_bandwidths=[3.0],
            sampling_rate=1000,
            num_filters=4,
            hidden_size=8,
            num_residual_layers=1,
            upsampling_ratios=[4, 4],
            codebook_size=32,
            codebook_dim=8,
            compress=2,
            num_lstm_layers=1,
        ),
        decoder=MusicgenDecoderConfig(
            vocab_size=32,
            hidden_size=24,
            ffn_dim=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_codebooks=4 * channels,
            audio_channels=channels,
            pad_token_id=32,
            bos_token_id=32,
            initializer_factor=0.3,
        ),
    )
    model = MusicgenForConditionalGeneration(config)
    for layer in model.audio_encoder.quantizer.layers:
        layer.codebook.embed.normal_()  # zeros, so that every code sounds the same, until it is loaded
    model.generation_config.update(decoder_start_token_id=32, pad_token_id=32, bos_token_id=32, max_length=12)
    model.save_pretrained(folder)
    t5_tokenizer().save_pretrained(folder)
    return folder
