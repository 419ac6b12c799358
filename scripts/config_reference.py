"""Writes docs/config.md, the reference of every key of the YAML file, from the schema and its docstrings.

python scripts/config_reference.py            writes the page
python scripts/config_reference.py --check    exits with 1 if the page is not what the schema says
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from modalities.settings import Settings
from uniml_rl.schema import Option, TypedBlock, describe, field_options, keys_of, options
from uniml_rl.yaml_files import inline_yaml

PAGE = Path(__file__).resolve().parent.parent / "docs" / "config.md"
INTRODUCTION = """# Every key of the YAML file

Written by `scripts/config_reference.py` from the schema; change the docstrings there, not this page.

`*` in a block's name stands for a name or an index: `stages.*.until` is the block `until` of any stage. On the command
line a key is written with its path, and the item of a list by its `name` or index:
`uniml-rl train run.yaml stages.image-align.until.iterations=3`. What the text calls None is `null` in the file.
"""


@dataclass
class Reference:
    """The sections of the page in reading order, each block once."""

    sections: list[str] = field(default_factory=list)
    anchors: dict[type[BaseModel], str] = field(default_factory=dict)
    undocumented: list[str] = field(default_factory=list)

    def add(
        self, block: type[BaseModel], title: str, path: str, owner: str = "", parent: type[Settings] | None = None
    ) -> None:
        """Adds the section of a block and then those of the blocks inside it.

        Keys that `parent` declares stand in its own section.
        """
        if block in self.anchors:
            return
        name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
        self.anchors[block] = name + (f"-{len(self.sections)}" if name in self.anchors.values() else "")
        position = len(self.sections)
        self.sections.append("")
        hidden = set(parent.model_fields) - set(inspect.get_annotations(block)) if parent else set()
        fields = {key: item for key, item in keys_of(block).items() if key not in hidden}
        for key, item in fields.items():
            if not item.description:
                self.undocumented.append(f"{block.__module__}.{block.__qualname__}.{key}")
            for option, steps in _blocks_inside(field_options(item)):
                self._add_option(option, f"{path}.{key}".lstrip(".") + steps, owner)
        rows = [self._row(key, item) for key, item in fields.items()]
        table = (
            ["| key | allowed | default | meaning |", "|---|---|---|---|", *rows] if rows else ["No keys of its own."]
        )
        text = [
            f'<a id="{self.anchors[block]}"></a>\n## {title}',
            inspect.cleandoc(block.__doc__ or ""),
            "\n".join(table),
        ]
        if parent:
            text.append(f"And the [keys that it shares with others](#{self.anchors[parent]}).")
        self.sections[position] = "\n\n".join(text)

    def _add_option(self, option: Option, path: str, owner: str) -> None:
        if isinstance(option.kind, TypedBlock):
            self._add_registry(option.kind, path)
        elif (block := option.model(None)) is not None:
            tag = f" with `type: {_tag(block)}`" if _tag(block) else ""
            self.add(block, f"`{path}`{tag}{owner}", path, owner)

    def _add_registry(self, block: TypedBlock, path: str) -> None:
        classes = {name: block.import_class(name) for name in block.registry}
        for name, settings_class in classes.items():
            owner = f" of {block.what} `{name}`"
            parent: type[Settings] | None = None
            for base in reversed(settings_class.__mro__[1:]):  # from the most general one down
                if issubclass(base, Settings) and base.model_fields:
                    sharing = [f"`{other}`" for other, found in classes.items() if issubclass(found, base)]
                    every = f"Every {block.what}" if len(sharing) == len(classes) else ""
                    self.add(base, every or f"Keys of {block.what} {', '.join(sharing)}", path, owner, parent)
                    parent = base
            self.add(settings_class, f"{block.what.capitalize()} `{name}`", path, owner, parent)

    def _row(self, key: str, item: FieldInfo) -> str:
        meaning = " ".join((item.description or "").split())
        cells = [f"`{key}`", self._allowed(field_options(item)), _default(item), meaning]
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    def _allowed(self, allowed: Sequence[Option]) -> str:
        """What `describe` says, with links where it names a block."""
        words = []
        for option in allowed:
            links = " or ".join(link for inside, _ in _blocks_inside([option]) for link in self._links(inside))
            around = {list: "a list, each ", tuple: "a list, each ", dict: "a mapping from names to "}
            words.append(around.get(get_origin(option.kind), "") + links if links else describe([option]))
        return " or ".join(dict.fromkeys(words))

    def _links(self, option: Option) -> list[str]:
        if isinstance(option.kind, TypedBlock):
            classes = {name: option.kind.import_class(name) for name in option.kind.registry}
            return [f"[`type: {name}`](#{self.anchors[block]})" for name, block in classes.items()]
        block = option.model(None)
        if block is None:
            return []
        return [f"[{f'`type: {_tag(block)}`' if _tag(block) else 'a block'}](#{self.anchors[block]})"]


def _tag(block: type[BaseModel]) -> str:
    """The one `type` of a block that is told from others by it."""
    words = get_args(block.model_fields["type"].annotation) if "type" in block.model_fields else ()
    return words[0] if len(words) == 1 else ""


def _blocks_inside(allowed: Sequence[Option]) -> Iterator[tuple[Option, str]]:
    """The blocks among the options and inside their lists and mappings, with the steps that lead there."""
    for option in allowed:
        if isinstance(option.kind, TypedBlock) or option.model(None) is not None:
            yield option, ""
        elif get_origin(option.kind) in (list, tuple, dict):
            for argument in get_args(option.kind):
                yield from ((inner, f".*{steps}") for inner, steps in _blocks_inside(options(argument)))


def _default(item: FieldInfo) -> str:
    if item.is_required():
        return "required"
    value: Any = item.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return f"`{inline_yaml(list(value) if isinstance(value, tuple) else value)}`"


def reference(schema: type[BaseModel]) -> str:
    """The page of a schema. Raises ValueError that lists the keys without a docstring."""
    page = Reference()
    page.add(schema, "The file", "")
    if page.undocumented:
        raise ValueError("these keys have no docstring under them: " + ", ".join(page.undocumented))
    return "\n\n".join([INTRODUCTION.strip(), *page.sections]) + "\n"


def main() -> int:
    """Writes or checks the page; the exit code."""
    from uniml_rl.build import RunConfig

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    is_check = parser.parse_args().check
    text = reference(RunConfig)
    if not is_check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE} is not what the schema says; run `python scripts/config_reference.py`.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
