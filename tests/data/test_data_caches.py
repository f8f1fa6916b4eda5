"""Every kind gives the same samples, names all faults that it meets at once, and stops at once on Ctrl-C."""

from __future__ import annotations

import gzip
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_builders import make_recipe, save, write_decathlon
from torch.utils.data import DataLoader, Dataset

from fasttrain.data.caches import CACHES, estimate_bytes, open_case_source
from fasttrain.data.preprocess import Preprocess
from fasttrain.data.sources import find_cases
from fasttrain.errors import DataError
from fasttrain.recipe.recipe import Recipe
from fasttrain.samples import Case, CaseSource, Sample

KINDS = sorted(CACHES)
FILLED = [kind for kind in KINDS if kind != "none"]
READ_WHOLE = [kind for kind in FILLED if kind != "smart"]
RECIPE = make_recipe(storage_dtype="float16", intensity={"kind": "zscore"}, spacing=[1.0, 1.0, 1.2])


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, ...]:
    root = write_decathlon(tmp_path_factory.mktemp("set"), [f"c{index}" for index in range(6)], shape=(18, 17, 20))
    return find_cases(RECIPE.data, root).cases


def bytes_of(sample: Sample) -> int:
    tensors = [sample.image, sample.label, sample.background_centres, *sample.centres]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_samples_are_those_of_preprocessing(cases: tuple[Case, ...], kind: str, workers: int) -> None:
    preprocess = Preprocess(RECIPE)
    seen: list[tuple[int, int]] = []
    opened = open_case_source(kind, cases, preprocess, workers, lambda done, total: seen.append((done, total)))
    total = {"none": 0, "smart": 3}.get(kind, 6)  # smart keeps half of the cases where the recipe names no share
    assert seen == [(done, total) for done in range(1, total + 1)]
    assert isinstance(opened, CaseSource)
    assert len(opened) == 6
    for index, case in enumerate(cases):
        wanted, sample = preprocess.as_sample(preprocess(case)), opened[index]
        assert sample.name == case.name
        assert type(sample.image) is torch.Tensor
        assert torch.equal(sample.image, wanted.image)
        assert sample.image.dtype == torch.float16
        assert torch.equal(sample.label, wanted.label)  # type: ignore[arg-type]
        assert all(torch.equal(a, b) for a, b in zip(sample.centres, wanted.centres, strict=True))
        assert np.array_equal(sample.grid.affine, wanted.grid.affine)
        assert sample.source_grid.shape == wanted.source_grid.shape
    with pytest.raises(IndexError):
        opened[6]
    opened.close()


def test_memory_keeps_volumes_and_none_does_not(cases: tuple[Case, ...]) -> None:
    opened = {kind: open_case_source(kind, cases, Preprocess(RECIPE), 2) for kind in KINDS}
    assert opened["memory"][0].image.data_ptr() == opened["memory"][0].image.data_ptr()
    first, second = opened["none"][0], opened["none"][0]
    assert first.image.data_ptr() != second.image.data_ptr()


@pytest.mark.parametrize("kind", READ_WHOLE)
def test_all_faulty_cases_come_in_one_error(cases: tuple[Case, ...], tmp_path: Path, kind: str) -> None:
    cut = tmp_path / "cut.nii.gz"
    cut.write_bytes(cases[0].images[0].read_bytes()[:-40])
    strange = save(tmp_path / "strange.nii", np.full((18, 17, 20), 9, np.uint8))
    bad = [Case("z", (cut,), cases[0].label), Case("y", cases[1].images, strange), Case("x", (cut,), strange)]
    with pytest.raises(DataError) as caught:
        open_case_source(kind, [*cases, *bad], Preprocess(RECIPE), 2)
    assert len(caught.value.faults) == 4
    assert [fault.split(" ")[0].split("/")[-1] for fault in caught.value.faults] == [
        "cut.nii.gz", "strange.nii", "strange.nii", "cut.nii.gz",
    ]  # fmt: skip


def test_none_reads_a_case_when_it_is_asked_for(cases: tuple[Case, ...], tmp_path: Path) -> None:
    source = open_case_source("none", [cases[0], Case("gone", (tmp_path / "gone.nii",), None)], Preprocess(RECIPE), 2)
    assert source[0].name == cases[0].name
    with pytest.raises(DataError, match=r"gone\.nii"):
        source[1]


