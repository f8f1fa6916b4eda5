"""The list of keys: it holds whatever a recipe may hold, and nothing else."""

import subprocess
import sys

import pytest
from pydantic import BaseModel

from fasttrain.errors import RecipeError
from fasttrain.recipe import bundled_recipes, resolve
from fasttrain.recipe.reference import sections


def plain(path: str) -> str:
    """`loss[dice].batch` → `loss.batch`."""
    return "".join(part.split("]")[-1] for part in path.split("["))


def leaves(value: BaseModel, path: str = ""):
    for name in type(value).model_fields:
        inner, item = f"{path}.{name}" if path else name, getattr(value, name)
        if isinstance(item, BaseModel):
            yield from leaves(item, inner)
        elif item is not None:
            yield inner


@pytest.mark.parametrize("name", sorted(bundled_recipes()))
def test_every_value_of_a_recipe_is_a_key_of_the_list(name: str) -> None:
    keys = {plain(key.path) for section in sections() for key in section.keys}
    assert set(leaves(resolve(name).recipe)) <= keys


def test_what_the_keys_take_and_their_defaults() -> None:
    keys = {key.path: key for section in sections() for key in section.keys}
    assert (keys["training.batch_size"].takes, keys["training.batch_size"].default) == ("whole number ≥ 1", "needed")
    assert keys["data.source[folders].label_suffix"].default == '""'
    assert keys["acceleration.amp"].takes.startswith("auto | bf16")
    assert keys["augment.rotate.degrees"].takes == "number ≥ 0 ≤ 180"
    assert keys["data.spacing"].default == "null"
    assert keys["augment.flip.axes"].default == "[0, 1, 2]"


def test_every_section_says_what_it_is_for() -> None:
    assert [section.path for section in sections() if len(section.about) < 15] == []


def test_one_section_and_what_lies_below_it() -> None:
    paths = [section.path for section in sections("data.source")]
    kinds = ["decathlon", "nnunet", "folders", "dicom", "phantom", "openkbp"]
    assert paths == [f"data.source[{kind}]" for kind in kinds]
    assert {section.path.split(".")[0] for section in sections("augment")} == {"augment"}
    with pytest.raises(RecipeError, match="no section 'dtaa'; did you mean data"):
        sections("dtaa")


def test_the_command_needs_no_torch() -> None:
    program = (
        "import sys; from fasttrain.recipe.reference import sections; sections(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_one_key_by_itself_and_lengths_of_lists() -> None:
    (section,) = sections("training.epochs")
    assert [key.path for key in section.keys] == ["training.epochs"]
    (dynunet,) = sections("network[dynunet].features")
    assert dynunet.keys[0].takes == "list of: whole number ≥ 1; at least 3"
    assert len(sections("network.features")) == 3
