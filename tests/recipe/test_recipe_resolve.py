"""From a name or file to a checked recipe: extends, --set, origins, and what is refused with which sentence."""

import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.errors import RecipeError
from fasttrain.recipe import bundled_recipes, resolve
from fasttrain.recipe.names import nearest
from fasttrain.recipe.run_spec import parse_interval, parse_intervals

WHOLE = """\
task: segmentation
data:
  source: {kind: phantom, cases: 6}
  channels: [CT]
  classes: {1: liver, 2: kidney}
  split: {kind: last, validation: 2}
  intensity: {kind: window, low: -150, high: 250}
patch:
  size: [32, 32, 32]
network: {kind: dynunet, features: [8, 16, 32, 64]}
loss: {kind: dice_ce}
optimizer: {kind: adamw, learning_rate: 2e-4}
schedule: {kind: cosine}
training:
  epochs: 2
  batch_size: 2
"""


@pytest.fixture
def write(tmp_path: Path):
    def written(text: str | bytes, name: str = "mine.yaml") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return written


def faults(name: str, *sets: str) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        resolve(name, sets)
    return caught.value.faults


def origin(resolved, dotted: str) -> str:
    return resolved.origins[tuple(dotted.split("."))]


@pytest.mark.parametrize("name", sorted(bundled_recipes()))
def test_every_bundled_recipe_resolves_and_reads_back(name: str, write) -> None:
    resolved = resolve(name)
    assert resolved.recipe.name == name
    assert resolve(write(resolved.as_yaml())).recipe == resolved.recipe


def test_there_are_bundled_recipes() -> None:
    assert {"demo", "hippocampus", "spleen"} <= set(bundled_recipes())


def test_yaml_1_2_in_a_file_and_in_sets(write) -> None:
    recipe = resolve(write(WHOLE + "acceleration: {amp: off, tf32: on, channels_last: false}\n")).recipe
    assert (recipe.acceleration.amp, recipe.acceleration.tf32, recipe.acceleration.channels_last) == (
        "off",
        "on",
        "off",
    )
    assert recipe.optimizer.learning_rate == 2e-4
    set_recipe = resolve(write(WHOLE), ["acceleration.amp=off", "optimizer.learning_rate=3e-5"]).recipe
    assert set_recipe.acceleration.amp == "off"
    assert set_recipe.optimizer.learning_rate == 3e-5
    assert resolve(write(WHOLE)).recipe.name == "mine"


def test_yaml_1_1_booleans_are_strings(write) -> None:
    (fault,) = faults(write(WHOLE + "output: {plots: {a: yes}}\n"))
    assert "output.plots" in fault
    (fault,) = faults(write(WHOLE), "validation.grid=no")
    assert "found 'no', expected one of original, preprocessed" in fault


def test_extends_a_relative_file_and_says_whose_value_is_whose(write, tmp_path: Path, monkeypatch) -> None:
    write(WHOLE, "below/parent.yaml")
    child = write("extends: parent.yaml\ntraining: {epochs: 7}\n", "below/child.yaml")
    monkeypatch.chdir("/")
    resolved = resolve(child, ["training.seed=3"])
    assert (resolved.recipe.training.epochs, resolved.recipe.training.batch_size) == (7, 2)
    assert origin(resolved, "training.epochs") == "recipe"
    assert origin(resolved, "training.batch_size") == "extends parent.yaml"
    assert origin(resolved, "training.seed") == "--set"
    assert origin(resolved, "training.accumulate") == "default"
    section = resolved.as_yaml().partition("\ntraining:\n")[2]
    lines = {line.split(":")[0].strip(): line for line in section.splitlines()[:6]}
    assert lines["epochs"].endswith("# recipe")
    assert lines["batch_size"].endswith("# extends parent.yaml")
    assert lines["accumulate"].endswith("# default")
    assert resolved.as_yaml().count("# --set") == 1


