"""Two processes that take trials of one SQLite study at the same moment: each trial goes to one of them."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from search_parts import MadePool, ended, made_search

from fasttrain.studies.search.processes import Presence
from fasttrain.studies.search.storage import place_of
from fasttrain.studies.search.taking import taking

pytest.importorskip("optuna")
_TRIALS = 40
_TAKER = """
import sys, time
from pathlib import Path
folder = Path(sys.argv[1])
sys.path.insert(0, sys.argv[2])
from search_parts import MadePool, ended, made_search
search, _ = made_search(folder, MadePool(lambda task: [ended()]), storage="sqlite", trials=int(sys.argv[4]))
(folder / f"here-{sys.argv[3]}").touch()
while len(list(folder.glob("here-*"))) < 2:
    time.sleep(0.001)
while (trial := search._next()) is not None:
    print(trial.number)
# Whose process is gone before its trials have ended is taken for dead
(folder / f"left-{sys.argv[3]}").touch()
while len(list(folder.glob("left-*"))) < 2:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("left", ["waiting", "dead"])
def test_no_trial_is_taken_twice(left: str, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    search, _ = made_search(folder, MadePool(lambda task: [ended()]), storage="sqlite", trials=_TRIALS)
    study, gone = search.study.optuna, Presence(search.study.folder)
    for _ in range(_TRIALS):
        if left == "waiting":
            study.enqueue_trial({"optimizer.learning_rate": 1e-3})
        else:
            study.ask().set_user_attr("process", gone.name)
    gone.close()
    words = [sys.executable, "-c", _TAKER, str(folder), str(Path(__file__).parent)]
    both = [
        subprocess.Popen([*words, str(number), str(_TRIALS)], stdout=subprocess.PIPE, text=True) for number in range(2)
    ]
    taken = [number for process in both for number in process.communicate(timeout=120)[0].split()]
    assert [process.returncode for process in both] == [0, 0]
    assert len(taken) == len(set(taken)) == _TRIALS


def test_who_waits_goes_on_when_told_to_stop_and_when_the_other_has_left(tmp_path: Path) -> None:
    place, entered, leave = place_of(None, tmp_path), threading.Event(), threading.Event()

    def other() -> None:
        with taking(place):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    assert entered.wait(60)
    with taking(place, lambda: True):
        assert thread.is_alive()
    threading.Timer(0.2, leave.set).start()
    began = time.monotonic()
    with taking(place):
        assert time.monotonic() - began > 0.1
    thread.join(60)
    with taking(place_of("journal", tmp_path)):
        assert [path.name for path in tmp_path.iterdir()] == ["study.db.taking"]


def test_a_folder_without_locks_or_room_is_no_fault(tmp_path: Path) -> None:
    with taking(place_of(None, tmp_path / "not there")):
        assert not (tmp_path / "not there").exists()
