"""Losses over pairs and over labelled samples, in float32. None of these is averaged here."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def sample_scores(log_probs: Tensor, mask: Tensor, *, draws: bool, per_decision: bool = False) -> Tensor:
    """[b, u] the log-likelihood of each sample: the sum of its decisions' log-probs under the mask, u = 1.

    With `draws` the t decisions are t draws of one quantity (the forward process's times) and stay apart, u = t.
    With `per_decision` the sum is divided by the number of decisions.
    """
    kept = torch.where(mask, log_probs, 0.0)
    if draws:
        return kept
    total = kept.sum(1, keepdim=True)
    return total / mask.sum(1, keepdim=True).clamp(min=1) if per_decision else total


def logistic_preference_loss(margin: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """DPO (Rafailov et al. 2023, eq. 7): -log sigmoid(beta h), h = log-ratio of chosen - log-ratio of rejected.

    With label smoothing s it is the conservative form (Mitchell 2023): a label is wrong with probability s.
    """
    loss: Tensor = -(1 - label_smoothing) * logsigmoid(beta * margin)
    return loss - label_smoothing * logsigmoid(-beta * margin) if label_smoothing else loss


def kto_loss(
    log_ratios: Tensor,
    desirable: Tensor,
    drift: Tensor,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """KTO (Ethayarajh et al. 2024, eq. 8): lambda_y - v, v = lambda_D sigmoid(beta (r - z)) of desirable samples and
    lambda_U sigmoid(beta (z - r)) of the others; z >= 0 is the detached estimate of KL(pi || pi_ref).

    Args:
        log_ratios: [b, u] float32, log pi - log pi_ref of whole samples.
        desirable: [b] bool.
        drift: 0-dim, z, not below 0 and without gradient.
        desirable_weight, undesirable_weight: lambda_D and lambda_U.
    """
    distance = beta * (log_ratios - drift)
    good = desirable_weight * (1 - torch.sigmoid(distance))
    bad = undesirable_weight * (1 - torch.sigmoid(-distance))
    return torch.where(desirable.unsqueeze(1), good, bad)
