"""Picture grids: one row per prompt, its samples side by side, the rewards under each."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from PIL import Image as Pillow
from PIL import ImageDraw, ImageFont
from torch import Tensor

from modalities.samples import Image, Sample, Video

SMALLEST = 128
"""Pictures lower than this many pixels are enlarged by a whole factor, each pixel a square."""
MARGIN = 8
LINE = 16
_FRAMES = 6
_FONT_SIZE = 12


@dataclass(frozen=True)
class Cell:
    """One picture and the lines under it."""

    picture: Pillow.Image
    lines: Sequence[str]


@dataclass(frozen=True)
class Row:
    """One prompt and blocks of cells by heading; headings are drawn if there are several."""

    caption: str
    blocks: Mapping[str, Sequence[Cell]]


def to_picture(sample: Sample) -> Pillow.Image:
    """An image, or evenly spaced frames of a video (the first and the last among them) from left to right."""
    if isinstance(sample, Image):
        pixels = sample.uint8()
    elif isinstance(sample, Video):
        frames = sample.uint8()
        chosen = torch.linspace(0, len(frames) - 1, min(_FRAMES, len(frames))).round().long()
        pixels = torch.cat(list(frames[chosen]), dim=-1)
    else:
        raise TypeError(f"a sample of kind {sample.kind!r} is no picture.")
    picture = to_pixels(pixels)
    factor = max(1, SMALLEST // picture.height)
    return picture.resize((picture.width * factor, picture.height * factor), Pillow.Resampling.NEAREST)


def to_pixels(pixels: Tensor) -> Pillow.Image:
    """uint8 [3, H, W] as a picture of that size."""
    return Pillow.fromarray(rearrange(pixels, "c h w -> h w c").contiguous().cpu().numpy())


def draw_grid(rows: Sequence[Row], title: str) -> Pillow.Image:
    """All rows under one another in cells of one size; captions that are too long for their place are shortened."""
    cells = [cell for row in rows for block in row.blocks.values() for cell in block]
    width = max(cell.picture.width for cell in cells) + MARGIN
    picture_height = max(cell.picture.height for cell in cells)
    row_height = LINE + picture_height + LINE * max(len(cell.lines) for cell in cells) + MARGIN
    columns = {heading: max(len(row.blocks[heading]) for row in rows) for heading in rows[0].blocks}
    starts, total_width = {}, MARGIN
    for heading, count in columns.items():
        starts[heading] = total_width
        total_width += count * width + MARGIN
    top = MARGIN + LINE * (2 if len(columns) > 1 else 1)

    canvas = Pillow.new("RGB", (total_width, top + row_height * len(rows)), "white")
    pen = _Pen(canvas)
    pen.write(MARGIN, MARGIN, title, total_width - 2 * MARGIN, "gray")
    for heading, left in starts.items() if len(columns) > 1 else ():
        pen.write(left, MARGIN + LINE, heading, columns[heading] * width, "black")
    for number, row in enumerate(rows):
        y = top + number * row_height
        pen.write(MARGIN, y, row.caption, total_width - 2 * MARGIN, "black")
        for heading, block in row.blocks.items():
            for column, cell in enumerate(block):
                x = starts[heading] + column * width
                canvas.paste(cell.picture, (x, y + LINE))
                for line, text in enumerate(cell.lines):
                    pen.write(x, y + LINE * (1 + line) + picture_height, text, width - MARGIN, "gray")
    return canvas


class _Pen:
    """Writes single lines that never leave their place."""

    def __init__(self, canvas: Pillow.Image) -> None:
        self._draw = ImageDraw.Draw(canvas)
        self._font = ImageFont.load_default(size=_FONT_SIZE)

    def write(self, x: int, y: int, text: str, width: int, colour: str) -> None:
        line = " ".join(text.split())
        if self._width(line) > width:
            lengths = range(len(line))
            fitting = bisect_right(lengths, width, key=lambda length: self._width(line[:length] + "..."))
            line = line[: max(0, fitting - 1)] + "..."
        self._draw.text((x, y), line, fill=colour, font=self._font)

    def _width(self, line: str) -> int:
        return math.ceil(self._draw.textlength(line, font=self._font))
