"""Files: what is read is what was written, and what cannot be read is named with its file and place."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from modalities.errors import UserError
from uniml_rl.data.prompts import FilePromptsConfig, ReasoningGymPromptsConfig
from uniml_rl.data.shards import StoredBytes

PNG = bytes(range(256)) * 5


def build(path: Path | str | list[str], **keys):
    return FilePromptsConfig(path=path if isinstance(path, list) else str(path), shuffle=False, **keys).build(seed=0)


def texts(path: Path | str | list[str], **keys) -> list[str]:
    stream = build(path, **keys)
    return [prompt.text for prompt in stream.first(stream.size)]


def write_shard(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """Three records of two members each, every payload one block."""
    return write_shard(
        tmp_path / "three.tar",
        [m for i in range(3) for m in ((f"{i}.png", PNG[:400]), (f"{i}.json", b'{"caption": "picture %d"}' % i))],
    )


def test_text_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("﻿a red fox\r\n\n   \n two  words \u2028 here\nlast".encode())
    assert texts(path) == ["a red fox", "two  words \u2028 here", "last"]
    assert [p.index for p in build(path, skip=1).first(9)] == [1, 2], "an index is the place in the whole source"
    assert texts(path, skip=1, limit=1) == ["two  words \u2028 here"]
    assert texts(path, template="Draw {text}!", limit=1) == ["Draw a red fox!"]


def test_json_lines_keep_the_record_for_rewards(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "1+1", "answer": 2, "not": None, "extra": {"level": "easy"}}, {"prompt": "é", "not": "blurry"}]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    first, second = build(path, negative_field="not").first(2)
    assert (first.text, first.negative, first.record["answer"]) == ("1+1", None, 2)
    assert (second.text, second.negative) == ("é", "blurry")
    assert texts(path, template="{prompt} ({extra[level]})", limit=1) == ["1+1 (easy)"]


def test_several_files_braces_and_wildcards_keep_their_order(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(f"from {name}\n")
    (tmp_path / "d.jsonl").write_text('{"text": "from d"}\n')
    assert texts(tmp_path / "*.txt") == ["from a", "from b", "from c"]
    assert texts(f"{tmp_path}/{{c,a}}.txt") == ["from c", "from a"]
    assert texts([f"{tmp_path}/d.jsonl", f"{tmp_path}/a.txt"]) == ["from d", "from a"]


def test_bundled_paths_are_the_repositorys_assets() -> None:
    prompts = texts("bundled:prompts/image_train.txt")
    assert len(prompts) > 100 and "grinning face" in prompts


def test_shards_agree_with_webdataset_and_images_stay_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "set-000.tar"
    with webdataset.TarWriter(str(path)) as writer:
        for i in range(4):
            writer.write({"__key__": f"deep/{i:03d}", "png": PNG[i:], "txt": f"caption {i}", "json": {"style": i}})
    expected = [
        (s["__key__"], s["txt"].decode(), s["png"]) for s in webdataset.WebDataset(str(path), shardshuffle=False)
    ]
    prompts = build(f"{tmp_path}/set-{{000..000}}.tar").first(9)
    assert all(isinstance(p.record["png"], StoredBytes) for p in prompts)
    assert [(p.record["__key__"], p.text, p.record["png"].read()) for p in prompts] == expected
    assert [p.record["style"] for p in prompts] == [0, 1, 2, 3]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_shard_cut_anywhere_is_an_error_that_names_the_byte(tmp_path_factory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("cut")
    whole = write_shard(folder / "whole.tar", [(f"{i}.txt", b"x" * (300 * i + 1)) for i in range(4)])
    content = whole.read_bytes().rstrip(b"\0")  # cut within what matters, not within the padding at the end
    payload_end = len(content)
    cut = folder / "cut.tar"
    cut.write_bytes(content[: data.draw(st.integers(0, payload_end))])
    with pytest.raises(UserError, match=r"cut\.tar.*byte \d+"):
        build(cut)


@pytest.mark.parametrize("member", range(6))
def test_a_damaged_header_is_not_taken_for_the_archives_end(shard: Path, member: int) -> None:
    content = bytearray(shard.read_bytes())
    offset = 1024 * member
    content[offset + 150] ^= 0xFF  # within the header's checksum
    shard.write_bytes(content)
    with pytest.raises(UserError, match=rf"three\.tar.*byte {offset}\b"):
        build(shard)


def test_a_shard_that_shrank_later_is_an_error_when_its_image_is_read(shard: Path) -> None:
    stored = build(shard).first(3)[2].record["png"]
    shard.write_bytes(shard.read_bytes()[: stored.offset + 5])
    with pytest.raises(UserError, match=r"three\.tar.*'2\.png'"):
        stored.read()


def _file(name: str, content: str | bytes, message: str, **keys) -> object:
    return pytest.param(name, content.encode() if isinstance(content, str) else content, keys, message, id=message[:40])


@pytest.mark.parametrize(
    ("name", "content", "keys", "message"),
    [
        _file("a.txt", "", r"a\.txt holds no prompts"),
        _file("a.txt", "\n \n", r"a\.txt holds no prompts"),
        _file("a.txt", b"fine\nb\xff\n", r"a\.txt:2: not UTF-8"),
        _file("a.txt", "one\n", r"skip: 1 leaves none of the 1", skip=1),
        _file("a.jsonl", '{"text": "a"}\n{"text": "b', r"a\.jsonl:2: not JSON, column 10.*file may be cut"),
        _file("a.jsonl", '{"text": "a"}\n{oops}\n{"text": "c"}\n', r"a\.jsonl:2: not JSON, column 2"),
        _file("a.jsonl", '["text"]\n', r"a\.jsonl:1: expected a JSON object, found list"),
        _file("a.jsonl", '{"text": 3}\n', r"a\.jsonl:1: the prompt must be a text"),
        _file("a.jsonl", '{"text": " "}\n', r"a\.jsonl:1: the prompt must be a text that is not blank"),
        _file("a.jsonl", '{"body": "a"}\n', r"a\.jsonl:1: none of the fields.*has body.*text_field"),
        _file("a.jsonl", '{"x": 1}\n', r"a\.jsonl:1: text_field 'capton'.*has x", text_field="capton"),
        _file("a.jsonl", '{"text": "a", "bad": 1}\n', r"a\.jsonl:1: negative_field 'bad' must", negative_field="bad"),
        _file("a.jsonl", '{"text": "a"}\n', r"negative_field 'tex'.*did you mean 'text'", negative_field="tex"),
        _file("a.jsonl", '{"text": "a"}\n', r"template field 'txt'.*did you mean 'text'", template="{txt}"),
        _file("a.jsonl", '{"text": "a"}\n', r"a\.jsonl:1: template.*does not fit", template="{text:d}"),
        _file("a.json", "[]", r"ending '\.json'.*one object per line"),
        _file("a.jsnl", "{}", r"ending '\.jsnl'.*did you mean '\.jsonl'"),
        _file("a.tar", b"\x1f\x8b" + b"x" * 600, r"a\.tar is compressed"),
        _file("a.tar", b"no tar at all" * 100, r"a\.tar: not a readable tar at byte 0"),
    ],
)
def test_bad_files_name_the_place(tmp_path: Path, name: str, content: bytes, keys: dict, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        build(tmp_path / name, **keys)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("0.json", b"{broken")], r"member '0\.json' at byte 512: not valid UTF-8 json"),
        ([("0.json", b"[1]")], r"member '0\.json'.*expected a JSON object"),
        ([("0.txt", b"\xff")], r"member '0\.txt'.*not valid UTF-8 txt"),
        ([("0.txt", b"a"), ("0.txt", b"b")], r"member '0\.txt'.*already has a field 'txt'"),
        ([("0.png", b"a")], r"record '0': none of the fields.*has __key__, png"),
        ([("README", b"a")], "holds no prompts"),
    ],
)
def test_bad_shard_members_are_named(tmp_path: Path, members: list[tuple[str, bytes]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(write_shard(tmp_path / "s.tar", members))


def test_missing_files_are_answered_with_what_exists(tmp_path: Path) -> None:
    (tmp_path / "image_train.txt").write_text("a")
    for path, message in {
        f"{tmp_path}/image_trian.txt": "did you mean '.*image_train.txt'",
        f"{tmp_path}/nowhere/deeper/x.txt": "holds image_train.txt",
        f"{tmp_path}/*.tar": "no such file",
        f"{tmp_path}/{{image_train,other}}.txt": "other.txt'.*no such file",
        f"{tmp_path}/image{{0..3.txt": "a brace is open",
        str(tmp_path): "is a folder",
    }.items():
        with pytest.raises(UserError, match=message):
            build(path)


@pytest.mark.parametrize("template", ["no field", "{", "{}", "{0}", "{text.__class__}"])
def test_useless_templates_are_refused(template: str) -> None:
    with pytest.raises(ValueError, match="template"):
        FilePromptsConfig(path="a.txt", template=template)


def test_a_key_that_would_not_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match=r"text_field 'q' is not read.*\{q\}"):
        FilePromptsConfig(path="a.txt", template="Q: {q}", text_field="q")


def test_changed_content_is_noticed_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "q", "answer": "1"}\n')
    state = build(path).state_dict()
    build(path).load_state_dict(state)
    path.write_text('{"text": "q", "answer": "2"}\n')
    with pytest.raises(UserError, match="content changed"):
        build(path).load_state_dict(state)


def test_puzzles_carry_what_their_verifier_needs() -> None:
    import reasoning_gym

    config = ReasoningGymPromptsConfig(dataset="chain_sum", size=20, options={"max_terms": 3}, template="Q: {question}")
    stream = config.build(seed=5)
    prompts = stream.take(20)
    verifier = reasoning_gym.create_dataset("chain_sum")
    for prompt in prompts:
        assert prompt.text == f"Q: {prompt.record['question']}"
        assert verifier.score_answer(prompt.record["answer"], entry=dict(prompt.record)) == 1.0
    assert [p.text for p in config.build(seed=5).take(20)] == [p.text for p in prompts]


def test_neighbouring_seeds_share_no_puzzles() -> None:
    questions = [
        {
            prompt.text
            for prompt in ReasoningGymPromptsConfig(dataset="basic_arithmetic", size=30, seed=seed).build(0).take(30)
        }
        for seed in (0, 1)
    ]
    assert len(questions[0] & questions[1]) <= 1


def test_wrong_puzzle_settings_name_what_is_allowed() -> None:
    for keys, message in (
        ({"dataset": "chain_sums"}, "did you mean 'chain_sum'"),
        ({"dataset": "chain_sum", "options": {"max_term": 3}}, "'max_term'.*max_digits.*did you mean 'max_terms'"),
        ({"dataset": "chain_sum", "options": {"max_terms": -1}}, "refuses options"),
    ):
        with pytest.raises(UserError, match=message):
            ReasoningGymPromptsConfig(**keys).build(0)
