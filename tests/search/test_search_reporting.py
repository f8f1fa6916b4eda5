"""What a trial tells of its time: training until a validation begins, which tells of itself only after a case."""

import itertools
import json
import socket
import threading
from pathlib import Path

import pytest

from fasttrain.engine.run import train
from fasttrain.engine.stop import StopRequest
from fasttrain.studies.search.lines import Lines
from fasttrain.studies.search.reporting import TRAINING, VALIDATION, Reporter


@pytest.mark.parametrize("cases", [1, 3])
def test_a_validation_counts_from_its_beginning(cases: int, tiny, phantoms: Path, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    reporter = Reporter(Lines(theirs), StopRequest())
    reporter.hear({"go": True})
    answers = Lines(ours)

    def answer() -> None:
        while (word := answers.next(60.0)) is not None:
            if "epoch" in word:
                reporter.hear({"prune": False})

    threading.Thread(target=answer, daemon=True).start()
    recipe = tiny(training__epochs=3, data__split__validation=cases)
    result = train(recipe, data=phantoms, run=tmp_path / "run", device="cpu", observers=[reporter])
    theirs.close()
    spans = reporter.spans
    lengths = {name: sum(end - begin for begin, end in some) for name, some in spans.items()}
    seconds = json.loads((result.run / "summary.json").read_text())["seconds"]
    # Each is written to a thousandth
    assert lengths[VALIDATION] > seconds["validation"] - 0.01
    assert lengths[TRAINING] > 0
    in_order = sorted(spans[TRAINING] + spans[VALIDATION])
    assert len(spans[VALIDATION]) == 3
    assert all(one[1] <= after[0] for one, after in itertools.pairwise(in_order))
