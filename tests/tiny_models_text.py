"""Real causal language models at tiny size, random weights, made on the spot: no downloads."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

WORDS = "abcdefghijklm"
EOS, PAD = 0, 1


def word_tokenizer(pad_is_eos: bool) -> PreTrainedTokenizerFast:
    """Every letter is a word; so few tokens that random responses end early."""
    vocab = {word: index for index, word in enumerate(["<eos>", "<pad>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad = "<eos>" if pad_is_eos else "<pad>"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token=pad, unk_token="<unk>", bos_token="<eos>"
    )


def _saved(model_class: type[PreTrainedModel], config: PreTrainedConfig, pad_is_eos: bool, folder: Path) -> Path:
    torch.manual_seed(0)
    model_class(config).save_pretrained(folder)
    word_tokenizer(pad_is_eos).save_pretrained(folder)
    return folder


def tiny_gpt2(folder: Path) -> Path:
    """Absolute positions, and a pad that is the end token."""
    config = GPT2Config(
        vocab_size=16,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=EOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        initializer_range=0.3,
    )
    return _saved(GPT2LMHeadModel, config, True, folder)


def _rotary() -> dict[str, object]:
    return {
        "vocab_size": 16,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "bos_token_id": EOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "initializer_range": 0.3,
    }


def tiny_llama(folder: Path) -> Path:
    """Rotary positions, and a pad of its own."""
    return _saved(LlamaForCausalLM, LlamaConfig(**_rotary()), False, folder)


def tiny_qwen(folder: Path) -> Path:
    """Rotary positions, tied embeddings, and a pad of its own."""
    return _saved(Qwen2ForCausalLM, Qwen2Config(**_rotary(), tie_word_embeddings=True), False, folder)


_HEADS: dict[str, object] = {"num_attention_heads": 4, "num_key_value_heads": 2}
"""So many that two processes can share them."""


def tiny_llama_of_heads(folder: Path) -> Path:
    """Biases in every linear layer."""
    config = LlamaConfig(**_rotary() | _HEADS, attention_bias=True, mlp_bias=True)
    return _saved(LlamaForCausalLM, config, False, folder)


def tiny_qwen3_of_heads(folder: Path) -> Path:
    """A norm of each head, and tied embeddings."""
    config = Qwen3Config(**_rotary() | _HEADS, head_dim=4, tie_word_embeddings=True)
    return _saved(Qwen3ForCausalLM, config, False, folder)


def tiny_qwen3_of_experts(folder: Path) -> Path:
    """Four experts, of which a router chooses two for each token."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = Qwen3MoeConfig(**_rotary() | experts, head_dim=4, decoder_sparse_step=1)
    return _saved(Qwen3MoeForCausalLM, config, False, folder)
