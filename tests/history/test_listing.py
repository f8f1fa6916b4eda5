"""The list of runs: key figures, newest first, damaged ones as damaged, and what is no run left out."""

import os
from pathlib import Path

import pytest
from made_runs import made_run

from fasttrain.history.listing import DAMAGED, list_runs, listed
from fasttrain.run_folder import RunFolder


def test_key_figures(tmp_path: Path) -> None:
    made_run(tmp_path / "demo-20260101-000000", epochs=3, price=2.5)
    (run,) = list_runs(tmp_path)
    assert (run.recipe, run.status, run.epochs_done, run.epochs) == ("demo", "done", 3, 3)
    assert run.best is not None
    assert run.best == ("val_dice", pytest.approx(0.3), 3)
    assert run.patches_per_second == pytest.approx(10, abs=60)
    assert run.hours == 1.0
    assert run.machine == "A CPU, 4 CPUs"
    assert run.faults == []


def test_damaged_and_odd_folders_do_no_harm(tmp_path: Path) -> None:
    made_run(tmp_path / "good")
    no_recipe = made_run(tmp_path / "no-recipe")
    no_recipe.recipe.unlink()
    torn = made_run(tmp_path / "torn", status=None)
    torn.plan.write_text('{"sizes": {"epo')
    odd = made_run(tmp_path / "odd")
    odd.events.unlink()
    odd.events.mkdir()
    loop = RunFolder(tmp_path / "loop")
    loop.path.mkdir()
    loop.recipe.symlink_to(loop.recipe)
    loop.metrics.write_bytes(b"\x00\xff,epoch\n")
    cut_short = RunFolder(tmp_path / "cut-short")
    cut_short.path.mkdir()
    cut_short.environment.write_text("{}")
    (tmp_path / "a file").touch()
    (tmp_path / "notes").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    made_run(tmp_path / ".hidden")
    found = {run.path.name: run for run in list_runs(tmp_path)}
    assert set(found) == {"good", "no-recipe", "torn", "odd", "loop", "cut-short"}
    assert {name for name, run in found.items() if run.status == DAMAGED} == {"no-recipe", "torn", "loop"}
    assert found["no-recipe"].faults == ["recipe.yaml is missing"]
    assert found["torn"].faults[0].startswith("plan.json is damaged")
    assert found["good"].status == "done"
    assert found["odd"].status == "done"
    assert found["cut-short"].status == "not begun"
    for run in found.values():
        run.record()


def test_newest_first(tmp_path: Path) -> None:
    for name, second in (
        ("old", "2026-01-01T00:00:00"),
        ("new", "2026-03-01T00:00:00"),
        ("middle", "2026-02-01T00:00:00"),
    ):
        folder = made_run(tmp_path / name)
        text = folder.events.read_text()
        folder.events.write_text(text.replace(text[10:29], second, 1))
    assert [run.path.name for run in list_runs(tmp_path)] == ["new", "middle", "old"]


@pytest.mark.skipif(os.getuid() == 0, reason="root may look into any folder")
def test_a_folder_that_may_not_be_looked_into_is_damaged(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "closed")
    folder.path.chmod(0)
    run = listed(folder)
    folder.path.chmod(0o755)
    assert run is not None
    assert run.status == DAMAGED
