"""The configuration that every denoising policy shares: samplers, what one sampling run is, how the model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from modalities.attention import choose_attention
from modalities.base import PolicyConfig
from modalities.errors import UserError
from modalities.lora import LoraSettings, require_float32_when_trained
from modalities.pipeline_folder import component_config, empty_components, pipeline_class, pipeline_folder
from modalities.randomness import SampleKey, seeded_generator
from modalities.samples import Prompt
from modalities.settings import Settings
from modalities.summary import PolicySummary, RowMemory, sizes_of

if TYPE_CHECKING:
    from modalities.denoising import DenoisingPolicy, Families
    from modalities.noise_process import Schedule


class FlowSde(Settings):
    """Flow-SDE (Flow-GRPO, Liu et al. 2025); flow models."""

    type: Literal["flow_sde"] = "flow_sde"
    """Selects this sampler."""
    noise_level: float = Field(default=0.7, gt=0)
    """The paper's a: noise a * sqrt(sigma / (1 - sigma)) per unit of time; the std of the first transition."""


class DanceSde(Settings):
    """The SDE of DanceGRPO (Xue et al. 2025); flow models."""

    type: Literal["dance_sde"] = "dance_sde"
    """Selects this sampler."""
    noise_level: float = Field(default=0.3, gt=0)
    """The paper's eta: the same noise at every time."""


class Cps(Settings):
    """Coefficients-preserving sampling (Flow-CPS, Wang and Yu 2025); flow models."""

    type: Literal["cps"] = "cps"
    """Selects this sampler."""
    noise_level: float = Field(default=0.8, gt=0, le=1)
    """The paper's a: a share sin(a pi / 2) of the noise is drawn afresh at each step. It contracts the marginals."""
    log_prob: Literal["gaussian", "unnormalised"] = "gaussian"
    """`gaussian` is the transition's log-density; `unnormalised` is the paper's -(x' - mean)^2."""


class Ddim(Settings):
    """DDIM with noise (Song et al. 2021), the sampler of DDPO and DPOK; Stable Diffusion 1.x/2.x."""

    type: Literal["ddim"] = "ddim"
    """Selects this sampler."""
    eta: float = Field(default=1.0, ge=0, le=1)
    """Share of DDPM's noise: 1 samples as DDPM, 0 is deterministic."""


class Ode(Settings):
    """The deterministic sampler: Euler steps of a flow, DDIM with eta 0 for a diffusion model. Nothing to train."""

    type: Literal["ode"] = "ode"
    """Selects this sampler."""


Sampler = Annotated[FlowSde | DanceSde | Cps | Ddim | Ode, Field(discriminator="type")]


class MovingWindow(Settings):
    """A window that moves down the schedule in the course of training (MixGRPO, Li et al. 2025).

    Its place is a function of the run's seed and the iteration, so a resumed run finds it where it was. It is always
    whole: the last place ends at the last stochastic transition, where the published code lets the window run out.
    The paper's exponentially decaying interval is left out.
    """

    size: int = Field(default=4, ge=1)
    """Transitions in it."""
    stride: int = Field(default=1, ge=1)
    """Transitions that it moves by."""
    every: int = Field(default=25, ge=1)
    """Iterations that it stays in one place."""
    strategy: Literal["progressive", "random"] = "progressive"
    """`progressive` moves from noise to sample; `random` draws each place anew and reads no `stride`."""
    at_end: Literal["wrap", "stay"] = "wrap"
    """After the last place of `progressive`: from the start again, as the published runs do, or stay there."""

    def steps_at(self, key: SampleKey, stochastic: Sequence[int]) -> tuple[int, int]:
        """First and last step in the iteration of `key`, of the steps that draw noise at all; UserError if too few."""
        last = len(stochastic) - self.size
        if last < 0:
            raise UserError(
                f"sampling.window.moving.size: {self.size} transitions, but only {len(stochastic)} of the schedule are "
                "stochastic; take a smaller window, more steps or another sampler."
            )
        moves = key.iteration // self.every
        if self.strategy == "random":
            generator = seeded_generator(key.run_seed, key.stage, moves)
            place = int(torch.randint(last + 1, (1,), generator=generator))
        else:
            places = [*range(0, last, self.stride), last]
            place = places[moves % len(places) if self.at_end == "wrap" else min(moves, len(places) - 1)]
        return stochastic[place], stochastic[place + self.size - 1]


