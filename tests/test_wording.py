"""Counts and sizes as they stand in sentences: never `1 cases`, never `0 MiB` of something, never two sizes that read alike."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.wording import counted, size_in_memory, sizes_apart


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1,023 bytes"),
        (1 << 10, "1 KiB"),
        (640 << 10, "640 KiB"),
        (1 << 20, "1 MiB"),
        (31 << 20, "31 MiB"),
        (3 << 29, "1.5 GiB"),
        (1000 << 30, "1000.0 GiB"),
    ],
)
def test_a_size_is_told_in_the_unit_of_which_there_is_one(count: int, text: str) -> None:
    assert size_in_memory(count) == text


@given(st.floats(0.5, 2.0**50))
def test_a_size_is_what_its_text_says(count: float) -> None:
    number, unit = size_in_memory(count).replace(",", "").split(" ")
    told = float(number) * {"byte": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]
    assert told == pytest.approx(count, rel=0.5, abs=0.5)


@given(st.integers(0, 2**45), st.integers(0, 2**45))
def test_two_sizes_that_differ_read_differently(needed: int, free: int) -> None:
    texts = sizes_apart(needed, free)
    assert (texts[0] == texts[1]) == (needed == free)


def test_decimals_come_only_where_they_are_wanted() -> None:
    assert sizes_apart(3 << 30, 2 << 30) == ("3.0 GiB", "2.0 GiB")
    assert sizes_apart(3 << 20, 3 << 10) == ("3 MiB", "3 KiB")
    assert sizes_apart(32_300_000, 32_400_000) == ("30.8 MiB", "30.9 MiB")
    assert sizes_apart((8 << 30) + (1 << 20), 8 << 30) == ("8.001 GiB", "8.000 GiB")
    assert sizes_apart(7 << 20, 7 << 20) == ("7 MiB", "7 MiB")


@given(st.integers(0, 10**12))
def test_one_is_singular_and_nothing_else_is(number: int) -> None:
    assert re.fullmatch(r"1 case|(?!1 )[\d,]+ cases", counted(number, "case"))
    assert counted(1, "retry", "retries") == "1 retry"
