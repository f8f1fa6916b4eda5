"""Owns the `data` section: where cases come from, how they are split, preprocessed and kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from fasttrain.errors import RecipeError
from fasttrain.recipe.slices import SlicesSpec
from fasttrain.recipe.spec import (
    Float,
    FolderName,
    Int,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    Spec,
    Switch,
)


class DecathlonSource(Spec):
    """A Medical Segmentation Decathlon folder: a `dataset.json` that lists image and label paths."""

    kind: Literal["decathlon"]
    file: str = "dataset.json"


class NnunetSource(Spec):
    """An nnU-Net v2 folder: `imagesTr/CASE_0000.nii.gz` (one file a channel) and `labelsTr/CASE.nii.gz`."""

    kind: Literal["nnunet"]


class FoldersSource(Spec):
    """Plain folders, image and label paired by id: the file name less its ending and less its `image_suffixes` or `label_suffix`.

    With several `image_suffixes` there is one file a channel, in that order. `case_folders`: each case has a folder of its own in
    `images`, as BraTS has it: `images: ., labels: ., image_suffixes: [_flair, _t1, _t1ce, _t2], label_suffix: _seg`.
    """

    kind: Literal["folders"]
    images: str = "images"
    labels: str = "labels"
    image_suffixes: tuple[str, ...] = ("",)
    label_suffix: str = ""
    case_folders: bool = False


class PhantomSource(Spec):
    """Made CT-like volumes with two organs; written once, deterministic, needs no download."""

    kind: Literal["phantom"]
    cases: Annotated[Int, Field(ge=2, le=1000)] = 24
    seed: Seed = 0


SeriesName = NonNegativeInt | Annotated[str, Field(min_length=1)]
"""A DICOM series by its number, or by its SeriesInstanceUID or description."""


class DicomSource(Spec):
    """A folder a case, with DICOM files in it or below it, and its mask: a DICOM SEG, an RTSTRUCT, or NIfTI.

    `series` picks the image of a case that has several, by SeriesInstanceUID, number or description; a list names one a channel.
    `labels` picks the mask where a case has several kinds, `label_series` where it has several of a kind. A NIfTI mask lies in
    the folder of the case, or beside it as `CASE.nii.gz`. Structures of a SEG or RTSTRUCT are taken by the names of
    `data.classes`, or as `structures` says (`{GTV: 1, BODY: 0}`; later ones are drawn over earlier ones, 0 draws nothing);
    others are refused, or left out (`other_structures: skip`). Files of the names in `ignore` are passed over.
    """

    kind: Literal["dicom"]
    series: SeriesName | Annotated[tuple[SeriesName, ...], Field(min_length=1)] | None = None
    labels: Literal["auto", "seg", "rtstruct", "nifti"] = "auto"
    label_series: SeriesName | None = None
    structures: dict[str, Annotated[Int, Field(ge=0, le=255)]] = Field(default_factory=dict)
    other_structures: Literal["refuse", "skip"] = "refuse"
    ignore: tuple[str, ...] = ("LICENSE",)


class OpenKBPSource(Spec):
    """OpenKBP patients (Babier et al. 2021) for `task: dose`: folders of sparse CSV files, or what `fasttrain data import` makes
    of them, in the parts that the set comes in (`train-pats`, `validation-pats`, `test-pats`) or all in one folder.
    """

    kind: Literal["openkbp"]


SourceSpec = Annotated[
    DecathlonSource | NnunetSource | FoldersSource | DicomSource | PhantomSource | OpenKBPSource,
    Field(discriminator="kind"),
]


class KFoldSplit(Spec):
    """Shuffled k-fold over the sorted case names, the folds nnU-Net draws (scikit-learn's KFold, random_state 12345)."""

    kind: Literal["kfold"]
    folds: Annotated[Int, Field(ge=2)] = 5
    fold: NonNegativeInt = 0
    seed: Seed = 12345
    test: tuple[str, ...] = ()


def check_folds(split: Spec) -> KFoldSplit:
    """The split of a recipe all of whose folds are wanted; raises RecipeError for one of another kind."""
    if isinstance(split, KFoldSplit):
        return split
    kind = getattr(split, "kind", None)
    raise RecipeError(
        f"all folds need data.split.kind: kfold, and the recipe has {kind}; set that, or leave out --fold all"
    )


class LastSplit(Spec):
    """The last `validation` cases of the sorted names validate, the rest train; the `test` before them are left out."""

    kind: Literal["last"]
    validation: PositiveInt
    test: NonNegativeInt = 0


class RatioSplit(Spec):
    """Shares of the shuffled cases for validation and test; the rest train."""

    kind: Literal["ratio"]
    validation: Annotated[Float, Field(gt=0.0, lt=1.0)] = 0.2
    test: Annotated[Float, Field(ge=0.0, lt=1.0)] = 0.0
    seed: Seed = 0


class ListsSplit(Spec):
    """Case names written out."""

    kind: Literal["lists"]
    train: tuple[str, ...]
    validation: tuple[str, ...]
    test: tuple[str, ...] = ()


class SameSplit(Spec):
    """Every case trains and the same cases validate (nnU-Net's fold `all`): the score says nothing of cases not seen.

    For a set of one case, or to see whether a network can fit the data at all.
    """

    kind: Literal["same"]


class ProvidedSplit(Spec):
    """The parts that the set comes in: the folders `train-pats`, `validation-pats` and `test-pats` of `data.source: openkbp`."""

    kind: Literal["provided"]


SplitSpec = Annotated[
    KFoldSplit | LastSplit | RatioSplit | ListsSplit | SameSplit | ProvidedSplit, Field(discriminator="kind")
]


class WindowIntensity(Spec):
    """Maps `low…high` (HU in CT) to 0…1 and clips what lies outside."""

    kind: Literal["window"]
    low: Float
    high: Float


class ZScoreIntensity(Spec):
    """Subtracts the mean and divides by the standard deviation, each image and channel by itself.

    `nonzero` counts and scales the voxels alone that are not background, and leaves the others 0: of images without a skull,
    those of the brain. The `background` is 0, or the channel's lowest value (of images that were scaled before).
    """

    kind: Literal["zscore"]
    nonzero: bool = False
    background: Literal["zero", "lowest"] = "zero"


class PercentileIntensity(Spec):
    """Maps the `low…high` percentiles of each image and channel to 0…1 and clips what lies outside."""

    kind: Literal["percentile"]
    low: Annotated[Float, Field(ge=0.0, le=100.0)] = 0.5
    high: Annotated[Float, Field(ge=0.0, le=100.0)] = 99.5


class NoIntensity(Spec):
    """Keeps the values of the file."""

    kind: Literal["none"]


IntensitySpec = Annotated[
    WindowIntensity | ZScoreIntensity | PercentileIntensity | NoIntensity, Field(discriminator="kind")
]


class ForegroundCrop(Spec):
    """Cuts each volume to the box of voxels above `above` (after the intensity step), plus `margin` voxels."""

    above: Float = 0.0
    margin: NonNegativeInt = 0


DEFAULT_SHARE = 0.5
"""Of the cases, that `data.cache.kind: smart` keeps where neither `cache_share` nor `cache_cases` is set."""


class CacheSpec(Spec):
    """Where preprocessed volumes are kept between epochs.

    `gpu` keeps the cases that train in the GPU's memory, where patches are cut and augmented. Several GPUs keep a copy each, or,
    where the set is too large for that, a part each, and cut patches out of each other's memory (`shard`: `on` always does so,
    `off` never). `folder` is for `disk` and `lmdb`; null means `$FASTTRAIN_CACHE`, or the user's cache folder. The rest is for
    `smart`, which keeps a share or a number of the cases in memory, trains an epoch on these alone, and replaces a share of them
    after each epoch. The cases are gone through in the order drawn from `shuffle_seed`; null keeps the order of their names.
    """

    kind: Literal["auto", "none", "memory", "disk", "lmdb", "smart", "gpu"] = "auto"
    shard: Switch = "auto"
    folder: Annotated[str, Field(min_length=1)] | None = None
    cache_share: Annotated[Float, Field(gt=0.0, le=1.0)] | None = None
    cache_cases: PositiveInt | None = None
    replace_rate: Annotated[Float, Field(gt=0.0, le=1.0)] = 0.1
    shuffle_seed: Seed | None = 0

    @model_validator(mode="after")
    def _one_size(self) -> CacheSpec:
        if self.cache_share is not None and self.cache_cases is not None:
            raise ValueError("cache_share and cache_cases say the same thing twice; set one of them to null")
        return self


def _check_orientation(codes: str) -> str:
    if sorted("R" if code in "RL" else "A" if code in "AP" else code for code in codes.replace("I", "S")) != list(
        "ARS"
    ):
        raise ValueError(f"should have one letter of each pair R/L, A/P, S/I, such as RAS or LPS, found {codes!r}")
    return codes


class DataSpec(Spec):
    """What is trained on, and how it gets to the device.

    `classes` names the values of the label files but for 0, the background; in `task: dose` it names the structures in the order
    of their channels, and doses are divided by `dose_scale` (Gy) before they are learnt. `label_map` (`{255: 1}`) first
    replaces values of the files, each once and all at the same time, by 0, a class or the ignore label. Voxels of
    `ignore_label` are neither a class nor background: losses and scores leave them out.
    `regions` (`{whole: [1, 2, 3], core: [2, 3]}`) are sets of classes that may overlap: the network then answers a sigmoid a
    region, regions are scored, and predictions are written as classes, later regions over earlier ones.
    Cases with faults are refused, all in one list, or left out (`bad_cases: skip`) once the cases are split, so that the folds
    stay what they are.
    Batches are made by `workers` processes or threads (`worker_kind`), each `prefetch_factor` batches ahead, wait in pinned
    memory, and are copied on a stream of their own (`copy_stream`) beside the step.
    """

    name: FolderName | None = None
    source: SourceSpec
    channels: Annotated[tuple[str, ...], Field(min_length=1)]
    classes: Annotated[dict[Int, str], Field(min_length=1)]
    label_map: dict[Int, Int] = Field(default_factory=dict)
    regions: dict[str, tuple[Int, ...]] = Field(default_factory=dict)
    ignore_label: Int | None = None
    dose_scale: PositiveFloat = 70.0
    split: SplitSpec
    orientation: Annotated[str, AfterValidator(_check_orientation)] | None = "RAS"
    spacing: tuple[PositiveFloat, ...] | None = None
    intensity: IntensitySpec
    crop_foreground: ForegroundCrop | None = None
    nan_policy: Literal["refuse", "replace"] = "refuse"
    bad_cases: Literal["refuse", "skip"] = "refuse"
    storage_dtype: Literal["float32", "float16"] = "float32"
    samples_per_case: PositiveInt = 1
    slices: SlicesSpec | None = None
    cache: CacheSpec = CacheSpec()
    workers: Literal["auto"] | Annotated[Int, Field(ge=0, le=1024)] = "auto"
    prefetch_factor: Annotated[Int, Field(ge=1, le=1024)] = 2
    worker_kind: Literal["auto", "process", "thread"] = "auto"
    pin_memory: Switch = "auto"
    copy_stream: Switch = "auto"

    @property
    def sliced_across(self) -> str | int | None:
        """The axis across which volumes are cut into slices; None where they are not."""
        return None if self.slices is None else self.slices.axis

    @property
    def class_count(self) -> int:
        """Output channels: the declared classes and the background."""
        return len(self.classes) + 1

    @property
    def class_values(self) -> tuple[int, ...]:
        """Label values by class index, as a label has them after `label_map`; class 0 is the background, value 0."""
        return (0, *sorted(self.classes))

    @property
    def scored_names(self) -> tuple[str, ...]:
        """Names of what is scored: the regions where there are any, else as `class_names`."""
        return tuple(self.regions) or self.class_names

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the foreground classes, in the order of their class index."""
        return tuple(self.classes[value] for value in sorted(self.classes))
