"""The config: what is read is what was written, and every mistake is one message that names line, key and way out."""

from __future__ import annotations

import math
import string
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError, model_validator

from modalities.errors import UserError
from modalities.settings import Settings
from uniml_rl.config import difference, load_yaml, overlay, resolved_dump, typed_block, validate
from uniml_rl.schema import example, field_options, keys_of
from uniml_rl.yaml_files import dump_yaml, inline_yaml

HERE = __name__
FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Loud(Settings):
    """A component with a range."""

    volume: float = Field(default=0.5, gt=0, lt=1)
    """How loud."""
    repeats: int = Field(default=1, ge=1)
    """How often."""


class Quiet(Settings):
    """A component that declares its own type."""

    type: Literal["quiet"] = "quiet"
    """Its name."""
    words: list[str] | str = "hush"
    """What it says."""
    inner: Annotated[Any, typed_block({"loud": f"{HERE}:Loud"}, "speaker")] | None = None
    """A component inside a component."""


SPEAKERS = {"loud": f"{HERE}:Loud", "quiet": f"{HERE}:Quiet", "broken": f"{HERE}:Nothing", "extra": "no_such_package:X"}
Speaker = Annotated[Any, typed_block(SPEAKERS, "speaker")]


class Circle(Settings):
    """One shape."""

    type: Literal["circle"] = "circle"
    """Its name."""
    radius: float = Field(ge=0)
    """Half its width."""


class Square(Settings):
    """Another shape."""

    type: Literal["square"] = "square"
    """Its name."""
    side: float = Field(default=1, alias="lambda")
    """Its width, under a key that Python does not allow."""


class Until(Settings):
    """When to stop."""

    iterations: int | None = Field(default=None, ge=0)
    """Iterations."""
    share: float = 0.5
    """A number."""

    @model_validator(mode="after")
    def _ends(self) -> Until:
        if self.iterations is None:
            raise ValueError("a stage without an end: give `iterations`")
        return self


class Stage(Settings):
    """One stage."""

    name: str
    """Its name."""
    until: Until
    """Its end."""
    check: Literal["error", "warn", "off"] = "error"
    """What to do."""
    size: int = Field(default=4, ge=2, le=64)
    """A range."""
    shape: Annotated[Circle | Square, Field(discriminator="type")] = Square()
    """A union told apart by its type."""
    speakers: dict[str, Speaker] = Field(default_factory=dict)
    """Components by name."""
    path: Path | None = None
    """A path."""
    pair: tuple[float, float] = (0.9, 0.999)
    """Two numbers."""
    strict: bool = False
    """A switch."""
    only: Circle = Circle(radius=1)
    """The only shape of its kind."""


class Run(Settings):
    """Everything."""

    name: str
    """Name of the run."""
    stages: list[Stage] = Field(min_length=1)
    """The stages."""
    speaker: Annotated[Any, typed_block(SPEAKERS, "speaker", default="loud")] = Field(default_factory=dict)
    """A component with a default type."""


