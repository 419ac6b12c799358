"""Records with given samples: what comes out is what the files say, in the order of a prompt stream."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modalities.errors import UserError
from modalities.samples import Image, Text
from uniml_rl.data.prompts import FilePromptsConfig
from uniml_rl.data.records import (
    DemonstrationsConfig,
    DrawnRecord,
    LabelledConfig,
    PreferencesConfig,
    RecordsConfig,
    RecordStream,
)

FEW = settings(max_examples=30, deadline=None)


def lines(folder: Path, *rows: dict) -> str:
    path = folder / "data.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def pairs(folder: Path, size: int, **keys) -> PreferencesConfig:
    rows = [{"prompt": f"p{i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(size)]
    return PreferencesConfig(path=lines(folder, *rows), **keys)


def picture(mode: str, colour: tuple[int, ...], size: tuple[int, int] = (5, 4)) -> PIL.Image.Image:
    return PIL.Image.new(mode, size, colour)


def encoded(image: PIL.Image.Image, format: str = "PNG", **keys) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **keys)
    return buffer.getvalue()


def shard(path: Path, members: dict[str, bytes]) -> str:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return str(path)


def shown(record: DrawnRecord) -> tuple:
    """What two equal records have in common; images are compared by their bytes."""
    samples = [s.text if isinstance(s, Text) else s.pixels.numpy().tobytes() for s in record.samples]
    return record.index, record.prompt, samples, record.labels, record.repeat


def test_texts_and_labels_of_each_block(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1", "response": "2", "chosen": "two", "rejected": "three", "label": True, "by": "ann"}]
    path = lines(tmp_path, *rows, {**rows[0], "prompt": "2+2", "label": 0})
    demo, second = DemonstrationsConfig(path=path).build(0).first(9)
    pair, _ = PreferencesConfig(path=path).build(0).first(9)
    assert demo.samples == [Text("2", 0, True)] and demo.labels == [1.0]
    assert (demo.index, demo.prompt.text, demo.prompt.record["by"], second.index) == (0, "1+1", "ann", 1)
    assert [sample.text for sample in pair.samples] == ["two", "three"] and pair.labels == [1.0, 0.0]
    labelled = LabelledConfig(path=path, sample_field="chosen").build(0).first(9)
    assert [(record.samples[0].text, record.labels) for record in labelled] == [("two", [1.0]), ("two", [0.0])]
    other = PreferencesConfig(path=path, template="{by}: {prompt}", chosen_field="response", rejected_field="rejected")
    assert [record.prompt.text for record in other.build(0).first(2)] == ["ann: 1+1", "ann: 2+2"]
    assert [record.samples[0].text for record in other.build(0).first(2)] == ["2", "2"]
    assert [r.index for r in DemonstrationsConfig(path=path, skip=1, limit=1).build(0).take(2)] == [1, 1]


@FEW
@given(
    size=st.integers(1, 7),
    counts=st.lists(st.integers(0, 9), max_size=5),
    stop=st.integers(0, 5),
    world=st.integers(1, 4),
    shuffle=st.booleans(),
)
def test_order_resume_and_ranks_are_those_of_prompts(tmp_path_factory, size, counts, stop, world, shuffle) -> None:
    config = pairs(tmp_path_factory.mktemp("pairs"), size, shuffle=shuffle)
    uninterrupted = config.build(5)
    expected = [uninterrupted.take(count) for count in counts]
    prompts = FilePromptsConfig(path=config.path, shuffle=shuffle).build(5)
    assert [[(r.index, r.repeat) for r in batch] for batch in expected] == [
        [(p.index, p.repeat) for p in prompts.take(count)] for count in counts
    ]
    before, after = config.build(5), config.build(5)
    got = [before.take(count) for count in counts[:stop]]
    after.load_state_dict(before.state_dict())
    assert got + [after.take(count) for count in counts[stop:]] == expected
    ranks = [config.build(5) for _ in range(world)]
    for count, whole in zip(counts, expected, strict=True):
        shares = [stream.take(count, rank, world) for rank, stream in enumerate(ranks)]
        assert [record for share in shares for record in share] == whole
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(record.samples[0].text == f"good {record.index}" for batch in expected for record in batch)


def test_a_checkpoint_of_other_samples_is_refused(tmp_path: Path) -> None:
    state = pairs(tmp_path, 3).build(0).state_dict()
    swapped = PreferencesConfig(path=pairs(tmp_path, 3).path, chosen_field="rejected", rejected_field="chosen")
    for changed in (pairs(tmp_path, 4), swapped):
        with pytest.raises(UserError, match=r"data\.jsonl.*not the data"):
            changed.build(0).load_state_dict(state)
    pairs(tmp_path, 3).build(0).load_state_dict(state)


def test_images_of_a_shard_and_of_files_are_the_pixels_that_were_written(tmp_path: Path) -> None:
    noise = numpy.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=numpy.uint8)
    good, bad = PIL.Image.fromarray(noise), picture("RGB", (1, 2, 3))
    in_shard = shard(
        tmp_path / "pairs.tar",
        {"a.chosen.png": encoded(good), "a.rejected.webp": encoded(bad, "WEBP", lossless=True), "a.txt": b"a fox"},
    )
    (tmp_path / "good.png").write_bytes(encoded(good))
    (tmp_path / "bad.bmp").write_bytes(encoded(bad, "BMP"))
    named = lines(tmp_path, {"prompt": "a fox", "chosen": "good.png", "rejected": str(tmp_path / "bad.bmp")})
    for path in (in_shard, named):
        (record,) = PreferencesConfig(path=path, kind="image").build(0).first(1)
        assert record.prompt.text == "a fox" and record.labels == [1.0, 0.0]
        assert torch.equal(record.samples[0].pixels, torch.from_numpy(noise).permute(2, 0, 1))
        assert record.samples[1].pixels.dtype == torch.uint8 and record.samples[1].pixels.shape == (3, 4, 5)
        assert record.samples[1].pixels[:, 0, 0].tolist() == [1, 2, 3]


def test_transparent_grey_and_turned_images_look_as_they_do_in_a_viewer(tmp_path: Path) -> None:
    half = picture("RGBA", (255, 0, 0, 0))
    half.putpixel((0, 0), (255, 0, 0, 255))
    turned = picture("RGB", (9, 9, 9), (5, 2))
    exif = turned.getexif()
    exif[0x0112] = 6  # rotated by 90 degrees
    members = {
        "a.png": encoded(half),
        "b.png": encoded(picture("L", (7,))),
        "c.jpg": encoded(turned, "JPEG", exif=exif),
    }
    captions = {f"{key}.txt": b"x" for key in "abc"}
    path = shard(tmp_path / "d.tar", dict(sorted((members | captions).items())))
    transparent, grey, rotated = (
        r.samples[0].pixels for r in DemonstrationsConfig(path=path, kind="image").build(0).first(3)
    )
    assert transparent[:, 0, 0].tolist() == [255, 0, 0] and transparent[:, 3, 3].tolist() == [255, 255, 255]
    assert grey.unique().tolist() == [7] and rotated.shape == (3, 5, 2)


def test_the_bundled_emoji_are_demonstrations() -> None:
    stream = DemonstrationsConfig(path="bundled:emoji/emoji-noto.tar", kind="image").build(0)
    records = stream.take(5)
    assert stream.size == 776 and stream.first(1)[0].prompt.text == "grinning face"
    assert all(isinstance(r.samples[0], Image) and r.samples[0].pixels.shape == (3, 32, 32) for r in records)
    assert len({shown(record)[2][0] for record in records}) == 5


def test_samples_of_another_kind_than_the_policys_are_refused(tmp_path: Path) -> None:
    stream = pairs(tmp_path, 2).build(0)
    stream.check_kind("text")
    with pytest.raises(UserError, match=r"data\.jsonl.*samples of text.*makes image"):
        stream.check_kind("image")


ROW = {"prompt": "p", "response": "r", "chosen": "good", "rejected": "bad", "label": 1}


@pytest.mark.parametrize(
    ("block", "keys", "change", "message"),
    [
        (DemonstrationsConfig, {}, {"response": " "}, r":2: 'response' must be a text that is not blank, but is ' '"),
        (DemonstrationsConfig, {}, {"response": None}, r":2: 'response' must be .* but is None"),
        (DemonstrationsConfig, {}, {"response": [{"role": "user"}]}, r":2: 'response' must be a text"),
        (DemonstrationsConfig, {"sample_field": "respons"}, {}, r":1: sample_field 'respons'.*did you mean 'response'"),
        (PreferencesConfig, {}, {"rejected": "good"}, r":2: 'chosen' and 'rejected' are the same"),
        (PreferencesConfig, {}, {"chosen": ""}, r":2: 'chosen' must be a text that is not blank"),
        (PreferencesConfig, {"rejected_field": "reject"}, {}, r":1: rejected_field 'reject'.*did you mean 'rejected'"),
        (LabelledConfig, {}, {"label": 2}, r":2: 'label' is 2; allowed are 1 or true .* 0 or false"),
        (LabelledConfig, {}, {"label": "1"}, r":2: 'label' is '1'; allowed"),
        (LabelledConfig, {}, {"label": float("nan")}, r":2: 'label' is nan; allowed"),
        (LabelledConfig, {"label_field": "lable"}, {}, r":1: label_field 'lable'.*did you mean 'label'"),
        (DemonstrationsConfig, {}, {"prompt": ""}, r":2: the prompt must be a text"),
        (DemonstrationsConfig, {"kind": "image"}, {}, r":1: sample_field 'image' is not in the record"),
        (
            DemonstrationsConfig,
            {"kind": "image", "sample_field": "response"},
            {},
            r":1: 'response' names the image 'r'",
        ),
        (DemonstrationsConfig, {"kind": "image", "sample_field": "label"}, {}, r":1: 'label' must be a member"),
        (DemonstrationsConfig, {"skip": 2}, {}, r"records .*skip: 2 leaves none of the 2 records"),
    ],
)
def test_what_cannot_be_learned_from_is_named(tmp_path, block: type[RecordsConfig], keys, change, message) -> None:
    path = lines(tmp_path, ROW, {**ROW, **change})
    with pytest.raises(UserError, match=message) as raised:
        block(path=path, **keys).build(0)
    assert "data.jsonl" in str(raised.value)


def test_a_missing_field_of_a_later_line_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.jsonl:2: rejected_field 'rejected' is not in the record, which has"):
        PreferencesConfig(path=lines(tmp_path, ROW, {"prompt": "p", "chosen": "a"})).build(0)


def test_images_that_cannot_be_decoded_are_named_when_they_are_drawn(tmp_path: Path) -> None:
    fine, cut = encoded(picture("RGB", (1, 2, 3))), encoded(picture("RGB", (1, 2, 3), (99, 99)))[:60]
    path = shard(tmp_path / "d.tar", {"a.png": fine, "a.txt": b"x", "b.png": cut, "b.txt": b"x"})
    stream = DemonstrationsConfig(path=path, kind="image", shuffle=False).build(0)
    with pytest.raises(UserError, match=r"d\.tar, record 'b': 'b\.png' is no image that can be decoded"):
        stream.take(2)
    deep = shard(tmp_path / "deep.tar", {"a.png": encoded(PIL.Image.new("I;16", (2, 2), 9999)), "a.txt": b"x"})
    with pytest.raises(UserError, match=r"'a\.png' has more than 8 bits per channel"):
        DemonstrationsConfig(path=deep, kind="image").build(0)
    noise = shard(tmp_path / "noise.tar", {"a.png": b"noise", "a.txt": b"x"})
    with pytest.raises(UserError, match=r"decoded: it is damaged or of an unknown format$"):
        DemonstrationsConfig(path=noise, kind="image").build(0)
    with pytest.raises(UserError, match=r"d\.tar, record 'b'"):
        DemonstrationsConfig(path=path, kind="image", skip=1).build(0)  # the first of all is tried at once
    with pytest.raises(UserError, match=r"'png' must be a text.*set `kind: image`"):
        DemonstrationsConfig(path=path, sample_field="png").build(0)


def test_a_stream_says_its_size_and_kind(tmp_path: Path) -> None:
    stream = pairs(tmp_path, 4).build(0)
    assert isinstance(stream, RecordStream) and (stream.size, stream.kind) == (4, "text")
    assert len({record.index for record in stream.take(4)}) == 4
