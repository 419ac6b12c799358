"""Every metric that a run may log, with its unit, reduction and formula; docs/metrics.md is made from this table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from modalities.errors import did_you_mean
from uniml_rl.monitor.tables import Markup, markdown_table

Reduction = Literal[
    "mean", "sum", "maximum", "last", "standard deviation", "explained variance", "sum per rank", "rate"
]

REDUCTIONS: dict[Reduction, str] = {
    "mean": "sum of the values over the number of values, over every rank and micro-batch; absent over nothing",
    "sum": "sum over every rank and micro-batch",
    "maximum": "largest value over every rank and micro-batch",
    "last": "the value that rank 0 logged last",
    "standard deviation": "population standard deviation (ddof 0) of all values of all ranks",
    "explained variance": "1 − Var(target − prediction) / Var(target) over all values of all ranks; absent if the "
    "target is constant",
    "sum per rank": "sum over a rank's calls, then the largest over ranks: steps that all take together, seconds of "
    "the slowest",
    "rate": "count summed over ranks, over the seconds of the slowest rank",
}


@dataclass(frozen=True)
class Metric:
    """What a metric is. `{...}` in a metric's name stands for a name: of a reward, an optimizer or another metric."""

    unit: str
    reduction: Reduction
    definition: str


METRICS: dict[str, Metric] = {
    "reward/mean": Metric(
        "reward", "mean", "Weighted sum of the rewards, over the samples that have one; failed samples are left out."
    ),
    "reward/std": Metric("reward", "standard deviation", "Of the weighted sum over all samples of the iteration."),
    "reward/{reward}/raw_mean": Metric("the reward's own", "mean", "The reward before its weight, over valid samples."),
    "reward/{reward}/weighted_mean": Metric(
        "reward", "mean", "The reward times its current weight, over valid samples."
    ),
    "reward/{reward}/weight": Metric("1", "last", "The weight in force, which a fade-in changes."),
    "reward/{reward}/failures": Metric(
        "samples", "sum", "Samples without a score: an exception, a time-out or a non-finite value. They are masked."
    ),
    "reward/overlong_penalty": Metric(
        "reward",
        "mean",
        "What `algorithm.overlong` takes from the reward, over the valid samples that train (`dynamic_sampling` leaves "
        "groups out); not in `reward/mean`.",
    ),
    "group/without_signal_share": Metric(
        "share",
        "mean",
        "Of the groups with a valid sample that train (`dynamic_sampling` leaves groups out), those that teach nothing "
        "by themselves: equal rewards, or one valid sample. Before `whiten`; with `normalisation: per_reward` the mean "
        "over the rewards.",
    ),
    "resampling/rounds": Metric(
        "rounds", "sum per rank", "Further rollouts of the iteration, in place of groups without signal."
    ),
    "resampling/dropped_groups": Metric(
        "groups", "sum per rank", "Groups of the iteration, over all ranks, that were sampled and not trained on."
    ),
    "kl/reference": Metric(
        "nats per decision, or squared velocity",
        "mean",
        "Distance to the reference policy over trained decisions. With log-probs the k3 estimate, "
        "exp(d) − 1 − d with d = log p_reference − log p_policy, without weights for the sampling distribution; for a "
        "denoising objective that penalises it, the mean squared difference of the predictions.",
    ),
    "kl/coefficient": Metric("1", "last", "Factor of the KL term in the loss or the reward."),
    "kl/old": Metric(
        "1", "mean", "Mean squared difference of the predictions from those of the old policy, over trained draws."
    ),
    "policy/old_decay": Metric("1", "last", "Share of itself that the old policy keeps at the iteration's end."),
    "forward/log_prob": Metric(
        "1", "mean", "−w(t) × mean squared error of the denoiser on its own noised samples, over trained draws."
    ),
    "policy/entropy": Metric(
        "nats per decision", "mean", "Entropy of the distribution of each trained decision at the sampling temperature."
    ),
    "policy/clip_share": Metric(
        "share", "mean", "Trained decisions whose gradient the clipping removed, or (cispo) whose weight it bounded."
    ),
    "policy/ratio_mean": Metric(
        "1", "mean", "exp(log p_current − log p_old) over trained decisions; 1 at the first update."
    ),
    "policy/ratio_max_deviation": Metric("1", "maximum", "Largest |ratio − 1| over trained decisions."),
    "loss/total": Metric(
        "1",
        "sum",
        "What was differentiated: all terms with their factors, summed over the iteration's optimizer steps.",
    ),
    "loss/policy": Metric(
        "1", "sum", "The clipped surrogate or other policy objective, summed over the iteration's optimizer steps."
    ),
    "loss/value": Metric("1", "sum", "The value term before its factor, summed over the iteration's optimizer steps."),
    "loss/kl": Metric("1", "sum", "The KL term before its coefficient, summed over the iteration's optimizer steps."),
    "loss/entropy": Metric("1", "sum", "The entropy bonus with its sign, before its coefficient, summed likewise."),
    "loss/auxiliary": Metric(
        "1", "sum", "The auxiliary supervised loss before its weight, summed over the iteration's optimizer steps."
    ),
    "supervised/log_prob": Metric(
        "nats per token, or minus squared error",
        "mean",
        "Log-prob of the given samples' decisions; of denoising models −w(t)·mean((prediction − target)²).",
    ),
    "preference/accuracy": Metric("share", "mean", "Pairs whose chosen sample is ahead, i.e. whose margin is above 0."),
    "preference/margin": Metric(
        "nats, or the reward model's score",
        "mean",
        "log(p/p_reference) of the chosen sample minus that of the rejected one; without a reference the difference of "
        "their log-probs or scores.",
    ),
    "kto/desirable_share": Metric("share", "mean", "Samples that count as desirable."),
    "kto/drift": Metric(
        "nats", "mean", "z, the mean log(p/p_reference) of samples under exchanged prompts, not below 0."
    ),
    "value/explained_variance": Metric(
        "1", "explained variance", "Of the returns by the critic's values before the update."
    ),
    "rollout/mismatch": Metric(
        "nats per decision",
        "mean",
        "|log p_old − log p_rollout| over trained decisions: training's own numerics against the sampler's. 0 where "
        "training takes the sampler's for old: in float32 under `replay_check: error`, which compares them once, and "
        "without `mismatch`.",
    ),
    "rollout/near_ties": Metric(
        "draws",
        "sum",
        "Token draws whose uniform number lay within rounding of an edge of the cumulative distribution.",
    ),
    "gradient/norm/{optimizer}": Metric(
        "1", "mean", "L2 norm of the gradient over one optimizer's parameters, before clipping."
    ),
    "gradient/skipped_steps": Metric(
        "steps", "sum per rank", "Optimizer steps of the iteration that were skipped for a non-finite gradient."
    ),
    "gradient/loss_scale": Metric(
        "1",
        "last",
        "Factor of the losses before the backward pass in float16, of which norms and updates are free; half as large "
        "after a step that was skipped because it overflowed.",
    ),
    "update/empty_steps": Metric(
        "steps", "sum per rank", "Optimizer steps left out because not one of their decisions could be trained."
    ),
    "update/weight_ratio/{optimizer}": Metric(
        "1", "mean", "‖Δw‖ / ‖w‖ of an optimizer step over one optimizer's parameters."
    ),
    "learning_rate/{optimizer}": Metric("1", "last", "Learning rate of that optimizer at this iteration."),
    "time/rollout": Metric("s", "sum per rank", "Sampling."),
    "time/encode": Metric("s", "sum per rank", "Reading given samples as if the policy had made them."),
    "time/decode": Metric("s", "sum per rank", "From latents or tokens to samples."),
    "time/reward": Metric("s", "sum per rank", "Scoring."),
    "time/replay": Metric(
        "s", "sum per rank", "Replays without gradient: old and reference log-probs, critic's values."
    ),
    "time/update": Metric("s", "sum per rank", "Replays with gradient, backward and optimizer steps."),
    "time/evaluation": Metric("s", "sum per rank", "Evaluation on held-out prompts."),
    "time/checkpoint": Metric("s", "sum per rank", "Writing the checkpoint after the iteration before."),
    "time/iteration": Metric("s", "sum per rank", "The whole iteration, without evaluation and checkpoint."),
    "throughput/samples_per_second": Metric("samples/s", "rate", "Samples of the iteration over its time."),
    "throughput/decisions_per_second": Metric(
        "decisions/s", "rate", "Decisions of the iteration, trained or not, over its time."
    ),
    "memory/peak_gib": Metric(
        "GiB", "maximum", "Largest resident set of a process so far, or of a device's allocations if there is one."
    ),
    "text/length_mean": Metric("tokens", "mean", "Tokens that the model chose, an end-of-sequence token included."),
    "text/finished_share": Metric("share", "mean", "Texts that the model ended itself before the length limit."),
    "text/distinct_1": Metric(
        "share",
        "mean",
        "Different words over all words of the texts of one group, mean over groups that have a word. Words are split "
        "at white space and lower-cased.",
    ),
    "text/distinct_2": Metric("share", "mean", "The same for pairs of neighbouring words within a text."),
    "stage/index": Metric("1", "last", "Number of the curriculum's stage, from 0."),
    "nonfinite/{metric}": Metric(
        "values", "sum", "NaN or infinite values that were left out of the metric named; shown only if there were any."
    ),
}

