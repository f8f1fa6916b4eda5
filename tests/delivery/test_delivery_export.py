"""Exports of a trained run: each answers as the network does, and what cannot be exported is one sentence."""

import getpass
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.bundle import verify_metadata

from fasttrain.cli.main import run as command_line
from fasttrain.delivery.export import EXPORTS, export, exported, exporting, onnx_file, torchscript
from fasttrain.delivery.export.agreement import TOLERANCE
from fasttrain.delivery.export.bundle_configs import metadata
from fasttrain.delivery.export.plain import open_plain, real_windows, sample_of
from fasttrain.engine.run import RunResult, train
from fasttrain.errors import DataError, MachineError, RecipeError, StorageError

NEEDS_BUNDLE = pytest.mark.skipif(importlib.util.find_spec("ignite") is None, reason="needs pytorch-ignite")
NEEDS_ONNX = pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="needs onnxruntime")
OPENED: dict[str, Callable] = {
    "torchscript": torchscript.opened,
    "exported": exported.opened,
    "onnx": onnx_file.opened,
}


def silent(text: str) -> None: ...


@pytest.mark.parametrize("format", ["torchscript", "exported", pytest.param("onnx", marks=NEEDS_ONNX)])
def test_a_file_answers_as_the_network_does(whole_run: RunResult, tmp_path: Path, format: str) -> None:
    done = export(whole_run.run, format, tmp_path / "out" / EXPORTS[format].file_name, None, False, silent)
    assert done.difference <= TOLERANCE
    assert [path.name for path in done.path.parent.iterdir()] == [EXPORTS[format].file_name]
    model = open_plain(whole_run.run, None)
    windows = torch.cat([real_windows(model), torch.randn(3, 1, *model.patch)])
    found = OPENED[format](done.path)(windows)
    assert torch.allclose(found, model.network(windows), atol=1e-3)
    assert float(found.std()) > 0.01


@NEEDS_ONNX
def test_onnxruntime_reports_to_nobody(whole_run: RunResult, tmp_path: Path) -> None:
    """It would leave the session and the device that it reports for."""
    places = {"TMPDIR": "temporary", "HOME": "home", "XDG_CACHE_HOME": "cache"}
    for name in places.values():
        (tmp_path / name).mkdir()
    command = [sys.executable, "-m", "fasttrain", "export", str(whole_run.run), "--format", "onnx"]
    environment = {**os.environ, **{variable: str(tmp_path / name) for variable, name in places.items()}}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    subprocess.run([*command, "--out", str(tmp_path / "m.onnx")], env=environment, check=True, timeout=120)
    assert {path.name for path in tmp_path.iterdir()} == {"m.onnx", *places.values()}
    assert [
        path for path in (tmp_path / "temporary").iterdir() if path.name != f"torchinductor_{getpass.getuser()}"
    ] == []
    assert [*(tmp_path / "home").rglob("*icrosoft*"), *(tmp_path / "cache").rglob("*icrosoft*")] == []


@pytest.mark.parametrize("format", ["torchscript", "exported", pytest.param("onnx", marks=NEEDS_ONNX)])
def test_a_full_disk_is_told_and_does_not_end_the_process(
    whole_run: RunResult, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, format: str
) -> None:
    full, module = Path("/dev/full"), EXPORTS[format].module
    write = module.write
    monkeypatch.setattr(module, "write", lambda model, path: write(model, full))
    with pytest.raises(StorageError, match="No space left on device; name another with --out"):
        export(whole_run.run, format, tmp_path / "model", None, False, silent)
    assert list(tmp_path.iterdir()) == []


def test_what_the_file_means_lies_in_it(whole_run: RunResult, tmp_path: Path) -> None:
    done = export(whole_run.run, "torchscript", tmp_path / "model.ts", None, False, silent)
    inside = {torchscript.DESCRIPTION: ""}
    torch.jit.load(str(done.path), _extra_files=inside)
    described = json.loads(inside[torchscript.DESCRIPTION])
    assert described["outputs"] == ["background", *open_plain(whole_run.run, None).recipe.data.class_names]
    assert described["spacing_mm"] == [5.0, 5.0, 5.0]


