"""`recipes suggest` as a user meets it: where it writes, what it prints, and how it refuses."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from fasttrain.cli import main
from fasttrain.recipe import resolve

CHECKOUT = Path(__file__).resolve().parents[2]


class Answer:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    monkeypatch.chdir(tmp_path)

    def called(*arguments: object) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.run(["recipes", "suggest", *(str(argument) for argument in arguments)])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return Answer(ended.value.code or 0, out, err)

    return called


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Three small volumes in plain folders."""
    root = tmp_path / "my set"
    for number in range(3):
        values = np.random.default_rng(number).normal(size=(12, 12, 12)).astype(np.float32)
        for folder, what in (("images", values), ("labels", (values > 1).astype(np.uint8))):
            (root / folder).mkdir(parents=True, exist_ok=True)
            nib.save(nib.Nifti1Image(what, np.eye(4)), root / folder / f"c{number}.nii.gz")
    return root


def real_data(name: str) -> Path:
    folder = Path(os.environ.get("FASTTRAIN_TEST_DATA", CHECKOUT.parent / "shared" / "data")) / name
    if not folder.exists():
        pytest.skip(f"no real data at {folder}; set FASTTRAIN_TEST_DATA")
    return folder


def test_the_path_goes_to_stdout_and_the_findings_to_stderr(call, mine: Path):
    answer = call("--data", mine, "--gpu-gib", 8)
    assert answer.code == 0
    assert answer.out == "my set.yaml\n"
    assert "folders, 3 cases, 1 channel, not CT" in answer.err
    recipe = resolve("./my set.yaml").recipe
    assert recipe.name == "my set"
    text = Path("my set.yaml").read_text(encoding="utf-8")
    assert f"--recipe 'my set.yaml' --data '{mine}'" in text


@pytest.mark.slow
def test_the_command_in_the_recipe_runs(call, mine: Path, tmp_path: Path):
    call("--data", mine, "--gpu-gib", 0, "--name", "small")
    line = next(one for one in Path("small.yaml").read_text(encoding="utf-8").splitlines() if "fasttrain train" in one)
    command = line.partition("Train it: fasttrain ")[2].replace("$", "")
    ended = subprocess.run(
        f"{sys.executable} -m fasttrain {command} --dry-run --set acceleration.amp=off --set acceleration.channels_last=off",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert "2 training, 1 validation" in ended.stdout


def test_json_is_one_document(call, mine: Path):
    answer = call("--data", mine, "--gpu-gib", 8, "--json", "--name", "one")
    document = json.loads(answer.out)
    assert document["recipe"] == "one.yaml"
    assert document["cases"] == 3
    assert document["patch"] == list(resolve("./one.yaml").recipe.patch.size)


def test_nothing_is_ever_overwritten(call, mine: Path, tmp_path: Path):
    Path("kept.yaml").write_text("mine")
    answer = call("--data", mine, "--name", "kept")
    assert answer.code == 2
    assert "kept.yaml exists already; choose another file with --out or another --name" in answer.err
    assert Path("kept.yaml").read_text() == "mine"
    Path("link.yaml").symlink_to(tmp_path / "nowhere.yaml")
    assert call("--data", mine, "--out", "link.yaml").code == 2
    assert not (tmp_path / "nowhere.yaml").exists()


def test_out_is_a_file_or_a_folder_that_is_there(call, mine: Path, tmp_path: Path):
    (tmp_path / "there").mkdir()
    assert call("--data", mine, "--out", "there", "--gpu-gib", 8).out == "there/my set.yaml\n"
    assert call("--data", mine, "--out", "there/a.yml", "--gpu-gib", 8).out == "there/a.yml\n"
    answer = call("--data", mine, "--out", "nowhere/a.yaml")
    assert answer.code == 6
    assert "its folder nowhere does not exist" in answer.err
    answer = call("--data", mine, "--out", "a.txt")
    assert answer.code == 2
    assert ".yaml or .yml" in answer.err


@pytest.mark.parametrize("name", ["a/b", "..", " ", "a\nb"])
def test_a_name_that_is_no_folders_name_is_refused_before_anything_is_read(call, tmp_path: Path, name: str):
    answer = call("--data", tmp_path / "nowhere", "--name", name)
    assert answer.code == 2
    assert "--name" in answer.err
    assert len(answer.err.splitlines()) == 1


@pytest.mark.parametrize("gib", ["-1", "nan", "much"])
def test_memory_that_is_none_is_refused(call, mine: Path, gib: str):
    answer = call("--data", mine, "--gpu-gib", gib)
    assert answer.code == 2
    assert "--gpu-gib" in answer.err
    assert not list(Path().glob("*.yaml"))


def test_bad_data_is_exit_3_with_every_fault_and_no_file(call, mine: Path):
    (mine / "images/c0.nii.gz").write_bytes(b"")
    (mine / "labels/c2.nii.gz").write_bytes(b"\x1f\x8bxx")
    answer = call("--data", mine, "--gpu-gib", 8)
    assert answer.code == 3
    faults = [line for line in answer.err.splitlines() if line.startswith("fasttrain: ")]
    assert len(faults) == 2
    assert "c0.nii.gz is empty" in faults[0]
    assert "c2.nii.gz is damaged" in faults[1]
    assert not Path("my set.yaml").exists()
    assert call("--data", mine / "images").code == 3
    assert call("--data", mine / "nowhere").code == 3


def test_help_comes_without_torch(tmp_path: Path):
    code = (
        "import sys\nfrom fasttrain.cli import main\n"
        "try: main.run(['recipes', 'suggest', '--help'])\n"
        "finally: print([n for n in ('torch', 'monai', 'numpy') if n in sys.modules], file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0
    assert "--gpu-gib" in ended.stdout
    assert ended.stderr.strip() == "[]"


def test_hippocampus_is_planned_as_nnunet_does(call):
    answer = call("--data", real_data("hippocampus"), "--gpu-gib", 80)
    assert answer.code == 0, answer.err
    recipe = resolve("./hippocampus.yaml").recipe
    assert recipe.patch.size == (40, 56, 40)
    assert recipe.network.features == (32, 64, 128, 256)
    assert recipe.network.strides == (2, 2, 2)
    assert recipe.training.batch_size == 9
    assert recipe.data.split.folds == 5


@pytest.mark.slow
def test_one_real_ct_gives_a_recipe_that_trains(call, tmp_path: Path):
    data = real_data("ct_organs")
    assert call("--data", data, "--gpu-gib", 0).code == 0
    sets = {
        "training.epochs": 1, "training.iterations_per_epoch": 2, "patch.size": "[16,16,16]", "network.features": "[4,4,4,4]",
        "data.spacing": "[12,12,12]", "acceleration.amp": "off", "acceleration.channels_last": "off", "output.plots": "false",
        "validation.grid": "preprocessed", "data.workers": 0,
    }  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-m", "fasttrain", "train", "--recipe", "ct_organs.yaml", "--data", str(data), "--run", "run",
         "--device", "cpu", "--json", *(part for key, value in sets.items() for part in ("--set", f"{key}={value}"))],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["status"] == "done"
