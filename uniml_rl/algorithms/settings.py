"""Every `algorithm` block, told apart by its objective, which comes with the name."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from uniml_rl.algorithms.direct_settings import (
    KTOSettings,
    PreferenceSettings,
    RewardGradientSettings,
    SupervisedSettings,
)
from uniml_rl.algorithms.forward_process_settings import ForwardProcessAlgorithmSettings
from uniml_rl.algorithms.policy_gradient_settings import PolicyGradientSettings

AnyAlgorithm = Annotated[
    PolicyGradientSettings
    | SupervisedSettings
    | PreferenceSettings
    | KTOSettings
    | RewardGradientSettings
    | ForwardProcessAlgorithmSettings,
    Field(discriminator="objective"),
]
