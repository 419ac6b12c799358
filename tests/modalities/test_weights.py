"""Named weight sets: what is swapped in, what stays, and what may not happen in between."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from modalities.lora import LoraSettings, attach_lora
from modalities.weights import WeightSets

INPUT = torch.linspace(-1, 1, 6).view(2, 3)


def network(lora: bool) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    if lora:
        attach_lora(module, LoraSettings(rank=2), ["0", "1"], seed=0)
    return module


def train(module: nn.Module, seed: int = 1) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))


def output(sets: WeightSets, module: nn.Module, *names: str) -> Tensor:
    """The output inside nested contexts, outermost first."""
    if not names:
        return module(INPUT).detach()
    with sets.using(names[0]):
        return output(sets, module, *names[1:])


@pytest.mark.parametrize("lora", [True, False])
def test_the_reference_stays_what_it_was(lora: bool) -> None:
    module = network(lora)
    before = module(INPUT).detach()
    sets = WeightSets({"m": module})
    sets.keep("reference")
    train(module)
    after = module(INPUT).detach()
    assert not torch.allclose(before, after, atol=1e-2)
    assert torch.equal(output(sets, module, "reference"), before)
    assert torch.equal(module(INPUT).detach(), after)
    copied = [key for key in sets.state() if key.startswith("reference/m.")]
    assert bool(copied) != lora  # an adapter that was never trained is switched off, not copied


@pytest.mark.parametrize("lora", [True, False])
def test_autocast_computes_with_the_set_in_use(lora: bool) -> None:
    module = network(lora)
    sets = WeightSets({"m": module})
    sets.keep("copy")
    train(module)
    expected = {}
    for name in ("copy", "current"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected[name] = output(sets, module, name)
    assert not torch.allclose(expected["copy"], expected["current"], atol=1e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for name in ("current", "copy", "current"):
            assert torch.equal(output(sets, module, name), expected[name])


def test_adapter_off_equals_a_frozen_copy() -> None:
    module = network(lora=True)
    sets = WeightSets({"m": module})
    sets.keep("reference")
    sets.keep("copy")
    train(module)
    torch.testing.assert_close(output(sets, module, "reference"), output(sets, module, "copy"), rtol=0, atol=0)


def test_the_reference_of_a_trained_adapter_is_a_copy_of_it() -> None:
    module = network(lora=True)
    train(module)
    before = module(INPUT).detach()
    sets = WeightSets({"m": module})
    sets.keep("reference")
    train(module, seed=2)
    assert torch.equal(output(sets, module, "reference"), before)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["current", "reference", "old", "ema"]), min_size=1, max_size=4), st.booleans())
def test_the_innermost_context_decides_and_everything_is_undone(names: list[str], lora: bool) -> None:
    module = network(lora)
    sets = WeightSets({"m": module})
    sets.keep("reference")
    expected = {"reference": module(INPUT).detach()}
    for seed, name in enumerate(("old", "ema"), start=1):
        train(module, seed)
        sets.keep(name)
        expected[name] = module(INPUT).detach()
    train(module, seed=3)
    expected["current"] = module(INPUT).detach()
    pointers = [parameter.data_ptr() for parameter in module.parameters()]
    for depth in range(1, len(names) + 1):
        assert torch.equal(output(sets, module, *names[:depth]), expected[names[depth - 1]])
    with pytest.raises(ZeroDivisionError), sets.using(names[0]):
        raise ZeroDivisionError
    assert [parameter.data_ptr() for parameter in module.parameters()] == pointers
    assert torch.equal(module(INPUT).detach(), expected["current"])


def test_training_in_place_never_reaches_a_kept_set() -> None:
    module = network(lora=False)
    sets = WeightSets({"m": module})
    sets.average("ema", 0.9)
    before = output(sets, module, "ema")
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module(INPUT).sum().backward()
    optimizer.step()
    assert torch.equal(output(sets, module, "ema"), before)
    assert not torch.equal(module(INPUT).detach(), before)


def test_the_average_is_the_exponential_one() -> None:
    module = nn.Linear(1, 1, bias=False)
    sets = WeightSets({"m": module})
    values = [3.0, -1.0, 4.0, 2.0]
    for value in values:
        module.weight.data.fill_(value)
        sets.average("ema", 0.75)
    closed_form = 0.75**3 * values[0] + sum(0.25 * 0.75 ** (3 - i) * values[i] for i in (1, 2, 3))
    with sets.using("ema"):
        assert module.weight.item() == pytest.approx(closed_form, rel=1e-6)


def test_an_averaged_reference_starts_from_the_reference() -> None:
    module = network(lora=True)
    before = module(INPUT).detach()
    sets = WeightSets({"m": module})
    sets.keep("reference")
    train(module)
    sets.average("reference", 1.0)
    torch.testing.assert_close(output(sets, module, "reference"), before)
    sets.average("reference", 0.0)
    torch.testing.assert_close(output(sets, module, "reference"), module(INPUT).detach())


@pytest.mark.parametrize("lora", [True, False])
def test_a_loaded_state_brings_every_set_back(lora: bool) -> None:
    module = network(lora)
    sets = WeightSets({"m": module})
    sets.keep("reference")
    train(module)
    sets.keep("ema")
    train(module, seed=2)
    state = {key: value.clone() for key, value in sets.state().items()}
    again = network(lora)
    restored = WeightSets({"m": again})
    restored.load_state(state)
    assert restored.names() == sets.names() == ["current", "ema", "reference"]
    for name in sets.names():
        assert torch.equal(output(restored, again, name), output(sets, module, name))
    state["ema/" + next(iter(sets.parameters()))].zero_()
    assert torch.equal(output(restored, again, "ema"), output(sets, module, "ema"))


def test_a_state_that_does_not_fit_is_refused_whole() -> None:
    module = network(lora=False)
    sets = WeightSets({"m": module})
    state = {key: value.clone() + 1 for key, value in sets.state().items()}
    before = module(INPUT).detach()
    missing = {key: value for key, value in state.items() if "0.bias" not in key}
    for wrong, message in [
        (missing, r"missing \['m\.0\.bias'\]"),
        (state | {"current/m.9.weight": torch.zeros(1)}, r"unexpected \['m\.9\.weight'\]"),
        (state | {"current/m.0.bias": torch.zeros(1)}, r"other shapes for \['m\.0\.bias'\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            sets.load_state(wrong)
    assert torch.equal(module(INPUT).detach(), before)


def test_sets_do_not_change_while_another_one_is_in_use() -> None:
    sets = WeightSets({"m": network(lora=False)})
    sets.keep("old")
    with sets.using("old"):
        for change in (
            lambda: sets.keep("old"),
            lambda: sets.average("ema", 0.5),
            lambda: sets.drop("old"),
            sets.state,
        ):
            with pytest.raises(RuntimeError, match="'old' is in use"):
                change()


def test_an_unknown_set_is_named() -> None:
    sets = WeightSets({"m": network(lora=False)})
    with pytest.raises(KeyError, match="'olt'"), sets.using("olt"):
        pass
    with pytest.raises(ValueError, match="current"):
        sets.keep("current")