for _weights, _whose in (("eval", "raw"), ("eval_ema", "EMA")):
    METRICS |= {
        f"{_weights}/{{reward}}/mean": Metric(
            "the reward's own",
            "last",
            f"Raw reward with {_whose} weights on the held-out prompts: mean over prompts of the "
            "mean over a prompt's valid samples.",
        ),
        f"{_weights}/{{reward}}/difference": Metric(
            "the reward's own", "last", "The same minus the value before the stage, paired by prompt."
        ),
        f"{_weights}/{{reward}}/difference_low": Metric(
            "the reward's own", "last", "Lower end of the paired difference's 95 % t-interval over prompts."
        ),
        f"{_weights}/{{reward}}/difference_high": Metric("the reward's own", "last", "Its upper end."),
        f"{_weights}/{{reward}}/failures": Metric("samples", "last", "Held-out samples without a score."),
    }

_PLACEHOLDERS = {"reward": "[^/]+", "optimizer": ".+", "metric": ".+"}


def _pattern(name: str) -> re.Pattern[str]:
    escaped = re.escape(name)
    for placeholder, expression in _PLACEHOLDERS.items():
        escaped = escaped.replace(re.escape(f"{{{placeholder}}}"), expression)
    return re.compile(escaped)


_PATTERNS = [(_pattern(name), metric) for name, metric in METRICS.items() if "{" in name]