GOOD = """\
name: toy
stages:
  - name: first
    until: {iterations: 3}
    speakers:
      one: {type: loud, volume: 0.25}
  - name: second
    until:
      iterations: 5
    shape: {type: circle, radius: 1e-4}
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def _write(text: str, name: str = "run.yaml") -> str:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
        return name

    return _write


def mistake(path: str, *overrides: str) -> str:
    """The message about a config that must be refused."""
    with pytest.raises(UserError) as caught:
        validate(Run, load_yaml(path, overrides))
    message = str(caught.value)
    assert "pydantic" not in message and "Input should" not in message and "Traceback" not in message
    return message


# What is read is what was written

TRAPS = [
    "1e-4",
    "off",
    "no",
    "yes",
    "~",
    "None",
    "null",
    "012",
    "1:30",
    "1_000",
    "0x1f",
    ".inf",
    "<<",
    "=",
    "a: b",
    "# x",
    "",
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(TRAPS)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
)
KEYS = st.text(string.ascii_letters + "_", min_size=1, max_size=6).filter(lambda key: key != "base")
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))


@FEW
@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=4))
def test_what_is_dumped_is_read_again(tmp_path: Path, values: dict[str, Any]) -> None:
    path = tmp_path / "any.yaml"
    path.write_text(dump_yaml(values), encoding="utf-8")
    assert repr(load_yaml(path).values) == repr(values)  # repr tells 1, 1.0 and True apart


@FEW
@given(KEYS, KEYS, SCALARS.filter(lambda value: value != ""))
def test_an_override_sets_what_the_same_text_in_a_file_sets(tmp_path: Path, outer: str, inner: str, value: Any) -> None:
    path = tmp_path / "any.yaml"
    path.write_text("other: {kept: 1}\n", encoding="utf-8")
    loaded = load_yaml(path, [f"{outer}_.{inner}={inline_yaml(value)}"]).values
    assert repr(loaded) == repr({"other": {"kept": 1}, f"{outer}_": {inner: value}})


@pytest.mark.parametrize(
    ("written", "read"),
    {
        "1e-4": 1e-4, "1E5": 1e5, "-.5": -0.5, "1.": 1.0, "1_000": 1000, "0x10": 16, "-.inf": -math.inf,
        "off": "off", "on": "on", "no": "no", "y": "y", "true": True, "None": None, "~": None, "": None,
        "1:30": "1:30", "2024-01-01": "2024-01-01", "'1e-4'": "1e-4", "package:x": "package:x",
    }.items(),
)  # fmt: skip
def test_scalars_mean_what_they_look_like(write: Any, written: str, read: Any) -> None:
    assert repr(load_yaml(write(f"key: {written}\n")).values) == repr({"key": read})


def test_the_resolved_config_is_complete_and_gives_an_equal_config(write: Any) -> None:
    config = validate(
        Run, load_yaml(write(GOOD), ["stages.first.shape={type: square, lambda: 7}", "stages.0.path=a/b"])
    )
    text = resolved_dump(config)
    assert validate(Run, load_yaml(write(text, "resolved.yaml"))) == config
    values = yaml.safe_load(text)
    assert values["speaker"] == {"type": "loud", "volume": 0.5, "repeats": 1}
    assert values["stages"][0]["shape"] == {"type": "square", "lambda": 7.0}
    assert set(values["stages"][0]) == set(Stage.model_fields)


def test_a_component_of_the_users_own_needs_no_registration(write: Any) -> None:
    path = write(GOOD)
    config = validate(Run, load_yaml(path, [f"stages.0.speakers.mine={{type: '{HERE}:Until', iterations: 2}}"]))
    assert config.stages[0].speakers["mine"] == Until(iterations=2)
    again = validate(Run, load_yaml(write(resolved_dump(config), "again.yaml")))
    assert again == config
    by_path = validate(Run, load_yaml(path, [f"stages.0.speakers.mine={{type: '{HERE}:Quiet'}}"]))
    assert by_path.stages[0].speakers["mine"] == Quiet()


# Files that build on one another


def test_bases_merge_in_order_and_the_file_itself_lies_on_top(write: Any) -> None:
    write("a: {x: 1, y: 1, z: 1}\nlist: [1, 2]\n", "shared/one.yaml")
    write("base: one.yaml\na: {y: 2, z: 2}\n", "shared/two.yaml")
    write("list: [3]\n", "shared/three.yaml")
    loaded = load_yaml(write("base: [shared/two.yaml, shared/three.yaml]\na: {z: 3}\n"))
    assert loaded.values == {"a": {"x": 1, "y": 2, "z": 3}, "list": [3]}
    assert [loaded.where(("a", key)) for key in "xyz"] == ["shared/one.yaml:1", "shared/two.yaml:2", "run.yaml:2"]
    assert loaded.where(("list", 0)) == "shared/three.yaml:1"


def test_a_mapping_over_a_list_changes_the_items_that_it_names(write: Any) -> None:
    write(GOOD, "base.yaml")
    loaded = load_yaml(write("base: base.yaml\nname: other\nstages: {second: {until: {iterations: 9}}}\n"))
    assert [stage["until"]["iterations"] for stage in loaded.values["stages"]] == [3, 9]
    assert loaded.values["name"] == "other" and len(loaded.values["stages"]) == 2
    by_index = load_yaml("base.yaml", ["stages.1.until.iterations=9", "name=other"])
    assert by_index.values == loaded.values
    assert by_index.where(("stages", 1, "until", "iterations")) == "command line"


def test_another_type_replaces_and_the_same_type_merges(write: Any) -> None:
    write("s: {type: loud, volume: 0.1}\nalgorithm: {name: ppo, clip: 1}\n", "base.yaml")
    assert load_yaml(write("base: base.yaml\ns: {type: loud, repeats: 2}\n")).values["s"] == {
        "type": "loud", "volume": 0.1, "repeats": 2,
    }  # fmt: skip
    assert load_yaml(write("base: base.yaml\ns: {type: quiet}\n")).values["s"] == {"type": "quiet"}
    assert load_yaml(write("base: base.yaml\nalgorithm: {name: grpo}\n")).values["algorithm"] == {"name": "grpo"}


def test_overrides_of_one_command_do_not_depend_on_their_order(write: Any) -> None:
    path = write("s: {type: loud, volume: 0.1}\n")
    orders = [["s.type=quiet", "s.words=a"], ["s.words=a", "s.type=quiet"]]
    with pytest.warns(
        UserWarning, match="s: type=quiet replaces the whole block of run.yaml:1, which gives volume too"
    ):
        assert [load_yaml(path, order).values for order in orders] == [{"s": {"type": "quiet", "words": "a"}}] * 2
    assert load_yaml(path, ["s.volume=1", "s.volume=2"]).values["s"]["volume"] == 2


def test_the_renaming_of_a_list_item_keeps_the_item(write: Any) -> None:
    loaded = load_yaml(write(GOOD), ["stages.first.name=renamed"])
    assert loaded.values["stages"][0]["until"] == {"iterations": 3}


def test_anchors_and_merge_keys_work_and_keep_their_lines(write: Any) -> None:
    loaded = load_yaml(write("a: &a\n  x: 1\n  y: 2\nb:\n  <<: *a\n  y: 3\nc: *a\n"))
    assert loaded.values == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 1, "y": 2}}
    assert (loaded.where(("b", "x")), loaded.where(("b", "y"))) == ("run.yaml:2", "run.yaml:6")


UNREADABLE = {
    "key: 1\nkey: 2\n": ["run.yaml:2", "'key' is given twice", "run.yaml:1"],
    "a:\n  b: {c: 1, c: 2}\n": ["run.yaml:2", "'c' is given twice"],
    "a: [1, 2\nb: 3\n": ["run.yaml:2", "not valid YAML"],
    "a: 1\n\tb: 2\n": ["run.yaml:2", "not valid YAML"],
    "": ["run.yaml", "expected a mapping"],
    "- a\n- b\n": ["run.yaml", "expected a mapping"],
    "a: &a [*a]\n": ["run.yaml:1", "inside itself"],
    "a: !!python/name:os.system\n": ["run.yaml:1", "not valid YAML"],
    "a: !!int ten\n": ["run.yaml:1", "not valid YAML"],
    "? [a, b]\n: 1\n": ["run.yaml:1", "a key must be a plain word"],
    "a: \x07\n": ["run.yaml", "not a YAML text"],
    "a: 1\n---\nb: 2\n": ["run.yaml:2", "not valid YAML"],
    "base: bass.yaml\n": ["run.yaml:1", "base", "bass.yaml", "did you mean 'base.yaml'?"],
    "base: run.yaml\n": ["run.yaml:1", "circle: run.yaml -> run.yaml"],
    "base: circle.yaml\n": ["circle: run.yaml -> circle.yaml -> run.yaml"],
    "base: {a: b}\n": ["run.yaml:1", "base", "name of a YAML file"],
    "a: " + 900 * "[" + 900 * "]" + "\n": ["run.yaml", "nested more than 64 levels deep"],
    "a: " + 3000 * "{a: " + "1" + 3000 * "}" + "\n": ["run.yaml", "nested more than 64 levels deep"],
    "a: " + 70 * "[" + 70 * "]" + "\n": ["run.yaml:1", "nested more than 64 levels deep"],
    "base: .\n": ["run.yaml:1", "cannot read"],
}


@pytest.mark.parametrize("text", UNREADABLE, ids=lambda text: repr(text[:20]))
def test_an_unreadable_file_is_one_message_with_the_line(write: Any, text: str) -> None:
    write("a: 1\n", "base.yaml")
    write("base: ./run.yaml\n", "circle.yaml")
    message = mistake(write(text))
    assert all(part in message for part in UNREADABLE[text]), message


def test_a_missing_or_binary_config_is_one_message(write: Any, tmp_path: Path) -> None:
    write(GOOD, "quickstart.yaml")
    assert "did you mean 'quickstart.yaml'?" in mistake("quickstrat.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in mistake("binary.yaml")


# Mistakes against the schema

WRONG_OVERRIDES = {
    "nam=x": ["command line: nam: unknown key; allowed here: name, stages, speaker; did you mean 'name'?"],
    "stages.first.until.iteratons=3": ["stages.first.until.iteratons: unknown key", "did you mean 'iterations'?"],
    "stages.frist.until.iterations=3": ["stages.frist", "did you mean 'first'?"],
    "stages.7.until.iterations=3": ["stages.7", "items: first, second"],
    "stages.first.iterations=3": ["unknown key", "did you mean 'until.iterations'?"],
    "stages.first.check=of": ["stages.first.check: of: must be one of 'error', 'warn', 'off'; did you mean 'off'?"],
    "stages.first.check=OFF": ["stages.first.check: OFF: must be one of", "did you mean 'off'?"],
    "stages.first.check='1'": ["stages.first.check: '1': must be one of 'error', 'warn', 'off'"],
    "speaker.words=hush": ["unknown key; allowed here: volume, repeats; 'words' is a key of type: quiet"],
    "speaker.type=null": ["speaker.type: null: must be one of loud, quiet"],
    "stages.first.size=1": ["stages.first.size: 1: must be a whole number >= 2 and <= 64"],
    "stages.first.size=2.5": ["2.5: must be a whole number"],
    "stages.first.size=true": ["stages.first.size: true: must be a whole number >= 2 and <= 64"],
    "stages.first.until.iterations=false": ["until.iterations: false: must be a whole number >= 0 or null"],
    "stages.first.until.share=true": ["stages.first.until.share: true: must be a number"],
    "stages.first.pair=[1, true]": ["stages.first.pair.1: true: must be a number"],
    "stages.first.shape={type: circle, radius: true}": ["stages.first.shape.radius: true: must be a number >= 0"],
    "stages.first.speakers.one.repeats=true": ["speakers.one.repeats: true: must be a whole number >= 1"],
    "stages.first.size=null": ["null: must be a whole number"],
    "stages.first.until=never": ["stages.first.until: never: must be a block with the keys iterations, share"],
    "stages.first.until.share=nan": ["stages.first.until.share", "NaN"],
    "stages.first.strict=perhaps": ["perhaps: must be true or false"],
    "stages.first.pair=[1]": ["stages.first.pair: [1]: must be a list of 2: a number, a number"],
    "stages.first.pair=[1, x]": ["stages.first.pair.1: x: must be a number"],
    "stages.first.name=3": ["stages.0.name: 3: must be text"],
    "stages.first.shape={type: circle}": ["shape.radius: required: a number >= 0; for example `radius: 1.0`"],
    "stages.first.shape={type: circle, radius: 1, side: 2}": ["shape.side: unknown key; allowed here: type, radius"],
    "stages.first.shape={type: square, lambd: 2}": ["shape.lambd: unknown key", "did you mean 'lambda'?"],
    "stages.first.shape={type: square, side: 2}": ["shape.side: unknown key; allowed here: type, lambda"],
    "stages.first.shape={type: triangl}": ["stages.first.shape.type: triangl: must be one of 'circle', 'square'"],
    "stages.first.shape={radius: 1}": ["stages.first.shape.type: must be one of 'circle', 'square'"],
    "stages.first.only={type: circel, radius: 1}": ["stages.first.only.type: circel: must be 'circle'; did you mean"],
    "stages.first.speakers.one.volume=3": ["stages.first.speakers.one.volume: 3: must be a number > 0 and < 1"],
    "stages.first.speakers.one.volum=3": ["one.volum: unknown key; allowed here: volume, repeats; did you mean"],
    "stages.first.speakers.one.type=lod": ["one.type: lod: must be one of loud, quiet", "did you mean 'loud'?"],
    "stages.first.speakers.two.volume=0.5": ["stages.first.speakers.two.type: required: one of loud, quiet"],
    "stages.first.speakers.ome.volume=0.5": ["speakers.ome.type: required", "; did you mean 'one'?"],
    "stages.first.speakers.two=loud": ["stages.first.speakers.two: loud: must be a block whose `type` is one of"],
    "stages.first.speakers.two.type=nowhere:X": ["two.type: nowhere:X: there is no module 'nowhere'"],
    f"stages.first.speakers.two.type={HERE}:Lod": ["two.type", "did you mean 'Loud'?"],
    f"stages.first.speakers.two.type={HERE}:Any": ["two.type", "derives from modalities.settings.Settings"],
    "stages.first.speakers.two.type=extra": ["two.type: extra: needs the package 'no_such_package'"],
    "stages.first.speakers.two={type: quiet, words: [1]}": ["two.words.0: 1: must be text"],
    "stages.first.speakers.two={type: quiet, inner: {type: loud, volum: 1}}": ["two.inner.volum: unknown key"],
    "speaker.repeats=0": ["command line: speaker.repeats: 0: must be a whole number >= 1"],
    "stages=[]": ["stages: []: must be a list of at least 1, each a block with the keys name, until"],
    "name": ["'name' is not an override", "key.path=value"],
    "=x": ["not an override"],
    "name=": ["has no value", "name=null"],
    "name=[a": ["'[a'", "not valid YAML", "quotes"],
}  # fmt: skip


@pytest.mark.parametrize("override", WRONG_OVERRIDES)
def test_a_wrong_override_is_one_line_that_names_key_value_and_what_is_allowed(write: Any, override: str) -> None:
    with pytest.warns(UserWarning) if "type=lod" in override else nullcontext():
        message = mistake(write(GOOD), override)
    assert all(part in message for part in WRONG_OVERRIDES[override]), message
    assert message.startswith("command line: ") and len(message.splitlines()) == 1, message


def test_only_true_and_false_are_no_numbers(write: Any) -> None:
    """A whole number stays one where any number is allowed, and so does a number that is written as text."""
    path = write(GOOD)
    changed = validate(
        Run, load_yaml(path, ["stages.0.until.share=1", "stages.0.pair=[1, '1e-4']", "stages.0.size='8'"])
    )
    first = changed.stages[0]
    assert (first.until.share, first.pair, first.size) == (1.0, (1.0, 1e-4), 8)
    assert validate(Run, load_yaml(path, ["stages.0.strict=true"])).stages[0].strict is True


def test_what_a_block_itself_refuses_is_said_at_the_block(write: Any) -> None:
    message = mistake(write(GOOD), "stages.first.until.iterations=null")
    assert message == "run.yaml:4: stages.first.until: a stage without an end: give `iterations`"


def test_contradicting_overrides_are_refused(write: Any) -> None:
    path = write(GOOD)
    assert "contradicts" in mistake(path, "name=x", "name.a=1")
    assert "contradicts" in mistake(path, "speaker.repeats=1", "speaker=null")


def test_all_mistakes_come_at_once_each_with_its_own_file_and_line(write: Any) -> None:
    write("stages:\n  - nam: first\n    until: {iterations: -1}\n", "base.yaml")
    message = mistake(write("base: base.yaml\nname: toy\nspeeker: {}\n"), "speaker.volume=2")
    assert message.splitlines()[0] == "run.yaml: 5 problems"
    for line in (
        "  base.yaml:2: stages.0.name: required: text; for example `name: ...`",
        "  base.yaml:2: stages.0.nam: unknown key; allowed here: name, until",
        "  base.yaml:3: stages.0.until.iterations: -1: must be a whole number >= 0 or null",
        "  run.yaml:3: speeker: unknown key; allowed here: name, stages, speaker; did you mean 'speaker'?",
        "  command line: speaker.volume: 2: must be a number > 0 and < 1",
    ):
        assert line in message, message


def test_overrides_of_values_that_no_file_holds_name_their_block() -> None:
    changed = validate(Until, overlay(Until(iterations=3).model_dump(), ["share=1e-3"], "until"))
    assert changed == Until(iterations=3, share=1e-3)
    with pytest.raises(UserError, match=r"^command line: shre: unknown key; .*did you mean 'share'"):
        validate(Until, overlay({"iterations": 3}, ["shre=1"], "until"))
    with pytest.raises(UserError, match=r"^until: iterations: -3: must be a whole number >= 0 or null$"):
        validate(Until, overlay({"iterations": -3}, [], "until"))


def test_a_bug_inside_a_component_is_not_dressed_up_as_a_mistake_of_the_user(write: Any) -> None:
    class Buggy(Settings):
        def model_post_init(self, context: Any) -> None:
            raise KeyError("bug")

    globals()["Buggy"] = Buggy
    with pytest.raises(KeyError):
        validate(Run, load_yaml(write(GOOD), [f"speaker.type={HERE}:Buggy"]))


@pytest.mark.parametrize("block", [Loud, Until, Stage, Circle, Square, Quiet])
def test_the_example_that_a_message_gives_is_itself_allowed(block: type[Settings]) -> None:
    written = {key: example(field_options(field)) for key, field in keys_of(block).items()}
    values = {key: yaml.safe_load(text) for key, text in written.items() if "..." not in text}
    assert values
    try:
        block.model_validate(values)
    except ValidationError as error:
        complaints = [item["loc"] for item in error.errors() if item["loc"][0] in values]
        assert not complaints, (complaints, written)


# The difference between two resolved configs

CONFIGS = st.recursive(
    st.integers() | st.text("ab", max_size=2),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=2)
        | st.lists(st.fixed_dictionaries({"name": st.sampled_from("xyz"), "v": inner}), max_size=3)
    ),
    max_leaves=8,
)


@FEW
@given(CONFIGS, CONFIGS)
def test_there_is_a_difference_exactly_where_two_configs_differ(old: Any, new: Any) -> None:
    assert difference(old, old) == []
    assert bool(difference(old, new)) == (old != new)


def test_the_difference_names_the_key_as_an_override_would(write: Any) -> None:
    path = write(GOOD)
    old, new = (
        validate(Run, load_yaml(path, overrides)).model_dump(mode="json")
        for overrides in ([], ["stages.second.size=8", "stages.first.speakers.two={type: quiet}", "stages.0.path=x"])
    )
    assert difference(old, new) == [
        "stages.first.speakers.two: (not there) -> {type: quiet, words: hush, inner: null}",
        "stages.first.path: null -> x",
        "stages.second.size: 4 -> 8",
    ]
    swapped = {**old, "stages": old["stages"][::-1]}
    assert difference(old, swapped) == ["stages (order): [first, second] -> [second, first]"]
