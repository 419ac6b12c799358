"""`check` finds what would stop a run, wherever it is written, and trains nothing."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_models_audio import tiny_musicgen
from tiny_models_clip import tiny_clip
from tiny_models_diffusion import tiny_stable_diffusion, tiny_stable_diffusion_3, tiny_wan
from tiny_models_text import tiny_gpt2, tiny_qwen
from toy_policy import ToyPolicy
from toy_runs import COUNT_A, TOY, held_out, stage, write_run
from transformers import AutoModelForCausalLM

from modalities.errors import UserError
from uniml_rl.check import check_from_yaml
from uniml_rl.run import train_from_yaml
from uniml_rl.trainer import Trainer
from uniml_rl.until import UntilSettings


@pytest.fixture(autouse=True)
def nothing_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(trainer: Trainer, iteration: int) -> None:
        raise AssertionError("check trained")

    monkeypatch.setattr(Trainer, "iterate", train)


def test_a_valid_configuration_is_described(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = write_run(tmp_path, stage(tmp_path, "one"), stage(tmp_path, "two", evaluation=held_out(tmp_path)))
    check_from_yaml(config)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "stage 2 two: grpo on letters, 2 prompts x 3 samples = 6 per iteration, rewards a; ends at 2 iterations" in said
    )
    assert "the configuration is valid" in said
    assert "100.00%" in said
    assert said.count("cache and activations of this policy are not known") == 2
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


WRONG = {
    "missing prompts": ({"prompts": {"type": "file", "path": "nowhere.txt"}}, r"nowhere\.txt"),
    "a field that no prompt has": ({"rewards": {"t": {"type": "exact_match", "field": "anwser"}}}, "'anwser'"),
    "a reward of another kind": ({"rewards": {"j": {"type": "jpeg_size"}}}, "scores image, but the policy makes text"),
    "a judge of another kind": ({"evaluation": {"rewards": {"j": {"type": "jpeg_size"}}}}, "makes text"),
    "missing held-out prompts": ({"evaluation": {"prompts": {"type": "file", "path": "none.txt"}}}, r"none\.txt"),
    "an algorithm of another kind": ({"algorithm": {"name": "flow_grpo"}}, "compares denoising steps"),
    "an average that nothing reads": ({"ema": {"decay": 0.9}}, "ema: only the evaluation uses"),
    "a decay without an end": (
        {"optimizer": {"schedule": {"type": "linear"}}},
        "type 'linear' without decay_iterations",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_in_a_later_stage_is_found_with_its_place(case: str, tmp_path: Path) -> None:
    keys, message = WRONG[case]
    keys = {key: held_out(tmp_path) | value if key == "evaluation" else value for key, value in keys.items()}
    config = write_run(tmp_path, stage(tmp_path, "fine"), stage(tmp_path, "wrong", **keys))
    with pytest.raises(UserError, match=message) as caught:
        check_from_yaml(config)
    assert "run.yaml:" in str(caught.value) and "stages.wrong" in str(caught.value)


def test_a_policy_with_nothing_to_train_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = ToyPolicy.__init__

    def frozen(policy: ToyPolicy, name: str) -> None:
        build(policy, name)
        policy.table.requires_grad_(False)

    monkeypatch.setattr(ToyPolicy, "__init__", frozen)
    with pytest.raises(UserError, match=r"policies\.letters: nothing in it is trainable"):
        check_from_yaml(write_run(tmp_path, stage(tmp_path)))


MODELS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "qwen": ("text", tiny_qwen),
    "musicgen": ("audio", tiny_musicgen),
    "stable-diffusion": ("image", tiny_stable_diffusion),
    "stable-diffusion-3": ("image", tiny_stable_diffusion_3),
    "wan": ("video", tiny_wan),
}
REWARD = {"text": "repetition", "audio": "rms_level", "image": "jpeg_size", "video": "frame_smoothness"}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Path]:
    """Makes a fresh copy of a tiny model's folder."""
    made: dict[str, Path] = {}

    def copy(name: str, to: Path) -> Path:
        if name not in made:
            made[name] = MODELS[name][1](tmp_path_factory.mktemp(name))
        return Path(shutil.copytree(made[name], to / "model"))

    return copy


