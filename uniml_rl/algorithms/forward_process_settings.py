"""The `algorithm` block of objectives on the forward process: DiffusionNFT, AWM."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from modalities.errors import UserError
from modalities.forward_process import ForwardProcessSettings
from uniml_rl.algorithms.advantage_settings import AdvantageSettings, GAEAdvantage, GroupAdvantage, ReturnsAdvantage
from uniml_rl.algorithms.algorithm import AlgorithmSettings
from uniml_rl.algorithms.matching import MatchingLoss, OldPolicySettings
from uniml_rl.algorithms.parts import KLSettings


class ForwardProcessAlgorithmSettings(AlgorithmSettings):
    """Reinforcement on noised samples, whatever sampler they come from; see `matching`."""

    kinds: ClassVar[frozenset[str]] = frozenset({"denoising"})

    objective: Literal["forward_process"] = "forward_process"
    """How rewards become a gradient; it comes with the name."""
    loss: MatchingLoss
    """What an advantage does to the denoising loss."""
    advantage: AdvantageSettings
    """How good each sample was; every estimator but gae."""
    forward: ForwardProcessSettings = ForwardProcessSettings()
    """At which times of the forward process samples are trained."""
    old: OldPolicySettings | None = None
    """The policy that follows the trained one; needed by nft, a second reference for awm."""
    kl: KLSettings | None = None
    """Divergence from the reference policy, prediction_mse in the loss; null: none, and no reference is loaded."""

    @model_validator(mode="after")
    def _parts_fit(self) -> ForwardProcessAlgorithmSettings:
        if isinstance(self.advantage, GAEAdvantage | ReturnsAdvantage):
            raise UserError(
                f"advantage.type: {self.advantage.type} assigns credit to decisions, and here a whole sample is "
                "learned from. Take another."
            )
        if isinstance(self.advantage, GroupAdvantage) and self.advantage.normalisation == "per_reward":
            raise UserError("advantage.normalisation: per_reward is for policy gradients. Use total.")
        if self.kl is not None and self.kl.estimator != "prediction_mse":
            raise UserError(
                f"kl.estimator {self.kl.estimator!r} compares the sampler's decisions, and this algorithm trains none "
                "of them. Use prediction_mse, the mean squared difference of the predictions."
            )
        if self.loss.needs_old_policy and self.old is None:
            raise UserError(f"loss.type {self.loss.type!r} compares with the old policy: add an `old` block.")
        if self.old is not None and not (self.loss.needs_old_policy or self.old.pull):
            raise UserError(
                f"the `old` block: loss.type {self.loss.type!r} has no use for an old policy but to be pulled to it. "
                "Give old.pull, or remove the block (old: null)."
            )
        updates = self.epochs * self.minibatches
        if updates > 1 and not (self.loss.needs_old_policy or self.loss.needs_old_log_prob):
            raise UserError(
                f"loss.clip: null with epochs x minibatches = {updates}: without a ratio every sample is taken for one "
                "of the current policy, and after the first update they are not; nothing then bounds how far a bad "
                "sample is pushed away. Give the ratio a clip range (loss.clip), or take one update per rollout."
            )
        return self

    @property
    def compares_groups(self) -> bool:
        return self.advantage.compares_groups
