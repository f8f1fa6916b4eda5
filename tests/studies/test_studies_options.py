"""Ranges from the command line: for all networks or one kind of them."""

import pytest

from fasttrain.errors import RecipeError
from fasttrain.studies.options import read_numbers, read_seconds, read_words


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (None, None),
        ([], None),
        (["4,1,2"], (1, 2, 4)),
        (["universal:8"], (8,)),
        (["1,2", "dynunet:4,8"], (4, 8)),
        (["dynunet:4,8", "1,2"], (4, 8)),
        (["unet:4,8"], None),
        (["unet:4,8", "3,3"], (3,)),
    ],
)
def test_numbers_for_a_kind_of_network(texts: list[str] | None, found: tuple[int, ...] | None) -> None:
    assert read_numbers("--batch-sizes", texts, "dynunet") == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0", "--batch-sizes 0: should be a whole number of at least 1"),
        ("2,x", "--batch-sizes x: should be a whole number"),
        ("-3", "--batch-sizes -3: should be a whole number"),
        ("1.5", "--batch-sizes 1.5: should be a whole number"),
        ("", "--batch-sizes : should be a list such as 1,2,4"),
        ("dynunt:2", "'dynunt' is no network.kind; did you mean dynunet"),
        ("9999999999999", "should be a whole number"),
    ],
)
def test_what_is_no_range_is_refused(text: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_numbers("--batch-sizes", [text], "dynunet")
    assert said in str(caught.value)


def test_words_are_of_a_choice() -> None:
    assert read_words("--stitching", ["gpu,cpu"], "unet", ("gpu", "cpu")) == ("gpu", "cpu")
    with pytest.raises(RecipeError, match=r"--stitching gpx: there is no such choice; did you mean gpu"):
        read_words("--stitching", ["gpx"], "unet", ("gpu", "cpu"))


def test_times() -> None:
    assert (read_seconds("--budget", "3m"), read_seconds("--budget", None)) == (180.0, None)
    for text in ("3", "0s", "5 steps", "soon", "-1m"):
        with pytest.raises(RecipeError, match="should be a time such as 90s, 3m or 1h"):
            read_seconds("--budget", text)
