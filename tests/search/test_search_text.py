"""What a person is told of a study: where trials were pruned, and what its storage or its folder lost."""

import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from search_parts import MadePool, ended, made_search

from fasttrain.cli.search_study import _last_words
from fasttrain.cli.search_text import rows_of
from fasttrain.engine.stop import StopRequest
from fasttrain.errors import StorageError
from fasttrain.studies.search.one_trial import short_names
from fasttrain.studies.search.standing import standing_of
from fasttrain.studies.search.study import open_kept

pytest.importorskip("optuna")


@pytest.mark.parametrize(
    ("epochs", "text"),
    [
        ([], "0% of the trials that ended by themselves"),
        ([1], "25% of the trials that ended by themselves, 1 after epoch 1"),
        ([1, 1, 1, 3, 3] * 8, "75% of the trials that ended by themselves, 24 after epoch 1, 16 after epoch 3"),
        (list(range(1, 10)), "25% of the trials that ended by themselves, after epochs 1 to 9"),
    ],
)
def test_where_trials_were_pruned(epochs: list[int], text: str, tmp_path: Path) -> None:
    search, _ = made_search(tmp_path / "s", MadePool(lambda task: [ended()]))
    rate = int(text.partition("%")[0]) / 100
    found = {**standing_of(open_kept(search.study.folder)), "pruned_after_epochs": epochs, "pruning_rate": rate}
    assert dict(rows_of(found))["pruning"] == text


def test_runs_that_the_storage_knows_nothing_of_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    _, told = made_search(folder, MadePool(lambda task: [ended()]), storage="sqlite")
    assert told == []
    (folder / "trial-0000").mkdir()
    _, told = made_search(folder, MadePool(lambda task: [ended()]), storage="sqlite")
    assert "knows no trial of demo, though" in told[0]
    assert "holds 1 run: the search begins anew beside it" in told[0]
    search, _ = made_search(folder, MadePool(lambda task: [ended()]), storage="sqlite")
    search.study.optuna.ask()
    _, told = made_search(folder, MadePool(lambda task: [ended()]), storage="sqlite")
    assert told == []


@pytest.mark.parametrize("lost", [True, False])
def test_a_folder_that_went_away_is_no_mistake_in_the_command(lost: bool, tmp_path: Path) -> None:
    search, _ = made_search(tmp_path / "s", MadePool(lambda task: [ended()]), storage="sqlite")
    if lost:
        shutil.rmtree(tmp_path / "s")
    with pytest.raises(StorageError, match="holds no study") if lost else nullcontext():
        _last_words(search.study.folder.path, None, False, StopRequest())


def test_values_whose_last_word_is_the_same_are_told_apart() -> None:
    paths = ["augment.noise.probability", "augment.flip.probability", "network.dropout"]
    assert short_names(paths) == ["noise.probability", "flip.probability", "dropout"]
    assert short_names(paths[1:]) == ["probability", "dropout"]


def test_monitor_stays_while_a_search_looks_at_its_data_and_ends_with_it(tmp_path: Path) -> None:
    search, _ = made_search(tmp_path / "s", MadePool(lambda task: None))
    monitor = [sys.executable, "-m", "fasttrain", "monitor", str(tmp_path / "s"), "--every", "1"]
    # As another process sees it
    process = subprocess.Popen(monitor, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    time.sleep(3.0)
    assert process.poll() is None
    search.presence.close()
    assert process.wait(30) == 0