@pytest.mark.parametrize("kind", FILLED)
def test_other_failures_are_not_data_faults(
    cases: tuple[Case, ...], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Preprocess, case: Case) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(Preprocess, "_read", broken)
    with pytest.raises(ZeroDivisionError):
        open_case_source(kind, cases, Preprocess(RECIPE), 2)


class Indexed(Dataset[Any]):
    def __init__(self, opened: CaseSource) -> None:
        self.opened = opened

    def __len__(self) -> int:
        return len(self.opened)

    def __getitem__(self, index: int) -> tuple[str, torch.Tensor, torch.Tensor]:
        sample = self.opened[index]
        assert sample.label is not None
        return sample.name, sample.image.float() * 2, sample.label


def _first(items: Sequence[Any]) -> Any:
    return items[0]


@pytest.mark.parametrize("kind", KINDS)
def test_samples_pass_through_forked_workers(cases: tuple[Case, ...], kind: str) -> None:
    opened = open_case_source(kind, cases, Preprocess(RECIPE), 2)
    loader = DataLoader(
        Indexed(opened), batch_size=1, num_workers=2, collate_fn=_first, multiprocessing_context="fork", timeout=60
    )
    for _ in range(2):
        for index, (name, image, label) in enumerate(loader):
            assert name == opened[index].name
            assert torch.equal(image, opened[index].image.float() * 2)
            assert torch.equal(label, opened[index].label)  # type: ignore[arg-type]


_SLOW = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from data_builders import make_recipe
from fasttrain.data.caches import open_case_source
from fasttrain.data.preprocess import Preprocess
from fasttrain.samples import Case

class Slow(Preprocess):
    def _read(self, case):
        time.sleep(0.5)
        return super()._read(case)

cases = [Case(str(n), (Path({image!r}),), None) for n in range(400)]
try:
    open_case_source({kind!r}, cases, Slow(make_recipe()), 2, lambda done, total: print(done, flush=True))
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(130)
"""


@pytest.mark.parametrize("kind", FILLED)
def test_ctrl_c_ends_a_fill_at_once(cases: tuple[Case, ...], kind: str) -> None:
    program = _SLOW.format(tests=str(Path(__file__).parent), image=str(cases[0].images[0]), kind=kind)
    checkout = Path(__file__).resolve().parents[2]
    process = subprocess.Popen([sys.executable, "-c", program], cwd=checkout, stdout=subprocess.PIPE, text=True)
    guard = threading.Timer(90, process.kill)
    guard.start()
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "1"
        process.send_signal(signal.SIGINT)
        start = time.perf_counter()
        text = process.stdout.read()
        code = process.wait()
    finally:
        guard.cancel()
    assert "interrupted" in text
    assert code == 130
    assert time.perf_counter() - start < 5  # 400 cases would take 100 s


def check_estimate(recipe: Recipe, cases: Sequence[Case]) -> float:
    opened = open_case_source("memory", cases, Preprocess(recipe), 1)
    return estimate_bytes(cases, recipe) / sum(bytes_of(opened[index]) for index in range(len(opened)))


def test_estimate_is_a_close_upper_bound(cases: tuple[Case, ...], tmp_path: Path) -> None:
    assert 1.0 <= check_estimate(RECIPE, cases) < 2.5  # small volumes: the centres weigh most
    assert 1.0 <= check_estimate(make_recipe(patch={"size": [64, 64, 64]}), cases) < 1.2
    turned = np.array([[0, -2.0, 0, 0], [0, 0, 1.0, 0], [3.0, 0, 0, 0], [0, 0, 0, 1]])
    values = np.zeros((30, 40, 50), np.int16)
    big = Case("t", (save(tmp_path / "t.nii", values, turned),), save(tmp_path / "l.nii", values.astype("u1"), turned))
    assert 1.0 <= check_estimate(make_recipe(spacing=[1.0, 1.0, 2.0]), [big]) < 1.2


def test_estimate_reads_headers_alone(tmp_path: Path) -> None:
    path = save(tmp_path / "a.nii.gz", np.random.default_rng(0).normal(size=(64, 64, 64)))
    path.write_bytes(path.read_bytes()[:5000])
    assert estimate_bytes([Case("a", (path,), None)], make_recipe()) >= 64**3 * 5
    path.write_bytes(gzip.compress(b"no header"))
    with pytest.raises(DataError, match="is not a NIfTI file"):
        estimate_bytes([Case("a", (path,), None)], make_recipe())
