"""Build the bundled captioned images: 32x32 emoji in three drawing styles, as webdataset tar shards.

The drawings come from npm packages of emoji sets with permissive licences, the captions, tags and groups from
``emojibase-data``. Each record holds one lossless WebP image and one JSON object::

    000123.webp    32x32 RGB on white, at most 32 colours
    000123.json    {caption, concept, style, group, tags, licence, author, source}

Kept are concepts that all three styles draw and that 32x32 pixels can show: smileys, hearts, animals and plants, food,
travel and weather, activities, objects, coloured shapes. Left out are people, skin tones, flags, letters, keycaps,
clock times and paper goods. The same packages give the same bytes.

Also written: ``prompts/image_train.txt`` and ``prompts/image_heldout.txt`` (disjoint concepts, for RL), and, outside
the bundled assets, ``texts.txt`` (names and tags for the text distillation) and shards of two more styles for the
judge.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import random
import re
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

IMAGE_SIZE = 32
RENDER_SIZE = 64
TAR_BLOCK = 512
PALETTE_SIZES = (32, 24, 16, 12, 8)
HELDOUT_CONCEPTS = 112


@dataclass(frozen=True)
class Package:
    """A pinned npm package and, for an emoji set, who drew it and under which licence."""

    name: str
    version: str
    sha256: str
    author: str = ""
    licence: str = ""
    url: str = ""

    @property
    def file_name(self) -> str:
        return f"{self.name.lstrip('@').replace('/', '-')}-{self.version}.tgz"

    @property
    def source(self) -> str:
        return f"npm:{self.name}@{self.version}"


NAMES = Package(
    "emojibase-data",
    "17.0.0",
    "d01d0e2ca4e22cb402679532155342c71e2e871f25c32223c013b8b166ebdf5a",
    "Miles Johnson",
    "MIT",
)
BUNDLED = {
    "noto": Package(
        "@iconify-json/noto",
        "1.2.9",
        "3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad",
        "Google Inc",
        "Apache-2.0",
        "https://github.com/googlefonts/noto-emoji",
    ),
    "twemoji": Package(
        "@iconify-json/twemoji",
        "1.2.5",
        "19046dff7d8707ce96212ec86468b36ac5f8e60409629dd13f809265c6d0ebb7",
        "Twitter",
        "CC-BY-4.0",
        "https://github.com/jdecked/twemoji",
    ),
    "fluent": Package(
        "@iconify-json/fluent-emoji-flat",
        "1.2.6",
        "7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175",
        "Microsoft Corporation",
        "MIT",
        "https://github.com/microsoft/fluentui-emoji",
    ),
}
EXTRA = {
    "emojione": Package(
        "@iconify-json/emojione",
        "1.2.3",
        "26a14f44284407e8bcde91799388dca2bfd91dbcd55a97f425524a1c5b73610e",
        "Emoji One",
        "CC-BY-4.0",
        "https://github.com/EmojiTwo/emojitwo",
    ),
    "fxemoji": Package(
        "@iconify-json/fxemoji",
        "1.2.2",
        "f3e72b3c59d05e1db03b7e308d55c0d05bd7ba3f625a90da1b79313c12858eef",
        "Mozilla",
        "Apache-2.0",
        "https://github.com/mozilla/fxemoji",
    ),
}

EXCLUDED_SUBGROUPS = {
    "office", "mail", "hotel", "place-religious", "place-map", "money", "other-object", "book-paper", "phone",
    "computer", "writing", "sound",
}  # fmt: skip
EXCLUDED_LABELS = re.compile(
    r"o’clock|-thirty|speech|bubble|balloon$|zzz|hole|medium|oncoming|woman|man’s|worker|guide dog|service dog|mate$"
    r"|head shaking|dotted line|symbols on mouth|drop of blood|bikini|briefs|swimsuit|love hotel|cigarette"
    r"|japanese|tanabata|pine decoration|tokyo|statue|viewing ceremony|carp streamer|wind chime|red envelope"
    r"|office|post|bank|convenience|department|stadium|construction|brick|derelict|classical"
    r"|railway|light rail|monorail|station|tramway|cableway|bus stop|motorway|wheelchair|rickshaw|trolleybus|minibus"
    r"|pouring|tumbler|beverage box|amphora|oden|stuffed flatbread|tamale|fondue|poultry|cut of meat|sheaf"
    r"|elevator|plunger|mouse trap|razor|safety pin|roll of paper|lotion|funeral|prayer|hamsa|piñata"
    r"|videocassette|film frames|projector|diya|clapper|identification|placard|petri|clamp|broken chain|white cane"
    r"|cricket game|field hockey|lacrosse|flying disc|curling|goal net|rosette|microbe|oyster|small|barber"
    r"|mahjong|flower playing"
    r"|radio button|square button|diamond with|folding hand|hair pick|thong|sari|safety vest|lab coat",
    re.IGNORECASE,
)


def slugify(label: str) -> str:
    """``"smiling face with heart-eyes"`` -> ``"smiling-face-with-heart-eyes"``."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")


