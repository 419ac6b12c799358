"""YAML files that build on one another, with the file and line of every key, and overrides from the command line.

`base: other.yaml` (or a list, merged in order) at the top of a file names the files that it builds on, relative to its
own folder. What lies on top wins, by four rules:

1. A mapping laid over a mapping merges key by key.
2. A mapping laid over a list merges into the items that its keys name, by the item's `name` or its index:
   `stages: {image-align: {until: {iterations: 3}}}` changes one number of one stage of the base.
3. Anything else replaces: lists as a whole, scalars, null.
4. A mapping that states another `type` or `name` than the one below replaces it, because the keys of one component mean
   nothing to another (on the command line, where one may not see the keys that go, with a warning). At the top of a
   file and in the items of a list a `name` is a label: there another one merges.

An override `a.b.c=value` is the mapping `{a: {b: {c: value}}}` laid over the file by the same rules. All overrides of a
command are put together first, so their order matters only where one key is given twice: then the last one counts.

Scalars are read as YAML 1.2 reads them, because version 1.1 makes a string of `1e-4` and a boolean of `off`. Two
deviations: `1_000` is a number, and `None` is null.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from modalities.errors import UserError, did_you_mean

KeyPath = tuple[str | int, ...]
DEEPEST = 64
"""Levels of a YAML file; blocks in blocks without end are a mistake, and reading them would end in a RecursionError."""
COMMAND_LINE = "command line"


def _scalar_rules() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """PyYAML's table: first character -> tags and patterns, tried in order."""
    digits = "0123456789"
    rules = [
        ("null", r"~|null|Null|NULL|None|", ["~", "n", "N", ""]),
        ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
        ("int", r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)", list("-+" + digits)),
        ("float", r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+." + digits)),
        ("float", r"[-+]?\.(inf|Inf|INF)", list("-+.")),
        ("merge", r"<<", ["<"]),
    ]
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, starts in rules:
        for start in starts:
            table.setdefault(start, []).append((f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{pattern})\\Z")))
    return table


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _scalar_rules()


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


@dataclass(frozen=True)
class Located:
    """A value and where it was written: `file:line` of its key, or the command line."""

    value: Any
    """`dict[str, Located]`, `list[Located]` or a scalar."""
    where: str


@dataclass(frozen=True)
class LoadedConfig:
    """The merged values of a YAML file, its bases and the overrides, and where each of them was written."""

    path: Path
    values: dict[str, Any]
    locations: Mapping[KeyPath, str]

    def where(self, path: KeyPath) -> str:
        """`file:line` of a key path, or of the nearest block around it for a key that nobody wrote."""
        while path not in self.locations:
            path = path[:-1]
        return self.locations[path]

    def _at(self, path: KeyPath) -> Any:
        value: Any = self.values
        for key in path:
            value = value[key] if _holds(value, key) else None
        return value

    def spell(self, path: KeyPath) -> str:
        """The key path as an override spells it: `stages.image-align.until`."""
        parts: list[str] = []
        value: Any = self.values
        for key in path:
            value = value[key] if _holds(value, key) else None
            parts.append((isinstance(key, int) and _name(value)) or str(key))
        return ".".join(parts)

    def error(self, path: KeyPath, message: str) -> UserError:
        """A UserError about the value at `path`: `file:line: key.path: message`.

        A message that itself begins with a key, that of the value or one inside it (`threads: too many`), is about the
        value there, which is shown.
        """
        head, colon, rest = message.partition(": ")
        *above, last = self.spell(path).split(".")
        if colon and path and head == last:
            return self.error(path, rest)
        within = tuple(head.removeprefix(".".join([*above, last, ""])).split("."))
        if colon and _has(self._at(path), within):
            path = (*path, *within)
            value = shown(self._at(path))
            message = rest if rest.startswith(value.removesuffix(": ")) else value + rest
        return UserError(f"{self.where(path)}: {self.spell(path)}: {message}" if path else f"{self.path}: {message}")


def load_yaml(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> LoadedConfig:
    """Reads a YAML file with its bases and lays overrides `key.path=value` on top (rules: this module's docstring).

    Raises UserError that names file and line: unreadable file, bad YAML, duplicate keys, bases that form a circle.
    """
    return _loaded(Path(path), _read_with_bases(Path(path), (), ""), overrides)


def overlay(values: Mapping[str, Any], overrides: Sequence[str], name: str) -> LoadedConfig:
    """Overrides laid over values that no file holds; messages call these by `name`. Raises UserError as `load_yaml`."""
    return _loaded(Path(name), _locate_all(values, name), overrides)


def _loaded(path: Path, tree: Located, overrides: Sequence[str]) -> LoadedConfig:
    tree = _merge(tree, _override_tree(overrides))
    return LoadedConfig(path, _plain(tree), dict(_locations(tree, ())))


def dump_yaml(values: Mapping[str, Any]) -> str:
    """The text from which `load_yaml` reads equal values."""
    return _dump(dict(values), default_flow_style=False, width=110)


def inline_yaml(value: Any) -> str:
    """A value on one line, as one would write it on the command line."""
    return _dump([value], default_flow_style=True, width=math.inf).strip()[1:-1]


def shown(value: Any) -> str:
    """`value: ` as a message repeats it; blocks are not repeated."""
    if isinstance(value, Mapping):
        return ""
    text = value if isinstance(value, str) and not _reads_as_number(value) else inline_yaml(value)
    return (text if len(text) <= 60 else text[:57] + "...") + ": "


def _reads_as_number(word: str) -> bool:
    rules = _Loader.yaml_implicit_resolvers.get(word[:1], [])
    return any(tag.endswith((":int", ":float")) and pattern.match(word) for tag, pattern in rules)


def _dump(value: Any, **layout: Any) -> str:
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **layout)
    if any(character in text for character in "\x85\u2028\u2029"):  # written plainly they would be read as line breaks
        text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, **layout)
    return text


def _read_with_bases(path: Path, above: tuple[Path, ...], named_by: str) -> Located:
    path = Path(os.path.normpath(path))
    if path.resolve() in [other.resolve() for other in above]:
        circle = " -> ".join(str(other) for other in (*above, path))
        raise UserError(f"{named_by}these files build on each other in a circle: {circle}; remove one `base`.")
    tree = _parse(_read_text(path, named_by), str(path))
    if tree is None or not isinstance(tree.value, dict):
        raise UserError(f"{path}: expected a mapping of keys at the top of the file, as in `stages: [...]`.")
    own = {key: item for key, item in tree.value.items() if key != "base"}
    merged = Located({}, tree.where)
    for base in _base_names(tree.value.get("base")):
        below = _read_with_bases(path.parent / base.value, (*above, path), f"{base.where}: base: ")
        merged = _merge(merged, below)
    return _merge(merged, Located(own, tree.where))


def _base_names(base: Located | None) -> list[Located]:
    if base is None or base.value is None:
        return []
    names = base.value if isinstance(base.value, list) else [base]
    if not all(isinstance(name.value, str) for name in names):
        raise UserError(f"{base.where}: base: expected the name of a YAML file or a list of such names.")
    return names


def _read_text(path: Path, named_by: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        neighbours = [str(path.parent / other.name) for other in path.parent.glob("*.y*ml")]
        raise UserError(f"{named_by}there is no file {str(path)!r}{did_you_mean(str(path), neighbours)}") from None
    except IsADirectoryError:
        inside = sorted(str(other) for other in path.glob("*.y*ml"))
        hint = f"; did you mean {inside[0]!r}?" if inside else "; name the YAML file."
        raise UserError(f"{named_by}cannot read {str(path)!r}: it is a folder{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{named_by}cannot read {str(path)!r}: {reason}.") from None


def _parse(text: str, source: str) -> Located | None:
    """The tree of one YAML document, None for an empty one."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else _TreeBuilder(loader, source).build(node, node)
    except RecursionError:
        raise UserError(f"{source}: blocks are nested more than {DEEPEST} levels deep.") from None
    except yaml.reader.ReaderError as error:
        raise UserError(f"{source}: not a YAML text: {error.reason} at character {error.position}.") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if source == COMMAND_LINE or mark is None:
            where = f"{source}: {text!r}: put text that holds special characters in quotes"
        else:
            where = f"{source}:{mark.line + 1}"
        raise UserError(f"{where}: not valid YAML: {error.problem or error.context}.") from None


class _TreeBuilder:
    """Turns composed nodes into a located tree; anchors may be used many times but not inside themselves."""

    def __init__(self, loader: _Loader, source: str):
        self.loader, self.source = loader, source
        self.open: list[int] = []
        self.flattened: set[int] = set()

    def where(self, node: yaml.Node) -> str:
        return self.source if self.source == COMMAND_LINE else f"{self.source}:{node.start_mark.line + 1}"

    def build(self, node: yaml.Node, key: yaml.Node) -> Located:
        if id(node) in self.open:
            raise UserError(f"{self.where(key)}: an anchor is used inside itself.")
        if len(self.open) >= DEEPEST:
            raise UserError(f"{self.where(key)}: blocks are nested more than {DEEPEST} levels deep.")
        self.open.append(id(node))
        if isinstance(node, yaml.MappingNode):
            value: Any = self.mapping(node)
        elif isinstance(node, yaml.SequenceNode):
            value = [self.build(item, item) for item in node.value]
        else:
            value = self.scalar(node)
        self.open.pop()
        return Located(value, self.where(key))

    def scalar(self, node: yaml.Node) -> Any:
        try:
            return self.loader.construct_object(node)
        except ValueError:
            raise UserError(f"{self.where(node)}: not valid YAML: {node.value!r} is no {node.tag}.") from None

    def mapping(self, node: yaml.MappingNode) -> dict[str, Located]:
        if id(node) not in self.flattened:
            self.flattened.add(id(node))
            written: dict[str, str] = {}
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise UserError(f"{self.where(key)}: a key must be a plain word.")
                if key.value in written:
                    raise UserError(
                        f"{self.where(key)}: the key {key.value!r} is given twice (first at {written[key.value]}); "
                        "remove one."
                    )
                written[key.value] = self.where(key)
            self.loader.flatten_mapping(node)
        return {key.value: self.build(value, key) for key, value in node.value}


def _override_tree(overrides: Sequence[str]) -> Located:
    root: dict[str, Located] = {}
    for text in overrides:
        key, equals, written = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise UserError(f"{COMMAND_LINE}: {text!r} is not an override; write it as `key.path=value`.")
        value = _parse(written, COMMAND_LINE)
        if value is None:
            raise UserError(f"{COMMAND_LINE}: {text!r} has no value; write {key}=null, or {key}='\"\"' for empty text.")
        entries = root
        for part in parts[:-1]:
            entries = entries.setdefault(part, Located({}, COMMAND_LINE)).value
            if not isinstance(entries, dict):
                raise UserError(f"{COMMAND_LINE}: {text!r} contradicts an earlier override of {part!r}.")
        if parts[-1] in entries and isinstance(entries[parts[-1]].value, dict):
            raise UserError(f"{COMMAND_LINE}: {text!r} contradicts an earlier override of a key inside {key!r}.")
        entries[parts[-1]] = value
    return Located(root, COMMAND_LINE)


def _merge(
    below: Located, above: Located, path: tuple[str, ...] = (), identities: Sequence[str] = ("type",)
) -> Located:
    """`above` laid over `below`: the four rules of this module's docstring."""
    if not isinstance(above.value, dict) or not isinstance(below.value, dict | list):
        return above
    if above.where == COMMAND_LINE and not above.value and below.value and path:
        raise UserError(
            f"{COMMAND_LINE}: {'.'.join(path)}: {{}} changes nothing of what {below.where} gives; name the keys to "
            "change, or give null to remove it."
        )
    if isinstance(below.value, list):
        items = list(below.value)
        for key, item in above.value.items():
            index = _index(items, key, item.where, path)
            items[index] = _merge(items[index], item, (*path, key))
        return Located(items, below.where)
    merged = dict(below.value)
    if any(key in merged and key in above.value and merged[key].value != above.value[key].value for key in identities):
        _warn_of_lost_keys(below, above, path)
        return above
    for key, item in above.value.items():
        merged[key] = _merge(merged[key], item, (*path, key), ("type", "name")) if key in merged else item
    return Located(merged, below.where)


def _warn_of_lost_keys(below: Located, above: Located, path: tuple[str, ...]) -> None:
    """In a file both blocks are in view; who overrides one key of a block may not know of the others."""
    lost = [key for key in below.value if key not in above.value]
    if above.where == COMMAND_LINE and lost:
        new = next(f"{key}={above.value[key].value}" for key in ("type", "name") if key in above.value)
        warnings.warn(
            f"{'.'.join(path)}: {new} replaces the whole block of {below.where}, which gives {', '.join(lost)} "
            "too; what of these the new one shall have must be given with it.",
            stacklevel=2,
        )


def _index(items: Sequence[Located], key: str, where: str, path: tuple[str, ...]) -> int:
    """Which item of a list a key of the mapping above it means."""
    names = [_name(_plain(item)) for item in items]
    if names.count(key) == 1:
        return names.index(key)
    if key.isdecimal() and int(key) < len(items):
        return int(key)
    known = [name for name in names if name] or [str(index) for index in range(len(items))]
    raise UserError(
        f"{where}: {'.'.join((*path, key))}: the list {'.'.join(path)!r} has no single item {key!r}; its items: "
        f"{', '.join(known) or 'none'}{did_you_mean(key, known)}"
    )


def _name(value: Any) -> str | None:
    name = value.get("name") if isinstance(value, dict) else None
    return name if isinstance(name, str) else None


def _holds(value: Any, key: str | int) -> bool:
    return (isinstance(value, dict) and key in value) or (
        isinstance(value, list) and isinstance(key, int) and key < len(value)
    )


def _has(value: Any, keys: Sequence[str]) -> bool:
    for key in keys:
        if not (isinstance(value, Mapping) and key in value):
            return False
        value = value[key]
    return True


def _plain(tree: Located) -> Any:
    if isinstance(tree.value, dict):
        return {key: _plain(item) for key, item in tree.value.items()}
    return [_plain(item) for item in tree.value] if isinstance(tree.value, list) else tree.value


def _locate_all(value: Any, where: str) -> Located:
    if isinstance(value, Mapping):
        return Located({key: _locate_all(item, where) for key, item in value.items()}, where)
    return Located([_locate_all(item, where) for item in value] if isinstance(value, list) else value, where)


def _locations(tree: Located, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    yield path, tree.where
    if isinstance(tree.value, dict):
        for key, item in tree.value.items():
            yield from _locations(item, (*path, key))
    elif isinstance(tree.value, list):
        for index, item in enumerate(tree.value):
            yield from _locations(item, (*path, index))