def test_extends_a_bundled_recipe_by_name(write) -> None:
    recipe = resolve(write("extends: demo\ntraining: {epochs: 3}\n")).recipe
    assert recipe.training.epochs == 3
    assert recipe.network == resolve("demo").recipe.network


def test_a_new_kind_replaces_its_section_and_a_same_kind_is_merged(write) -> None:
    write(WHOLE + "", "parent.yaml")
    other = resolve(write("extends: parent.yaml\noptimizer: {kind: sgd}\n", "c.yaml"))
    assert other.recipe.optimizer.learning_rate == 0.01
    assert origin(other, "optimizer.learning_rate") == "default"
    same = resolve(write("extends: parent.yaml\noptimizer: {beta1: 0.8}\n", "d.yaml"))
    assert (same.recipe.optimizer.learning_rate, same.recipe.optimizer.beta1) == (2e-4, 0.8)


def test_classes_are_replaced_whole_not_mixed(write) -> None:
    write(WHOLE.replace("kind: phantom, cases: 6", "kind: nnunet"), "parent.yaml")
    recipe = resolve(write("extends: parent.yaml\ndata: {classes: {4: tumour}}\n", "child.yaml")).recipe
    assert recipe.data.classes == {4: "tumour"}


def test_two_levels_are_refused(write) -> None:
    write(WHOLE, "a.yaml")
    write("extends: a.yaml\n", "b.yaml")
    (fault,) = faults(write("extends: b.yaml\n", "c.yaml"))
    assert "one level is the limit" in fault
    assert "a.yaml" in fault


@pytest.mark.parametrize(
    ("parent", "said"), [("nobody", "there is no recipe 'nobody'"), ("[1]", "found [1]"), ("x.yaml", "does not exist")]
)
def test_a_parent_that_is_not_there(write, parent: str, said: str) -> None:
    (fault,) = faults(write(f"extends: {parent}\n"))
    assert said in fault


def test_a_fault_names_the_file_and_line_where_the_value_stands(write) -> None:
    parent = write(WHOLE.replace("epochs: 2", "epochs: none"), "parent.yaml")
    child = write("extends: parent.yaml\ntraining:\n  batch_size: 4\n  seed: x\n", "child.yaml")
    told = faults(child)
    line = WHOLE.splitlines().index("  epochs: 2") + 1
    assert f"{parent}:{line}: training.epochs: should be a valid integer" in told[0]
    assert f"{child}:4: training.seed: " in told[1]


def test_all_faults_come_at_once_with_lines_and_paths(write) -> None:
    text = WHOLE.replace("batch_size", "batchsize").replace("dice_ce", "dice_cee").replace("kind: last", "knd: last")
    path = write(text)
    told = faults(path, "output.keep=0")
    for expected in (
        f"{path}:16: training.batchsize: no such key; did you mean batch_size or batch_policy?",
        f"{path}:11: loss.kind: there is no kind 'dice_cee'; did you mean dice_ce",
        f"{path}:6: data.split: needs a `kind`: one of kfold, last, ",
        f"{path}:14: training.batch_size: is missing",
        "--set output.keep: should be greater than or equal to 1, found 0",
    ):
        assert any(expected.replace("loss.kind", "loss") in fault.replace("loss.kind", "loss") for fault in told), (
            expected,
            told,
        )
    assert len(told) == 5


def test_faults_across_sections_are_also_told_together(write) -> None:
    path = write(WHOLE.replace("[32, 32, 32]", "[36, 32, 3]").replace("high: 250", "high: -200"))
    told = faults(path)
    assert f"{path}:9: patch.size[0]: 36 is not a multiple of 8; use 32 or 40" in told
    assert f"{path}:9: patch.size[2]: 3 is not a multiple of 8; use 8" in told
    assert any("data.intensity.low: -150 is not below high, -200" in fault for fault in told)


