"""The folder of a data set: given, from the environment, or beside the run; a missing one names its remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_builders import make_recipe

from fasttrain.data.location import DECATHLON_TASKS, data_root
from fasttrain.errors import DataError, StorageError


def test_the_given_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = make_recipe(name="spleen")
    for folder in ("given", "env/spleen", "data/spleen"):
        (tmp_path / folder).mkdir(parents=True)
    environ = {"FASTTRAIN_DATA": str(tmp_path / "env")}
    assert data_root(recipe, tmp_path / "given", environ) == tmp_path / "given"
    assert data_root(recipe, None, environ) == tmp_path / "env" / "spleen"
    assert data_root(recipe, None, {}) == Path("data/spleen")
    assert data_root(recipe, None, {"FASTTRAIN_DATA": ""}) == Path("data/spleen")
    with pytest.raises(DataError):
        data_root(recipe, tmp_path / "absent", environ)


def test_the_folder_is_called_after_the_set_else_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    assert data_root(make_recipe(), None, {"FASTTRAIN_DATA": str(tmp_path)}).name == "made"


@pytest.mark.parametrize("name", [*DECATHLON_TASKS, "own"])
def test_a_missing_folder_names_its_remedy(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError) as caught:
        data_root(make_recipe(name=name), None, {"FASTTRAIN_DATA": str(tmp_path)})
    text = str(caught.value)
    assert str(tmp_path / name) in text
    assert "--data" in text
    assert (f"`fasttrain data fetch {name}`" in text) == (name != "own")
    with pytest.raises(DataError) as caught:
        data_root(make_recipe(name=name), tmp_path / "a b", {})
    assert (f"`fasttrain data fetch {name} --to '{tmp_path / 'a b'}'`" in str(caught.value)) == (name != "own")
    (tmp_path / name).write_text("x")
    with pytest.raises(DataError, match="is a file"):
        data_root(make_recipe(name=name), None, {"FASTTRAIN_DATA": str(tmp_path)})


def test_the_folder_for_phantoms_is_made(tmp_path: Path) -> None:
    recipe = make_recipe(source={"kind": "phantom"})
    root = data_root(recipe, None, {"FASTTRAIN_DATA": str(tmp_path / "new")})
    assert root == tmp_path / "new" / "made"
    assert root.is_dir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot be made"):
        data_root(recipe, tmp_path / "file" / "below", {})
