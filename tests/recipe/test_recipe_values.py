"""What a value may be: a switch is no number, seeds fit every generator, and no text of a `--set` ends in anything else than a
recipe that reads back or a sentence."""

import re
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from fasttrain.errors import RecipeError
from fasttrain.recipe import resolve
from fasttrain.recipe.examples import models_in
from fasttrain.recipe.recipe import Recipe
from fasttrain.recipe.reference import sections


def faults(*sets: str, name: str = "demo") -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        resolve(name, sets)
    return caught.value.faults


@pytest.mark.parametrize(
    "text",
    ["training.batch_size=true", "training.seed=false", "optimizer.learning_rate=true", "network.deep_supervision=true",
     "network.dropout=false", "patch.size=[true, 48, 48]", "network.strides=[true, 2, 2]", "acceleration.threads=true",
     "data.intensity.low=false", "data.classes={true: a, 2: b}", "augment.noise.probability=true", "data.spacing=[true, 1, 1]"],
)  # fmt: skip
def test_a_switch_is_no_number(text: str) -> None:
    (fault,) = faults(text)
    assert fault.startswith(f"--set {text.partition('=')[0]}")
    assert f"should be a number, found {'false' if 'false' in text else 'true'}" in fault


def test_a_switch_stays_a_switch() -> None:
    recipe = resolve("demo", ["validation.hd95=true", "output.plots=false", "acceleration.tf32=true"]).recipe
    assert (recipe.validation.hd95, recipe.output.plots, recipe.acceleration.tf32) == (True, False, "on")


@pytest.mark.parametrize("key", ["training.seed", "data.source.seed"])
def test_a_seed_is_what_every_generator_takes(key: str) -> None:
    resolve("demo", [f"{key}={2**32 - 1}"])
    for value in (2**32, 2**70, -1):
        (fault,) = faults(f"{key}={value}")
        assert fault.startswith(f"--set {key}: should be ")
        assert fault.endswith(f"found {value}")


@pytest.mark.parametrize(("value", "shown"), [("null", "null"), ("true", "true"), ("[1]", "[1]"), ("x", "'x'")])
def test_a_section_that_holds_no_keys_is_told_in_yamls_words(value: str, shown: str) -> None:
    assert faults(f"training={value}") == (
        f"--set training: should hold keys and values, such as training.epochs=20, found {shown}",
    )
    assert faults("training.epochs=") == ("--set training.epochs: should be a valid integer, found null",)


def test_an_index_of_thousands_of_digits_is_a_sentence() -> None:
    assert "patch.size is a list of 3 values" in faults(f"patch.size[{'9' * 5000}]=1")[0]
    assert "not valid YAML" in faults(f"training.epochs={'9' * 5000}")[0]


def test_what_depends_on_order_in_sets() -> None:
    """A whole section replaces what was set in it before; what comes after is set inside it."""
    section = "augment.scale={probability: 0.5, low: 0.9}"
    assert resolve("demo", [section, "augment.scale.low=0.8"]).recipe.augment.scale.low == 0.8
    assert resolve("demo", ["augment.scale.low=0.8", section]).recipe.augment.scale.low == 0.9


def test_a_parent_and_sets_leave_the_right_origins_after_a_change_of_kind(tmp_path: Path) -> None:
    child = tmp_path / "child.yaml"
    child.write_text("extends: demo\noptimizer: {kind: sgd, momentum: 0.8}\n")
    resolved = resolve(str(child), ["schedule.kind=poly", "patch.size[0]=40"])
    origins = {".".join(map(str, keys)): origin for keys, origin in resolved.origins.items()}
    assert origins["optimizer.kind"] == origins["optimizer.momentum"] == "recipe"
    assert origins["optimizer.learning_rate"] == origins["schedule.power"] == origins["schedule.warmup"] == "default"
    assert origins["schedule.kind"] == origins["patch.size"] == "--set"
    assert origins["data.channels"] == "extends demo"
    text = resolved.as_yaml()
    for key, value, said in [("momentum", "0.8", "recipe"), ("power", "0.9", "default"), ("kind", "poly", "--set")]:
        (line,) = [line for line in text.splitlines() if line.strip().startswith(f"{key}: {value} ")]
        assert line.endswith(f"# {said}")


