"""The table of claims: what each algorithm says it optimises, on a problem whose answer is known.

Claims:

* `kl_regularised_optimum`: training ends at the maximum of the reward minus beta times a divergence from the reference.
  On tokens that is pi_ref exp(r / beta) / Z for a KL in the reward; for denoising it is the solution of the Riccati
  recursion. A KL in the loss of each decision is not the KL of the whole sample, because a decision does not answer for
  the KL that comes after it; its optimum is another one, and exact too.
* `maximum_likelihood`: training ends at the maximum likelihood of given samples or pairs; a denoiser ends at the least
  error.
* `least_preference_loss`: training ends where a preference loss that is no likelihood is least.
* `raises_expected_reward`: the exact expected reward rises.

The first three measure the distance that is left as a share of that from the reference to the target (`distance` of the
problem), and the largest of all seeds counts. The last measures the rise as a share of what is possible, and the
smallest counts.

Which claim a row can make follows from its parts:

* Advantages divided by a standard deviation weigh otherwise against a KL in the loss, so that the optimum is that of
  another beta. On tokens it is still known, by enumeration of all groups. Reward and a KL in the reward are divided
  alike; on tokens every sample's advantage is then 0 at the optimum, so that neither the division nor a clip moves it.
* A group's mean holds the sample itself, which shrinks advantages by (G - 1) / G against a KL in the loss.
* Where advantages are not 0 at the optimum, a clip that acts moves it; such rows are on-policy (`minibatches: 1`).
* With log-probs that are means over d elements, a KL in the reward is charged as KL / d, so beta is coefficient / d. A
  KL in the loss is a mean as the policy's own term is, and beta is the coefficient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from uniml_rl.selftest.denoising import DenoisingProblem
from uniml_rl.selftest.running import Problem, train
from uniml_rl.selftest.targets import DataKind, Imitation, Optimum, Preferred, Target
from uniml_rl.selftest.tokens import TokenProblem


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    problem: Literal["tokens", "denoising"]
    algorithm: str
    """The preset."""
    target: Target | None
    """Where training ends; None claims that the expected reward rises."""
    bound: float
    """The largest distance that is left, or the smallest share of the possible rise."""
    variant: str = ""
    """What `parts` change, in words."""
    parts: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the `algorithm` block that replace parts of the preset."""
    stage: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the stage."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Of denoising."""
    data: DataKind | None = None
    """Learn from given samples."""
    iterations: int = 60
    learning_rate: float = 0.1
    """Where it starts; it falls to a fiftieth, linearly."""

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.algorithm, self.problem, self.variant)))

    @property
    def claim(self) -> str:
        return "raises_expected_reward" if self.target is None else f"{self.target.claim}: {self.target}"

    def make_problem(self) -> Problem:
        """The problem, untouched."""
        return TokenProblem() if self.problem == "tokens" else DenoisingProblem(**self.sampling)

    def measure(self, seed: int) -> float:
        """Trains once: the distance that is left, or the share of the possible rise."""
        problem = self.make_problem()
        schedule = {"type": "linear", "decay_iterations": self.iterations, "final_share": 0.02}
        optimizer = {"learning_rate": self.learning_rate, "schedule": schedule}
        algorithm = {"name": self.algorithm, **self.parts}
        stage = {"optimizer": optimizer, **self.stage, "algorithm": algorithm}
        policy = train(problem, stage, self.iterations, self.data, seed)
        if self.target is not None:
            return problem.distance(policy, self.target)
        start = problem.expected_reward(problem.policy())
        return (problem.expected_reward(policy) - start) / (problem.best_reward() - start)

    def worst(self, measured: list[float]) -> float:
        """Of several seeds the one that counts."""
        return min(measured) if self.target is None else max(measured)

    def passes(self, measured: float) -> bool:
        """Whether a measured value keeps the bound; NaN does not."""
        return measured >= self.bound if self.target is None else measured <= self.bound


def _charged(coefficient: float) -> dict[str, Any]:
    return {"coefficient": coefficient, "estimator": "k1", "placement": "reward"}


