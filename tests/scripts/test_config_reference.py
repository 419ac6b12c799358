"""The config reference: complete, linked, and the one in docs/ is what the schema says."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from modalities.settings import Settings
from uniml_rl.build import RunConfig
from uniml_rl.config import typed_block

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "config_reference.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("config_reference", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Common(Settings):
    """What every pet has."""

    weight: float = Field(default=1.5, gt=0)
    """How heavy."""


class Cat(Common):
    """A cat."""

    lives: int = 9
    """How many | are left."""


class Dog(Common):
    """A dog."""

    weight: float = 30
    """Heavier than others."""
    bark: Literal["loud", "soft"] = "loud"
    """How it barks."""


class Bowl(Settings):
    """What it eats from."""

    litres: float
    """How much fits in."""


class House(Settings):
    """A house."""

    pets: dict[str, Annotated[Any, typed_block({"cat": f"{__name__}:Cat", "dog": f"{__name__}:Dog"}, "pet")]]
    """Who lives there."""
    bowls: list[Bowl] = Field(default_factory=list)
    """What stands around."""
    address: str | None = None
    """Where it is."""


def test_each_key_has_its_row_with_what_is_allowed_its_default_and_its_docstring(script: ModuleType) -> None:
    page = script.reference(House)
    for row in (
        "| `pets` | a mapping from names to [`type: cat`](#pet-cat) or [`type: dog`](#pet-dog) | required |",
        "| `bowls` | a list, each [a block](#bowls) | `[]` | What stands around. |",
        "| `address` | text or null | `null` | Where it is. |",
        "| `lives` | a whole number | `9` | How many \\| are left. |",
        "| `bark` | one of 'loud', 'soft' | `loud` | How it barks. |",
        "| `litres` | a number | required | How much fits in. |",
    ):
        assert row in page
    assert page.count("| `weight` |") == 2  # of every pet, and the dog's own


def test_a_key_without_a_docstring_is_refused_by_name(script: ModuleType) -> None:
    class Silent(Settings):
        """A block."""

        said: int = 1
        """It is documented."""
        unsaid: int = 1

    with pytest.raises(ValueError, match=r"Silent\.unsaid$"):
        script.reference(Silent)


def test_the_page_in_docs_is_what_the_schema_says_and_its_links_lead_somewhere(script: ModuleType) -> None:
    page = script.reference(RunConfig)
    anchors = re.findall(r'<a id="([^"]+)">', page)
    assert len(anchors) == len(set(anchors)) > 30
    assert set(re.findall(r"\(#([^)]+)\)", page)) <= set(anchors)
    assert script.PAGE.read_text(encoding="utf-8") == page, "run `python scripts/config_reference.py`"