@NEEDS_BUNDLE
def test_a_bundle_runs_by_monais_own_command(
    whole_run: RunResult, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # As it is typed, for a command that the check starts in another working folder
    monkeypatch.chdir(tmp_path)
    done = export(whole_run.run, "bundle", Path("bundle"), None, False, silent)
    model = open_plain(whole_run.run, None)
    (tmp_path / "images").mkdir()
    for image in model.case.images:
        shutil.copy(image, tmp_path / "images")
    # The bundle has to run where fasttrain is not
    apart = ["-P"] if sys.version_info >= (3, 11) else []
    command = [sys.executable, *apart, "-m", "monai.bundle", "run", "--config_file", "configs/inference.json"]
    command += ["--meta_file", "configs/metadata.json", "--dataset_dir", str(tmp_path / "images")]
    command += ["--output_dir", str(tmp_path / "out"), "--device", "$torch.device('cpu')"]
    subprocess.run(command, cwd=done.path, check=True, capture_output=True, timeout=120)
    (written,) = (tmp_path / "out").iterdir()
    given, found = nib.load(model.case.images[0]), nib.load(written)
    expected = model.predictor().class_map(sample_of(model), True).numpy()
    assert found.shape == given.shape
    assert np.allclose(found.affine, given.affine)
    assert set(np.unique(expected)) == {0, 1, 2}
    assert (np.asarray(found.dataobj) != expected).mean() < 1e-3
    assert not torch.load(done.path / "models/model.pt", weights_only=True).keys() ^ model.network.state_dict().keys()


TEXT, OBJECT, LIST = {"type": "string"}, {"type": "object"}, {"type": "array"}
TENSOR = {"type": TEXT, "format": TEXT, "num_channels": {"type": "integer"}, "dtype": TEXT}
TENSOR |= {
    "spatial_shape": LIST | {"items": {"type": ["string", "integer"]}},
    "value_range": LIST | {"items": {"type": "number"}},
}
TENSORS = {"type": "object", "additionalProperties": {"properties": TENSOR, "required": list(TENSOR)}}
IN_AND_OUT = {
    "type": "object",
    "properties": {"inputs": TENSORS, "outputs": TENSORS},
    "required": ["inputs", "outputs"],
}
REQUIRED = (
    "schema",
    "version",
    "monai_version",
    "pytorch_version",
    "numpy_version",
    "task",
    "description",
    "authors",
    "copyright",
)
SCHEMA = {
    "type": "object",
    "properties": {
        **dict.fromkeys(
            (*REQUIRED, "data_type", "image_classes", "label_classes", "pred_classes", "intended_use"), TEXT
        ),
        **dict.fromkeys(("changelog", "required_packages_version", "supported_apps"), OBJECT),
        "network_data_format": IN_AND_OUT,
    },
    "required": [*REQUIRED, "required_packages_version", "network_data_format"],
}
"""What MONAI's schema of 25 July 2024 asks of a bundle's description; the file itself lies where `metadata.json` says."""


@pytest.mark.skipif(importlib.util.find_spec("jsonschema") is None, reason="needs jsonschema")
def test_a_bundles_description_holds_by_monais_schema(whole_run: RunResult, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    description = metadata(open_plain(whole_run.run, None))
    given = {"meta_file": str(tmp_path / "metadata.json"), "filepath": str(tmp_path / "schema.json")}
    (tmp_path / "metadata.json").write_text(json.dumps(description))
    verify_metadata(**given)
    for key in ("authors", "network_data_format"):
        (tmp_path / "metadata.json").write_text(
            json.dumps({name: of for name, of in description.items() if name != key})
        )
        with pytest.raises(ValueError, match=f"'{key}' is a required property"):
            verify_metadata(**given)


@NEEDS_BUNDLE
def test_a_bundle_has_the_recipes_regions_flips_and_label_values(tiny, phantoms: Path, tmp_path: Path) -> None:
    """The check is the test: the bundle's label map is `predict`'s, else export raises."""
    data = tmp_path / "data"
    for part in ("images", "labels"):
        shutil.copytree(phantoms / f"{part}Tr", data / part)
    for path in (data / "labels").iterdir():
        image = nib.load(path)
        values = np.asarray(image.dataobj).copy()
        values[values == 2] = 4
        nib.save(nib.Nifti1Image(values.astype(np.uint8), image.affine), path)
    recipe = tiny(
        data__source={"kind": "folders"},
        data__classes={1: "liver", 4: "kidney"},
        data__regions={"both": [1, 4], "kidney": [4]},
        data__orientation="LPS",
        data__spacing=[5.0, 4.0, 6.0],
        data__intensity={"kind": "percentile"},
        data__crop_foreground={"above": 0.1, "margin": 1},
        loss={"kind": "bce_dice"},
        network={"kind": "unet", "features": [8, 16, 16], "strides": [2, 2], "residual_units": 1},
        validation__mirror=[0, 2],
        training__epochs=1,
        training__iterations_per_epoch=8,
    )
    result = train(recipe, data=data, run=tmp_path / "run", device="cpu")
    done = export(result.run, "bundle", None, None, False, silent)
    assert done.path == result.run / "export/bundle"
    config = json.loads((done.path / "configs/inference.json").read_text())
    assert config["label_values"] == [0, 1, 4]
    assert len(config["flips"]) == 4
    with pytest.raises(DataError, match="checked on a real case, name the data set with --data"):
        export(result.run, "torchscript", tmp_path / "a", tmp_path / "elsewhere", False, silent)
    # A damaged bundle is found out: the check looks at what the configuration does
    config["flips"] = [[2]]
    config["network_def"]["channels"] = [8, 16, 16]
    config["postprocessing"]["transforms"][1]["func"] = "$lambda pred: 1 - (pred[:1] > 0.5).float()"
    (done.path / "configs/inference.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match="is not what `predict` does"):
        EXPORTS["bundle"].module.difference(open_plain(result.run, None), done.path)


def test_a_file_that_fails_its_check_is_not_kept(
    whole_run: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model, path: Path) -> None:
        with torch.no_grad():
            for weight in model.network.parameters():
                weight.mul_(1.5)
            torchscript_write(model, path)
            for weight in model.network.parameters():
                weight.div_(1.5)

    torchscript_write = torchscript.write
    monkeypatch.setattr(torchscript, "write", wrong)
    with pytest.raises(RecipeError, match=r"was not exported: on case .* differ"):
        export(whole_run.run, "torchscript", tmp_path / "model.ts", None, False, silent)
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_is_there_stays_unless_it_is_to_go(whole_run: RunResult, tmp_path: Path) -> None:
    (tmp_path / "model.ts").write_text("mine")
    with pytest.raises(RecipeError, match="is there already"):
        export(whole_run.run, "torchscript", tmp_path / "model.ts", None, False, silent)
    assert (tmp_path / "model.ts").read_text() == "mine"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/notes.txt").write_text("mine")
    with pytest.raises(RecipeError, match="holds no bundle"):
        export(whole_run.run, "torchscript", tmp_path / "folder", None, True, silent)
    assert (tmp_path / "folder/notes.txt").read_text() == "mine"
    export(whole_run.run, "torchscript", tmp_path / "model.ts", None, True, silent)
    assert (tmp_path / "model.ts").read_bytes() != b"mine"


def test_a_bundle_that_is_there_is_whole_until_another_takes_its_place(tmp_path: Path) -> None:
    target, part = tmp_path / "bundle", tmp_path / ".bundle.1.part"
    for folder, text in ((target, "former"), (part, "new")):
        (folder / "configs").mkdir(parents=True)
        (folder / "configs/inference.json").write_text(text)
    with pytest.raises(FileNotFoundError):
        exporting._put(tmp_path / "nothing", target)
    assert (target / "configs/inference.json").read_text() == "former"
    exporting._put(part, target)
    assert (target / "configs/inference.json").read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_what_cannot_be_exported_is_one_sentence(
    whole_run: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecipeError, match="holds no run"):
        export(tmp_path, "onnx", None, None, False, silent)
    shutil.copytree(whole_run.run, tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare/checkpoints")
    with pytest.raises(StorageError, match="checkpoint"):
        export(tmp_path / "bare", "torchscript", None, None, False, silent)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match=r"pip install 'fasttrain\[export\]'"):
        export(whole_run.run, "onnx", tmp_path / "a", None, False, silent)


def test_a_network_that_a_format_cannot_hold_is_one_sentence(whole_run: RunResult, tmp_path: Path) -> None:
    """A network whose shapes hang on its input's values: torch.export cannot follow it, and says so at length."""

    class Asks(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return image if bool(image.sum() > 0) else -image

    model = open_plain(whole_run.run, None)
    object.__setattr__(model, "network", Asks())
    with pytest.raises(RecipeError, match="cannot be exported with --format exported") as told:
        exporting._checked(EXPORTS["exported"], model, tmp_path / "a.pt2", "exported", silent)
    assert len(told.value.faults) == 1
    assert "\n" not in told.value.faults[0]


def test_the_command_says_what_it_checked(
    whole_run: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["export", str(whole_run.run), "--format", "torchscript", "--out", str(tmp_path / "m.ts"), "--json"]
    monkeypatch.setattr(sys, "argv", ["fasttrain", *arguments])
    with pytest.raises(SystemExit) as ended:
        command_line()
    assert ended.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["path"] == str(tmp_path / "m.ts")
    assert document["largest_difference"] <= TOLERANCE
    monkeypatch.setattr(sys, "argv", ["fasttrain", *arguments])
    with pytest.raises(SystemExit) as again:
        command_line()
    assert again.value.code == 2