_LEAVE_ONE_OUT = {"type": "leave_one_out"}
_CRITIC = {"critic": {"hidden_size": 32, "optimizer": {"learning_rate": 0.02}}}
_ON_POLICY = {"epochs": 1, "minibatches": 1}
_LARGE = {"group_size": 128}
_SMALL = {"group_size": 32}
_DANCE = {"sampler": {"type": "dance_sde", "noise_level": 0.8}}
_FEW_DRAWS = {"times": "sampling_grid", "draws": 3}

ROWS: tuple[Row, ...] = (
    # Policy gradients on tokens
    Row(
        "tokens",
        "ppo",
        Optimum(0.25, True),
        0.12,
        parts={"kl": _charged(0.25)},
        stage=_CRITIC,
        learning_rate=0.05,
    ),
    Row("tokens", "grpo", None, 0.7, stage=_SMALL),
    Row(
        "tokens",
        "grpo",
        Optimum(1.0, False, scale="group_std", group_size=16, epsilon=1e-4),
        0.15,
        variant="beta 1",
        parts={"kl": {"coefficient": 1.0}},
        iterations=100,
    ),
    Row("tokens", "grpo", Optimum(0.25, True), 0.12, variant="KL in the reward", parts={"kl": _charged(0.25)}),
    Row("tokens", "dr_grpo", None, 0.7, stage=_SMALL),
    Row(
        "tokens",
        "dr_grpo",
        Optimum(0.25, False, scale="group_mean", group_size=32),
        0.15,
        variant="KL in the loss",
        parts={"kl": {"coefficient": 0.25, "estimator": "k2", "placement": "loss"}},
        stage=_SMALL,
        iterations=100,
    ),
    Row("tokens", "reinforce", None, 0.7, stage=_SMALL),
    Row("tokens", "rloo", Optimum(0.25, True), 0.12, parts={"kl": _charged(0.25)}, iterations=80),
    Row("tokens", "reinforce_plus_plus", Optimum(0.25, True), 0.15, parts={"kl": _charged(0.25)}, iterations=100),
    Row("tokens", "reinforce_plus_plus_baseline", None, 0.7, stage=_SMALL),
    Row("tokens", "dapo", None, 0.5, parts={"overlong": {"maximum": 100}}, stage=_SMALL, iterations=40),
    Row("tokens", "gspo", None, 0.5),
    Row("tokens", "cispo", None, 0.5, stage=_SMALL),
    Row("tokens", "drpo", None, 0.5, stage=_SMALL),
    Row(
        "tokens",
        "ppo_dual_clip",
        Optimum(0.25, True),
        0.12,
        parts={"kl": _charged(0.25)},
        stage=_CRITIC,
        learning_rate=0.05,
    ),
    # Policy gradients on denoising steps
    Row("denoising", "ddpo", None, 0.4, sampling={"sampler": {"type": "ddim"}}, stage=_SMALL, iterations=40),
    Row("denoising", "flow_grpo", None, 0.4, stage=_SMALL, iterations=40),
    Row(
        "denoising",
        "flow_grpo",
        Optimum(0.2, False),
        0.15,
        variant="no std",
        parts={"advantage": _LEAVE_ONE_OUT, "kl": {"coefficient": 0.2}, **_ON_POLICY},
        stage=_LARGE,
    ),
    Row(
        "denoising",
        "flow_grpo",
        Optimum(0.02, False, divergence="prediction_mse"),
        0.15,
        variant="no std, velocity KL",
        parts={
            "advantage": _LEAVE_ONE_OUT,
            "kl": {"coefficient": 0.02, "estimator": "prediction_mse"},
            **_ON_POLICY,
        },
        stage=_LARGE,
        sampling={"steps": 4},
        learning_rate=0.2,
    ),
    *(
        Row(
            "denoising",
            "flow_grpo",
            Optimum(0.2, True),
            0.13,
            variant=f"no std, KL in the reward, {sampler['type']}",
            parts={"advantage": _LEAVE_ONE_OUT, "kl": _charged(0.4), **_ON_POLICY},
            sampling={"sampler": sampler},
            stage=_LARGE,
        )
        for sampler in (
            {"type": "flow_sde"},
            _DANCE["sampler"],
            {"type": "cps"},
            {"type": "ddim"},
        )
    ),
    Row("denoising", "denoising_ppo", None, 0.4, stage=_SMALL | _CRITIC, iterations=40),
    Row(
        "denoising",
        "denoising_ppo",
        Optimum(0.2, True),
        0.13,
        variant="one update per rollout, KL in the reward",
        parts={"kl": _charged(0.4), **_ON_POLICY},
        stage=_LARGE | _CRITIC,
    ),
    Row("denoising", "dance_grpo", None, 0.4, sampling=_DANCE, stage=_SMALL, iterations=40),
    Row("denoising", "flow_cps", None, 0.4, sampling={"sampler": {"type": "cps"}}, stage=_SMALL, iterations=40),
    Row("denoising", "grpo_guard", None, 0.4, stage=_SMALL, iterations=40),
    Row("denoising", "flow_dppo", None, 0.4, stage=_SMALL, iterations=40),
    Row("denoising", "flow_grpo_fast", None, 0.3, sampling={"window": {"steps": (0, 0)}}, stage=_SMALL, iterations=40),
    Row(
        "denoising",
        "mix_grpo",
        None,
        0.3,
        sampling={"window": {"moving": {"size": 1, "every": 5}}},
        stage=_SMALL,
        iterations=40,
    ),
    # Given samples
    Row("tokens", "sft", Imitation(), 0.1, data="demonstrations"),
    Row(
        "denoising",
        "sft",
        Imitation(),
        0.1,
        data="demonstrations",
        parts={"forward": {"times": "sampling_grid"}},
        learning_rate=0.2,
    ),
    Row(
        "tokens",
        "reward_model",
        Preferred("logistic", 1.0, from_reference=False),
        0.1,
        data="preferences",
        parts={"scores_only": False},  # a sample's score is its log-prob
    ),
    Row(
        "tokens",
        "dpo",
        Preferred("logistic", 0.5, from_reference=True),
        0.1,
        data="preferences",
        parts={"loss": {"beta": 0.5}},
        learning_rate=0.2,
    ),
    Row(
        "tokens",
        "ipo",
        Preferred("square", 0.5, from_reference=True),
        0.1,
        data="preferences",
        parts={"loss": {"beta": 0.5}},
    ),
    Row("tokens", "dpo", None, 0.5, variant="own samples"),
    Row("tokens", "kto", None, 0.3, data="labelled"),
    Row("denoising", "kto", None, 0.3, data="labelled", parts={"beta": 3.0, "forward": _FEW_DRAWS}),
    Row(
        "denoising",
        "diffusion_dpo",
        None,
        0.3,
        data="preferences",
        parts={"loss": {"beta": 10.0}, "forward": _FEW_DRAWS},
    ),
    Row(
        "denoising",
        "diffusion_dpo",
        None,
        0.3,
        variant="own samples",
        parts={"forward": _FEW_DRAWS},
        stage=_SMALL,
        iterations=40,
    ),
    # The reward's own gradient
    Row(  # from any of the few steps: the last one alone would be draft
        "denoising",
        "refl",
        None,
        0.5,
        variant="any step",
        parts={"gradient": {"first": 0.0}},
        stage=_SMALL,
        iterations=40,
    ),
    Row("denoising", "draft", None, 0.5, stage=_SMALL, iterations=40),
    Row("denoising", "alignprop", None, 0.5, stage=_SMALL, iterations=40),
    # The forward process of rewarded samples
    Row("denoising", "diffusion_nft", None, 0.4, parts={"forward": _FEW_DRAWS}, iterations=30),
    Row("denoising", "awm", None, 0.4, parts={"forward": _FEW_DRAWS}, iterations=30),
)