def test_sets_reach_lists_maps_and_sections(write) -> None:
    path = write(WHOLE)
    resolved = resolve(path, ["patch.size[0]=40", "data.classes.1=organ", "augment.flip={probability: 0.5, axes: [2]}"])
    assert resolved.recipe.patch.size == (40, 32, 32)
    assert resolved.recipe.data.classes == {1: "organ", 2: "kidney"}
    assert resolved.recipe.augment.flip.axes == (2,)
    assert origin(resolved, "patch.size") == "--set"
    assert resolved.origins[("data", "classes", 1)] == "--set"
    assert resolved.origins[("data", "classes", 2)] == "recipe"
    assert "size: [40, 32, 32]" in resolved.as_yaml()
    assert resolve(path, ["patch.size.0=40"]).recipe == resolve(path, ["patch.size[0]=40"]).recipe


def test_a_set_kind_empties_the_section_wherever_it_stands(write) -> None:
    recipe = resolve(write(WHOLE), ["optimizer.momentum=0.5", "optimizer.kind=sgd"]).recipe
    assert (recipe.optimizer.kind, recipe.optimizer.momentum, recipe.optimizer.learning_rate) == ("sgd", 0.5, 0.01)
    kept = resolve(write(WHOLE), ["optimizer.kind=adamw"]).recipe
    assert kept.optimizer.learning_rate == 2e-4


def test_the_last_of_two_sets_counts(write) -> None:
    assert resolve(write(WHOLE), ["training.epochs=3", "training.epochs=4"]).recipe.training.epochs == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("training.epoch=3", "--set training.epoch: no such key; did you mean epochs"),
        ("trainig.epochs=3", "--set trainig: no such key; did you mean training?"),
        ("augment.flp.probability=1", "--set augment.flp: no such key; did you mean flip?"),
        ("network.unknown=1", "--set network.unknown: no such key"),
        ("network.dynunet=1", "--set network.dynunet: no such key"),
        ("network.kind=dynnet", "there is no kind 'dynnet'; did you mean dynunet"),
        ("acceleration.amp=fp17", "found 'fp17', expected one of auto, bf16, fp16, off; did you mean fp16"),
        ("training.epochs", "should be key.path=value"),
        ("=3", "should be key.path=value"),
        ("training.epochs=", "--set training.epochs: "),
        ("training.epochs=[1", "--set training.epochs=[1, line 1, column"),
        ("training.epochs=!!python/object/apply:os.getpid []", "not valid YAML"),
        ("patch.size[3]=8", "patch.size is a list of 3 values"),
        ("patch.size.x=8", "patch.size is a list of 3 values"),
        ("patch.size[0][1]=8", "patch.size[0] is one value, 32"),
        ("patch.size[0].a.b=8", "patch.size[0] is one value, 32"),
        ("patch.²=8", "--set patch.²: no such key"),
        ("training..epochs=8", "no such key"),
        ("optimizer.learning_rate=.nan", "should be a finite number"),
        ("optimizer.learning_rate=.inf", "should be a finite number"),
        ("output.checkpoint_every=0m", "'0m' is no interval"),
        ("output.checkpoint_every=off", "for a checkpoint at the end alone, more epochs than the run has"),
        ("data.orientation=RLS", "data.orientation"),
        ("name=a/b", "names a folder"),
        ("name=..", "names a folder"),
        ("extends=demo", "extends"),
        ("data.classes.300=x", "label values are whole numbers from 1 to 255, found 300"),
        ("data.classes.x=y", "data.classes.x"),
        ("network.deep_supervision=3", "3 heads, but 4 stages have room for 2"),
    ],
)  # fmt: skip
def test_what_a_set_is_refused_for(write, text: str, said: str) -> None:
    told = faults(write(WHOLE), text)
    assert any(said in fault for fault in told), told
    assert all("\n" not in fault for fault in told)