def fetch(package: Package, folder: Path) -> Path:
    """Return the package's unpacked folder, running ``npm pack`` if its archive is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / package.file_name
    if not archive.exists():
        command = ["npm", "pack", f"{package.name}@{package.version}"]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise SystemExit(f"npm is not installed; install it or put {archive.name} into {folder}") from None
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"`{' '.join(command)}` failed:\n{error.stderr}") from None
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != package.sha256:
        raise SystemExit(f"{archive} has sha256 {digest}, expected {package.sha256}")
    target = folder / archive.stem
    if not (target / "package.json").exists():
        with tarfile.open(archive) as tar:
            for member in tar.getmembers():
                member.name = member.name.partition("/")[2]
                if member.name:
                    tar.extract(member, target, filter="data")
    return target


class IconSet:
    """The SVG drawings of one emoji set, found by code point or by name."""

    def __init__(self, folder: Path) -> None:
        data = json.loads((folder / "icons.json").read_text())
        self.icons: dict[str, dict] = data["icons"]
        self.aliases: dict[str, dict] = data.get("aliases", {})
        self.size = (data.get("width", 16), data.get("height", 16))
        characters = json.loads((folder / "chars.json").read_text())
        self.by_code = {strip_variation(code): name for code, name in characters.items()}

    def find(self, code: str, label: str) -> dict | None:
        """The icon of an emoji, by its code points or, in sets that do not list them, by its name."""
        candidates = [self.by_code.get(code)]
        if not self.by_code:
            candidates += [slugify(label), slugify(label).replace("-", "")]
        for name in candidates:
            alias = self.aliases.get(name or "")
            if alias is not None and alias.keys() == {"parent"}:
                name = alias["parent"]
            if name in self.icons:
                return self.icons[name]
        return None

    def render(self, icon: dict) -> Image.Image:
        """Draw at twice the size on white, then reduce."""
        import resvg_py

        width, height = icon.get("width", self.size[0]), icon.get("height", self.size[1])
        box = f"{icon.get('left', 0)} {icon.get('top', 0)} {width} {height}"
        svg = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="{box}" width="{width}" height="{height}">{icon["body"]}</svg>'
        )
        png = resvg_py.svg_to_bytes(svg_string=svg, width=RENDER_SIZE, height=RENDER_SIZE, background="white")
        image = Image.open(io.BytesIO(bytes(png))).convert("RGB")
        return image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.LANCZOS)


def strip_variation(code: str) -> str:
    """Upper-case code points without the variation selector FE0F."""
    return "-".join(part for part in code.upper().split("-") if part != "FE0F")


def encode(image: Image.Image) -> bytes:
    """Lossless WebP with the largest palette whose file fills one tar block (512 bytes), if any does."""
    data = b""
    for colours in PALETTE_SIZES:
        quantised = image.quantize(colours, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).convert("RGB")
        buffer = io.BytesIO()
        quantised.save(buffer, "WEBP", lossless=True, quality=100, method=6)
        data = buffer.getvalue()
        if len(data) <= TAR_BLOCK:
            break
    return data


def record_json(emoji: dict, concept: str, style: str, package: Package) -> bytes:
    """The record's JSON; tags are cut so that it fills one tar block."""
    record = {
        "caption": emoji["caption"],
        "concept": concept,
        "style": style,
        "group": emoji["subgroup"],
        "tags": list(emoji["tags"]),
        "licence": package.licence,
        "author": package.author,
        "source": package.source,
    }
    while len(data := json.dumps(record, ensure_ascii=False).encode()) > TAR_BLOCK:
        record["tags"].pop()
    return data


