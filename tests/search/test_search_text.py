"""How a study is written for a person: the epochs after which trials were pruned, counted, whatever their number."""

from pathlib import Path

import pytest
from search_parts import MadePool, ended, made_search

from fasttrain.cli.search_text import rows_of
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
