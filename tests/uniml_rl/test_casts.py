"""Weights in half precision: what autograd keeps of their casts, and the gradients without."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from uniml_rl.engines.casts import saving_no_casts


def passed(saving: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of a pass in bfloat16, and what it kept in that type."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24, bias=False))
    model[0].bias.requires_grad_(False)
    rows, kept = torch.randn(3, 5, 24, requires_grad=True), list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    casting = torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)
    with casting, saving_no_casts() if saving else nullcontext(), hooks:
        loss = model(rows).float().square().sum()
    loss.backward()
    found = [rows.grad, model[0].weight.grad, model[2].weight.grad]
    return [each for each in found if each is not None], [each for each in kept if each.dtype == torch.bfloat16]


def test_no_cast_of_a_weight_is_kept_and_gradients_stay() -> None:
    (expected, before), (gradients, kept) = passed(saving=False), passed(saving=True)
    sizes = {24 * 40}
    assert any(each.numel() in sizes for each in before)
    assert kept and not any(each.numel() in sizes for each in kept)
    for found, wanted in zip(gradients, expected, strict=True):
        assert found.dtype == torch.float32
        assert float((found - wanted).norm() / wanted.norm()) < 1e-3


def test_other_passes_are_torchs_own() -> None:
    """In float32, without gradient, and of weights in half precision nothing is cast."""
    layer, half = nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16)
    rows = torch.randn(2, 3, 8)
    with saving_no_casts():
        assert "Remembering" not in type(layer(rows).grad_fn).__name__
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert "Remembering" in type(layer(rows).grad_fn).__name__
            assert "Remembering" not in type(half(rows).grad_fn).__name__
            with torch.no_grad():
                assert layer(rows).grad_fn is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "Remembering" not in type(layer(rows).grad_fn).__name__