def write_shard(path: Path, files: list[tuple[str, bytes]]) -> None:
    """A tar whose bytes depend on the files alone."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mode = 0o644
            tar.addfile(info, io.BytesIO(data))


def load_emoji(folder: Path) -> tuple[list[dict], list[str]]:
    """All emoji of the kept groups (with code, caption, subgroup, tags), and every name and tag in the data."""
    rows = json.loads((folder / "en" / "data.json").read_text())
    meta = json.loads((folder / "meta" / "groups.json").read_text())
    kept_groups = {"smileys-emotion", "animals-nature", "food-drink", "travel-places", "activities", "objects"}
    emoji, texts = [], set()
    for row in rows:
        if "group" not in row or row.get("gender") is not None:
            continue
        group, subgroup = meta["groups"][str(row["group"])], meta["subgroups"][str(row["subgroup"])]
        if group in {"component", "flags"}:
            continue
        label = row["label"]
        caption = label.lower().replace("’", "'")
        texts.update([caption, *row.get("tags", [])])
        if group not in kept_groups and subgroup != "geometric":
            continue
        if subgroup in EXCLUDED_SUBGROUPS or EXCLUDED_LABELS.search(label):
            continue
        emoji.append(
            {
                "code": strip_variation(row["hexcode"]),
                "label": label,
                "caption": caption,
                "subgroup": subgroup,
                "tags": row.get("tags", []),
            }
        )
    return emoji, sorted(text.lower().replace("’", "'") for text in texts)


def split_prompts(emoji: list[dict], seed: int) -> tuple[list[str], list[str]]:
    """Captions for training and for held-out evaluation, the latter drawn evenly over the subgroups."""
    by_subgroup: dict[str, list[str]] = {}
    for row in emoji:
        by_subgroup.setdefault(row["subgroup"], []).append(row["caption"])
    generator = random.Random(seed)
    total = len(emoji)
    heldout: set[str] = set()
    taken, seen = 0, 0
    for captions in by_subgroup.values():
        seen += len(captions)
        share = round(HELDOUT_CONCEPTS * seen / total) - taken
        heldout.update(generator.sample(captions, share))
        taken += share
    train = [row["caption"] for row in emoji if row["caption"] not in heldout]
    return train, [row["caption"] for row in emoji if row["caption"] in heldout]


def build_style(style: str, package: Package, icons: IconSet, emoji: list[dict], folder: Path) -> tuple[Path, int, int]:
    """Write one style's shard; return its path, the number of its records and its size in bytes."""
    files: list[tuple[str, bytes]] = []
    count = 0
    for index, row in enumerate(emoji):
        icon = icons.find(row["code"], row["label"])
        if icon is None:
            continue
        files.append((f"{index:06d}.webp", encode(icons.render(icon))))
        files.append((f"{index:06d}.json", record_json(row, slugify(row["label"]), style, package)))
        count += 1
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"emoji-{style}.tar"
    write_shard(path, files)
    return path, count, path.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, default=Path("assets"), help="where emoji/ and prompts/ are written")
    parser.add_argument("--work", type=Path, required=True, help="folder for packages, texts.txt and the extra styles")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split into training and held-out prompts")
    arguments = parser.parse_args()

    packages = arguments.work / "npm"
    emoji, texts = load_emoji(fetch(NAMES, packages))
    icon_sets = {style: IconSet(fetch(package, packages)) for style, package in (BUNDLED | EXTRA).items()}
    bundled = [icon_sets[style] for style in BUNDLED]
    emoji = [row for row in emoji if all(icons.find(row["code"], row["label"]) for icons in bundled)]

    for style, package in (BUNDLED | EXTRA).items():
        folder = arguments.assets / "emoji" if style in BUNDLED else arguments.work / "emoji-extra"
        path, count, size = build_style(style, package, icon_sets[style], emoji, folder)
        print(f"{path}: {count} records, {size / 1e6:.2f} MB")

    prompts = arguments.assets / "prompts"
    prompts.mkdir(parents=True, exist_ok=True)
    train, heldout = split_prompts(emoji, arguments.seed)
    (prompts / "image_train.txt").write_text("".join(f"{line}\n" for line in train))
    (prompts / "image_heldout.txt").write_text("".join(f"{line}\n" for line in heldout))
    (arguments.work / "texts.txt").write_text("".join(f"{line}\n" for line in texts))
    print(f"{len(train)} training prompts, {len(heldout)} held-out prompts, {len(texts)} texts")


if __name__ == "__main__":
    main()
