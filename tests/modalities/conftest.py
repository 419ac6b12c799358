"""Tiny diffusers pipelines, each made once per test run."""

from pathlib import Path

import pytest
from tiny_models_diffusion import tiny_stable_diffusion, tiny_stable_diffusion_3, tiny_wan


@pytest.fixture(scope="session")
def stable_diffusion_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_stable_diffusion(tmp_path_factory.mktemp("models") / "stable-diffusion")


@pytest.fixture(scope="session")
def stable_diffusion_3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_stable_diffusion_3(tmp_path_factory.mktemp("models") / "stable-diffusion-3")


@pytest.fixture(scope="session")
def wan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_wan(tmp_path_factory.mktemp("models") / "wan")