class Window(Settings):
    """The transitions that are stochastic and trained (MixGRPO, Li et al. 2025); the others are deterministic."""

    steps: tuple[int, int] | None = None
    """First and last step, counted from 0, both included."""
    noise_levels: tuple[float, float] | None = None
    """Lowest and highest noise level where a transition may start: sigma, or sqrt(1 - alpha) of a diffusion model."""
    moving: MovingWindow | None = None
    """Steps that change with the iteration; all samples of an iteration have the same."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Window:
        if sum(form is not None for form in (self.steps, self.noise_levels, self.moving)) != 1:
            raise ValueError("give exactly one of `steps`, `noise_levels` and `moving`.")
        low, high = self.steps if self.steps is not None else self.noise_levels or (0, 0)
        if not 0 <= low <= high:
            raise ValueError(f"({low}, {high}) must be ordered and not negative.")
        return self


class DenoisingSampling(Settings):
    """How samples are drawn; evaluation usually has its own block (no noise, more steps)."""

    steps: int = Field(default=10, ge=1)
    """Denoising transitions from noise to sample."""
    sampler: Sampler | None = None
    """Transition kernel; None takes `flow_sde` for flow models and `ddim` for Stable Diffusion 1.x/2.x."""
    guidance_scale: float = Field(default=1.0, ge=1)
    """Classifier-free guidance (Ho and Salimans 2022), in rollout and replay alike; 1 is off and halves the work."""
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    """Guide only the steps i of T with start <= i / T < end (Kynkaanniemi et al. 2024); (0, 1) guides them all."""
    negative_prompt: str = ""
    """Negative prompt of every prompt that brings none of its own; read only with guidance."""
    shift: float | None = Field(default=None, gt=0)
    """Flow models: a schedule uniform in time and shifted once by this; None takes exactly the schedule of the
    pipeline's own scheduler (which shifts its last sigma twice)."""
    window: Window | None = None
    """Train only these transitions and draw the others without noise; None trains every stochastic one."""
    shared_initial_noise: bool = False
    """Samples of one prompt start from the same noise (DanceGRPO); their later noise still differs."""
    log_prob_unit: Literal["element_mean", "element_sum"] = "element_mean"
    """A transition's log-prob as the mean or the sum over the latent's elements; clip ranges depend on it."""
    height: int | None = Field(default=None, ge=1)
    """Height in pixels; None takes the model's own."""
    width: int | None = Field(default=None, ge=1)
    """Width in pixels; None takes the model's own."""

    @model_validator(mode="after")
    def _interval_is_ordered(self) -> DenoisingSampling:
        start, end = self.guidance_interval
        if not 0 <= start < end <= 1:
            raise ValueError(f"guidance_interval ({start}, {end}) must satisfy 0 <= start < end <= 1.")
        return self

    @model_validator(mode="after")
    def _deterministic_sampling_is_not_confused(self) -> DenoisingSampling:
        if isinstance(self.sampler, Ode) and self.shared_initial_noise:
            raise ValueError(
                "with the sampler `ode` and shared_initial_noise all samples of a prompt would be the same; set "
                "`shared_initial_noise: false`."
            )
        if isinstance(self.sampler, Ode) and self.window is not None:
            raise ValueError("a window picks stochastic steps, and the sampler `ode` has none; set `window: null`.")
        return self


