"""The algorithm block: presets, overrides, what is refused, and the pages that document them."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from toy_policy import ToyPolicy

from modalities.base import summary_of
from modalities.errors import UserError
from modalities.settings import Settings
from modalities.tokens import TokenSampling
from uniml_rl.algorithms.policy_gradient_settings import PolicyGradientSettings, replay_tolerance
from uniml_rl.algorithms.presets import PRESETS, merge_preset, resolve_algorithm
from uniml_rl.algorithms.surrogate import SurrogateInputs
from uniml_rl.build import AlgorithmBlock
from uniml_rl.config import validate
from uniml_rl.yaml_files import load_yaml

ROOT = Path(__file__).parents[2]
PAGES = sorted(set((ROOT / "docs" / "algorithms").glob("*.md")) - {ROOT / "docs" / "algorithms" / "README.md"})
SEQUENCE = {"ratio": "sequence", "aggregation": {"mode": "sequence_mean_token_mean"}}


@pytest.mark.parametrize("name", PRESETS)
def test_a_resolved_algorithm_survives_being_written_down_and_read_again(name):
    settings = resolve_algorithm({"name": name})
    written = yaml.safe_load(yaml.safe_dump(settings.model_dump(mode="json")))
    assert resolve_algorithm(written) == settings
    assert resolve_algorithm(settings) is settings
    assert resolve_algorithm(name) == settings


def test_the_rows_of_the_table():
    rows = {name: row for name in PRESETS if isinstance(row := resolve_algorithm(name), PolicyGradientSettings)}
    parts = {
        name: (row.advantage.type, row.surrogate.type, row.aggregation.mode, row.kl and row.kl.estimator)
        for name, row in rows.items()
    }
    expected = {
        "ppo": ("gae", "ppo_clip", "token_mean", "k1"),
        "ppo_dual_clip": ("gae", "ppo_clip", "token_mean", "k1"),
        "grpo": ("group", "ppo_clip", "sequence_mean_token_mean", "k2"),
        "reinforce": ("batch", "reinforce", "sequence_mean_token_sum", None),
        "rloo": ("leave_one_out", "reinforce", "sequence_mean_token_sum", "k1"),
        "reinforce_plus_plus": ("returns", "ppo_clip", "token_mean", "k1"),
        "reinforce_plus_plus_baseline": ("returns", "ppo_clip", "token_mean", "k2"),
        "dr_grpo": ("group", "ppo_clip", "sequence_mean_token_sum", None),
        "dapo": ("group", "ppo_clip", "token_mean", None),
        "gspo": ("group", "ppo_clip", "sequence_mean_token_mean", None),
        "cispo": ("group", "cispo", "token_mean", None),
        "drpo": ("group", "drpo", "token_mean", None),
        "ddpo": ("running_prompt", "ppo_clip", "token_mean", None),
        "flow_grpo": ("group", "ppo_clip", "token_mean", "gaussian"),
        "flow_grpo_fast": ("group", "ppo_clip", "token_mean", None),
        "dance_grpo": ("group", "ppo_clip", "token_mean", None),
        "flow_cps": ("group", "ppo_clip", "token_mean", None),
        "mix_grpo": ("group", "ppo_clip", "token_mean", None),
        "grpo_guard": ("group", "grpo_guard", "token_mean", None),
        "flow_dppo": ("group", "flow_dppo", "token_mean", None),
        "denoising_ppo": ("gae", "ppo_clip", "token_mean", None),
    }
    assert {name: parts[name] for name in expected} == expected
    assert {name for name, row in rows.items() if row.value is not None} == {"ppo", "ppo_dual_clip", "denoising_ppo"}
    assert {name for name, row in rows.items() if row.ratio == "sequence"} == {"gspo"}
    assert {name for name, row in rows.items() if row.dynamic_sampling or row.overlong} == {"dapo"}


def test_overrides_reach_their_key_and_leave_the_others():
    settings = resolve_algorithm(
        {"name": "ppo", "advantage": {"lambda": 0.9}, "kl": {"adaptive": {"target": 6, "horizon": 1e4}}}
    )
    assert (settings.advantage.lambda_, settings.advantage.gamma, settings.advantage.whiten) == (0.9, 1.0, True)
    assert settings.kl.coefficient == resolve_algorithm("ppo").kl.coefficient
    assert (settings.kl.adaptive.target, settings.epochs) == (6, 4)


def test_a_changed_type_replaces_its_block():
    settings = resolve_algorithm({"name": "ddpo", "advantage": {"type": "leave_one_out"}})
    assert settings.advantage.model_dump() == {"type": "leave_one_out", "clip": None, "whiten": False}


def test_null_removes_a_part():
    assert resolve_algorithm({"name": "grpo", "kl": None}).kl is None


def test_merging_leaves_the_table_alone():
    before = repr(PRESETS)
    merge_preset({"name": "grpo", "kl": {"coefficient": 9.0}})["kl"]["estimator"] = "k3"
    assert repr(PRESETS) == before


class Stage(Settings):
    """A stage as far as its algorithm goes."""

    algorithm: AlgorithmBlock
    """The block under test."""


@pytest.mark.parametrize(
    ("block", "fragments"),
    [
        ("grop", ["algorithm: ", "name 'grop'", "gspo, ipo", "did you mean 'grpo'"]),
        ({"name": "grop"}, ["algorithm: name 'grop'", "did you mean 'grpo'"]),
        ({}, ["algorithm: name None", "dapo, ddpo"]),
        ([], ["algorithm: []", "a block with a name"]),
        ({"name": ["grpo"]}, ["name ['grpo']"]),
        ({"name": "grpo", "surogate": {}}, ["algorithm.surogate", "did you mean 'surrogate'"]),
        ({"name": "grpo", "kl": {"coeficient": 1}}, ["algorithm.kl.coeficient", "did you mean 'coefficient'"]),
        ({"name": "grpo", "kl": {"adaptive": {"target": 1}}}, ["algorithm.kl.adaptive.horizon", "required"]),
        ({"name": "grpo", "surrogate": {"low": -1}}, ["algorithm.surrogate.low: -1"]),
        ({"name": "grpo", "advantage": {"scale": "std"}}, ["algorithm.advantage.scale: std", "'group_std'"]),
        ({"name": "grpo", "advantage": {"type": "grup"}}, ["algorithm.advantage.type: grup", "did you mean 'group'"]),
        ({"name": "grpo", "advantage": {"gama": 1}}, ["algorithm.advantage.gama", "scale, normalisation, epsilon"]),
        (
            {"name": "grpo", "advantage": {"gamma": 1}},
            ["algorithm.advantage", "gamma: ", "no critic to bootstrap from"],
        ),
        ({"name": "rloo", "advantage": {"lambda": 1}}, ["algorithm.advantage", "lambda: ", "no critic to bootstrap"]),
        ({"name": "reinforce_plus_plus", "advantage": {"lambda": 1}}, ["lambda: ", "'returns' has no critic"]),
        ({"name": "reinforce", "epochs": 2}, ["'reinforce' with epochs x minibatches = 2", "cispo is this one"]),
        ({"name": "rloo", "minibatches": 3}, ["'reinforce' with epochs x minibatches = 3", "after the first update"]),
        ({"name": "reinforce", "replay": {"iterations": 1}}, ["'reinforce' with replay", "cispo is this one"]),
        ({"name": "reinforce", **SEQUENCE}, ["ratio: sequence with surrogate 'reinforce'", "reads no ratio"]),
        ({"name": "drpo", **SEQUENCE}, ["surrogate.weight: old_probability", "Use one"]),
        ({"name": "gspo", "aggregation": {"mode": "token_mean"}}, ["ratio: sequence", "long samples would dominate"]),
        ({"name": "cispo", "surrogate": {"low": 5.0}}, ["low 5.0 is not below high 5.0"]),
        (
            {"name": "cispo", "surrogate": {"low": 1, "high": 2, "schedule": {"final_share": 0.4, "iterations": 9}}},
            ["low 1.0 is not below high 0.8"],
        ),
        ({"name": "ppo", "replay": {"iterations": 1}}, ["replay with a critic"]),
        (
            {"name": "grpo", "replay": {"iterations": 1}, "kl": {"reference": {"type": "refreshed", "every": 2}}},
            ["replay with a reference that moves"],
        ),
        ({"name": "grpo", "kl": {"reference": {"type": "refreshed"}}}, ["algorithm.kl.reference.every", "required"]),
        (
            {"name": "grpo", "kl": {"reference": {"decay": 0.9}}},
            ["algorithm.kl.reference.type", "one of 'fixed', 'refreshed', 'moving_average'"],
        ),
        (
            {"name": "reinforce", "dynamic_sampling": {"rounds": 2}},
            ["dynamic_sampling with advantage.type 'batch'", "group or leave_one_out"],
        ),
        ({"name": "dapo", "dynamic_sampling": {"rounds": 0}}, ["algorithm.dynamic_sampling.rounds: 0"]),
        ({"name": "dapo", "overlong": {"maximum": 3, "buffer": 4}}, ["buffer: 4: it is longer than the maximum of 3"]),
        (
            {
                "name": "grpo",
                "advantage": {"normalisation": "per_reward"},
                "kl": {"estimator": "k1", "placement": "reward"},
            },
            ["per_reward", "no total that the KL could be subtracted from", "kl.placement: loss"],
        ),
        (
            {"name": "dapo", "advantage": {"normalisation": "per_reward"}},
            ["no total that overlong could be subtracted"],
        ),
        ({"name": "ppo", "advantage": {"lambda_": 1}}, ["algorithm.advantage.lambda_", "did you mean 'lambda'"]),
        ({"name": "ddpo", "advantage": {"min_count": 17}}, ["min_count 17", "buffer_size 16"]),
        ({"name": "ppo", "value": None}, ["gae needs a critic", "`value` block"]),
        ({"name": "ppo", "advantage": {"type": "group"}}, ["'group' has no use for a critic", "value: null"]),
        ({"name": "grpo", "value": {}}, ["`value` block", "no use for a critic"]),
        ({"name": "grpo", "kl": {"estimator": "k1"}}, ["algorithm.kl", "k1 in the loss does nothing", "k2"]),
        ({"name": "flow_grpo", "kl": {"placement": "reward"}}, ["'gaussian'", "placement: loss"]),
        ({"name": "flow_grpo", "kl": {"adaptive": {"target": 1, "horizon": 1}}}, ["adaptive", "'gaussian'"]),
        ({"name": "grpo", "aggregation": {"mode": "sum_over_constant"}}, ["sum_over_constant needs a `constant`"]),
        ({"name": "grpo", "aggregation": {"constant": 5}}, ["constant: 5: mode sequence_mean_token_mean reads none"]),
        (
            {"name": "grpo", "ratio": "sequence", "aggregation": {"mode": "token_mean"}},
            ["ratio: sequence", "token_mean"],
        ),
        ({"name": "grpo", "mismatch": {"type": "mask", "cap": 2}}, ["algorithm.mismatch.cap", "low, high, level"]),
        ({"name": "grpo", "mismatch": {"type": "mask", "low": 1.5}}, ["band [1.5, 2.0] must hold 1"]),
        ({"name": "grpo", "objective": "preference"}, ["it comes with the name", "'policy_gradient'"]),
        ({"name": "dpo", "advantage": {}}, ["algorithm.advantage", "reference_free"]),
        ({"name": "grpo", "epochs": 0, "minibatches": 0}, ["algorithm.epochs: 0", "algorithm.minibatches: 0"]),
    ],
)
def test_a_wrong_block_in_a_file_is_answered_with_the_key_the_value_and_the_way_out(block, fragments, tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"algorithm": block}))
    with pytest.raises(UserError) as error:
        validate(Stage, load_yaml(tmp_path / "run.yaml"))
    for fragment in ["run.yaml:", *fragments]:
        assert fragment in str(error.value)


@pytest.mark.parametrize(
    ("block", "facts", "fragment"),
    [
        ({"name": "grpo"}, {"group_size": 1}, "group size is 1"),
        ({"name": "flow_grpo"}, {"group_size": 1}, "group size is 1"),
        ({"name": "grpo", "advantage": {"type": "leave_one_out"}}, {"group_size": 1}, "group size is 1"),
        ({"name": "flow_grpo"}, {"log_prob_unit": "token", "kind": "tokens"}, "'gaussian' compares denoising steps"),
        ({"name": "ddpo"}, {"log_prob_unit": "element_sum", "kind": "denoising"}, "algorithm.surrogate.low"),
        (
            {"name": "grpo", **SEQUENCE},
            {"log_prob_unit": "element_mean", "kind": "denoising"},
            "ratio: sequence is for tokens",
        ),
        ({"name": "ddpo", "entropy_coefficient": 0.1}, {"kind": "denoising"}, "no gradient"),
        ({"name": "kto", "desirable_above": "group_mean"}, {"group_size": 1}, "compares the samples of a prompt"),
        ({"name": "dpo"}, {"kind": "scores"}, "the scores of a reward model have none"),
        ({"name": "dapo"}, {"kind": "denoising"}, "no length to punish"),
        ({"name": "dapo"}, {"group_size": 1}, "group size is 1"),
        ({"name": "reinforce_plus_plus_baseline"}, {"group_size": 1}, "group size is 1"),
        ({"name": "reward_model"}, {"kind": "tokens"}, "trains a reward model, and this policy makes tokens"),
        ({"name": "reward_model"}, {"kind": "denoising"}, "trains a reward model, and this policy makes denoising"),
        ({"name": "drpo"}, {"kind": "denoising"}, "a density, not a probability"),
        (
            {"name": "drpo", "surrogate": {"weight": "one"}},
            {"log_prob_unit": "element_sum", "kind": "denoising"},
            "algorithm.surrogate.epsilon",
        ),
    ],
)
def test_an_algorithm_that_does_not_fit_the_segment_is_refused(block, facts, fragment):
    with pytest.raises(UserError, match=re.escape(fragment)):
        resolve_algorithm(block).check(**{"group_size": 4, **facts})


@pytest.mark.parametrize(
    ("block", "facts"),
    [
        ({"name": "ppo"}, (1, "token", "tokens")),
        ({"name": "ddpo"}, (1, "element_mean", "denoising")),
        ({"name": "kto"}, (1, "token", "tokens")),
        ({"name": "dpo"}, (2, "token", "tokens")),
        ({"name": "dpo", "reference_free": True}, (2, "none", "scores")),
        ({"name": "grpo"}, (2, "element_mean", "denoising")),
        ({"name": "flow_grpo"}, (2, "element_mean", "denoising")),
        ({"name": "flow_grpo"}, (2,)),  # before the policy is known
        ({"name": "grpo", "advantage": {"type": "batch"}}, (1, "token", "tokens")),
        ({"name": "ddpo", "surrogate": {"low": 1.0}}, (1, "element_sum", "denoising")),
        ({"name": "grpo", "entropy_coefficient": 0.1, **SEQUENCE}, (2, "token", "tokens")),
        ({"name": "reinforce_plus_plus"}, (1, "token", "tokens")),
        ({"name": "reinforce"}, (1, "element_sum", "denoising")),
        ({"name": "drpo", "surrogate": {"weight": "one"}}, (2, "element_mean", "denoising")),
        ({"name": "dapo", "overlong": None}, (2, "element_mean", "denoising")),
        ({"name": "cispo", "replay": {"iterations": 2}, "epochs": 2}, (2, "token", "tokens")),
    ],
)
def test_an_algorithm_that_fits_is_let_through(block, facts):
    resolve_algorithm(block).check(*facts)


def surrogate_terms(settings, log_ratio, advantages, unit="token"):
    mask = torch.ones_like(log_ratio, dtype=torch.bool)
    return settings.surrogate.terms(SurrogateInputs(log_ratio, advantages, log_ratio, mask, unit, iteration=0))


@pytest.mark.parametrize(
    ("block", "unit", "low", "high"),
    [
        ({}, "token", 0.2, 0.2),
        ({}, "element_mean", 1e-4, 1e-4),
        ({"low": 0.1}, "token", 0.1, 0.1),
        ({"low": 0.1, "high": 0.4}, "element_mean", 0.1, 0.4),
        ({"high": 0.28}, "token", 0.2, 0.28),
    ],
)
def test_the_clip_range_follows_the_unit_of_the_log_prob(block, unit, low, high):
    settings = resolve_algorithm({"name": "grpo", "surrogate": block})
    ratio = torch.tensor([[3.0, 0.01]]).log()
    terms = surrogate_terms(settings, ratio, torch.tensor([[1.0, -1.0]]), unit)
    assert terms.loss.tolist() == [pytest.approx([-(1 + high), 1 - low])]


def test_the_dual_bound_reaches_the_surrogate():
    settings = resolve_algorithm({"name": "grpo", "surrogate": {"dual": 3.0}})
    assert surrogate_terms(settings, torch.tensor([[2.0]]), torch.tensor([[-1.0]])).loss.item() == 3.0


def test_ipo_wants_a_margin_of_half_the_inverse_of_beta():
    loss = resolve_algorithm({"name": "ipo", "loss": {"beta": 0.25}}).loss
    assert loss.terms(torch.tensor([2.0, 0.0, -1.0])).tolist() == [0.0, 4.0, 9.0]


def test_the_mismatch_block_builds_the_correction_that_it_names():
    old, rollout, mask = torch.tensor([[1.5, 0.0]]), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    truncated = resolve_algorithm({"name": "grpo", "mismatch": {"type": "truncate", "cap": 3.0}}).mismatch
    assert truncated.correct(old, rollout, mask).weights.tolist() == [[3.0, 1.0]]
    masked = resolve_algorithm({"name": "grpo", "mismatch": {"type": "mask", "high": 4.0}}).mismatch
    assert masked.correct(old, rollout, mask).kept.tolist() == [[False, True]]
    sequence = resolve_algorithm(
        {"name": "grpo", "mismatch": {"type": "mask", "high": 4.0, "level": "sequence"}}
    ).mismatch
    assert sequence.correct(old, rollout, mask).kept.tolist() == [[True, True]]


def test_the_kl_block_builds_its_controller():
    fixed = resolve_algorithm({"name": "grpo", "kl": {"coefficient": 0.3}}).kl.controller()
    adaptive = resolve_algorithm({"name": "ppo", "kl": {"adaptive": {"target": 2.0, "horizon": 10.0}}}).kl.controller()
    for controller in (fixed, adaptive):
        controller.update(2.2, 5)
    assert fixed.coefficient == 0.3
    assert adaptive.coefficient == pytest.approx(0.05 * (1 + 0.1 * 5 / 10))


FOUR = TokenSampling(max_new_tokens=4)
TOKENS, LATENTS = ("tokens", "token"), ("denoising", "element_mean")


@pytest.mark.parametrize(
    ("block", "decisions", "facts", "fragment"),
    [
        ({"name": "grpo", "entropy_coefficient": 0.1}, [TOKENS], {}, "entropy_coefficient: reads entropy"),
        ({"name": "grpo"}, [TOKENS], {}, None),
        ({"name": "ppo"}, [TOKENS], {}, "value, the critic: reads features"),
        ({"name": "ppo"}, [TOKENS], {"offers": frozenset({"features"})}, None),
        ({"name": "flow_dppo"}, [LATENTS], {}, "surrogate.type: flow_dppo: reads mean, std"),
        ({"name": "flow_grpo"}, [LATENTS], {}, "kl.estimator: gaussian: reads mean, std"),
        ({"name": "flow_grpo"}, [LATENTS], {"offers": frozenset({"mean", "std"})}, None),
        ({"name": "dapo", "overlong": {"maximum": None}}, [TOKENS], {}, "has no sampling.max_new_tokens"),
        ({"name": "dapo", "overlong": {"maximum": None}}, [TOKENS], {"sampling": TokenSampling()}, None),
        ({"name": "dapo", "overlong": {"maximum": 9}}, [TOKENS], {}, None),
        ({"name": "dapo", "overlong": {"maximum": 5}}, [TOKENS], {"sampling": FOUR}, "nothing ever would be"),
        ({"name": "dapo", "overlong": {"maximum": 5, "buffer": 2}}, [TOKENS], {"sampling": FOUR}, None),
        (
            {"name": "dapo", "overlong": {"buffer": 5}},
            [TOKENS],
            {"sampling": FOUR},
            "overlong.buffer: 5: the",
        ),
        ({"name": "dapo", "overlong": {"buffer": 4}}, [TOKENS], {"sampling": FOUR}, None),
        (
            {"name": "mix_grpo"},
            [TOKENS],
            {},
            "window of denoising transitions, and this policy",
        ),
        ({"name": "mix_grpo"}, [LATENTS], {}, "trains a window of the transitions"),
        ({"name": "mix_grpo"}, [LATENTS], {"windowed": True}, None),
        ({"name": "reward_model"}, [TOKENS], {}, "this policy makes tokens"),
        ({"name": "reward_model"}, [("scores", "none")], {}, None),
        ({"name": "grpo"}, [TOKENS, TOKENS], {}, None),
        ({"name": "kto"}, [TOKENS], {}, None),
        ({"name": "kto"}, [TOKENS, TOKENS], {}, "in 2 segments"),
    ],
)
def test_an_algorithm_that_reads_what_a_policy_does_not_offer_is_refused(block, decisions, facts, fragment):
    policy = replace(summary_of(ToyPolicy("letters")), decisions=decisions, **{"offers": frozenset()} | facts)
    check = resolve_algorithm(block).check_policy
    if fragment is None:
        check(policy, 4)
        return
    with pytest.raises(UserError, match=re.escape(fragment)):
        check(policy, 4)


@pytest.mark.parametrize(
    ("block", "labels", "fragment"),
    [
        ({"name": "sft"}, {0.0, 1.0}, None),
        ({"name": "sft"}, {0.0}, "no sample has the label 1"),
        ({"name": "kto"}, {0.0, 1.0}, None),
        ({"name": "kto"}, {1.0}, "every sample is desirable"),
        ({"name": "kto", "desirable_above": "group_mean"}, {0.0, 1.0}, None),
        ({"name": "kto", "desirable_above": 0.0}, {0.0, 1.0}, None),
        ({"name": "kto", "desirable_above": 1.0}, {0.0, 1.0}, "at least 0 and below 1"),
        ({"name": "kto", "desirable_above": -0.1}, {0.0, 1.0}, "at least 0 and below 1"),
    ],
)
def test_labels_that_teach_nothing_are_refused(block, labels, fragment):
    check = resolve_algorithm(block).check_labels
    if fragment is None:
        check(labels)
        return
    with pytest.raises(UserError, match=fragment):
        check(labels)


@pytest.mark.parametrize(
    ("block", "kind", "doubtful"),
    [
        ({"name": "dpo", "loss": {"beta": 11.0}}, "tokens", True),
        ({"name": "dpo", "loss": {"beta": 10.0}}, "tokens", False),
        ({"name": "kto", "beta": 11.0}, "tokens", True),
        ({"name": "kto", "beta": 0.1}, "tokens", False),
        ({"name": "kto", "beta": 0.9}, "denoising", True),
        ({"name": "kto", "beta": 1.0}, "denoising", False),
        ({"name": "diffusion_dpo"}, "denoising", False),
        ({"name": "grpo"}, "tokens", False),
    ],
)
def test_a_beta_of_the_other_kind_of_decision_is_doubted(block, kind, doubtful):
    doubts = resolve_algorithm(block).doubts(kind)
    assert len(doubts) == doubtful
    for doubt in doubts:
        beta = float(re.search(r"beta: ([0-9.]+)", doubt)[1])
        assert float(re.search(r"1 / beta = ([0-9.]+)", doubt)[1]) == pytest.approx(1 / beta, rel=0.2)


@pytest.mark.parametrize(
    ("block", "limit", "penalties"),
    [
        ({"maximum": 20, "buffer": 10, "factor": 3.0}, 99, {10: 0.0, 15: 1.5, 20: 3.0, 30: 3.0}),
        ({"maximum": 20}, 99, {16: 0.0, 18: 0.5, 20: 1.0, 30: 1.0}),  # a fifth
        ({}, 10, {8: 0.0, 9: 0.5, 10: 1.0}),  # of the sampling limit
        ({}, 2, {1: 0.0, 2: 1.0}),  # at least one token
    ],
)
def test_overlong_takes_its_limit_and_its_buffer_from_what_is_given(block, limit, penalties):
    overlong = resolve_algorithm({"name": "dapo", "overlong": {"buffer": None, "maximum": None} | block}).overlong
    found = overlong.penalty(torch.tensor(list(penalties)), limit)
    assert found.tolist() == pytest.approx(list(penalties.values()))


def test_the_replay_tolerance_is_the_users_or_fits_dtype_and_unit():
    settings = resolve_algorithm("grpo")
    assert replay_tolerance(resolve_algorithm({"name": "grpo", "replay_tolerance": 0.3}), torch.float32, "token") == 0.3
    for unit in ("token", "element_mean", "element_sum"):
        by_precision = [replay_tolerance(settings, d, unit) for d in (torch.float32, torch.float16, torch.bfloat16)]
        assert by_precision == sorted(by_precision) and by_precision[0] < by_precision[-1]


# -- documentation ---------------------------------------------------------------------------------------------------


def test_every_preset_has_a_page():
    assert {page.stem for page in PAGES} >= set(PRESETS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_yaml_of_a_page_is_valid_and_its_first_block_is_the_preset(page):
    blocks = [yaml.safe_load(text)["algorithm"] for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S)]
    resolved = [resolve_algorithm(block) for block in blocks]
    assert resolved[0] == resolve_algorithm(page.stem)
    assert set(blocks[0]) == set(type(resolved[0]).model_fields) - {"objective"}, "the first block spells every key out"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_test_that_a_page_names_exists(page):
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    exist = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    }
    assert named, "a page names the tests that guard its details"
    assert named <= exist
