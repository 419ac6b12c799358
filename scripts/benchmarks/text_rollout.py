"""Speed of the text rollout against transformers' `generate` on the same work, as one ratio.

    python scripts/benchmarks/text_rollout.py [--model SOURCE] [--device cuda] [--prompts 8 --samples 8 --tokens 48]

Both sample groups that share a prompt, prompts of different lengths, responses that end at different times, at
temperature 1 from the whole distribution. Both take turns in one process; what counts is sampled tokens per second, an
end token included and padding after it not. The rollout also records log-probs, which `generate` is not asked for.
Above 1.0x the rollout is faster. CPU seconds are compared where there is no GPU: they stand a busy machine better.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from modalities.base import Request, TokenSegment
from modalities.randomness import SampleKey
from modalities.samples import Prompt
from modalities.text import TextPolicy, TextPolicyConfig
from modalities.tokens import left_pad

VOCABULARY = 8192


def random_llama(folder: Path) -> Path:
    """13 million parameters with random weights: nearly uniform tokens, so some of them must serve as end tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=320,
        intermediate_size=864,
        num_hidden_layers=8,
        num_attention_heads=5,
        num_key_value_heads=5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=list(range(VOCABULARY // 50)),
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({str(index): index for index in range(VOCABULARY)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="0", eos_token="0").save_pretrained(folder)
    return folder


def timed(work: Callable[[], int], device: str) -> float:
    """Tokens per second."""
    clock = time.perf_counter if device.startswith("cuda") else time.process_time
    start = clock()
    tokens = work()
    return tokens / (clock() - start)


def rollout(policy: TextPolicy, prompts: list[Prompt], samples: int, turn: int) -> int:
    """Number of sampled tokens."""
    requests = [
        Request(prompt, prompt.index, SampleKey(turn, 0, 0, prompt.index, sample))
        for prompt in prompts
        for sample in range(samples)
    ]
    (segment,) = policy.rollout(requests).segments
    assert isinstance(segment, TokenSegment)
    return int(segment.length_mask.sum())


@torch.no_grad()
def generate(policy: TextPolicy, prompts: list[Prompt], samples: int, turn: int) -> int:
    """Number of sampled tokens."""
    torch.manual_seed(turn)
    tokens, mask = (tensor.to(policy.device) for tensor in left_pad([policy.tokenize(prompt) for prompt in prompts]))
    responses = policy.model.causal_lm.generate(
        tokens,
        attention_mask=mask.long(),
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        num_return_sequences=samples,
        max_new_tokens=policy.sampling.max_new_tokens,
        eos_token_id=policy.eos_token_ids,
        pad_token_id=policy.eos_token_ids[0],
    )[:, tokens.shape[1] :]
    ended = torch.isin(responses, torch.tensor(policy.eos_token_ids, device=policy.device))
    return int((ended.cumsum(1) - ended.long() == 0).sum())


def main() -> None:
    """Prints each turn and the median ratio."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", help="a causal language model (default: a small random Llama)")
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--prompts", type=int, default=8)
    arguments.add_argument("--samples", type=int, default=8)
    arguments.add_argument("--tokens", type=int, default=48)
    arguments.add_argument("--turns", type=int, default=3)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or str(random_llama(Path(folder)))
        sampling = {"max_new_tokens": given.tokens, "rows_per_batch": given.prompts * given.samples}
        policy = TextPolicyConfig(model=model, sampling=sampling).build("benchmark", given.device, seed=0)
    lengths = [4 + 37 * index % 45 for index in range(given.prompts)]
    prompts = [Prompt(" ".join(str(500 + i) for i in range(length)), index) for index, length in enumerate(lengths)]
    for work in (rollout, generate):
        work(policy, prompts, 2, turn=0)
    ratios = []
    for turn in range(1, given.turns + 1):
        ours = timed(lambda turn=turn: rollout(policy, prompts, given.samples, turn), given.device)
        theirs = timed(lambda turn=turn: generate(policy, prompts, given.samples, turn), given.device)
        ratios.append(ours / theirs)
        print(f"turn {turn}: rollout {ours:.0f} tokens/s, generate {theirs:.0f} tokens/s, {ratios[-1]:.2f}x")
    print(f"rollout / generate: {statistics.median(ratios):.2f}x (median of {given.turns} turns)")


if __name__ == "__main__":
    main()