def test_faulty_sets_are_told_together(write) -> None:
    assert len(faults(write(WHOLE), "a", "b=[")) == 2
    assert len(faults(write(WHOLE), "patch.size[3]=8", "network.features[9]=8")) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "should hold keys"),
        (b"- 1\n- 2\n", "should hold keys"),
        (b"just text\n", "should hold keys"),
        (b"\xff\xfe\x00a", "is not UTF-8 text"),
        (WHOLE.encode("utf-16"), "is not UTF-8 text"),
        (b"training: {epochs: 1, epochs: 2}\n", "duplicate key"),
        (b"training: [\n", "line 2"),
        (b"a: 1\n---\nb: 2\n", "not valid YAML"),
        (b"data: !!python/object/apply:os.system ['touch hacked']\n", "not valid YAML"),
        (b"data: !!python/name:os.system\n", "not valid YAML"),
        (b"data: &d\n  source: *d\n", "not valid YAML"),
        (b"a: \x07\n", "not valid YAML"),
        (b"a: " + b"[" * 5000, "not valid YAML"),
        (b"1: 2\n", ""),
        (b"? [1, 2]\n: 3\n", ""),
        (b"name: 2020-01-01\n", "name: "),
    ],
)
def test_files_that_are_no_recipe(write, tmp_path: Path, monkeypatch, content: bytes, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(content)
    told = faults(path)
    assert any(said in fault for fault in told), told
    assert all(path in fault for fault in told)
    assert not (tmp_path / "hacked").exists()


def test_aliases_that_multiply_are_refused_quickly(write) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    (fault,) = faults(write("\n".join(lines)))
    assert "more than 100,000 values" in fault


def test_what_an_alias_names_is_copied(write) -> None:
    text = WHOLE + "augment: {scale: &range {probability: 0.3, low: 0.9, high: 1.1}, gamma: *range}\n"
    augment = resolve(write(text), ["augment.scale.low=0.5"]).recipe.augment
    assert (augment.scale.low, augment.gamma.low) == (0.5, 0.9)


def test_a_byte_order_mark_is_accepted(write) -> None:
    assert resolve(write(b"\xef\xbb\xbf" + WHOLE.encode())).recipe.training.epochs == 2


def test_a_bundled_name_that_is_misspelt() -> None:
    (fault,) = faults("hipocampus")
    assert fault == "there is no recipe 'hipocampus'; did you mean hippocampus or hippocampus-fast?"
    assert "does not exist" in faults("./nowhere.yaml")[0]
    assert "does not exist" in faults("a/" + "a" * 300)[0]


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    assert "is a folder" in faults(f"{tmp_path}/")[0]


def test_nearest_names() -> None:
    assert nearest("Epochs", ["epochs", "seed"]) == ["epochs"]
    assert nearest("zzz", ["epochs", "seed"]) == []
    assert nearest("rate", ["learning_rate", "seed"]) == ["learning_rate"]


positive = st.integers(1, 10_000)
share = st.floats(0, 1)
SETTABLE = st.fixed_dictionaries(
    {},
    optional={
        "training.epochs": positive,
        "training.iterations_per_epoch": st.none() | positive,
        "optimizer.learning_rate": st.floats(1e-300, 1e300, exclude_min=True),
        "optimizer.weight_decay": st.floats(0, 1e10),
        "augment.noise": st.none() | st.fixed_dictionaries({"probability": share, "std": share}),
        "augment.flip": st.fixed_dictionaries({"probability": share, "axes": st.permutations([0, 1, 2])}),
        "data.name": st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), min_size=1, max_size=40).filter(
            lambda text: text.strip() and not set(text) & set("/\\") and text not in (".", "..") and text.isprintable()
        ),
        "data.channels": st.lists(st.text(max_size=30).filter(lambda text: text.isprintable()), min_size=1, max_size=1),
        "data.intensity": st.sampled_from([{"kind": "none"}, {"kind": "zscore", "nonzero": True}]),
        "data.spacing": st.none() | st.lists(st.floats(0.01, 100), min_size=3, max_size=3),
        "network.strides": st.just([2, [1, 2, 2], 2]),
        "acceleration.amp": st.sampled_from(["auto", "off", "bf16"]),
        "acceleration.threads": st.just("auto") | st.integers(1, 1024),
        "output.checkpoint_every": st.sampled_from(["1 epoch", "5m", "50 steps"]),
        "validation.mirror": st.lists(st.integers(0, 2), unique=True),
        "validation.hd95": st.booleans(),
    },
)


