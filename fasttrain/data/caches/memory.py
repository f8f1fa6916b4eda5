"""Owns the source that keeps every preprocessed volume in memory (MONAI's CacheDataset, filled by threads)."""

from __future__ import annotations

from collections.abc import Sequence

from monai.data import CacheDataset

from fasttrain.data.caches.filling import Gathering, Progress
from fasttrain.data.caches.storing import Options, Sizes, many_cases
from fasttrain.data.preprocess import Preprocess
from fasttrain.samples import Case, Sample


class MemoryCache:
    """The records are never written to, so forked workers share their pages."""

    def __init__(self, dataset: CacheDataset, preprocess: Preprocess) -> None:
        self._dataset = dataset
        self._preprocess = preprocess

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._preprocess.as_sample(self._dataset[index % len(self)])

    def close(self) -> None:
        """Gives the volumes back to the system."""
        self._dataset.set_data([])


def open_memory(
    cases: Sequence[Case], preprocess: Preprocess, workers: int, progress: Progress | None, options: Options
) -> MemoryCache:
    """Preprocesses every case with `workers` threads; raises one DataError with the faults of all."""
    gathering = Gathering(preprocess, len(cases), progress)
    with gathering.ending_together():
        dataset = CacheDataset(
            data=list(cases),
            transform=gathering,
            num_workers=workers,
            progress=False,
            copy_cache=False,
            as_contiguous=False,
        )
    gathering.raise_faults()
    if options.told is not None:
        sizes = Sizes()
        for record in dataset:
            sizes.add(record)
        options.told(f"memory cache: {many_cases(len(cases))}, {sizes}", "info")
    return MemoryCache(dataset, preprocess)
