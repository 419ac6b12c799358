"""Weights in half precision: what autograd keeps of their casts, and the gradients without."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from uniml_rl.engines.casts import saving_no_casts


def linear() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24, bias=False))
    model[0].bias.requires_grad_(False)
    return model, torch.randn(3, 5, 24)


def convolutions(dimensions: int) -> tuple[nn.Module, Tensor]:
    kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
    model = nn.Sequential(
        kind(4, 6, 3, padding=1),
        nn.GELU(),
        kind(6, 8, 3, stride=2, padding=1, groups=2, bias=False),
        nn.GELU(),
        kind(8, 5, 1, dilation=2),
    )
    return model, torch.randn(2, 4, *[6] * dimensions)


MODELS = {"linear": linear} | {f"{d} dimensions": partial(convolutions, d) for d in (1, 2, 3)}


def passed(name: str, saving: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of a pass in bfloat16, and the casts of weights that it kept."""
    torch.manual_seed(0)
    model, rows = MODELS[name]()
    rows.requires_grad_(True)
    kept = list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    casting = torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)
    with casting, saving_no_casts() if saving else nullcontext(), hooks:
        loss = model(rows).float().square().sum()
    loss.backward()
    found = [rows.grad, *(parameter.grad for parameter in model.parameters())]
    shapes = {parameter.shape for parameter in model.parameters() if parameter.ndim > 1}
    shapes |= {torch.Size(reversed(shape)) for shape in shapes}  # a linear layer keeps its weight turned
    casts = [each for each in kept if each.dtype == torch.bfloat16 and each.shape in shapes]
    return [each for each in found if each is not None], casts


@pytest.mark.parametrize("name", MODELS)
def test_no_cast_of_a_weight_is_kept_and_gradients_stay(name: str) -> None:
    (expected, before), (gradients, kept) = passed(name, saving=False), passed(name, saving=True)
    assert before and not kept
    assert len(gradients) == len(expected) > 2
    for found, wanted in zip(gradients, expected, strict=True):
        assert found.dtype == torch.float32
        assert float((found - wanted).norm() / wanted.norm()) < 1e-3


def test_other_passes_are_torchs_own() -> None:
    """In float32, without gradient, and of weights in half precision nothing is cast."""
    layer, half = nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16)
    same = nn.Conv1d(3, 3, 3, padding="same")
    rows = torch.randn(2, 3, 8)
    with saving_no_casts():
        assert "Remembering" not in type(layer(rows).grad_fn).__name__
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert "Remembering" in type(layer(rows).grad_fn).__name__
            assert "Remembering" not in type(half(rows).grad_fn).__name__
            assert "Remembering" not in type(same(rows).grad_fn).__name__
            with torch.no_grad():
                assert layer(rows).grad_fn is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "Remembering" not in type(layer(rows).grad_fn).__name__
