"""Samples for people: every sample is where its prompt and its rewards say."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image as Pillow

from modalities.samples import Audio, Image, Prompt, Text, Video
from uniml_rl.monitor.grids import LINE, MARGIN, SMALLEST, to_picture
from uniml_rl.monitor.samples import save_before_after, save_samples, write_wav

COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 255, 255), (255, 0, 255)]


def prompts(count: int, each: int) -> list[Prompt]:
    return [Prompt(f"prompt {index}", index) for index in range(count) for _ in range(each)]


def flat(colour: tuple[int, int, int], height: int = 16, width: int = 16) -> Image:
    return Image(torch.tensor(colour, dtype=torch.uint8)[:, None, None].expand(3, height, width))


def colours_of(path: Path) -> set[tuple[int, int, int]]:
    return {colour for count, colour in Pillow.open(path).getcolors(2**20) if count >= SMALLEST**2}


def test_a_grid_has_a_row_per_prompt_and_a_column_per_sample(tmp_path: Path) -> None:
    samples = [flat(colour) for colour in COLOURS]
    scores = {"one": [0.0] * 6, "two": [float("nan")] * 6}
    path = save_samples(tmp_path, "grid", samples, prompts(2, 3), scores)
    grid = Pillow.open(path)
    assert path == tmp_path / "grid.png"
    assert grid.width == 2 * MARGIN + 3 * (SMALLEST + MARGIN)
    row_height = LINE + SMALLEST + 2 * LINE + MARGIN
    assert grid.height == MARGIN + LINE + 2 * row_height
    for number, colour in enumerate(COLOURS):
        row, column = divmod(number, 3)
        x = MARGIN + column * (SMALLEST + MARGIN) + SMALLEST // 2
        y = MARGIN + LINE + row * row_height + LINE + SMALLEST // 2
        assert grid.getpixel((x, y)) == colour


def test_before_and_after_stand_side_by_side(tmp_path: Path) -> None:
    before, after = [flat(c) for c in COLOURS[:4]], [flat(c) for c in COLOURS[2:]]
    path = save_before_after(tmp_path, "both", before, after, prompts(2, 2), {"r": [0.0] * 4}, {"r": [1.0] * 4})
    grid = Pillow.open(path)
    assert grid.width == 3 * MARGIN + 4 * (SMALLEST + MARGIN)
    y = MARGIN + 2 * LINE + LINE + 5
    lefts = [
        MARGIN,
        MARGIN + SMALLEST + MARGIN,
        2 * MARGIN + 2 * (SMALLEST + MARGIN),
        2 * MARGIN + 3 * (SMALLEST + MARGIN),
    ]
    assert [grid.getpixel((x + 5, y)) for x in lefts] == [COLOURS[0], COLOURS[1], COLOURS[2], COLOURS[3]]


def test_small_pictures_are_enlarged_exactly_and_large_ones_left_alone() -> None:
    pixels = torch.randint(0, 256, (3, 20, 30), dtype=torch.uint8)
    factor = SMALLEST // 20
    enlarged = numpy.asarray(to_picture(Image(pixels)))
    expected = pixels.numpy().transpose(1, 2, 0).repeat(factor, axis=0).repeat(factor, axis=1)
    assert numpy.array_equal(enlarged, expected)
    assert to_picture(Image(torch.zeros(3, 200, 100))).size == (100, 200)
    assert to_picture(Image(torch.full((3, 200, 200), 0.5))).getpixel((0, 0)) == (128, 128, 128)


def test_pictures_of_unequal_size_and_long_captions_share_a_grid(tmp_path: Path) -> None:
    samples = [flat(COLOURS[0], 16, 16), flat(COLOURS[1], 300, 200)]
    both = [Prompt("words " * 200 + "\n中文 \x00", 0)] * 2
    grid = Pillow.open(save_samples(tmp_path, "grid", samples, both, {"a very long reward's name " * 9: [0.1, 0.2]}))
    assert grid.width == 2 * MARGIN + 2 * (200 + MARGIN)
    assert colours_of(tmp_path / "grid.png") >= {COLOURS[0], COLOURS[1], (255, 255, 255)}


def test_a_grid_shows_the_first_prompts(tmp_path: Path) -> None:
    path = save_samples(tmp_path, "g", [flat(colour) for colour in COLOURS], prompts(6, 1), {}, rows=2)
    assert colours_of(path) - {(255, 255, 255)} == set(COLOURS[:2])


def test_video_becomes_a_sheet_with_its_first_and_last_frame(tmp_path: Path) -> None:
    frames = torch.zeros(25, 3, SMALLEST, SMALLEST, dtype=torch.uint8)
    frames[0, 0] = frames[-1, 1] = 255
    sheet = to_picture(Video(frames))
    assert sheet.size == (6 * SMALLEST, SMALLEST)
    assert sheet.getpixel((0, 0)) == (255, 0, 0) and sheet.getpixel((sheet.width - 1, 0)) == (0, 255, 0)
    assert to_picture(Video(frames[:2])).size == (2 * SMALLEST, SMALLEST)
    assert save_samples(tmp_path, "v", [Video(frames)], prompts(1, 1), {}).suffix == ".png"


def rows_of(path: Path) -> list[list[str]]:
    return [line[2:-2].split(" | ") for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_text_table_has_a_line_per_sample(tmp_path: Path) -> None:
    texts = [Text("fine", 2, True), Text("a|b\n* c", 9, False), Text("", 1, True), Text("last", 2, True)]
    path = save_samples(tmp_path / "new", "t", texts, prompts(2, 2), {"r": [0.5, float("nan"), -1.0, 2.0]})
    assert rows_of(path) == [
        ["prompt", "sample", "r"],
        ["---", "---", "---"],
        ["prompt 0", "fine", "0.500"],
        ["", "a&#124;b<br>&#42; c (cut off)", "n/a"],
        ["prompt 1", "", "-1.000"],
        ["", "last", "2.000"],
    ]


def test_a_text_table_before_and_after(tmp_path: Path) -> None:
    before, after = [Text("old", 1, True)] * 2, [Text("new", 1, True)] * 2
    path = save_before_after(tmp_path, "t", before, after, prompts(2, 1), {"r": [0, 1]}, {"r": [2, 3], "judge": [4, 5]})
    assert rows_of(path)[0] == ["prompt", "before", "r before", "after", "r after", "judge after"]
    assert rows_of(path)[3] == ["prompt 1", "old", "1.000", "new", "3.000", "5.000"]


def test_sound_is_written_and_linked(tmp_path: Path) -> None:
    waveform = torch.stack([torch.linspace(-1, 1, 100), torch.linspace(2, -2, 100)])
    path = save_samples(tmp_path, "s", [Audio(waveform, 8000)], prompts(1, 1), {"r": [1.0]})
    assert rows_of(path)[2] == ["prompt 0", "[s/sample-000-0.wav](<s/sample-000-0.wav>)", "1.000"]
    with wave.open(str(tmp_path / "s" / "sample-000-0.wav")) as sound:
        assert (sound.getnchannels(), sound.getframerate(), sound.getnframes()) == (2, 8000, 100)
        read = numpy.frombuffer(sound.readframes(100), "<i2").reshape(100, 2).T / 32767
    assert numpy.abs(read - waveform.clamp(-1, 1).numpy()).max() < 1e-4


def test_sound_that_is_no_number_is_silence(tmp_path: Path) -> None:
    write_wav(tmp_path / "x.wav", Audio(torch.tensor([[float("nan"), 1.0]]), 8000))
    with wave.open(str(tmp_path / "x.wav")) as sound:
        assert numpy.frombuffer(sound.readframes(2), "<i2").tolist() == [0, 32767]


def test_numbers_that_do_not_fit_are_errors(tmp_path: Path) -> None:
    for samples, count in (([], 0), ([flat(COLOURS[0])], 2)):
        with pytest.raises(ValueError, match="one prompt per sample"):
            save_samples(tmp_path, "x", samples, prompts(count, 1), {})
