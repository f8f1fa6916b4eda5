"""A journal whose last write was cut short: nothing of the study is lost, and it goes on."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

optuna = pytest.importorskip("optuna")

from fasttrain.studies.search.journal import WholeLineJournal  # noqa: E402
from fasttrain.studies.search.storage import open_storage, place_of  # noqa: E402

CUT = """
import resource, signal, sys
from pathlib import Path
import optuna
from fasttrain.studies.search.storage import open_storage, place_of
place = place_of("journal", Path(sys.argv[1]))
study = optuna.load_study(study_name="a", storage=open_storage(place))
trial = study.ask()
size = place.path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 500, size + 500))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
trial.set_user_attr("long", "x" * 20000)
"""


def test_a_process_that_is_killed_as_it_writes(tmp_path: Path) -> None:
    place = place_of("journal", tmp_path)
    study = optuna.create_study(study_name="a", storage=open_storage(place))
    study.tell(study.ask(), 0.25)
    done = subprocess.run([sys.executable, "-c", CUT, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGXFSZ, done.stderr
    assert place.path is not None
    assert not place.path.read_bytes().endswith(b"\n")
    # The lock of the killed one is taken over after Optuna's grace
    Path(f"{place.path}.lock").unlink(missing_ok=True)
    # Both the process that was there before and a new one
    for each in (study, optuna.load_study(study_name="a", storage=open_storage(place))):
        each.tell(each.ask(), 0.5)
    found = optuna.load_study(study_name="a", storage=open_storage(place)).get_trials()
    assert [trial.value for trial in found] == [0.25, None, 0.5, 0.5]


@given(st.lists(st.text(max_size=40), max_size=5), st.integers(0, 200), st.text(max_size=20))
def test_what_is_whole_stays_and_a_half_goes(
    tmp_path_factory: pytest.TempPathFactory, kept: list[str], cut: int, last: str
) -> None:
    journal = WholeLineJournal(str(tmp_path_factory.mktemp("journal") / "journal.log"))
    path = Path(journal._file_path)
    for text in kept:
        journal.append_logs([{"text": text}])
    whole = path.read_bytes()
    half = json.dumps({"text": "half"}).encode()[:cut]
    path.write_bytes(whole + half)
    journal.append_logs([{"text": last}, {"text": "and one more"}])
    assert path.read_bytes().startswith(whole)
    assert [log["text"] for log in journal.read_logs(0)] == [*kept, last, "and one more"]


def test_a_half_that_is_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    journal = WholeLineJournal(str(tmp_path / "journal.log"))
    journal.append_logs([{"text": "y" * 70_000}])
    with open(tmp_path / "journal.log", "ab") as file:
        file.write(b"x" * 200_000)
    journal.append_logs([{"text": "z"}])
    assert [log["text"][0] for log in journal.read_logs(0)] == ["y", "z"]
