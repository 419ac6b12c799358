"""Splits the captions of faces into the quickstart's image prompts: to train on, and held out."""

from __future__ import annotations

import argparse
import random
from pathlib import Path


def main() -> None:
    """Reads `image_train.txt` and `image_heldout.txt`, writes `faces_train.txt` and `faces_heldout.txt`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, default=Path("assets/prompts"), help="folder to read from and write to")
    parser.add_argument("--held-out", type=int, default=64, help="number of held-out concepts")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    captions = [
        caption
        for name in ("image_train.txt", "image_heldout.txt")
        for caption in (arguments.prompts / name).read_text().splitlines()
    ]
    faces = sorted({caption for caption in captions if "face" in caption.split()})
    if len(faces) <= arguments.held_out:
        raise SystemExit(f"there are {len(faces)} faces, too few to hold out {arguments.held_out}.")
    random.Random(arguments.seed).shuffle(faces)
    for name, chosen in (("faces_heldout", faces[: arguments.held_out]), ("faces_train", faces[arguments.held_out :])):
        (arguments.prompts / f"{name}.txt").write_text("\n".join(chosen) + "\n")
        print(f"{name}: {len(chosen)} captions")


if __name__ == "__main__":
    main()
