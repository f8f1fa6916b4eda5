"""What every kind of cache owes: the bits of `none`, in this process and in forked workers, cold and warm, to the end."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from cache_checks import RECIPE, assert_same, assert_true, opened_with_lines, write_cases
from data_builders import make_recipe
from torch.utils.data import DataLoader, Dataset

from fasttrain.data.caches import CACHES, SmartCache, open_case_source
from fasttrain.data.caches.keys import settings_digest
from fasttrain.data.caches.storing import MIB
from fasttrain.data.preprocess import Preprocess
from fasttrain.errors import DataError
from fasttrain.samples import Case, CaseSource, Sample

KINDS = sorted(CACHES)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, ...]:
    return write_cases(tmp_path_factory.mktemp("set"), 5)


class Whole(Dataset[Any]):
    def __init__(self, source: CaseSource) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        return self.source[index]


def _as_it_is(sample: Any) -> Any:
    return sample


@pytest.mark.parametrize("training", [True, False], ids=["training", "validation"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_bits_of_none(
    cases: tuple[Case, ...], kind: str, workers: int, training: bool, tmp_path: Path
) -> None:
    preprocess = Preprocess(RECIPE, training=training)
    wanted = [preprocess.as_sample(preprocess(case)) for case in cases]
    for _ in ("cold", "warm"):
        source = open_case_source(kind, cases, preprocess, 2, folder=tmp_path)
        assert_same(source[0], wanted[0])  # the parent has looked before it forks
        loader = DataLoader(
            Whole(source),
            batch_size=None,
            num_workers=workers,
            collate_fn=_as_it_is,
            multiprocessing_context="fork" if workers else None,
            timeout=60 if workers else 0,
        )
        for _ in range(2):
            for sample, other in zip(loader, wanted, strict=True):
                assert_same(sample, other)
        assert_same(source[-1], wanted[-1])
        with pytest.raises(IndexError):
            source[len(cases)]
        source.close()


@pytest.mark.parametrize("kind", KINDS)
def test_two_sources_of_one_set_do_not_disturb_each_other(cases: tuple[Case, ...], kind: str, tmp_path: Path) -> None:
    preprocess = Preprocess(RECIPE)
    first = open_case_source(kind, cases, preprocess, 2, folder=tmp_path)
    second = open_case_source(kind, cases[:3], preprocess, 2, folder=tmp_path)
    first_of_second = second[0]
    first.close()
    assert_true(second, cases[:3], preprocess)
    second.close()
    assert_same(first_of_second, preprocess.as_sample(preprocess(cases[0])))  # what was handed out outlives the source


@pytest.mark.parametrize("kind", KINDS)
def test_close_gives_back_threads_and_files(cases: tuple[Case, ...], kind: str, tmp_path: Path) -> None:
    open_case_source(kind, cases, Preprocess(RECIPE), 3, folder=tmp_path).close()
    before = _settled()
    source = open_case_source(kind, cases, Preprocess(RECIPE), 3, folder=tmp_path)
    # Open, it holds no descriptor a case: none at all, and lmdb the one of its lock
    assert _settled() == (before[0], before[1] + (kind == "lmdb"))
    source.close()
    source.close()
    assert _settled() == before


def _settled() -> tuple[int, int]:
    """Threads and open files, once a pool that was just left has ended its threads."""
    until = time.monotonic() + 5
    while threading.active_count() > 1 and time.monotonic() < until:
        time.sleep(0.01)
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kind", ["disk", "lmdb"])
def test_a_case_in_the_cache_is_not_read_and_all_others_are_judged_together(
    cases: tuple[Case, ...], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_case_source(kind, cases, Preprocess(RECIPE), 2, folder=tmp_path / "cache")
    bad = []
    for name in ("z", "a"):
        cut = tmp_path / f"{name}.nii"
        cut.write_bytes(cases[0].images[0].read_bytes()[:-40])
        bad.append(Case(name, (cut,), cases[0].label))
    bad.append(Case("m", (tmp_path / "nowhere.nii",), cases[0].label))
    read: list[str] = []
    genuine = Preprocess._read

    def noted(self: Preprocess, case: Case) -> Any:
        read.append(case.name)
        return genuine(self, case)

    monkeypatch.setattr(Preprocess, "_read", noted)
    with pytest.raises(DataError) as caught:
        open_case_source(kind, (*bad, *cases), Preprocess(RECIPE), 2, folder=tmp_path / "cache")
    assert sorted(read) == ["a", "m", "z"]
    assert len(caught.value.faults) == 3
    assert [next(name for name in ("a.nii", "nowhere.nii", "z.nii") if name in fault) for fault in caught.value.faults] == [
        "a.nii", "nowhere.nii", "z.nii",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_into_the_data_folder(kind: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    cases = write_cases(data, 3)
    places = [data, *sorted(data.rglob("*"))]
    for place in reversed(places):
        place.chmod(0o555 if place.is_dir() else 0o444)  # root may write all the same: the times tell
    before = _state(data)
    try:
        for _ in ("cold", "warm"):
            source = open_case_source(kind, cases, Preprocess(RECIPE), 2, folder=tmp_path / "cache")
            for index in range(len(source)):
                source[index]
            source.close()
        assert _state(data) == before
    finally:
        for place in places:
            place.chmod(0o755)
    assert (tmp_path / "cache").exists() == (kind in ("disk", "lmdb"))


def _state(folder: Path) -> list[tuple[str, int, int, int]]:
    """Every file and folder with its size, time of last change and time of last change of what is known of it."""
    seen = [(str(path), path.lstat()) for path in (folder, *sorted(folder.rglob("*")))]
    return [(path, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for path, one in seen]


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_volumes_take_is_told(cases: tuple[Case, ...], kind: str, tmp_path: Path) -> None:
    preprocess = Preprocess(RECIPE)
    source, lines, _ = opened_with_lines(kind, cases, preprocess, tmp_path)
    samples = [source[index] for index in (source.held if isinstance(source, SmartCache) else range(len(source)))]
    kept = sum(bytes_of(sample) for sample in samples)
    full = kept + sum(2 * sample.image.numel() for sample in samples)
    sizes = f"{kept / MIB:.1f} MiB; {full / MIB:.1f} MiB as float32"
    assert (
        lines
        == {
            "none": [],
            "memory": [f"memory cache: 5 cases, {sizes}"],
            "smart": [f"smart cache: 2 of 5 cases in memory, {sizes}"],
            "disk": [
                f"disk cache {tmp_path}/disk/{settings_digest(preprocess)}: 0 of 5 cases were there (0%), {sizes}"
            ],
            "lmdb": [
                f"lmdb cache {tmp_path}/lmdb/{settings_digest(preprocess)}: 0 of 5 cases were there (0%), {sizes}"
            ],
        }[kind]
    )
    source.close()
    plain = Preprocess(make_recipe(**{**RECIPE.data.model_dump(), "storage_dtype": "float32"}))
    assert not any("float32" in line for line in opened_with_lines(kind, cases, plain, tmp_path)[1])


def bytes_of(sample: Sample) -> int:
    tensors = [sample.image, sample.label, *sample.centres, sample.background_centres]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
