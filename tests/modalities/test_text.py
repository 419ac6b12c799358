"""The text policy against transformers' own generate, full forward passes without a cache, and torch.distributions."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from scipy.stats import chisquare
from tiny_models_text import EOS, tiny_gpt2, tiny_llama, tiny_qwen, word_tokenizer
from torch import Tensor
from torch.distributions import Categorical
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from modalities.base import Cut, Need, Request, TokenSegment, Trajectory
from modalities.errors import UserError
from modalities.randomness import SampleKey
from modalities.samples import Prompt, Text
from modalities.text import TextPolicy, TextPolicyConfig
from modalities.tokens import TokenSampling, left_pad
from modalities.whole_models import load_model

FAMILIES: dict[str, Callable[[Path], Path]] = {"gpt2": tiny_gpt2, "qwen": tiny_qwen}
ALL: frozenset[Need] = frozenset({"log_prob", "entropy", "features"})
LOG_PROB: frozenset[Need] = frozenset({"log_prob"})
TOKENS = torch.tensor([[3, 8, 4]])
PROMPTS = ("a b", "k c d a f", "m", "d d e")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "model")


def build(folder: Path, sampling: dict[str, Any] | None = None, **options: Any) -> TextPolicy:
    config = TextPolicyConfig(model=str(folder), sampling={"max_new_tokens": 8} | (sampling or {}), **options)
    return config.build("writer", "cpu", seed=0)


def requests(prompts: Sequence[str] = PROMPTS, samples: int = 3) -> list[Request]:
    return [
        Request(Prompt(text, index), index, SampleKey(0, 0, 0, index, sample))
        for index, text in enumerate(prompts)
        for sample in range(samples)
    ]


def segment_of(trajectory: Trajectory) -> TokenSegment:
    (segment,) = trajectory.segments
    assert isinstance(segment, TokenSegment)
    return segment


def responses(segment: TokenSegment) -> list[list[int]]:
    return [row[exists].tolist() for row, exists in zip(segment.tokens, segment.length_mask, strict=True)]


def prompt_tokens(segment: TokenSegment, row: int) -> list[int]:
    index = segment.prompt_index[row]
    return segment.prompt_tokens[index][segment.prompt_mask[index]].tolist()


def train(policy: TextPolicy) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))


@torch.no_grad()
def distributions(model: PreTrainedModel, segment: TokenSegment, row: int) -> Categorical:
    """Of every decision of a row: one forward pass over the bare sequence, no padding, no cache."""
    response = responses(segment)[row]
    sequence = [*prompt_tokens(segment, row), *response]
    logits = model(torch.tensor([sequence]), use_cache=False).logits[0, -len(response) - 1 : -1]
    return Categorical(logits=logits.float() / segment.temperature)


def replayed(policy: TextPolicy, trajectory: Trajectory, budget: int, need: Need = "log_prob") -> Tensor:
    segment = segment_of(trajectory)
    whole = torch.zeros(segment.tokens.shape)
    if need == "features":
        whole = torch.zeros(*segment.tokens.shape, policy.feature_size)
    for cut in policy.plan(trajectory, torch.arange(segment.num_rows), budget):
        whole[cut.rows, cut.steps] = policy.replay(trajectory, cut, frozenset({need})).of(need).detach()
    return whole


def test_greedy_rollout_is_transformers_generate(folder: Path) -> None:
    policy = build(folder)
    segment = segment_of(policy.rollout(requests(samples=1), TokenSampling(max_new_tokens=12, temperature=0)))
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row, text in enumerate(PROMPTS):
        inputs = tokenizer(text, return_tensors="pt")
        expected = model.generate(
            inputs.input_ids, attention_mask=inputs.attention_mask, do_sample=False, max_new_tokens=12
        )
        assert responses(segment)[row] == expected[0, inputs.input_ids.shape[1] :].tolist()
    assert not segment.trained_mask.any()
    assert segment.temperature == 1


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_and_entropy_are_those_of_a_full_forward_pass(folder: Path, temperature: float) -> None:
    policy = build(folder, {"temperature": temperature})
    trajectory = policy.rollout(requests())
    segment = segment_of(trajectory)
    model = AutoModelForCausalLM.from_pretrained(folder)
    entropy, log_probs = replayed(policy, trajectory, 5, "entropy"), replayed(policy, trajectory, 5)
    for row, response in enumerate(responses(segment)):
        expected = distributions(model, segment, row)
        target = expected.log_prob(torch.tensor(response))
        for found in (segment.rollout_log_probs, log_probs):
            torch.testing.assert_close(found[row, : len(response)], target, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy[row, : len(response)], expected.entropy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_replay_equals_rollout_for_every_split(folder: Path, lora: dict | None) -> None:
    policy = build(folder, lora=lora, logits_chunk=7)
    train(policy)
    trajectory = policy.rollout(requests())
    segment = segment_of(trajectory)
    for budget in (1, 2, 5, 100):
        ratio = (replayed(policy, trajectory, budget) - segment.rollout_log_probs)[segment.length_mask].exp()
        assert (ratio - 1).abs().max() <= 1e-5


def test_features_are_the_last_hidden_states(folder: Path) -> None:
    policy = build(folder)
    trajectory = policy.rollout(requests())
    segment = segment_of(trajectory)
    model = AutoModelForCausalLM.from_pretrained(folder)
    features = replayed(policy, trajectory, 4, "features")
    for row, response in enumerate(responses(segment)):
        sequence = torch.tensor([[*prompt_tokens(segment, row), *response]])
        hidden = model(sequence, output_hidden_states=True).hidden_states[-1][0, -len(response) - 1 : -1]
        torch.testing.assert_close(features[row, : len(response)], hidden, rtol=1e-4, atol=1e-5)


def gradient(policy: TextPolicy, trajectory: Trajectory, budget: int) -> Tensor:
    segment = segment_of(trajectory)
    weights = torch.randn(2, *segment.tokens.shape, generator=torch.Generator().manual_seed(0))
    for cut in policy.plan(trajectory, torch.arange(segment.num_rows), budget):
        replay = policy.replay(trajectory, cut, ALL)
        exists = cut.take(segment.length_mask)
        loss = (cut.take(weights[0]) * replay.of("log_prob"))[exists].sum()
        loss = loss + (cut.take(weights[1]) * replay.of("entropy"))[exists].sum() + replay.of("features").square().sum()
        loss.backward()
    parameters = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    gradients = torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])
    policy.model.zero_grad()
    return gradients


@pytest.mark.parametrize(("lora", "checkpointing"), [(None, True), ({"rank": 2}, True), ({"rank": 2}, False)])
def test_gradients_do_not_depend_on_split_padding_chunk_or_checkpointing(
    folder: Path, lora: dict | None, checkpointing: bool
) -> None:
    plain = build(folder, lora=lora)
    train(plain)
    trajectory = plain.rollout(requests())
    expected = gradient(plain, trajectory, 1)
    other = build(folder, lora=lora, gradient_checkpointing=checkpointing, logits_chunk=3)
    train(other)
    wide = copy.deepcopy(trajectory)
    segment = segment_of(wide)
    pad = torch.zeros(len(segment.prompt_tokens), 5)
    segment.prompt_tokens = torch.cat([pad.long() + 7, segment.prompt_tokens], dim=1)
    segment.prompt_mask = torch.cat([pad.bool(), segment.prompt_mask], dim=1)
    for budget in (4, 100):
        found = gradient(other, wide, budget)
        assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_checkpointing_computes_the_layers_again_in_eval_mode_but_never_while_sampling(llama: Path) -> None:
    policy = build(llama, gradient_checkpointing=True)
    assert not any(module.training for module in policy.model.modules())
    calls: list[bool] = []
    projection = policy.model.causal_lm.get_submodule("model.layers.0.mlp.up_proj")
    projection.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    trajectory = policy.rollout(requests(("a b",), 4))
    assert not any(calls)
    (cut,) = policy.plan(trajectory, torch.arange(4), 4)
    calls.clear()
    replay = policy.replay(trajectory, cut, LOG_PROB)
    forward = len(calls)
    replay.of("log_prob").sum().backward()
    assert len(calls) == 2 * forward
    twin = copy.deepcopy(policy.model)
    train(policy)
    assert not torch.allclose(twin(TOKENS), policy.model(TOKENS), atol=1e-2)


def test_a_samples_tokens_do_not_depend_on_its_company(folder: Path) -> None:
    policy = build(folder)
    every = requests(samples=2)
    alone = {request.key: tokens for request in every for tokens in responses(segment_of(policy.rollout([request])))}
    for rows, limit in ((every, 64), (every[::-1], 5), (every[1::2], 2), (every[:3], 1)):
        segment = segment_of(policy.rollout(rows, policy.sampling.model_copy(update={"rows_per_batch": limit})))
        assert segment.keys == [request.key for request in rows]
        assert segment.group.tolist() == [request.group for request in rows]
        assert responses(segment) == [alone[request.key] for request in rows]


def test_fixed_shape_makes_even_the_last_bit_independent(folder: Path) -> None:
    policy = build(folder, {"fixed_shape": True})
    every = requests()
    segment = segment_of(policy.rollout(every))
    for row in (0, 4, 11):
        single = segment_of(policy.rollout([every[row]]))
        assert torch.equal(single.rollout_log_probs[0], segment.rollout_log_probs[row, : single.num_steps])


def test_samples_follow_the_models_distribution(llama: Path) -> None:
    policy = build(llama, {"max_new_tokens": 2, "temperature": 0.8, "rows_per_batch": 1000})
    rows = requests(("a b",), 1500)
    segment = segment_of(policy.rollout(rows))
    model = AutoModelForCausalLM.from_pretrained(llama)
    first = distributions(model, segment, 0).probs[0].double()
    counts = segment.tokens[:, 0].bincount(minlength=16)
    likely = first * 1500 >= 5
    assert chisquare(counts[likely], first[likely] / first[likely].sum() * counts[likely].sum()).pvalue > 1e-3
    assert counts[~likely].sum() <= 1500 * first[~likely].sum() + 30
    assert len({tuple(row) for row in segment.tokens.tolist()}) > 10


def test_one_prefill_serves_the_group_and_finished_rows_leave(llama: Path) -> None:
    policy = build(llama, {"max_new_tokens": 12})
    shapes: list[tuple[int, ...]] = []
    policy.model.causal_lm.get_input_embeddings().register_forward_hook(
        lambda _, inputs, __: shapes.append(inputs[0].shape)
    )
    segment = segment_of(policy.rollout(requests(samples=6)))
    assert shapes[0] == (len(PROMPTS), max(len(text.split()) for text in PROMPTS))
    lengths = segment.length_mask.sum(1)
    assert [shape[0] for shape in shapes[1:]] == [int((lengths > step).sum()) for step in range(1, len(shapes))]
    assert shapes[-1][0] < 24


def forced(policy: TextPolicy, *tokens: int) -> TextPolicy:
    """Makes the model want `tokens` alone, whatever it is given."""
    head = policy.model.causal_lm.get_output_embeddings()
    head.register_forward_hook(
        lambda _, __, logits: torch.full_like(logits, -20.0).index_fill(-1, torch.tensor(tokens), 0.0)
    )
    return policy


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama])  # pad is eos, pad is not eos
def test_a_lone_end_token_is_a_trained_decision_and_an_empty_text(make: Callable[[Path], Path], tmp_path: Path) -> None:
    policy = forced(build(make(tmp_path)), EOS)
    trajectory = policy.rollout(requests(("a",), 2))
    segment = segment_of(trajectory)
    assert responses(segment) == [[EOS], [EOS]]
    assert segment.trained_mask.all()
    assert segment.ended == ["eos", "eos"]
    assert policy.decode(trajectory) == 2 * [Text("", num_tokens=1, finished=True)]


def test_a_cut_response_ends_by_length_without_a_forged_end(folder: Path) -> None:
    policy = forced(build(folder, {"max_new_tokens": 3}), 4)
    trajectory = policy.rollout(requests(("a",), 2))
    assert responses(segment_of(trajectory)) == 2 * [[4, 4, 4]]
    assert segment_of(trajectory).ended == ["length", "length"]
    for text in policy.decode(trajectory):
        assert isinstance(text, Text)
        assert (text.text.replace(" ", ""), text.num_tokens, text.finished) == ("bbb", 3, False)


def test_any_of_several_end_tokens_ends_and_others_do_not(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.eos_token_id = [EOS, 5]
    model.save_pretrained(folder)
    policy = build(folder, {"max_new_tokens": 20})
    segment = segment_of(policy.rollout(requests()))
    ends = {row[-1] for row, ended in zip(responses(segment), segment.ended, strict=True) if ended == "eos"}
    assert ends == {EOS, 5}
    assert not any(token in (EOS, 5) for row in responses(segment) for token in row[:-1])
    own = segment_of(build(folder, {"max_new_tokens": 20, "eos_token_ids": [7]}).rollout(requests()))
    assert EOS in [token for row in responses(own) for token in row[:-1]]
    assert all(row[-1] == 7 for row, ended in zip(responses(own), own.ended, strict=True) if ended == "eos")
    evaluation = segment_of(policy.rollout(requests(), TokenSampling(max_new_tokens=20, eos_token_ids=[9])))
    assert all(
        (row[-1] == 9) == (ended == "eos") for row, ended in zip(responses(evaluation), evaluation.ended, strict=True)
    )


def test_the_masks_end_where_generation_ended(folder: Path) -> None:
    segment = segment_of(build(folder).rollout(requests()))
    assert torch.equal(segment.trained_mask, segment.length_mask)
    assert not segment.context_mask.any()
    assert segment.length_mask.any(0).all()
    for row, ended in zip(responses(segment), segment.ended, strict=True):
        assert (row[-1] == EOS) == (ended == "eos")
        assert ended == "eos" or len(row) == 8
        assert EOS not in row[:-1]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 5}, {"top_p": 0.9}])
def test_sampling_without_true_log_probs_is_refused_for_training_and_never_trained(llama: Path, options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        TextPolicyConfig(model=str(llama), sampling=options)
    segment = segment_of(build(llama).rollout(requests(), TokenSampling(max_new_tokens=4, **options)))
    assert segment.length_mask.any()
    assert not segment.trained_mask.any()


def test_more_tokens_than_positions_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    policy = build(tiny_gpt2(tmp_path), {"max_new_tokens": 30})
    with pytest.raises(
        UserError, match=r"prompt 1 .* has 5 tokens; with sampling.max_new_tokens: 30 that is more than .* 32 positions"
    ):
        policy.rollout(requests())
    assert segment_of(policy.rollout(requests(("a b",), 1))).num_steps <= 30


def test_logits_that_are_not_finite_stop_the_run(llama: Path) -> None:
    policy = build(llama)
    with torch.no_grad():
        next(policy.model.parameters()).fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="writer"):
        policy.rollout(requests())


def test_given_texts_are_scored_like_own_ones(folder: Path) -> None:
    policy = build(folder, {"temperature": 0.7})
    trajectory = policy.rollout(requests())
    rows = [
        row for row, text in enumerate(policy.decode(trajectory)) if isinstance(text, Text) and "<" not in text.text
    ]
    own = segment_of(trajectory)
    special = [any(token in (1, 2) for token in row) for row in responses(own)]
    rows = [row for row in rows if not special[row]]
    assert len(rows) >= 3
    texts = policy.decode(trajectory)
    given = policy.encode(
        [trajectory.requests[row].prompt for row in rows], [texts[row] for row in rows], [own.keys[row] for row in rows]
    )
    segment = segment_of(given)
    assert responses(segment) == [responses(own)[row] for row in rows]
    assert segment.ended == [own.ended[row] for row in rows]
    assert segment.rollout_log_probs.isnan().all()
    found = replayed(policy, given, 2)
    for index, row in enumerate(rows):
        length = len(responses(own)[row])
        torch.testing.assert_close(found[index, :length], own.rollout_log_probs[row, :length], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="no decision"):
        policy.encode([Prompt("a", 0)], [Text("", 0, finished=False)], [SampleKey(0, 0, 0, 0, 0)])


def test_prompts_are_wrapped_in_the_chat_template(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    with pytest.raises(UserError, match="chat_template is set, but the tokenizer has no chat template"):
        build(folder, chat_template=True).tokenize(Prompt("a", 0))
    tokenizer = word_tokenizer(pad_is_eos=False)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'k ' if m.role == 'system' else 'l ' }}{{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}m{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    words = {option: build(folder, **dict(option)).tokenize(Prompt("a b", 0)) for option in [
        (), (("system_prompt", "c"),), (("chat_template", False),)
    ]}  # fmt: skip
    ids = tokenizer.get_vocab()
    assert list(words.values()) == [[ids[word] for word in text.split()] for text in ("l a b m", "k c l a b m", "a b")]
    tokenizer.chat_template = "{{ raise_exception('System role not supported') if messages[0].role == 'system' }}"
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match=r"refuses messages of \['system', 'user'\]: System role not supported"):
        build(folder, system_prompt="c").tokenize(Prompt("a b", 0))
    with pytest.raises(ValueError, match="system_prompt needs the chat template"):
        TextPolicyConfig(model=str(folder), chat_template=False, system_prompt="c")


def test_an_empty_prompt_starts_from_the_start_token(llama: Path) -> None:
    policy = build(llama)
    assert policy.tokenize(Prompt("", 0)) == [EOS]
    assert segment_of(policy.rollout(requests(("",), 2))).num_rows == 2


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_weight_sets_hold_the_reference_while_the_policy_learns(folder: Path, lora: dict | None) -> None:
    policy = build(folder, lora=lora)
    frozen = AutoModelForCausalLM.from_pretrained(folder)
    policy.keep("reference")
    train(policy)
    trajectory = policy.rollout(requests())
    segment = segment_of(trajectory)
    with policy.using("reference"):
        reference = replayed(policy, trajectory, 4)
        assert responses(segment_of(policy.rollout(requests()))) != responses(segment)
    for row, response in enumerate(responses(segment)):
        expected = distributions(frozen, segment, row).log_prob(torch.tensor(response))
        torch.testing.assert_close(reference[row, : len(response)], expected, rtol=1e-5, atol=1e-5)
    ratio = (replayed(policy, trajectory, 4) - segment.rollout_log_probs)[segment.length_mask].exp()
    assert (ratio - 1).abs().max() <= 1e-5


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_the_export_is_the_trained_model_for_plain_transformers(
    folder: Path, tmp_path: Path, lora: dict | None
) -> None:
    policy = build(folder, lora=lora)
    train(policy)
    policy.export(tmp_path / "out")
    trajectory = policy.rollout(requests())
    segment = segment_of(trajectory)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float32
    assert isinstance(model, type(policy.model.causal_lm))
    again = build(tmp_path / "out")
    for row, response in enumerate(responses(segment)):
        expected = distributions(model, segment, row).log_prob(torch.tensor(response))
        torch.testing.assert_close(segment.rollout_log_probs[row, : len(response)], expected, rtol=1e-5, atol=1e-5)
    assert responses(segment_of(again.rollout(requests()))) == responses(segment)
    assert (tmp_path / "out" / "generation_config.json").exists()
    assert (tmp_path / "out" / "adapter").exists() == (lora is not None)
    if lora is not None:
        base = AutoModelForCausalLM.from_pretrained(folder)
        adapted = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter")
        torch.testing.assert_close(adapted(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_a_bfloat16_base_is_exported_in_bfloat16_with_a_warning(llama: Path, tmp_path: Path) -> None:
    policy = build(llama, dtype="bfloat16", lora={"rank": 2})
    train(policy)
    assert policy.dtype == torch.bfloat16
    with pytest.warns(UserWarning, match="rounds away"):
        policy.export(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_the_state_restores_weights_and_sets(folder: Path) -> None:
    policy = build(folder, lora={"rank": 2})
    policy.keep("reference")
    train(policy)
    policy.keep("ema")
    state = {key: value.clone() for key, value in policy.weight_state().items()}
    again = build(folder, lora={"rank": 2})
    again.load_weight_state(state)
    assert responses(segment_of(again.rollout(requests()))) == responses(segment_of(policy.rollout(requests())))
    again.set_version(7)
    assert segment_of(again.rollout(requests())).version == 7


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "lora": {"rank": 2}}, {"lora": {"rank": 2}}])
def test_replay_in_bfloat16_autocast_is_repeatable_to_the_bit(folder: Path, options: dict) -> None:
    policy = build(folder, **options, gradient_checkpointing=True)
    with torch.autocast("cpu", torch.bfloat16):
        trajectory = policy.rollout(requests())
        segment = segment_of(trajectory)
        first, second = replayed(policy, trajectory, 4), replayed(policy, trajectory, 4)
        assert torch.equal(first, second)
        found = gradient(policy, trajectory, 4)
    assert found.isfinite().all()
    assert found.any()
    assert first.dtype == torch.float32
    assert (first - segment.rollout_log_probs)[segment.length_mask].abs().mean() < 0.1


def other_model(kind: str, folder: Path) -> Path:
    common: dict[str, Any] = {
        "vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "eos_token_id": EOS, "pad_token_id": 1, "bos_token_id": EOS, "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "sliding window":
        model: PreTrainedModel = MistralForCausalLM(MistralConfig(**common, sliding_window=3))
    else:
        model = Gemma2ForCausalLM(Gemma2Config(**common, head_dim=8, final_logit_softcapping=2.0, sliding_window=4))
    model.save_pretrained(folder)
    word_tokenizer(pad_is_eos=False).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["sliding window", "capped logits"])
def test_models_with_other_caches_and_capped_logits_replay_too(kind: str, tmp_path: Path) -> None:
    policy = build(other_model(kind, tmp_path), gradient_checkpointing=True)
    trajectory = policy.rollout(requests())
    segment = segment_of(trajectory)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = replayed(policy, trajectory, 5)
    for row, response in enumerate(responses(segment)):
        expected = distributions(model, segment, row).log_prob(torch.tensor(response))
        for values in (segment.rollout_log_probs, found):
            torch.testing.assert_close(values[row, : len(response)], expected, rtol=1e-5, atol=1e-5)
    assert gradient(policy, trajectory, 5).isfinite().all()


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_gpt2(tmp_path)
    forward = GPT2LMHeadModel.forward

    def squared(self: GPT2LMHeadModel, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = output.logits**2
        return output

    monkeypatch.setattr(GPT2LMHeadModel, "forward", squared)
    with pytest.raises(UserError, match="GPT2LMHeadModel changes its logits"):
        build(folder)


def test_inspection_counts_without_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TextPolicyConfig(model=str(folder), lora={"rank": 2})
    loaded: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            "modalities.text.load_model", lambda *a, **keys: loaded.append(load_model(*a, **keys)) or loaded[0]
        )
        summary = config.inspect()
    assert {parameter.device.type for name, parameter in loaded[0].named_parameters() if "lora" not in name} == {"meta"}
    built = config.build("writer", "cpu", 0)
    parameters = list(built.model.parameters())
    assert summary.weights.parameters == sum(parameter.numel() for parameter in parameters)
    assert summary.weights.trainable == sum(p.numel() for p in parameters if p.requires_grad) > 0
    assert summary.decisions == built.decisions()


def test_mistakes_in_the_block_are_named(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype: bfloat16 is the type of frozen weights"):
        TextPolicyConfig(model=str(llama), dtype="bfloat16")
    with pytest.raises(UserError, match=r"lora\.targets"):
        build(llama, lora={"targets": ["c_attn"]})
    cut = tiny_llama(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(cut)
    state = {name: value for name, value in model.state_dict().items() if "layers.1.mlp" not in name}
    model.save_pretrained(cut, state_dict=state)
    with pytest.raises(
        UserError, match=r"no weights for 3 tensors of LlamaForCausalLM, for example 'model\.layers\.1\.mlp"
    ):
        build(cut)


def test_replay_refuses_what_it_does_not_offer(llama: Path) -> None:
    policy = build(llama)
    trajectory = policy.rollout(requests())
    with pytest.raises(ValueError, match="not \\['mean'\\]"):
        policy.replay(trajectory, Cut(0, torch.arange(2), slice(0, 2)), frozenset({"mean"}))
    with pytest.raises(ValueError, match="differentiable"):
        policy.decode(trajectory, differentiable=True)


def test_a_part_of_the_steps_can_be_replayed(llama: Path) -> None:
    policy = build(llama)
    trajectory = policy.rollout(requests())
    segment = segment_of(trajectory)
    rows = torch.tensor([0, 1, 5])
    part = policy.replay(trajectory, Cut(0, rows, slice(1, 3)), LOG_PROB).of("log_prob")
    assert part.shape == (3, 2)
    exists = segment.length_mask[rows, 1:3]
    torch.testing.assert_close(part[exists], segment.rollout_log_probs[rows, 1:3][exists], rtol=1e-5, atol=1e-5)


def test_the_chosen_layout_of_prompts_changes_nothing(llama: Path) -> None:
    policy = build(llama)
    trajectory = policy.rollout(requests())
    segment = segment_of(trajectory)
    assert policy.model.shares_prompts
    shared = replayed(policy, trajectory, 100)
    policy.model.shares_prompts = False
    torch.testing.assert_close(replayed(policy, trajectory, 100), shared, rtol=1e-5, atol=1e-5)
    order = torch.randperm(len(segment.prompt_tokens), generator=torch.Generator().manual_seed(0))
    segment.prompt_tokens, segment.prompt_mask = left_pad(
        [prompt_tokens(segment, 3 * int(i)) for i in order], padding=9
    )
    segment.prompt_index = order.argsort()[segment.prompt_index]
    torch.testing.assert_close(replayed(policy, trajectory, 100), shared, rtol=1e-5, atol=1e-5)