@lru_cache(maxsize=4096)
def define(name: str) -> Metric:
    """The definition of a metric by its full name. Raises ValueError for a name that the vocabulary does not hold."""
    if name in METRICS and "{" not in name:
        return METRICS[name]
    for pattern, metric in _PATTERNS:
        if pattern.fullmatch(name):
            return metric
    raise ValueError(f"metric {name!r} is not in uniml_rl/monitor/vocabulary.py{did_you_mean(name, METRICS)}")


def metrics_page() -> str:
    """The text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Every figure in `metrics.jsonl` and TensorBoard. A run cannot log a metric that is not in this table, nor",
        "with another reduction. One row is one iteration: one rollout and its updates. This page is made by",
        "`python -m uniml_rl.monitor.vocabulary > docs/metrics.md`.",
        "",
        "All ranks reduce the union of their metrics' names. NaN and infinite values are left out of a metric and",
        "counted in `nonfinite/{metric}`; a mean over nothing is absent, never 0. Partial results are float64.",
        "",
        "## Reductions",
        "",
        *markdown_table(["reduction", "meaning"], [[name, meaning] for name, meaning in REDUCTIONS.items()]),
        "",
        "## Vocabulary",
        "",
        "`{reward}`, `{optimizer}` and `{metric}` stand for names. In evaluations, `total` is the sum of the stage's",
        "rewards with their full weights.",
        "",
    ]
    rows = [
        [Markup(f"`{name}`"), metric.unit, metric.reduction, Markup(metric.definition.replace("|", r"\|"))]
        for name, metric in METRICS.items()
    ]
    return "\n".join([*lines, *markdown_table(["metric", "unit", "reduction", "definition"], rows), ""])


if __name__ == "__main__":
    print(metrics_page(), end="")
