"""Training, evaluation and prediction where the locale is C and Python's UTF-8 mode is off: names of cases that are no ASCII."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
NAME = "Müller_"


@pytest.fixture
def data(phantoms: Path, tmp_path: Path) -> Path:
    root = tmp_path / "data"
    for part in ("imagesTr", "labelsTr"):
        (root / part).mkdir(parents=True)
        for number, path in enumerate(sorted((phantoms / part).iterdir())):
            shutil.copy(path, root / part / f"{NAME}{number}.nii.gz")
    return root


COMMANDS = """
import json, sys
from fasttrain.cli.main import run
for words in json.loads(sys.argv[1]):
    try:
        run(words)
    except SystemExit as end:
        assert not end.code, words
"""


def called(folder: Path, *commands: list[object]) -> tuple[str, str]:
    """stdout and stderr of commands that end well, one after another in one process."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHON"))}
    environ |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps([[str(word) for word in words] for words in commands])],
        cwd=folder,
        env=environ,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout.decode("utf-8"), done.stderr.decode("utf-8")


def test_umlauts_under_the_c_locale(tiny_values: dict, data: Path, tmp_path: Path) -> None:
    values = {
        **{key: value for key, value in tiny_values.items() if not key.startswith("data.source")},
        "training.epochs": 1,
        "output.pictures": "best",
    }
    sets = ["data.source.kind=folders", "data.source.images=imagesTr", "data.source.labels=labelsTr"]
    sets += [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()]
    options = [option for one in sets for option in ("--set", one)]
    _, err = called(
        tmp_path,
        ["train", "--recipe", "demo", "--data", data, "--run", "run", "--device", "cpu", *options],
        ["resume", "run"],
        ["predict", "run", data / "imagesTr", "out", "--device", "cpu"],
    )
    assert "nothing to do" in err
    summary = json.loads((tmp_path / "run/summary.json").read_text(encoding="utf-8"))
    assert sorted(summary["cases"]) == [f"{NAME}4", f"{NAME}5"]
    assert any(NAME in path.name for path in (tmp_path / "run/pictures").iterdir())
    events = (tmp_path / "run/events.jsonl").read_text(encoding="utf-8").splitlines()
    assert not [line for line in map(json.loads, events) if line.get("level") == "warning"]
    scores = json.loads(called(tmp_path, ["evaluate", "run", "--device", "cpu", "--json"])[0])
    assert scores["dice"] == summary["best"]["value"]
    assert sorted(name for name in os.listdir(tmp_path / "out") if name[0] != ".") == [
        f"{NAME}{number}.nii.gz" for number in range(6)
    ]