def run_of(name: str, folder: Path, keys: dict[str, Any] | None = None, **stage_keys: Any) -> Path:
    """A run of one stage that trains the model in `folder/model`."""
    kind = MODELS[name][0]
    diffuses = kind in ("image", "video")
    sampling = {} if diffuses or kind == "audio" else {"max_new_tokens": 4}
    block = {"type": kind, "model": str(folder / "model"), "sampling": sampling} | (keys or {})
    algorithm = {"name": "flow_grpo"} if name in ("stable-diffusion-3", "wan") else {"name": "grpo", "kl": None}
    one = stage(
        folder, policy="tiny", algorithm=algorithm, rewards={"r": {"type": REWARD[kind]}}, prompts=letters(folder)
    )
    return write_run(folder, one | stage_keys, policies={"tiny": block})


def letters(folder: Path, text: str = "a b c\nd e\n") -> dict[str, Any]:
    path = folder / f"{len(text)}-letters.txt"
    path.write_text(text)
    return {"type": "file", "path": str(path)}


FILES = [
    ("qwen", "model.safetensors"),
    ("musicgen", "model.safetensors"),
    *(("stable-diffusion", f"{part}.safetensors") for part in ("unet/diffusion_pytorch_model", "text_encoder/model")),
    *(("stable-diffusion-3", f"{part}/model.safetensors") for part in ("text_encoder_2", "text_encoder_3")),
    ("stable-diffusion-3", "vae/diffusion_pytorch_model.safetensors"),
    ("wan", "transformer/diffusion_pytorch_model.safetensors"),
]


@pytest.mark.parametrize(("name", "file"), FILES)
def test_weights_that_are_not_whole_are_found_without_loading_them(
    name: str, file: str, tmp_path: Path, model_of: Callable[[str, Path], Path]
) -> None:
    weights = model_of(name, tmp_path) / file
    config = run_of(name, tmp_path)
    check_from_yaml(config)
    whole = weights.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], whole[:20], b""):
        weights.write_bytes(damaged)
        with pytest.raises(UserError, match=r"run\.yaml:\d+: policies\.tiny: model .* could not be loaded"):
            check_from_yaml(config)
    weights.unlink()
    with pytest.raises(UserError, match=r"policies\.tiny: model .* could not be loaded"):
        check_from_yaml(config)


def test_shards_and_the_tensors_that_they_should_hold_are_found(
    tmp_path: Path, model_of: Callable[[str, Path], Path]
) -> None:
    folder = model_of("qwen", tmp_path)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="2KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    config = run_of("qwen", tmp_path)
    check_from_yaml(config)
    shard = sorted(folder.glob("*.safetensors"))[2]
    tensors = load_file(shard)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(UserError, match="holds no weights for 1 tensors"):
        check_from_yaml(config)
    shard.unlink()
    with pytest.raises(UserError, match="could not be loaded: FileNotFoundError"):
        check_from_yaml(config)


@pytest.mark.parametrize("kind", ["text", "image"])
@pytest.mark.parametrize("file", ["tokenizer*", "model.safetensors", "preprocessor_config.json"])
def test_a_reward_model_that_is_not_whole_is_found(kind: str, file: str, tmp_path: Path) -> None:
    """Without its tokenizer's files a model would learn from texts without words."""
    folder = tmp_path / "model"
    folder.mkdir()
    (tiny_clip if kind == "image" else tiny_gpt2)(folder)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    Image.new("RGB", (8, 8), "red").save(tmp_path / "b.png")
    pair = {"prompt": "a", "chosen": "a.png", "rejected": "b.png"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair))
    block = stage(
        tmp_path,
        algorithm="reward_model",
        policy="tiny",
        records={"type": "preferences", "kind": kind, "path": str(tmp_path / "pairs.jsonl")},
    )
    block = {key: value for key, value in block.items() if key not in ("prompts", "group_size", "rewards")}
    policy = {"type": "image_text_reward_model" if kind == "image" else "text_reward_model", "model": str(folder)}
    config = write_run(tmp_path, block, policies={"tiny": policy})
    check_from_yaml(config)
    found = list(folder.glob(file))
    for path in found:
        path.unlink()
    if found:
        with pytest.raises(UserError, match=r"policies\.tiny: .*(has no tokenizer|could not be loaded)"):
            check_from_yaml(config)
    assert bool(found) == (kind == "image" or file != "preprocessor_config.json")


