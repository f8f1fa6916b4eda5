"""`check` as it is typed: the table, the document, exit codes, signals, and how soon an answer comes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nibabel as nib
import numpy as np
import psutil
import pytest

from fasttrain.cli import main

CHECKOUT = Path(__file__).resolve().parents[2]
SHAPE = (20, 18, 16)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """(exit code, stdout, stderr) of `check`, in an empty folder with an empty cache folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FASTTRAIN_DATA", raising=False)

    def called(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.run(["check", *map(str, arguments)])
        return (ended.value.code or 0, *capsys.readouterr())

    return called


def save(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(values, np.eye(4)), path)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Six sound cases in the layout of the recipe `hippocampus`."""
    root = tmp_path / "my set"
    entries = []
    for number in range(6):
        values = np.random.default_rng(number).normal(size=SHAPE).astype(np.float32)
        label = np.zeros(SHAPE, np.uint8)
        label[:5], label[5:8] = 1, 2
        save(root / f"imagesTr/c{number}.nii.gz", values)
        save(root / f"labelsTr/c{number}.nii.gz", label)
        entries.append({"image": f"imagesTr/c{number}.nii.gz", "label": f"labelsTr/c{number}.nii.gz"})
    document = {"training": entries, "labels": {"0": "background", "1": "front", "2": "back"}}
    (root / "dataset.json").write_text(json.dumps(document))
    return root


def test_a_sound_set_by_its_folder_alone(call, mine: Path) -> None:
    code, out, err = call("--data", mine)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split()[:2] == ["case", "shape"]
    assert [line.split()[0] for line in lines[1:7]] == [f"c{number}" for number in range(6)]
    assert "20×18×16" in lines[1]
    assert "1: 1,440  2: 864" in lines[1]
    assert "1 front" in out
    assert "2 back" in out
    assert lines[-1] == "6 cases, 12 files (12 read, 0 unchanged since an earlier check): no case has a fault"
    assert call("--data", mine)[1].splitlines()[-1].startswith("6 cases, 12 files (0 read, 12 unchanged")
    assert call("--data", mine, "--full")[1].splitlines()[-1].startswith("6 cases, 12 files (12 read, 0 unchanged")


def test_every_fault_of_every_case_and_exit_3(call, mine: Path) -> None:
    (mine / "imagesTr/c1.nii.gz").write_bytes(b"")
    values = np.random.default_rng(7).normal(size=SHAPE).astype(np.float32)
    values[3, 3, 3] = np.nan
    save(mine / "imagesTr/c2.nii.gz", values)
    label = np.zeros(SHAPE, np.uint8)
    label[0] = 7
    save(mine / "labelsTr/c2.nii.gz", label)
    code, out, _ = call("--recipe", "hippocampus", "--data", mine)
    assert code == 3
    faults = [line for line in out.splitlines() if line.startswith("fault: ")]
    assert len(faults) == 3
    for word, fault in zip(["c1.nii.gz is empty (0 bytes)", "1 NaN", "7 in 288 voxels"], faults, strict=True):
        assert word in fault
    assert "2 cases with faults" in out.splitlines()[-1]
    code, out, _ = call("--data", mine, "--recipe", "hippocampus", "--set", "data.nan_policy=replace")
    assert (code, out.count("fault: ")) == (3, 2)


def test_one_document(call, mine: Path) -> None:
    save(mine / "labelsTr/c3.nii.gz", np.zeros(SHAPE, np.uint8))
    code, out, err = call("--recipe", "hippocampus", "--data", mine, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert (document["status"], document["exit_code"], document["faults"]) == ("sound", 0, [])
    assert len(document["warnings"]) == 1
    assert "c3 holds nothing but background" in document["warnings"][0]
    first = document["cases"][0]
    assert (first["case"], first["shape"], first["voxels"]) == ("c0", [20, 18, 16], {"0": 3456, "1": 1440, "2": 864})
    assert {case["part"] for case in document["cases"]} == {"training", "validation"}
    figures = document["figures"]
    assert figures["median_shape"] == [20, 18, 16]
    assert figures["patch"] == [40, 56, 40]
    assert figures["cases_below_patch"] == 6
    assert figures["cache_bytes"]["memory"] == figures["cache_bytes"]["disk"] > figures["cache_bytes"]["gpu"]
    (mine / "imagesTr/c1.nii.gz").write_bytes(b"")
    code, out, _ = call("--recipe", "hippocampus", "--data", mine, "--json")
    assert (code, json.loads(out)["exit_code"], json.loads(out)["status"]) == (3, 3, "faulty")
    assert json.loads(out)["cases"][1]["faults"] == json.loads(out)["faults"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "check needs a recipe"),
        (["--data", ".", "--set", "data.spacing=null"], "name one with --recipe"),
        (["--recipe", "hipocampus"], "hippocampus"),
    ],
)
def test_usage(call, arguments: list[str], sentence: str) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert sentence in err


def test_a_folder_that_is_not_there(call, tmp_path: Path) -> None:
    code, out, err = call("--data", tmp_path / "nowhere", "--json")
    assert code == 3
    assert "does not exist" in err
    assert json.loads(out)["exit_code"] == 3


def test_on_a_terminal_the_table_keeps_to_its_width(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fasttrain.cli.check_table import print_check
    from fasttrain.data.checking import Terms, check_cases
    from fasttrain.data.sources import find_cases
    from fasttrain.recipe import resolve

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "60")
    (mine / "imagesTr/c1.nii.gz").write_bytes(b"")
    recipe = resolve("hippocampus").recipe
    cases = find_cases(recipe.data, mine).cases
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    print_check(check_cases(cases, mine, Terms.of_recipe(recipe), None, tmp_path / "cache", 1))
    text = re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue())
    table = text.split("fault: ")[0]
    assert "c5" in table
    assert all(len(line) <= 60 for line in table.splitlines())
    assert text.count("fault: ") == 1
    assert "volumes     median" in text


def fill_with_holes(mine: Path, tmp_path: Path, cases: int) -> Path:
    """Makes a set of that many names of one file with a hole in it, which is returned: much to read, and no space."""
    image = nib.Nifti1Image(np.zeros((2, 2, 2), np.float32), np.eye(4))
    image.header.set_data_shape((150, 150, 150))
    big = tmp_path / "big.nii"
    big.write_bytes(image.header.binaryblock + bytes(4))
    os.truncate(big, 352 + 4 * 150**3)
    entries = []
    for case in range(cases):
        (mine / f"imagesTr/b{case}.nii").symlink_to(big)
        entries.append({"image": f"imagesTr/b{case}.nii", "label": "labelsTr/c0.nii.gz"})
    (mine / "dataset.json").write_text(json.dumps({"training": entries}))
    return big


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it(number: signal.Signals, code: int, mine: Path, tmp_path: Path) -> None:
    fill_with_holes(mine, tmp_path, 800)  # seconds of reading
    process = subprocess.Popen(
        [sys.executable, "-m", "fasttrain", "check", "--data", str(mine), "--recipe", "hippocampus"],
        cwd=tmp_path, env={**os.environ, "FASTTRAIN_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(CHECKOUT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    time.sleep(3.0)
    assert process.poll() is None
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert out == ""
    assert "Traceback" not in err
    assert (tmp_path / "cache/checks").is_dir()


def test_files_that_do_not_pair_stand_beside_other_faults(call, mine: Path) -> None:
    (mine / "labelsTr/c0.nii.gz").unlink()
    (mine / "imagesTr/c1.nii.gz").write_bytes(b"")
    label = np.zeros(SHAPE, np.uint8)
    label[0] = 7
    save(mine / "labelsTr/c2.nii.gz", label)
    (mine / "imagesTr/c2.nii.gz").unlink()
    for arguments in (("--recipe", "hippocampus", "--data", mine), ("--data", mine)):
        code, out, _ = call(*arguments)
        assert code == 3
        assert [line.split()[0] for line in out.splitlines()[1:7]] == [f"c{number}" for number in range(6)]
        faults = [line for line in out.splitlines() if line.startswith("fault: ")]
        assert "labelsTr/c0.nii.gz does not exist" in faults[0]
        assert "c1.nii.gz is empty" in faults[1]
        assert "imagesTr/c2.nii.gz does not exist" in faults[2]
        assert ("7 in 288 voxels" in faults[-1]) == (len(faults) == 4) == ("--recipe" in arguments)


def test_what_skipping_leaves_is_said_and_it_stays_3(call, mine: Path) -> None:
    (mine / "imagesTr/c1.nii.gz").write_bytes(b"")
    skip = ("--recipe", "hippocampus", "--data", mine, "--set", "data.bad_cases=skip")
    code, out, _ = call(*skip)
    assert code == 3
    parts = {case["case"]: case["part"] for case in json.loads(call(*skip, "--json")[1])["cases"]}
    training = list(parts.values()).count("training")
    left = training - (parts["c1"] == "training")
    assert f"data.bad_cases: skip leaves out 1 faulty case (c1); there remain {left} of {training} training" in out
    record = json.loads(call(*skip, "--json")[1])["skipping"]
    assert record["left_out"] == ["c1"]
    assert record["remain"]["training"] == left
    assert "leaves out" not in call(*skip[:4])[1]
    assert json.loads(call(*skip[:4], "--json")[1])["skipping"] is None


def test_faults_of_many_cases_get_one_line(call, mine: Path) -> None:
    for number in range(5):
        label = np.zeros(SHAPE, np.uint8)
        label[: number + 1] = 7
        save(mine / f"labelsTr/c{number}.nii.gz", label)
    out = call("--recipe", "hippocampus", "--data", mine)[1]
    lines = out.splitlines()
    (alike,) = [line for line in lines if line.startswith("faults alike in ")]
    assert alike.startswith("faults alike in 5 cases: undeclared label value 7; declared are 0 background, ")
    assert alike.endswith("(c0, c1, c2, c3, c4)")
    assert len([line for line in lines if line.startswith("fault: ")]) == 5
    assert "undeclared 7: 288" in lines[1]
    assert "no class" not in out
    document = json.loads(call("--recipe", "hippocampus", "--data", mine, "--json")[1])
    assert document["faults_alike"] == [alike.removeprefix("faults alike in ")]
    assert document["cases"][0]["undeclared_voxels"] == {"7": 288}
    # Four are not many
    save(mine / "labelsTr/c4.nii.gz", np.pad(np.ones((5, 18, 16), np.uint8), ((0, 15), (0, 0), (0, 0))))
    assert "faults alike" not in call("--recipe", "hippocampus", "--data", mine)[1]


def test_a_stray_value_is_suspected_without_a_recipe(call, mine: Path) -> None:
    label = np.zeros(SHAPE, np.uint8)
    label[:5], label[5:8], label[10, 0, 0] = 1, 2, 7
    save(mine / "labelsTr/c3.nii.gz", label)
    code, out, _ = call("--data", mine)
    assert code == 0
    (warning,) = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert "the label value 7 occurs in case c3 alone, in 1 voxel of 13,825 labelled ones" in warning
    # In two cases it is no slip, nor where it fills a part of a volume
    save(mine / "labelsTr/c4.nii.gz", label)
    assert "warning" not in call("--data", mine)[1]
    label[10] = 7
    save(mine / "labelsTr/c3.nii.gz", label)
    label[10] = 0
    save(mine / "labelsTr/c4.nii.gz", label)
    assert "warning" not in call("--data", mine)[1]


def test_ignored_voxels_are_counted(call, mine: Path) -> None:
    label = np.zeros(SHAPE, np.uint8)
    label[:5], label[5:8], label[8] = 1, 2, 255
    save(mine / "labelsTr/c3.nii.gz", label)
    ignoring = ("--recipe", "hippocampus", "--data", mine, "--set", "data.ignore_label=255")
    code, out, _ = call(*ignoring)
    assert code == 0
    assert "ignored: 288" in out.splitlines()[4]
    assert "ignored" not in out.splitlines()[1]
    counts = [case["ignored_voxels"] for case in json.loads(call(*ignoring, "--json")[1])["cases"]]
    assert counts == [0, 0, 0, 288, 0, 0]
    # As the set itself says, where there is no recipe
    document = json.loads((mine / "dataset.json").read_text())
    document["labels"]["255"] = "ignore"
    (mine / "dataset.json").write_text(json.dumps(document))
    code, out, err = call("--data", mine)
    assert (code, err) == (0, "")
    assert "ignored: 288" in out.splitlines()[4]


def test_the_layout_and_each_channel_s_range_are_shown(call, tmp_path: Path) -> None:
    root = tmp_path / "two"
    for number in range(2):
        low = np.linspace(0, 1, 20 * 18 * 16, dtype=np.float32).reshape(SHAPE) + number
        save(root / f"imagesTr/c{number}_0000.nii.gz", low)
        save(root / f"imagesTr/c{number}_0001.nii.gz", 100 * low)
        label = np.zeros(SHAPE, np.uint8)
        label[:5] = 1
        save(root / f"labelsTr/c{number}.nii.gz", label)
    (root / "dataset.json").write_text(json.dumps({"channel_names": {"0": "T1", "1": "FLAIR"}, "labels": {"a": 1}}))
    code, out, _ = call("--data", root)
    assert code == 0
    assert "T1 0 … 1; FLAIR 0 … 100" in out.splitlines()[1]
    assert re.search(r"^layout +nnunet, 2 channels: T1, FLAIR$", out, re.MULTILINE)
    document = json.loads(call("--data", root, "--json")[1])
    assert document["layout"] == {"kind": "nnunet", "channels": ["T1", "FLAIR"]}
    assert document["cases"][1]["ranges"] == [[1, 2], [100, 200]]


def test_an_nnunet_folder_under_a_decathlon_recipe(call, tmp_path: Path) -> None:
    root = tmp_path / "nn"
    save(root / "imagesTr/c0_0000.nii.gz", np.zeros(SHAPE, np.float32))
    save(root / "labelsTr/c0.nii.gz", np.zeros(SHAPE, np.uint8))
    code, _, err = call("--recipe", "hippocampus", "--data", root)
    assert code == 3
    assert "a Decathlon folder has it at its top" in err
    assert "--set data.source.kind=nnunet" in err


def test_what_was_read_before_a_signal_is_remembered_by_train(mine: Path, tmp_path: Path) -> None:
    big = fill_with_holes(mine, tmp_path, 3200)  # a minute of reading
    process = subprocess.Popen(
        [sys.executable, "-m", "fasttrain", "train", "--data", str(mine), "--recipe", "hippocampus", "--run", "run"],
        cwd=tmp_path, env={**os.environ, "FASTTRAIN_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(CHECKOUT)},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    reading, until = psutil.Process(process.pid), time.monotonic() + 60
    while str(big) not in (one.path for one in reading.open_files()) and time.monotonic() < until:
        assert process.poll() is None
        time.sleep(0.005)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=30)[1]
    assert process.returncode == 130, told
    sentence = (
        "stopped by Ctrl-C before training began; what was read of the cases is remembered; give the command again"
    )
    assert told.endswith(f"fasttrain: {sentence}\n")
    assert "Traceback" not in told
    assert not (tmp_path / "run").exists()
    (facts,) = (tmp_path / "cache/checks").iterdir()
    assert facts.read_text().count("imagesTr/b") >= 2


def test_nothing_slow_is_loaded_where_all_is_remembered(mine: Path, tmp_path: Path) -> None:
    program = (
        "import sys, fasttrain.cli.main as m\ntry: m.run(sys.argv[1:])\nfinally: print(*sys.modules, file=sys.stderr)"
    )
    loaded = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", program, "check", "--data", str(mine), "--recipe", "hippocampus"],
            cwd=tmp_path, env={**os.environ, "FASTTRAIN_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(CHECKOUT)},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        loaded.append(set(done.stderr.split()) & {"torch", "monai", "nibabel", "rich"})
    assert loaded == [{"nibabel"}, set()]


PROOF = (
    "import sys, fasttrain.cli.main as m\n"
    "try: m.run(sys.argv[1:])\n"
    "finally: assert not {'torch', 'monai'} & set(sys.modules), 'torch was loaded'"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recipe"),
    [("hippocampus", ["--recipe", "hippocampus"]), ("hippocampus", []), ("brats2013", []), ("ct_organs", [])],
)
def test_real_sets_are_sound_and_quick(name: str, recipe: list[str], tmp_path: Path) -> None:
    root = Path(os.environ.get("FASTTRAIN_TEST_DATA", CHECKOUT.parent / "shared" / "data")) / name
    if not root.exists():
        pytest.skip(f"no real data at {root}; set FASTTRAIN_TEST_DATA")
    environ = {**os.environ, "FASTTRAIN_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(CHECKOUT)}
    seconds: list[float] = []
    # The best of three once all is remembered; of more where other work keeps this machine busy
    while len(seconds) < 4 or (min(seconds[1:]) >= 2.0 and len(seconds) < 10):
        begun = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", PROOF, "check", "--data", str(root), *recipe, "--json"],
            cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        seconds.append(time.perf_counter() - begun)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["files_read"] == (document["files"] if len(seconds) == 1 else 0)
    assert seconds[0] < 10.0
    assert min(seconds[1:]) < 2.0