class DenoisingSettings(PolicyConfig):
    """What every denoising policy's block has: a diffusers pipeline folder, and how it is trained and sampled."""

    model: str
    """Folder or hub id of a diffusers pipeline."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the text encoders and of the denoiser under an adapter. Trainable weights, latents and the decoder are
    always float32, so full fine-tuning takes no other; computing in bfloat16 is the engine's `precision`."""
    attention: Literal["auto", "sdpa", "flash_attention_2", "xformers"] = "auto"
    """Attention kernel of the denoiser. `auto` is, on a GPU, flash-attn or else xformers where they are installed and
    the denoiser takes them, and otherwise PyTorch's scaled_dot_product_attention. The two want queries, keys and values
    of one type, which autocast over a float32 `dtype` does not always give: there `auto` takes neither. `check` prints
    which one it is."""
    lora: LoraSettings | None = None
    """Train a low-rank adapter on the denoiser; None trains all of its weights."""
    trust_remote_code: bool = False
    """Allow Python code that comes with the model folder to run."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    guidance_gradient: bool = True
    """Whether gradient also flows through the unconditional branch of the guidance (DDPO: yes; Flow-GRPO: no, which
    saves time and memory and leaves out a part of the log-prob's gradient)."""
    max_sequence_length: int | None = Field(default=None, ge=0)
    """Tokens of the T5 text encoder (Stable Diffusion 3, Wan); None takes the pipeline's default."""
    storage_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Latents are rounded to this and kept in it between rollout and replay; scored after rounding."""
    sampling_rows: int = Field(default=16, ge=1)
    """Rows that are encoded and denoised together in a rollout."""
    decoding_rows: int = Field(default=4, ge=1)
    """Rows that the VAE decodes together."""
    vae_tiling: bool = False
    """Decode large images tile by tile: less memory, faint seams."""
    sampling: DenoisingSampling = DenoisingSampling()
    """How samples are drawn in training."""

    @model_validator(mode="after")
    def _trained_weights_are_float32(self) -> DenoisingSettings:
        require_float32_when_trained(self.dtype, self.lora)
        return self

    def families(self) -> Families:
        """The supported pipeline classes by name."""
        raise NotImplementedError

    def _family(self) -> tuple[type[DenoisingPolicy], Path]:
        folder, families = pipeline_folder(self.model), self.families()
        family = families[pipeline_class(folder, families)]
        if self.max_sequence_length is not None and not family.reads_max_sequence_length:
            raise UserError("max_sequence_length: this model's text encoder has a fixed length; remove the key.")
        family.check_folder(folder)
        return family, folder

    def settled(self, device: str, precision: torch.dtype) -> DenoisingSettings:
        """See `PolicyConfig.settled`: the attention kernel."""
        family, _ = self._family()
        weights = getattr(torch, self.dtype)
        is_half = {precision, weights} != {torch.float32}
        # Autocast computes norms of queries and keys in float32 over a float32 denoiser, and values in its own type.
        is_mixed = is_half and weights == torch.float32
        offered = () if is_mixed and self.attention == "auto" else family.attention_kernels
        kernel = choose_attention(self.attention, offered, device, is_half)
        return self.model_copy(update={"attention": kernel})

    def build(self, name: str, device: str, seed: int) -> DenoisingPolicy:
        """The policy; the class that the folder's model_index.json names chooses its family. UserError if none fits."""
        family, folder = self._family()
        return family(name, self, folder, device, seed)

    def inspect(self) -> PolicySummary:
        """Counts parameters from the folder's configurations and file headers.

        UserError if `sampling` does not fit the model.
        """
        family, folder = self._family()
        components = empty_components(folder, family.absent_components())
        denoiser, vae = components[family.denoiser_component], components["vae"]
        process = family.process_type(component_config(folder, "scheduler"))

        def fit(prompts: Sequence[Prompt], sampling: DenoisingSampling) -> int:
            family.schedule_of(sampling, process, denoiser.config, vae.config)
            return 0

        schedule = family.schedule_of(self.sampling, process, denoiser.config, vae.config)
        shape = family.latent_shape_of(self.sampling, denoiser.config, vae.config)
        family.make_trainable(denoiser, self.lora, seed=0)
        size = getattr(torch, self.dtype).itemsize
        beside = [
            (component, 4 if name == "vae" else size)
            for name, component in components.items()
            if isinstance(component, nn.Module) and component is not denoiser
        ]
        return PolicySummary(
            model=f"{self.model} ({pipeline_class(folder, self.families())})",
            sample_kind=family.sample_kind,
            decisions=[("denoising", schedule.log_prob_unit)],
            offers=family.offers,
            weights=sizes_of([denoiser], size, beside),
            feature_size=family.feature_size_of(denoiser.config),
            windowed=self.sampling.window is not None,
            sampling=self.sampling,
            attention=self.attention,
            fit=fit,
            rows=[self._row_memory(family.activations(denoiser.config, shape, self), schedule)],
        )

    def _row_memory(self, activations: int, schedule: Schedule) -> RowMemory:
        with_negative = self.guidance_gradient and bool((schedule.guidance_scale != 1).any())
        return RowMemory(1, 0, self.sampling_rows, activations * (2 if with_negative else 1))