@pytest.mark.parametrize("type_", ["text", "text_reward_model"])
def test_given_texts_that_do_not_fit_are_found_wherever_they_stand(type_: str, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 40
    rows[30] = rows[30] | {"rejected": "c " * 40}
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    block = stage(
        tmp_path,
        algorithm="dpo" if type_ == "text" else "reward_model",
        policy="tiny",
        records={"type": "preferences", "path": str(tmp_path / "pairs.jsonl")},
    )
    block = {key: value for key, value in block.items() if key not in ("prompts", "group_size", "rewards")}
    model = str(tiny_gpt2(tmp_path / "model"))
    config = write_run(tmp_path, block, policies={"tiny": {"type": type_, "model": model}})
    with pytest.raises(UserError, match=r"stages\.only: .*prompt 30 .*42"):
        check_from_yaml(config)


@pytest.mark.parametrize("place", range(9))
def test_each_of_the_first_eight_pictures_is_decoded(
    place: int, tmp_path: Path, model_of: Callable[[str, Path], Path]
) -> None:
    model_of("stable-diffusion", tmp_path)
    rows = []
    for number in range(9):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
        rows.append({"prompt": "a", "image": f"{number}.png"})
    (tmp_path / "pictures.jsonl").write_text("\n".join(map(json.dumps, rows)))
    records = {"type": "demonstrations", "kind": "image", "path": str(tmp_path / "pictures.jsonl")}
    block = stage(tmp_path, policy="tiny", algorithm="sft", records=records)
    block = {key: value for key, value in block.items() if key not in ("prompts", "group_size", "rewards")}
    config = write_run(tmp_path, block, policies={"tiny": {"type": "image", "model": str(tmp_path / "model")}})
    check_from_yaml(config)
    (tmp_path / f"{place}.png").write_bytes(b"noise")
    if place == 8:
        check_from_yaml(config)
        return
    with pytest.raises(UserError, match=rf"stages\.only: .*{place}\.png' is no image that can be decoded"):
        check_from_yaml(config)


@pytest.mark.parametrize(
    ("name", "tokenizer"),
    [
        ("qwen", ""),
        ("musicgen", ""),
        ("stable-diffusion", "tokenizer"),
        ("stable-diffusion-3", "tokenizer_3"),
        ("wan", "tokenizer"),
    ],
)
def test_a_missing_tokenizer_is_found(
    name: str, tokenizer: str, tmp_path: Path, model_of: Callable[[str, Path], Path]
) -> None:
    folder = model_of(name, tmp_path) / tokenizer
    config = run_of(name, tmp_path)
    check_from_yaml(config)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
        with pytest.raises(UserError, match=r"policies\.tiny: .*(has no tokenizer|could not be loaded)"):
            check_from_yaml(config)
    if tokenizer:
        folder.rmdir()
        with pytest.raises(UserError, match=f"incomplete, it has no folder {tokenizer}"):
            check_from_yaml(config)


WRONG_FOR_THE_MODEL: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a kernel of GPUs": ({"attention": "flash_attention_2"}, {}, "policies.tiny.attention: flash_att.*GPUs only"),
    "a template that is not there": ({"chat_template": True}, {}, "policies.tiny: .*chat_template is set, but"),
    "a system prompt without a template": ({"system_prompt": "Be kind."}, {}, "policies.tiny: .*system_prompt is set"),
    "end tokens that do not exist": (
        {"sampling": {"eos_token_ids": [3, 16, -1]}}, {}, r"policies.tiny.sampling.eos_token_ids: .*\[16, -1\] .* to 15"
    ),
    "responses beyond the positions": (
        {"sampling": {"max_new_tokens": 62}}, {}, r"stages.only: prompt 0 \('a b c'...\) has 3 tokens; with .* 64 pos"
    ),
    "evaluated responses beyond the positions": (
        {}, {"evaluation": {"count": 2, "sampling": {"max_new_tokens": 62}}}, "stages.only.evaluation: prompt 0 .* 64"
    ),
    "evaluated end tokens": (
        {}, {"evaluation": {"count": 2, "sampling": {"eos_token_ids": [99]}}}, r"evaluation.sampling.eos_token.*\[99\]"
    ),
    "a tokenizer of another model": ({}, {"prompts": "z"}, "gives token 15, but the model has only 15"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_FOR_THE_MODEL)
def test_settings_that_the_model_cannot_follow_are_found(
    case: str, tmp_path: Path, model_of: Callable[[str, Path], Path]
) -> None:
    keys, stage_keys, message = WRONG_FOR_THE_MODEL[case]
    folder = model_of("qwen", tmp_path)
    if "prompts" in stage_keys:
        settings = json.loads((folder / "config.json").read_text())
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.resize_token_embeddings(settings["vocab_size"] - 1)
        model.save_pretrained(folder)
        stage_keys = {"prompts": letters(tmp_path, "a b c\nm m m m\n")}
    if "evaluation" in stage_keys:
        stage_keys = {"evaluation": stage_keys["evaluation"] | {"prompts": letters(tmp_path)}}
    with pytest.raises(UserError, match=message):
        check_from_yaml(run_of("qwen", tmp_path, keys, **stage_keys))


def test_the_longest_prompt_of_a_file_is_seen_wherever_it_stands(
    tmp_path: Path, model_of: Callable[[str, Path], Path]
) -> None:
    model_of("qwen", tmp_path)
    prompts = letters(tmp_path, "a b\n" * 300 + "a " * 61 + "\nb\n")
    with pytest.raises(UserError, match=r"prompt 300 .* has 61 tokens; with sampling.max_new_tokens: 4"):
        check_from_yaml(run_of("qwen", tmp_path, prompts=prompts))


def test_a_size_of_the_evaluation_that_the_model_cannot_draw_is_found(
    tmp_path: Path, model_of: Callable[[str, Path], Path]
) -> None:
    model_of("stable-diffusion", tmp_path)
    evaluation = {"prompts": letters(tmp_path), "count": 2, "sampling": {"height": 17}}
    with pytest.raises(UserError, match=r"stages\.only\.evaluation.sampling.height: 17 is not a multiple"):
        check_from_yaml(run_of("stable-diffusion", tmp_path, evaluation=evaluation))


def test_sampling_that_a_chain_replaces_in_its_parts_is_checked(
    tmp_path: Path, model_of: Callable[[str, Path], Path]
) -> None:
    block = {"type": "text", "model": str(model_of("qwen", tmp_path)), "sampling": {"max_new_tokens": 4}}
    for replaced, message in (
        ({"second": {"max_new_token": 3}}, r"policies\.both\.sampling\.second\.max_new_token: .*\(policy 'two'\)"),
        ({"first": {"max_new_tokens": 62}}, r"stages\.only: prompt 0 .* 64 positions"),
    ):
        chain = {"type": "chain", "parts": ["one", "two"], "sampling": replaced}
        config = write_run(
            tmp_path,
            stage(tmp_path, policy="both", prompts=letters(tmp_path)),
            policies={"one": block, "two": block, "both": chain},
        )
        with pytest.raises(UserError, match=message):
            check_from_yaml(config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.device=cuda", r"engine.device: cuda: torch finds no CUDA device"),
        (f"seed={2**63}", rf"seed: {2**63} does not fit into 64 bits"),
        (f"stages.only.evaluation.seed={-(2**64)}", r"stages.only.evaluation.seed: -\d+ does not fit"),
    ],
)
def test_what_this_machine_or_64_bits_cannot_do_is_found(
    override: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = write_run(tmp_path, stage(tmp_path, evaluation=held_out(tmp_path)))
    with pytest.raises(UserError, match=message):
        check_from_yaml(config, [override])


def test_fewer_held_out_prompts_than_asked_for_are_said_with_both_numbers(tmp_path: Path) -> None:
    config = write_run(tmp_path, stage(tmp_path, evaluation=held_out(tmp_path, count=9)))
    with pytest.warns(
        UserWarning, match=r"stages\.only\.evaluation\.count: 9 held-out prompts .* there are only 5; all"
    ):
        check_from_yaml(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_from_yaml(config, ["stages.only.evaluation.count=5"])


NOT_OFFERED: dict[str, tuple[dict[str, Any], str]] = {
    "entropy": ({"algorithm": {"name": "grpo", "entropy_coefficient": 0.1}}, "entropy_coefficient: \S+: reads entropy"),
    "a critic": ({"algorithm": "ppo", "critic": {}}, "value, the critic: reads features"),
    "a critic of its own": ({"algorithm": "ppo", "critic": {"source": "model"}}, "value, the critic: reads features"),
}


@pytest.mark.parametrize("case", NOT_OFFERED)
def test_a_part_that_reads_what_the_policy_does_not_offer_is_found(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `check` and by the start of `train`, with the stage's place and before its policy is built."""
    keys, message = NOT_OFFERED[case]
    config = write_run(tmp_path, stage(tmp_path, "fine"), stage(tmp_path, "wrong", **keys))
    check_from_yaml(config)
    monkeypatch.setattr(ToyPolicy, "offers", frozenset({"log_prob"}))
    message = rf"run\.yaml:\d+: stages\.wrong(\.|: )algorithm\.{message}.* \(ToyPolicy\) gives only log_prob"
    with pytest.raises(UserError, match=message):
        check_from_yaml(config)
    with pytest.raises(UserError, match=message):
        train_from_yaml(config, [], tmp_path / "run")


def test_a_part_that_a_chain_does_not_offer_is_found(tmp_path: Path, model_of: Callable[[str, Path], Path]) -> None:
    """The widths of its parts' features differ, and no algorithm of whole samples trains two models at once."""
    block = {"type": "text", "model": str(model_of("qwen", tmp_path)), "sampling": {"max_new_tokens": 4}}
    chain = {"type": "chain", "parts": ["one", "two"]}
    for two, keys, message in (
        (block, {"algorithm": "ppo", "critic": {}}, None),
        (TOY, {"algorithm": "ppo", "critic": {}}, r"stages\.only: algorithm\.value, the critic: reads features"),
        (block, {"algorithm": "kto"}, r"stages\.only: algorithm 'kto' learns from samples that one model makes"),
    ):
        run = stage(tmp_path, policy="both", prompts=letters(tmp_path), **keys)
        config = write_run(tmp_path, run, policies={"one": block, "two": two, "both": chain})
        if message is None:
            check_from_yaml(config)
            continue
        with pytest.raises(UserError, match=message):
            check_from_yaml(config)


NO_SENSE: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "an algorithm of a window without one": (
        "stable-diffusion-3", {}, {"algorithm": "mix_grpo"},
        r"stages\.only: algorithm 'mix_grpo' trains a window .* sampling\.window is not set",
    ),
    "an algorithm of a window on tokens": (
        "qwen", {}, {"algorithm": "flow_grpo_fast"}, r"stages\.only: algorithm 'flow_grpo_fast' trains a window",
    ),
    "a window that ends beyond the schedule": (
        "stable-diffusion-3", {"sampling": {"steps": 4, "window": {"steps": [1, 5]}}}, {},
        r"policies\.tiny\.sampling\.window: \(1, 5\) asks for .* \[\(0, 1\.0\), .* \(2, 0\.6022\)\]\.",
    ),
    "a punishment that no sample reaches": (
        "qwen", {}, {"algorithm": {"name": "dapo", "overlong": {"maximum": 5}}},
        r"stages\.only\.algorithm\.overlong: .* = 5 - 1 tokens .*max_new_tokens ends every sample at 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_SENSE)
def test_what_makes_no_sense_is_refused(case: str, tmp_path: Path, model_of: Callable[[str, Path], Path]) -> None:
    name, keys, stage_keys, message = NO_SENSE[case]
    model_of(name, tmp_path)
    with pytest.raises(UserError, match=message):
        check_from_yaml(run_of(name, tmp_path, keys, **stage_keys))


def test_what_makes_sense_is_not_refused(tmp_path: Path, model_of: Callable[[str, Path], Path]) -> None:
    """The nearest neighbours of what is."""
    model_of("qwen", tmp_path)
    check_from_yaml(run_of("qwen", tmp_path, algorithm={"name": "dapo", "overlong": {"maximum": 5, "buffer": 2}}))
    shutil.rmtree(tmp_path / "model")
    model_of("stable-diffusion-3", tmp_path)
    window = {"sampling": {"steps": 4, "window": {"steps": [1, 2]}}}
    check_from_yaml(run_of("stable-diffusion-3", tmp_path, window, algorithm="mix_grpo"))
    check_from_yaml(run_of("stable-diffusion-3", tmp_path, algorithm={"name": "mix_grpo", "needs_window": False}))


def judged(folder: Path, **stage_keys: Any) -> Path:
    """A run that trains a reward model of 32 positions, and then a writer by it."""
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (folder / "pairs.jsonl").write_text(json.dumps(pair))
    first = stage(
        folder, "judge", policy="judge", algorithm="reward_model",
        records={"type": "preferences", "path": str(folder / "pairs.jsonl")},
    )  # fmt: skip
    first = {key: value for key, value in first.items() if key not in ("prompts", "group_size", "rewards")}
    second = stage(folder, policy="tiny", prompts=letters(folder), algorithm={"name": "grpo", "kl": None})
    second["rewards"] = {"good": {"type": "reward_model", "model": "policy:judge"}}
    second |= stage_keys
    model = tiny_gpt2(folder / "judge")
    policies = {
        "judge": {"type": "text_reward_model", "model": str(model)},
        "tiny": {"type": "text", "model": str(folder / "model"), "sampling": {"max_new_tokens": 29}},
    }
    used = {name: block for name, block in policies.items() if name in (first["policy"], second["policy"])}
    return write_run(folder, first, second, policies=used)


def test_a_reward_that_reads_less_than_the_policy_may_write_is_said(
    tmp_path: Path, model_of: Callable[[str, Path], Path]
) -> None:
    model_of("qwen", tmp_path)
    config = judged(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_from_yaml(config)
    message = r"stages\.only\.rewards\.good: it reads at most 32 tokens, and a prompt of 3 with .*: 30 .* 33"
    with pytest.warns(UserWarning, match=message):
        check_from_yaml(config, ["policies.tiny.sampling.max_new_tokens=30"])


def test_a_reward_model_has_no_prompts(tmp_path: Path, model_of: Callable[[str, Path], Path]) -> None:
    model_of("qwen", tmp_path)
    with pytest.raises(UserError, match=r"stages\.only\.prompts: policy 'judge' is a reward model and samples nothing"):
        check_from_yaml(judged(tmp_path, policy="judge", algorithm="reward_model", rewards=COUNT_A))


HARDLY_MEANT: dict[str, tuple[str, Any, str | None]] = {
    "thousands on tokens": ("qwen", "diffusion_dpo", r"loss\.beta: 2500 on tokens"),
    "a usual number on tokens": ("qwen", "dpo", None),
    "a small number on denoising": ("stable-diffusion-3", "kto", r"beta: 0\.1 on denoising"),
    "a small number on denoising, of pairs": ("stable-diffusion-3", "ipo", r"loss\.beta: 0\.1 on denoising"),
    "a usual number on denoising": ("stable-diffusion-3", {"name": "kto", "beta": 3.0}, None),
}


@pytest.mark.parametrize("case", HARDLY_MEANT)
def test_what_is_hardly_meant_is_said(case: str, tmp_path: Path, model_of: Callable[[str, Path], Path]) -> None:
    name, algorithm, message = HARDLY_MEANT[case]
    model_of(name, tmp_path)
    config = run_of(name, tmp_path, algorithm=algorithm)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check_from_yaml(config)
    found = [str(warning.message) for warning in said if "stages.only.algorithm: " in str(warning.message)]
    assert len(found) == (message is not None)
    if message is not None:
        assert re.search(rf"run\.yaml:\d+: stages\.only\.algorithm: {message}", found[0])


def test_overrides_are_checked_too(tmp_path: Path) -> None:
    config = write_run(tmp_path, stage(tmp_path))
    check_from_yaml(config, ["stages.only.group_size=2"])
    with pytest.raises(UserError, match="group_size: 1 with algorithm 'grpo'"):
        check_from_yaml(config, ["stages.only.group_size=1"])


def test_a_real_models_counts_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    policies = {"writer": {"type": "text", "model": str(tiny_gpt2(tmp_path / "model")), "lora": {"rank": 2}}}
    policies["writer"]["sampling"] = {"max_new_tokens": 8}
    check_from_yaml(write_run(tmp_path, stage(tmp_path, policy="writer"), policies=policies))
    said = capsys.readouterr().out
    assert "writer" in said and "the configuration is valid" in said
    assert "attention" in said and "sdpa" in said


@pytest.mark.parametrize(
    ("until", "words"),
    [
        ({"iterations": 1}, "1 iteration"),
        ({"iterations": 9, "reward": {"threshold": 0.5}}, "9 iterations or a reward of 0.5"),
        ({"reward": {"threshold": 2, "patience": 3}}, "a reward of 2, 3 times in a row"),
        ({"plateau": {"window": 4}}, "a plateau over twice 4 iterations"),
    ],
)
def test_the_end_of_a_stage_in_words(until: dict, words: str) -> None:
    assert UntilSettings.model_validate(until).in_words() == words