NUMBERS = st.one_of(st.integers(1, 500).map(str), st.floats(1e-9, 1e9).map(repr))
SCALARS = [
    "null",
    "true",
    "1",
    "-1",
    "0",
    "1.5",
    ".nan",
    "x",
    "''",
    "1e400",
    "2020-01-01",
    "0x10",
    "1_000",
    "=",
    "~",
    "<<",
    "*x",
]
COMPOUND = ["[]", "{}", "[1,2]", "{a: 1}", "{kind: x}", "{kind: [1]}", "{kind: {a: 1}}", "[[1]]", "!!set {a}",
            "!!binary aGk=", "!!omap [a: 1]", "{1: 2}", "{[1]: 2}", "&x 1", "{<<: {a: 1}}", "[null]", "{kind: null}", "!foo 1",
            '"\\0"']  # fmt: skip


def every_path(value: object, path: str = "") -> list[str]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key, item in value.items():
            found += every_path(item, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            found += every_path(item, f"{path}[{index}]")
    return found


PATHS = every_path(resolve("demo").recipe.model_dump())


@settings(max_examples=100, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    sets=st.lists(
        st.tuples(
            st.sampled_from([*PATHS, "x", "data.kind", "network.kind.a", "patch.size[0].kind", "augment.flip.kind", "", "."]),
            st.one_of(st.sampled_from([*SCALARS, *COMPOUND]), NUMBERS, st.text(max_size=6)),
        ),
        min_size=1,
        max_size=3,
    )
)  # fmt: skip
def test_any_set_gives_a_recipe_that_reads_back_or_sentences(sets: list[tuple[str, str]], tmp_path_factory) -> None:
    told: tuple[str, ...] = ()
    resolved = None
    try:
        resolved = resolve("demo", [f"{key}={value}" for key, value in sets])
    except RecipeError as error:
        told = error.faults
    if resolved is None:
        assert told
        assert all(fault.startswith(("--set", "/")) for fault in told)
        return
    path = tmp_path_factory.mktemp("again") / "recipe.yaml"
    path.write_text(resolved.as_yaml(), encoding="utf-8")
    assert resolve(str(path)).recipe == resolved.recipe
    assert "# --set" in resolved.as_yaml()


ODD = ["\x00", "\x85", "a\x85b", "\u2028", "\ufeff", "# no comment", "a # b", ": - ?", "a: b", "- a", "? a", "null",
       "1.0", "2e-4", " a ", "off", "yes", "", "\n", "a\n b", "x\n", "\r", "\t", "'", '"', "\\", "%", "@", "`", "|", "[", "}, {",
       "*a", "&a", "!!str", "<<", "=", "2020-01-01", "---", "...", "\U0001f600", "Längs", "a" * 5000 + " b"]  # fmt: skip


def read_back(name: str, path: Path) -> None:
    values = {"data.channels": [name], "data.classes": {1: name, 2: f"other than {name}"}}
    resolved = resolve("demo", values)
    path.write_bytes(resolved.as_yaml().encode())
    again = resolve(str(path)).recipe
    assert again == resolved.recipe
    assert again.data.channels == (name,)
    assert again.data.classes[1] == name


@pytest.mark.parametrize("name", ODD, ids=lambda name: ascii(name)[:12])
def test_odd_names_read_back(name: str, tmp_path: Path) -> None:
    read_back(name, tmp_path / "recipe.yaml")


# Without shrinking: it takes minutes, and what fails is short anyway
@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(name=st.text(max_size=8) | st.text("\x85:-?#,[]{}&*!|>'\"%@` \n\ta1", max_size=8))
def test_names_of_any_characters_read_back(name: str, tmp_path_factory) -> None:
    read_back(name, tmp_path_factory.getbasetemp() / "any_name.yaml")


@pytest.mark.parametrize("name", ["\ud800", "a\udcfcb"])
def test_half_a_surrogate_pair_is_refused_before_anything_is_trained(name: str) -> None:
    with pytest.raises(RecipeError, match=r"data.classes\[1\]: .* is no text that a file could hold"):
        resolve("demo", {"data.classes": {1: name, 2: "b"}})


def faults_or_none(text: str) -> tuple[str, ...]:
    try:
        resolve("demo", [text])
    except RecipeError as error:
        return error.faults
    return ()


OPTIONAL = {"augment.noise", "training.ema", "training.early_stopping", "data.crop_foreground", "augment.flip"}


@pytest.mark.parametrize(
    "section", sorted({re.sub(r"\[\w+\]", "", one.path) for one in sections() if one.path} | OPTIONAL)
)
def test_a_value_where_a_section_is_meant_is_answered_with_a_setting_that_is_taken(section: str) -> None:
    for value in ("true", "3", "disk"):
        (fault,) = faults(f"{section}={value}")
        match = re.match(rf"--set {re.escape(section)}: should hold keys and values, such as (\S+?=.+?), found ", fault)
        assert match is not None, fault
        assert match[1].startswith(f"{section}.")
        key = match[1].partition("=")[0]
        # What the new value asks for besides is another matter; the key itself is no fault
        assert not [one for one in faults_or_none(match[1]) if f"{key}: " in one]


def test_the_value_of_a_section_that_is_one_of_its_kinds_is_taken_for_the_kind() -> None:
    assert "such as data.cache.kind=disk, found 'disk'" in faults("data.cache=disk")[0]
    assert "such as loss.kind=cross_entropy, found 'cross_entropy'" in faults("loss=cross_entropy")[0]
    assert "such as training.ema.decay=0.999, found true" in faults("training.ema=true")[0]


@pytest.mark.parametrize("text", ["true", "yes", "on", "Yes", "'on'"])
def test_a_switch_is_spelt_in_any_way_that_a_plain_boolean_is(text: str) -> None:
    recipe = resolve(
        "demo", [f"acceleration.compile={text}", f"output.tensorboard={text}", f"data.pin_memory={text}"]
    ).recipe
    assert (recipe.acceleration.compile, recipe.output.tensorboard, recipe.data.pin_memory) == ("on", True, "on")
    assert faults(f"acceleration.amp={text}")[0].endswith("expected one of auto, bf16, fp16, off")


@pytest.mark.parametrize("text", ["false", "no", "off", "No"])
def test_off_is_spelt_in_any_way(text: str) -> None:
    sets = [f"{key}={text}" for key in ("acceleration.compile", "acceleration.amp", "output.pictures", "output.plots")]
    recipe = resolve("demo", sets).recipe
    assert (recipe.acceleration.compile, recipe.acceleration.amp, recipe.output.pictures) == ("off",) * 3
    assert recipe.output.plots is False
    assert faults("acceleration.compile=maybe")[0].endswith("found 'maybe', expected one of auto, on, off")


@pytest.mark.parametrize("kind", ["memory", "disk", "lmdb", "smart", "none"])
def test_what_only_the_gpu_cache_looks_at_is_refused_for_others(kind: str) -> None:
    (fault,) = faults(f"data.cache.kind={kind}", "data.cache.shard=on")
    assert f"--set data.cache.shard: is for data.cache.kind: gpu, and the kind is {kind}; set that" in fault
    for fitting in ("gpu", "auto"):
        assert resolve("demo", [f"data.cache.kind={fitting}", "data.cache.shard=on"]).recipe.data.cache.shard == "on"


@pytest.mark.parametrize("setting", ["cache_share=0.5", "cache_cases=3", "replace_rate=0.3", "shuffle_seed=null"])
@pytest.mark.parametrize("kind", ["memory", "auto", "disk"])
def test_what_only_the_smart_cache_looks_at_is_refused_for_others(setting: str, kind: str) -> None:
    (fault,) = faults(f"data.cache.kind={kind}", f"data.cache.{setting}")
    key = setting.partition("=")[0]
    assert fault == (
        f"--set data.cache.{key}: is for data.cache.kind: smart, and the kind is {kind}; set that, or leave this out"
    )
    resolve("demo", ["data.cache.kind=smart", f"data.cache.{setting}"])


def test_a_patch_of_two_values_is_named_where_the_spacing_has_three() -> None:
    (fault,) = faults("patch.size=[32, 32]")
    assert fault.startswith(
        "--set patch.size: has 2 values, but data.spacing has 3, as for volumes; give 3, or cut the volumes"
    )
    (fault,) = faults("data.spacing=[1, 1]")
    assert "data.spacing: has 2 values, but patch.size has 3, [48, 48, 48]; give both as many" in fault


def test_a_patch_that_is_too_small_is_answered_with_one_that_will_do() -> None:
    (fault,) = faults("network.kind=swinunetr", "patch.size=[32, 32, 32]")
    match = re.search(r"use a larger patch, such as (\[.*\])", fault)
    assert match is not None
    resolve("demo", ["network.kind=swinunetr", f"patch.size={match[1]}"])


def test_no_choice_that_has_numbers_takes_a_switch() -> None:
    """Python holds `True` for 1; so does a Literal of pydantic's."""
    seen: set[type[BaseModel]] = set()
    waiting: list[type[BaseModel]] = [Recipe]
    found = []
    while waiting:
        model = waiting.pop()
        if model in seen:
            continue
        seen.add(model)
        for name, field in model.model_fields.items():
            waiting += models_in(field.annotation)
            if any(type(value) is int for value in get_args(field.annotation)):
                found.append(name)
                for switch in (True, False):
                    with pytest.raises(ValidationError, match=f"{name}\n"):
                        model(**{name: switch})
    assert found == ["axis"]
