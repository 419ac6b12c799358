"""From per-decision losses to one number: the only place where a loss is averaged.

A step's loss is `sum(values * weights) / denominator`. The weights of a minibatch are computed once, on whole rows; the
minibatch is then cut into micro-batches at will (single denoising steps, chunks of rows), and each cut brings its part
of the weights. The denominator belongs to the whole optimizer step: over every rank and every micro-batch. So the
gradient depends neither on the cutting nor on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

AggregationMode = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sum_over_constant", "prompt_mean"
]
Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor elementwise over all ranks; every rank gets the sum."""


def decision_weights(mask: Tensor, mode: AggregationMode, *, groups: Tensor | None = None) -> Tensor:
    """The weight of each decision before the global denominator.

    With n_b the trained decisions of row b and N_g those of all rows of group g:

        mode                       weight    denominator
        token_mean                 1         sum_b n_b
        sequence_mean_token_mean   1 / n_b   number of rows with n_b > 0
        sequence_mean_token_sum    1         number of rows with n_b > 0
        sum_over_constant          1         the constant, whatever the batch holds
        prompt_mean                1 / N_g   number of groups with N_g > 0

    A row without a trained decision leaves numerator and denominator. `prompt_mean` takes a group's rows to lie in one
    minibatch of one rank; a group that is split counts once per part. Dr. GRPO (Liu et al. 2025) is `sum_over_constant`
    with constant = samples per optimizer step x maximal length.

    Args:
        mask: [B, T] bool, the trained decisions of whole rows.
        groups: [B] int64, read by `prompt_mean` alone.

    Returns:
        [B, T] float32, 0 outside of the mask.
    """
    weights = mask.float()
    if mode == "sequence_mean_token_mean":
        return weights / mask.sum(1, keepdim=True).clamp(min=1)
    if mode == "prompt_mean":
        row_group, decisions = _decisions_per_group(mask, groups)
        return weights / decisions.clamp(min=1)[row_group].unsqueeze(1)
    return weights


def local_denominator(mask: Tensor, mode: AggregationMode, *, groups: Tensor | None = None) -> Tensor:
    """This rank's summand of one optimizer step's denominator (table in `decision_weights`): 0-dim float64.

    `mask` covers everything that the rank contributes to the step. Raises ValueError for `sum_over_constant`, whose
    denominator is no sum over ranks.
    """
    if mode == "token_mean":
        count = mask.sum()
    elif mode == "prompt_mean":
        count = (_decisions_per_group(mask, groups)[1] > 0).sum()
    elif mode in ("sequence_mean_token_mean", "sequence_mean_token_sum"):
        count = mask.any(1).sum()
    else:
        raise ValueError(f"the denominator of {mode!r} is not a sum over ranks; take `global_denominator`.")
    return count.double()


def global_denominator(
    mask: Tensor,
    mode: AggregationMode,
    *,
    groups: Tensor | None = None,
    constant: float | None = None,
    reduce: Reduce | None = None,
) -> Tensor:
    """The denominator of one optimizer step over all ranks (`reduce`): 0-dim float64.

    For `sum_over_constant` it is exactly the constant, on any number of ranks; ValueError if there is none.
    """
    if mode == "sum_over_constant":
        if constant is None:
            raise ValueError("aggregation mode 'sum_over_constant' needs a constant.")
        return torch.tensor(constant, dtype=torch.float64, device=mask.device)
    local = local_denominator(mask, mode, groups=groups)
    return reduce(local) if reduce else local


def aggregate(values: Tensor, weights: Tensor, denominator: Tensor | float) -> Tensor:
    """sum(values * weights) / denominator over one cut: 0-dim float32; the cuts of a step add up to its loss.

    Values [b, t] under a weight [b, t] of 0 are left out, not multiplied by 0, so a NaN there stays there. Without any
    trained decision (denominator 0) the result is 0, still attached to the graph.
    """
    used = weights != 0
    total = (torch.where(used, values.float(), 0.0) * weights).sum()
    denominator = torch.as_tensor(denominator, dtype=torch.float64, device=total.device)
    return total / torch.where(denominator > 0, denominator, 1.0).float()


def _decisions_per_group(mask: Tensor, groups: Tensor | None) -> tuple[Tensor, Tensor]:
    """([B] index of each row's group, [G] trained decisions of each group)."""
    if groups is None:
        raise ValueError("aggregation mode 'prompt_mean' needs the rows' group ids.")
    _, row_group = groups.unique(return_inverse=True)
    decisions = torch.zeros(int(row_group.max()) + 1 if len(row_group) else 0, dtype=torch.long, device=mask.device)
    return row_group, decisions.index_add_(0, row_group, mask.sum(1))
