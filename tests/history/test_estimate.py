"""What a run will take by past ones: by the same shape, machine and plan alone, and never by a made figure."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from made_runs import DECIDED, STEPS, made_run

from fasttrain.engine.resuming.changes import as_values
from fasttrain.history.estimate import Estimate, Wanted, estimate
from fasttrain.recipe import resolve


def wanted(
    count: int = 1, cpus: int = 4, decided: dict | None = None, validated: int = 2, ranks: int = 1, **more: Any
) -> Wanted:
    base = {"training.epochs": 10, "training.iterations_per_epoch": STEPS}
    recipe = resolve("demo", {**base, **{key.replace("__", "."): value for key, value in more.items()}}).recipe
    sizes = {
        "ranks": ranks,
        "validation_cases": validated,
        "effective_batch": recipe.training.batch_size * recipe.training.accumulate,
        "steps_per_epoch": recipe.training.iterations_per_epoch or STEPS,
    }
    return Wanted(as_values(recipe), {**DECIDED, **(decided or {}), "sizes": sizes}, "A CPU", False, cpus, count)


@pytest.fixture
def past(tmp_path: Path) -> Path:
    """2 s an epoch of ten steps, 1 s a validation, 5 s to the first step and 4 s for the rest."""
    made_run(tmp_path / "runs" / "past", epochs=3)
    return tmp_path / "runs"


def test_a_past_run_tells(past: Path) -> None:
    every = resolve("demo").recipe.validation.every
    found = estimate(wanted(), [past], price_per_hour=3600.0)
    assert isinstance(found, Estimate)
    expected = 5 + 10 * 2 + (10 // every) * 1 + 4
    assert found.hours * 3600 == pytest.approx(expected)
    assert found.cost == pytest.approx(expected)
    assert found.run == str(past / "past")
    assert found.epochs_measured == 3


def test_longer_epochs_more_cases_and_folds_are_reckoned_with(past: Path) -> None:
    found = estimate(wanted(count=5, validated=8, training__iterations_per_epoch=30, validation__every=10), [past])
    assert isinstance(found, Estimate)
    assert found.hours * 3600 == pytest.approx(5 * (5 + 10 * 6 + 4 + 4))
    assert found.cost is None


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ({"training__batch_size": 3}, "training.batch_size"),
        ({"patch__size": [32, 32, 32]}, "patch.size"),
        ({"network": {"kind": "unet", "features": [8, 16], "strides": [2]}}, "network.kind"),
        ({"decided": {"amp": "bf16"}}, "amp"),
        ({"validation__mirror": [0]}, "validation.mirror"),
        ({"data__samples_per_case": 7}, "data.samples_per_case"),
        ({"ranks": 2}, "the number of ranks"),
    ],
)
def test_another_run_tells_nothing(past: Path, other: dict, key: str) -> None:
    found = estimate(wanted(**other), [past])
    assert isinstance(found, str)
    assert "not known" in found
    assert key in found


def test_what_changes_no_pace_is_no_matter(past: Path) -> None:
    other = {"training__seed": 7, "optimizer__learning_rate": 0.5, "output__plots": False, "name": "another"}
    assert isinstance(estimate(wanted(**other), [past]), Estimate)


def test_another_machine_tells_nothing(past: Path) -> None:
    found = estimate(wanted(cpus=64), [past])
    assert isinstance(found, str)
    assert "this kind of machine" in found
    assert isinstance(estimate(wanted(), [past / "nowhere"]), str)


def test_a_killed_run_tells_its_pace_and_one_of_two_epochs_is_taken_before_one(past: Path) -> None:
    made_run(past / "newer", epochs=1, status=None)
    killed = made_run(past / "newest", epochs=2, status=None)
    found = estimate(wanted(), [past])
    assert isinstance(found, Estimate)
    assert found.run == str(killed.path)
    assert found.other_seconds == 0.0
    killed.metrics.unlink()
    found = estimate(wanted(), [past])
    assert isinstance(found, Estimate)
    assert found.run == str(past / "past")


def test_epochs_of_another_batch_do_not_count(past: Path) -> None:
    folder = made_run(past / "changed", epochs=3)
    lines = folder.metrics.read_text().splitlines()
    columns = lines[0].split(",")
    cells = lines[2].split(",")
    rate, seconds = columns.index("patches_per_second"), columns.index("seconds")
    cells[rate], cells[seconds] = str(float(cells[rate]) * 4), "4.0"
    folder.metrics.write_text("\n".join([*lines[:2], ",".join(cells), lines[3]]) + "\n")
    found = estimate(wanted(), [past])
    assert isinstance(found, Estimate)
    assert found.run == str(folder.path)
    assert found.epochs_measured == 2


def test_damaged_runs_are_passed_over(past: Path) -> None:
    for name, text in (("a", "{"), ("b", "[]"), ("c", json.dumps({"recipe": 5})), ("d", "")):
        made_run(past / name).plan.write_text(text)
    os.symlink("nowhere", past / "link")
    found = estimate(wanted(), [past])
    assert isinstance(found, Estimate)
    assert found.run == str(past / "past")


def test_a_fold_after_the_first_began_in_a_process_that_had_loaded_all(tmp_path: Path) -> None:
    whole = tmp_path / "runs" / "folds"
    whole.mkdir(parents=True)
    (whole / "folds.json").write_text(json.dumps({"format": 1, "folds": 2, "device": "cpu"}))
    (whole / "recipe.yaml").touch()
    made_run(whole / "fold_0")
    summary = made_run(whole / "fold_1").summary
    record = json.loads(summary.read_text())
    record["seconds"]["to_first_step"], record["seconds"]["total"] = 1.0, record["seconds"]["total"] - 4.0
    summary.write_text(json.dumps(record))
    one = estimate(wanted(validation__every=10), [tmp_path / "runs"])
    three = estimate(wanted(count=3, validation__every=10), [tmp_path / "runs"])
    assert isinstance(one, Estimate)
    assert isinstance(three, Estimate)
    assert one.run.endswith("fold_1")
    assert one.hours * 3600 == pytest.approx(5 + 20 + 1 + 4)
    assert three.hours * 3600 == pytest.approx(5 + 1 + 1 + 3 * (20 + 1 + 4))
