"""A transformers causal language model as the token decisions see it: a trunk, a head applied in chunks, its caches."""

from __future__ import annotations

import inspect
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from modalities.attention import attention_that_runs
from modalities.base import Replay
from modalities.errors import UserError
from modalities.tensor_parallel import divide
from modalities.tokens import Continuations, score_hidden


class CausalTokenModel(nn.Module):
    """A causal language model whose logits exist only where they are asked for.

    Everything is computed inside `forward`, so that hooks of a sharded engine on this module see it. Raises UserError
    if the model does more to its logits after the head than is known here.
    """

    def __init__(self, causal_lm: PreTrainedModel, logits_chunk: int) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.logits_chunk = logits_chunk
        config = causal_lm.config.get_text_config()
        # Gemma caps, Cohere multiplies and Granite divides the logits.
        self._cap = getattr(config, "final_logit_softcapping", None)
        self._scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        accepted = inspect.signature(causal_lm.base_model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self.shares_prompts = all(type(layer) is DynamicLayer for layer in self.new_cache().layers)
        self._check_head()

    def forward(
        self,
        tokens: Tensor | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Any = None,
        continuations: Continuations | None = None,
    ) -> Tensor | Replay:
        """See `modalities.tokens.TokenModel`."""
        if continuations is not None:
            return self._score(continuations)
        # A copy: a sharded engine warns of outputs that are views, as those of a divided head are.
        return self.head(self._trunk(tokens, mask, positions, cache)[:, -1]).clone()

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states."""
        logits = self.causal_lm.get_output_embeddings()(hidden)
        if self._scale != 1:
            logits = logits * self._scale
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)

    def new_cache(self) -> DynamicCache:
        """An empty key-value cache with the layer types of the model."""
        return DynamicCache(config=self.causal_lm.config)

    def divide_heads(self, mesh: DeviceMesh) -> None:
        """Tensor parallelism over a mesh of one dimension: see `modalities.tensor_parallel.divide`."""
        divide(self.causal_lm, mesh)

    def _trunk(self, tokens: Tensor | None, mask: Tensor | None, positions: Tensor | None, cache: Any) -> Tensor:
        arguments: dict[str, Any] = {"use_cache": cache is not None, self._cache_argument: cache}
        if self._takes_positions and positions is not None:
            arguments["position_ids"] = positions
        return self.causal_lm.base_model(tokens, attention_mask=mask, **arguments).last_hidden_state

    def _score(self, given: Continuations) -> Replay:
        shared = self.shares_prompts and len(given.prompt_tokens) < len(given.tokens)
        states_bTD = self._states_shared(given) if shared else self._states(given)
        scored = given.decisions
        features = states_bTD[scored.rows, scored.positions]
        replay = Replay(features=features if "features" in scored.needs else None)
        if scored.needs & {"log_prob", "entropy"}:
            with_entropy = "entropy" in scored.needs
            replay.log_prob, replay.entropy = score_hidden(
                self.head, features, scored.tokens, scored.temperature, with_entropy, self.logits_chunk
            )
        return replay

    def _states(self, given: Continuations) -> Tensor:
        """[b, T, D]: what the model knew when it made each decision, every row by itself."""
        own = given.prompt_of_row
        responses = given.tokens[:, :-1]
        tokens = torch.cat([given.prompt_tokens[own], responses], dim=1)
        mask = torch.cat([given.prompt_mask[own], torch.ones_like(responses)], dim=1)
        width = given.prompt_tokens.shape[1]
        return self._trunk(tokens, mask, positions_of(mask), None)[:, width - 1 :]

    def _states_shared(self, given: Continuations) -> Tensor:
        """The same, each prompt computed once: its keys and values, with their gradient, serve all its rows."""
        own = given.prompt_of_row
        recorded = [_Recorded() for _ in self.new_cache().layers]
        hidden = self._trunk(given.prompt_tokens, given.prompt_mask, positions_of(given.prompt_mask), _cache(recorded))
        first = hidden[:, -1][own][:, None]
        responses = given.tokens[:, :-1]
        if responses.shape[1] == 0:
            return first
        mask = torch.cat([given.prompt_mask[own], torch.ones_like(responses)], dim=1)
        positions = positions_of(mask)[:, given.prompt_tokens.shape[1] :]
        prefix = [_Prefix(layer.keys[own], layer.values[own]) for layer in recorded]
        return torch.cat([first, self._trunk(responses, mask, positions, _cache(prefix))], dim=1)

    @torch.no_grad()
    def _check_head(self) -> None:
        token = torch.zeros(1, 1, dtype=torch.long, device=self.causal_lm.device)
        with attention_that_runs(self.causal_lm):
            expected = self.causal_lm(token, use_cache=False).logits[:, -1].float()
            actual = self.head(self._trunk(token, None, None, None)[:, -1]).float()
        if not torch.allclose(actual, expected, rtol=1e-2, atol=1e-2 * float(expected.std())):
            raise UserError(
                f"{type(self.causal_lm).__name__} changes its logits after the output embedding in a way that is not "
                "supported; use a model whose logits are a linear (capped or scaled) function of the hidden states."
            )


def positions_of(mask: Tensor) -> Tensor:
    """[b, S] int64 positions that count from the first real token, whatever padding is before it."""
    return (mask.cumsum(1) - 1).clamp_min(0)


class _Recorded(DynamicLayer):
    """Remembers the keys and values of one pass. Computing the pass again (checkpointing) changes nothing."""

    keys: Tensor
    values: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0


class _Prefix(DynamicLayer):
    """Puts given keys and values before those of a pass and stays as it is."""

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2)


def _cache(layers: list[Any]) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = layers
    return cache


def checkpoint_layers(model: nn.Module) -> None:
    """Makes every decoder layer compute its activations again in the backward pass instead of keeping them.

    transformers' own switch acts in training mode only, where dropout would be on too. Raises UserError if the model
    has no layers that support it.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"gradient_checkpointing: {type(model).__name__} has no layers that support it; set it to false."
        )
    inner = {id(child) for layer in layers for child in layer.modules() if child is not layer}
    for layer in layers:
        if id(layer) not in inner:
            layer.__class__ = _checkpointed(type(layer))  # type: ignore[assignment, arg-type]


@cache
def _checkpointed(layer_class: type[nn.Module]) -> type[nn.Module]:
    # A class and not a function put on the layer: a copy of the layer must not call the original.
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        compute = partial(layer_class.forward, self)
        if not torch.is_grad_enabled():
            return compute(*args, **kwargs)
        return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return type(layer_class.__name__, (layer_class,), {"forward": forward, "__module__": layer_class.__module__})