@settings(max_examples=40, deadline=None)
@given(values=SETTABLE)
def test_the_written_recipe_gives_the_same_recipe(values: dict, tmp_path_factory) -> None:
    resolved = resolve("demo", values)
    path = tmp_path_factory.mktemp("again") / "recipe.yaml"
    path.write_text(resolved.as_yaml(), encoding="utf-8")
    again = resolve(str(path))
    assert again.recipe == resolved.recipe
    for key, value in values.items():
        keys = tuple(key.split("."))
        if not isinstance(value, dict):
            assert resolved.origins[keys] == "--set"
    assert all(origin in ("default", "recipe", "--set") for origin in resolved.origins.values())


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [("1 epoch", 1, "epochs"), ("3 epochs", 3, "epochs"), ("50 steps", 50, "steps"), ("50steps", 50, "steps"),
     ("5m", 300, "seconds"), ("0.5h", 1800, "seconds"), (" 20 s ", 20, "seconds"), ("10 min", 600, "seconds"),
     ("1 hour", 3600, "seconds"), ("2hours", 7200, "seconds"), ("90 seconds", 90, "seconds"), ("3 minutes", 180, "seconds")],
)  # fmt: skip
def test_intervals(text: str, amount: float, unit: str) -> None:
    interval = parse_interval(text)
    assert (interval.amount, interval.unit) == (amount, unit)


@pytest.mark.parametrize(
    "text", ["0m", "0 epochs", "-1 s", "1.5 steps", "", "m", "1", "1 week", "1e3 s", "nan s", "٣m", "9" * 400 + "m"]
)
def test_what_is_no_interval(text: str) -> None:
    with pytest.raises(ValueError, match="interval|whole numbers"):
        parse_interval(text)


@given(
    amount=st.integers(1, 10**9),
    unit=st.sampled_from(["epoch", "epochs", "step", "steps", "s", "m", "h"]),
    space=st.sampled_from(["", " ", "  "]),
)
def test_any_whole_interval_is_read_with_its_unit(amount: int, unit: str, space: str) -> None:
    interval = parse_interval(f"{amount}{space}{unit}")
    factor = {"s": 1, "m": 60, "h": 3600}.get(unit)
    assert interval.unit == ("seconds" if factor else f"{unit.rstrip('s')}s")
    assert interval.amount == amount * (factor or 1)


def test_intervals_of_which_the_first_counts() -> None:
    found = parse_intervals("1 epoch, 5m,50 steps")
    assert [(one.amount, one.unit) for one in found] == [(1, "epochs"), (300, "seconds"), (50, "steps")]
    assert parse_intervals("5m") == (parse_interval("5m"),)
    for text in ("1 epoch,", "5m, 0s", ", 5m", "5m 1 epoch"):
        with pytest.raises(ValueError, match=re.escape(repr(text))):
            parse_intervals(text)


@given(text=st.text(max_size=12))
def test_an_interval_is_read_or_refused_with_its_text(text: str) -> None:
    sentence, interval = "", None
    try:
        interval = parse_interval(text)
    except ValueError as error:
        sentence = str(error)
    assert repr(text) in sentence if interval is None else 0 < interval.amount < math.inf


def test_a_changed_value_that_is_none_is_told_as_one_of_the_recipe() -> None:
    found = resolve("demo")
    assert found.with_values({("training", "batch_size"): 3}, "tuned").recipe.training.batch_size == 3
    for keys, value in (
        (("training", "batch_size"), 0),
        (("data", "cache", "kind"), []),
        (("patch", "size"), [48, 48, 50]),
    ):
        with pytest.raises(RecipeError) as caught:
            found.with_values({keys: value}, "tuned")
        assert str(caught.value).startswith(".".join(keys))
