"""Samples for people: tables of text and sound, grids of images and video."""

from __future__ import annotations

import math
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from modalities.samples import Audio, Image, Prompt, Sample, Text, Video
from uniml_rl.monitor.grids import Cell, Row, draw_grid, to_picture, to_pixels
from uniml_rl.monitor.tables import Markup, markdown_table

Scores = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class _Scored:
    """One sample and its raw rewards, NaN where it has none."""

    sample: Sample
    scores: dict[str, float]


@dataclass(frozen=True)
class _PromptRow:
    """One prompt and its samples, per heading (`sample`, or `before` and `after`)."""

    prompt: str
    samples: dict[str, list[_Scored]]


def save_samples(
    folder: Path, name: str, samples: Sequence[Sample], prompts: Sequence[Prompt], scores: Scores, rows: int = 12
) -> Path:
    """Writes what one evaluation made, and returns the file to look at.

    Consecutive samples with the same prompt index stand in one row. `scores` holds the raw rewards by name, one per
    sample. Text becomes the table `name.md`, sound the table `name.md` and one 16-bit `name/*.wav` per sample, both of
    all prompts; images and video (evenly spaced frames) become the grid `name.png` of the first `rows` prompts.
    Raises ValueError for no samples at all, or numbers that do not fit.
    """
    return _save(folder, name, _group({"sample": (samples, scores)}, prompts), rows)


def save_each(folder: Path, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> None:
    """Writes every sample to a file of its own in `folder`, which exists: `sample-PROMPT-NUMBER`, both counted from 0.

    Text becomes .txt, an image .png of its own size, video an animated .png, sound .wav.
    """
    for number, row in enumerate(_group({"sample": (samples, {})}, prompts)):
        for index, scored in enumerate(row.samples["sample"]):
            _save_one(folder / f"sample-{number:03d}-{index}", scored.sample)


def _save_one(path: Path, sample: Sample) -> None:
    if isinstance(sample, Text):
        path.with_suffix(".txt").write_text(sample.text, encoding="utf-8")
    elif isinstance(sample, Audio):
        write_wav(path.with_suffix(".wav"), sample)
    elif isinstance(sample, Image):
        to_pixels(sample.uint8()).save(path.with_suffix(".png"))
    elif isinstance(sample, Video):
        first, *others = [to_pixels(frame) for frame in sample.uint8()]
        milliseconds = 1000 / sample.frames_per_second
        first.save(path.with_suffix(".png"), save_all=True, append_images=others, duration=milliseconds)


def save_before_after(
    folder: Path,
    name: str,
    before: Sequence[Sample],
    after: Sequence[Sample],
    prompts: Sequence[Prompt],
    scores_before: Scores,
    scores_after: Scores,
    rows: int = 12,
) -> Path:
    """The same prompts and seeds before and after, side by side; `prompts` belongs to both. Files as `save_samples`."""
    both = {"before": (before, scores_before), "after": (after, scores_after)}
    return _save(folder, name, _group(both, prompts), rows)


def _group(columns: Mapping[str, tuple[Sequence[Sample], Scores]], prompts: Sequence[Prompt]) -> list[_PromptRow]:
    for samples, _ in columns.values():
        if not samples or len(samples) != len(prompts):
            raise ValueError(f"{len(samples)} samples for {len(prompts)} prompts: one prompt per sample is needed.")
    rows: list[_PromptRow] = []
    for position, prompt in enumerate(prompts):
        if position == 0 or prompt.index != prompts[position - 1].index:
            rows.append(_PromptRow(prompt.text, {heading: [] for heading in columns}))
        for heading, (samples, scores) in columns.items():
            values = {reward: float(by_sample[position]) for reward, by_sample in scores.items()}
            rows[-1].samples[heading].append(_Scored(samples[position], values))
    return rows


def _save(folder: Path, name: str, rows: list[_PromptRow], most_in_grid: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    first = next(iter(rows[0].samples.values()))[0].sample
    if isinstance(first, Image | Video):
        path = folder / f"{name}.png"
        shown = rows[:most_in_grid]
        draw_grid([_grid_row(row) for row in shown], f"{len(shown)} of {len(rows)} prompts").save(path)
    else:
        path = folder / f"{name}.md"
        path.write_text("\n".join([*_table(folder, name, rows), ""]), encoding="utf-8")
    return path


def _grid_row(row: _PromptRow) -> Row:
    blocks = {
        heading: [
            Cell(to_picture(scored.sample), [f"{_number(value)} {reward}" for reward, value in scored.scores.items()])
            for scored in block
        ]
        for heading, block in row.samples.items()
    }
    return Row(row.prompt, blocks)


def _table(folder: Path, name: str, rows: list[_PromptRow]) -> list[str]:
    """One line per sample; with several headings the samples of one number stand beside each other."""
    rewards = {heading: list(block[0].scores) for heading, block in rows[0].samples.items()}
    headings = ["prompt"]
    for heading, names in rewards.items():
        headings += [heading, *(reward if len(rewards) == 1 else f"{reward} {heading}" for reward in names)]
    lines = []
    for number, row in enumerate(rows):
        for index, beside in enumerate(zip(*row.samples.values(), strict=True)):
            line = [row.prompt if index == 0 else ""]
            for heading, scored in zip(row.samples, beside, strict=True):
                line.append(_content(scored.sample, folder, f"{name}/{heading}-{number:03d}-{index}.wav"))
                line += [_number(scored.scores[reward]) for reward in rewards[heading]]
            lines.append(line)
    return markdown_table(headings, lines)


def shown_text(sample: Text) -> str:
    """The text, marked where it ends for want of room."""
    return sample.text if sample.finished else f"{sample.text} (cut off)"


def _content(sample: Sample, folder: Path, sound_file: str) -> str:
    """The text, or a link to the sound, which is written."""
    if isinstance(sample, Text):
        return shown_text(sample)
    if isinstance(sample, Audio):
        (folder / sound_file).parent.mkdir(exist_ok=True)
        write_wav(folder / sound_file, sample)
        return Markup(f"[{sound_file}](<{sound_file}>)")
    raise TypeError(f"a sample of kind {sample.kind!r} cannot stand in a table.")


def write_wav(path: Path, sound: Audio) -> None:
    """Writes 16-bit PCM; what lies outside [-1, 1] is clipped, NaN becomes silence."""
    channels, _ = sound.waveform.shape
    scaled = sound.waveform.detach().cpu().float().nan_to_num(0.0).clamp(-1, 1) * 32767
    with wave.open(str(path), "wb") as handle:
        handle.setnchannels(channels)
        handle.setsampwidth(2)
        handle.setframerate(sound.sampling_rate)
        handle.writeframes(scaled.round().to(torch.int16).T.contiguous().numpy().astype("<i2").tobytes())


def _number(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "n/a"
