"""The collector rests in its scope and is afterwards as it was."""

from __future__ import annotations

import gc

import pytest

from fasttrain.machine.collector import collector_at_rest


@pytest.fixture(autouse=True)
def unfrozen() -> object:
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("on", [True, False])
def test_it_rests_and_is_as_it_was_before(on: bool) -> None:
    (gc.enable if on else gc.disable)()
    within = []

    def fail() -> None:
        with collector_at_rest():
            within.append(gc.isenabled())
            raise RuntimeError("within")

    with pytest.raises(RuntimeError, match="within"):
        fail()
    assert within == [False]
    assert gc.isenabled() is on


def test_what_was_made_within_is_not_looked_through_again() -> None:
    before = gc.get_freeze_count()
    with collector_at_rest():
        kept = [[number] for number in range(1000)]
    assert gc.get_freeze_count() >= before + len(kept)
