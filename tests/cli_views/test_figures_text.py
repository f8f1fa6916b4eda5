"""How single figures read: units, precision, and text that cannot reach the terminal's controls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasttrain.cli.figures import duration_text, hours_text, loss_text, one_line, rate_text, scientific_text, score_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min"), (125, "2 min"), (3599, "1 h 00 min"), (3900, "1 h 05 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(("days", "text"), [(2.1, "2 d 2 h"), (0.9999, "1 d 0 h")])
def test_durations_of_days(days: float, text: str) -> None:
    assert duration_text(days * 86400) == text


@pytest.mark.parametrize(
    ("loss", "text"),
    [(0.4123, "0.412"), (0.0, "0.000"), (1.2e-4, "1.2e-4"), (-0.83, "-0.830"), (3.5e6, "3.5e6"), (float("nan"), "nan")],
)
def test_losses(loss: float, text: str) -> None:
    assert loss_text(loss) == text


def test_hours_and_their_cost() -> None:
    assert hours_text(None, None) is None
    assert hours_text(0.75, None) == "in all 45 min"
    assert hours_text(3.2, 7.999) == "in all 3 h 12 min, 8.00 USD"


def test_other_figures() -> None:
    assert scientific_text(2.1e-3) == "2.1e-3"
    assert scientific_text(0.0) == "0"
    assert scientific_text(1.0) == "1.0e0"
    assert rate_text(54.23) == "54.2 patches/s"
    assert rate_text(1280.4) == "1280 patches/s"
    assert score_text(None, 2) == "–"
    assert score_text(0.8712, 3) == "0.871"


@given(st.text())
def test_one_line_has_no_controls_and_keeps_the_rest(text: str) -> None:
    line = one_line(text)
    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in line)
    assert [char for char in line if not char.isspace()] == [
        char for char in text if not char.isspace() and not (ord(char) < 32 or 127 <= ord(char) < 160)
    ]


def test_one_line_takes_escape_codes_apart() -> None:
    assert one_line("a\x1b[2Jb\r\nc") == "a[2Jb  c"
