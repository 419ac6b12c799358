"""The registries: every family of components by name. The only file that knows them all."""

from __future__ import annotations

from typing import Annotated, Any

from uniml_rl.config import typed_block

POLICIES = {
    "text": "modalities.text:TextPolicyConfig",
    "image": "modalities.image.config:ImagePolicyConfig",
    "video": "modalities.video.config:VideoPolicyConfig",
    "audio": "modalities.audio:AudioPolicyConfig",
    "chain": "modalities.chain:ChainPolicyConfig",
    "text_reward_model": "modalities.reward_model:TextRewardModelConfig",
    "image_text_reward_model": "modalities.reward_model:ImageTextRewardModelConfig",
}
PROMPTS = {
    "file": "uniml_rl.data.prompts:FilePromptsConfig",
    "reasoning_gym": "uniml_rl.data.prompts:ReasoningGymPromptsConfig",
}
RECORDS = {
    "demonstrations": "uniml_rl.data.records:DemonstrationsConfig",
    "preferences": "uniml_rl.data.records:PreferencesConfig",
    "labelled": "uniml_rl.data.records:LabelledConfig",
}
REWARDS = {
    "exact_match": "rewards.text:ExactMatchConfig",
    "regex": "rewards.text:RegexConfig",
    "length": "rewards.text:LengthConfig",
    "repetition": "rewards.text:RepetitionConfig",
    "distinct_n": "rewards.text:DistinctNConfig",
    "sentiment": "rewards.text_models:SentimentConfig",
    "topicality": "rewards.text_models:TopicalityConfig",
    "reasoning_gym": "rewards.text_models:ReasoningGymConfig",
    "jpeg_size": "rewards.image:JpegSizeConfig",
    "mean_colour": "rewards.image:MeanColourConfig",
    "clip_score": "rewards.clip:ClipScoreConfig",
    "image_text_scorer": "rewards.clip:ImageTextScorerConfig",
    "reward_model": "rewards.reward_model:ModelRewardConfig",
    "frame_smoothness": "rewards.video:FrameSmoothnessConfig",
    "per_frame": "rewards.video:PerFrameConfig",
    "rms_level": "rewards.audio:RmsLevelConfig",
    "spectral_centroid": "rewards.audio:SpectralCentroidConfig",
}
ENGINES = {
    "torch": "uniml_rl.engines.torch_engine:TorchEngineConfig",
    "deepspeed": "uniml_rl.engines.deepspeed_engine:DeepSpeedEngineConfig",
}

OBJECTIVES = {
    "policy_gradient": "uniml_rl.objectives.policy_gradient:PolicyGradientObjective",
    "supervised": "uniml_rl.objectives.supervised:SupervisedObjective",
    "preference": "uniml_rl.objectives.preference:PreferenceObjective",
    "kto": "uniml_rl.objectives.kto:KTOObjective",
    "reward_gradient": "uniml_rl.objectives.reward_gradient:RewardGradientObjective",
    "forward_process": "uniml_rl.objectives.forward_process:ForwardProcessObjective",
}

PolicyBlock = Annotated[Any, typed_block(POLICIES, "policy")]
PromptsBlock = Annotated[Any, typed_block(PROMPTS, "prompt source")]
RecordsBlock = Annotated[Any, typed_block(RECORDS, "records")]
RewardBlock = Annotated[Any, typed_block(REWARDS, "reward")]
EngineBlock = Annotated[Any, typed_block(ENGINES, "engine", default="torch")]
