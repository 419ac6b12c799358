"""Settings beside a model: in a folder, in the hub's cache, and where neither has them."""

import json

import huggingface_hub
import pytest

from modalities.errors import UserError
from rewards.model_files import read_settings
from rewards.packages import need_package


def test_settings_of_a_folder(tmp_path):
    (tmp_path / "a.json").write_text('{"x": 1}')
    assert read_settings(tmp_path, "a.json") == {"x": 1}
    assert read_settings(tmp_path, "b.json") is None


def test_settings_of_a_hub_id_without_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    commit = "0" * 40
    repository = tmp_path / "models--someone--tiny"
    for folder in ("refs", f"snapshots/{commit}", f".no_exist/{commit}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit / "config.json").write_text(json.dumps({"model_type": "clip"}))
    (repository / ".no_exist" / commit / "absent.json").touch()
    assert read_settings("someone/tiny", "config.json") == {"model_type": "clip"}
    assert read_settings("someone/tiny", "absent.json") is None
    with pytest.raises(UserError, match="'someone/tiny' could not be loaded"):
        read_settings("someone/tiny", "unknown.json")


def test_a_missing_package_is_named_with_its_command():
    with pytest.raises(UserError, match="pip install some-distribution"):
        need_package("package_that_nobody_has.part", "some-distribution")
    assert need_package("json.decoder", "json").JSONDecoder is json.JSONDecoder
