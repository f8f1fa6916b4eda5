"""Owns recognising which layout a folder of images and labels has, and what its `dataset.json` tells of channels and classes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from fasttrain.data.file_names import FileFinder
from fasttrain.data.name_patterns import FolderPattern, find_pattern, folders_in
from fasttrain.data.nifti import case_id, is_nifti
from fasttrain.data.reading import split_shape
from fasttrain.data.sources import FoundCases, look_for_cases
from fasttrain.data.sources.dataset_json import channel_table, label_values, read_dataset_json
from fasttrain.data.sources.dicom import holds_dicom, modality_of, structure_names
from fasttrain.data.sources.found import describe_files
from fasttrain.data.sources.openkbp import looks_like_openkbp
from fasttrain.data.volume_files import read_header
from fasttrain.errors import DataError
from fasttrain.recipe.data_spec import DataSpec, DecathlonSource, DicomSource, FoldersSource, NnunetSource, SourceSpec
from fasttrain.samples import Case
from fasttrain.wording import counted

ANY_CLASSES = {value: f"class_{value}" for value in range(1, 256)}
"""Every label value that a recipe can declare, so that reading a label refuses none of them."""
_MOST_SETS_NAMED, _MANY_SETS = 12, 6
_LOOKED_FOR = (
    "a dataset.json with a list under 'training' (Decathlon), imagesTr/CASE_0000.nii.gz with labelsTr/CASE.nii.gz (nnU-Net), "
    "a folder of DICOM files a case, a folder a case whose files begin with its name (BraTS), and two folders such as images/ "
    "and labels/ (or one folder, or train/images and train/labels) whose NIfTI files are named CASE.nii.gz and CASE.nii.gz, or "
    "CASE_ANYTHING.nii.gz, with the same CASE"
)


@dataclass(frozen=True)
class Layout:
    """Where the cases of a set are. `names` is {label value: name} as a JSON file of the set has it, {} where none does.

    ignore_label: the value that it calls `ignore`, which is in `names` no more. incomplete, faults: as in `FoundCases`.
    """

    source: SourceSpec
    channels: tuple[str, ...]
    named_channels: bool
    names: dict[int, str]
    dimensions: int
    cases: tuple[Case, ...]
    warnings: tuple[str, ...]
    ignore_label: int | None = None
    incomplete: tuple[Case, ...] = ()
    faults: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def reading_spec(self, nan_policy: str) -> DataSpec:
        """A `data` section that reads the files as they are, with any label value (that to be ignored among them)."""
        return _reading_spec(self.source, self.channels, nan_policy, _drawn_classes(self.source, self.names))


def recognise(root: Path) -> Layout:
    """The layout of the set under `root` with its cases, found by name; of the files only headers are read.

    Raises DataError where the folder is missing or fits no layout (with what was looked for), and with every fault of the
    layout that it fits: images without labels, missing files and so on.
    """
    layout = look_at_layout(root)
    if layout.faults:
        raise DataError(fault for _, faults in sorted(layout.faults.items()) for fault in faults)
    return layout


def look_at_layout(root: Path) -> Layout:
    """As `recognise`, but the faults of single cases are in what is returned."""
    if not root.is_dir():
        found = "is a file; the folder of a data set is expected" if root.exists() else "does not exist"
        raise DataError(f"{root} {found}; name the folder of the data set with --data")
    path = root / "dataset.json"
    document = read_dataset_json(path) if path.is_file() else {}
    numbered = _channel_count(root)
    if isinstance(document.get("training"), list) and not (numbered and _is_nnunet_list(root, document)):
        return _decathlon(root, document)
    if numbered:
        return _nnunet(root, document, numbered)
    if holds_dicom(root):
        return _dicom(root)
    pattern = find_pattern(root)
    if pattern is None or pattern.in_one_below:
        _refuse_several(root)
    if pattern is None and looks_like_openkbp(root):
        raise DataError(
            f"{root} looks like OpenKBP, which has a recipe of its own: name it by --recipe openkbp, or change a copy of it "
            "(`fasttrain recipes copy openkbp`)"
        )
    if pattern is None:
        raise DataError(f"{root} has no layout that is known: looked for {_LOOKED_FOR}; found {describe_files(root)}")
    return _folders(root, document, pattern)


def _refuse_several(root: Path) -> None:
    """Raises DataError where several folders below `root`, which is no set itself, are sets: one of them must be named."""
    sets = list(islice((child for child in folders_in(root).values() if _is_a_set(child)), _MOST_SETS_NAMED))
    if len(sets) < 2:
        return
    more = " and perhaps more" if len(sets) == _MOST_SETS_NAMED else ""
    cases = "; where each holds one case, put all cases into one folder" if len(sets) > _MANY_SETS else ""
    raise DataError(
        f"{root} holds several data sets: {', '.join(child.name for child in sets)}{more}; name one of them, such as --data "
        f"{sets[0]}{cases}"
    )


def _is_a_set(folder: Path) -> bool:
    path = folder / "dataset.json"
    try:
        if path.is_file() and isinstance(read_dataset_json(path).get("training"), list):
            return True
        if _channel_count(folder):
            return True
    except (DataError, OSError):
        return False
    pattern = find_pattern(folder)
    return pattern is not None and not pattern.in_one_below


def _decathlon(root: Path, document: dict[str, Any]) -> Layout:
    source = DecathlonSource(kind="decathlon")
    found = look_for_cases(_reading_spec(source, ("image",)), root)
    dimensions = _dimensions(found.cases)
    table = _channel_table(document)
    files = max(len(case.images) for case in found.cases)
    count = files if files > 1 else _channels_in_one_file(found.cases, dimensions)
    return _layout(source, root, document, table, count, dimensions)


def _nnunet(root: Path, document: dict[str, Any], count: int) -> Layout:
    source = NnunetSource(kind="nnunet")
    table = _channel_table(document)
    cases = look_for_cases(_reading_spec(source, _names_of(table, count)), root).cases
    return _layout(source, root, document, table, count, _dimensions(cases))


def _folders(root: Path, document: dict[str, Any], pattern: FolderPattern) -> Layout:
    source = FoldersSource(
        kind="folders",
        images=pattern.images,
        labels=pattern.labels,
        image_suffixes=pattern.image_suffixes,
        label_suffix=pattern.label_suffix,
        case_folders=pattern.case_folders,
    )
    table = _channel_table(document)
    count = len(pattern.image_suffixes)
    suffix_names = tuple(suffix.strip("_-. ") or "image" for suffix in pattern.image_suffixes)
    cases = look_for_cases(_reading_spec(source, suffix_names), root).cases
    dimensions = _dimensions(cases)
    if count == 1:
        count = _channels_in_one_file(cases, dimensions)
    elif not table:
        table = suffix_names
    return _layout(source, root, document or _label_table(root), table, count, dimensions)


def _dicom(root: Path) -> Layout:
    """Classes are called as the structures of the masks are; a mask of NIfTI has any class values."""
    source = DicomSource(kind="dicom")
    names: dict[int, str] = {}
    for name in structure_names(root)[: len(ANY_CLASSES)]:
        names[len(names) + 1] = _clean(name)
    found = look_for_cases(_reading_spec(source, ("image",), classes=_drawn_classes(source, names)), root)
    modality = _clean(modality_of(found.cases[0].images[0]))
    return Layout(
        source=source,
        channels=(modality or "image",),
        named_channels=bool(modality),
        names=names,
        dimensions=3,
        cases=found.cases,
        warnings=found.warnings,
        incomplete=found.incomplete,
        faults=found.faults,
    )


def _drawn_classes(source: SourceSpec, names: dict[int, str]) -> dict[int, str]:
    """Structures of DICOM masks get their values by name, so that reading has to know the names."""
    return names if names and isinstance(source, DicomSource) else ANY_CLASSES


def _layout(
    source: SourceSpec, root: Path, document: dict[str, Any], table: tuple[str, ...], count: int, dimensions: int
) -> Layout:
    channels = _names_of(table, count)
    names = _class_names(document)
    ignored = next((value for value, name in names.items() if name.casefold() == "ignore"), None)
    found = _found_with(source, channels, ignored, root)
    # What the made-up declaration of every label value calls for is no news
    warnings = [text for text in found.warnings if "but data.classes declares" not in text]
    if table and len(table) != count:
        warnings.append(
            f"{root / 'dataset.json'} names {counted(len(table), 'channel')} ({', '.join(table)}), but the images have {count}"
        )
    return Layout(
        source=source,
        channels=channels,
        named_channels=bool(table),
        names={value: name for value, name in names.items() if value != ignored},
        dimensions=dimensions,
        cases=found.cases,
        warnings=tuple(warnings),
        ignore_label=ignored,
        incomplete=found.incomplete,
        faults=found.faults,
    )


def _found_with(source: SourceSpec, channels: tuple[str, ...], ignored: int | None, root: Path) -> FoundCases:
    spec = _reading_spec(source, channels)
    if ignored is not None:
        # Nothing is read by this: it spares the warning that the value is not set to be ignored
        spec = spec.model_copy(update={"ignore_label": ignored})
    return look_for_cases(spec, root)


def _reading_spec(
    source: SourceSpec,
    channels: tuple[str, ...],
    nan_policy: str = "refuse",
    classes: dict[int, str] = ANY_CLASSES,
) -> DataSpec:
    return DataSpec.model_validate(
        {
            "source": source.model_dump(),
            "channels": channels,
            "classes": classes,
            "split": {"kind": "same"},
            "intensity": {"kind": "none"},
            "nan_policy": nan_policy,
        }
    )


def _is_nnunet_list(root: Path, document: dict[str, Any]) -> bool:
    """nnU-Net's list names images without the number of their channel, so that none of the files listed is there."""
    entries = [entry.get("image") for entry in document["training"] if isinstance(entry, dict)]
    finder = FileFinder(root)
    return not any(isinstance(one, list) or (isinstance(one, str) and finder.find(one).is_file()) for one in entries)


def _channel_count(root: Path) -> int:
    """How many channels the files of an nnU-Net folder are numbered for; 0 for another folder."""
    folder = root / "imagesTr"
    if not folder.is_dir() or not (root / "labelsTr").is_dir():
        return 0
    stems = [case_id(path) for path in folder.iterdir() if is_nifti(path) and not path.name.startswith(".")]
    numbers = {int(stem[-4:]) for stem in stems if stem[-5:-4] == "_" and stem[-4:].isdecimal()}
    # Case numbers such as img_0035 are no channels: those begin with 0000 and leave none out
    return len(numbers) if numbers == set(range(len(numbers))) else 0


def _channel_table(document: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name for _, name in sorted(channel_table(document).items()))


def _names_of(table: tuple[str, ...], count: int) -> tuple[str, ...]:
    """A name of its own for each channel."""
    names = [_clean(name) or "image" for name in table] if len(table) == count else []
    if not names:
        names = ["image"] if count == 1 else [f"channel_{index}" for index in range(count)]
    if len(set(names)) < len(names):
        names = [f"{name}_{index}" for index, name in enumerate(names)]
    return tuple(names)


def _class_names(document: dict[str, Any]) -> dict[int, str]:
    table = {value: _clean(name) for value, name in label_values(document).items() if 0 < value < 256}
    doubled = {name for name, count in Counter(table.values()).items() if count > 1}
    return {value: f"{name}_{value}" if name in doubled or not name else name for value, name in sorted(table.items())}


def _clean(name: str) -> str:
    """On one line, and nothing that a recipe's text cannot hold."""
    return " ".join("".join(char if char.isprintable() else " " for char in name).split())


def _label_table(root: Path) -> dict[str, Any]:
    """A JSON file beside the images that is a table of names and label values and nothing else."""
    for path in sorted(root.glob("*.json")):
        try:
            document = read_dataset_json(path)
        except DataError:
            continue
        table = document.get("labels", document)
        if isinstance(table, dict) and table and len(label_values({"labels": table})) == len(table):
            return {"labels": table}
    return {}


def _dimensions(cases: tuple[Case, ...]) -> int:
    """2 where every label is a plane, by the headers that can be read; labels have no channels to be taken for an axis."""
    depths = []
    for case in cases:
        try:
            shape = (read_header(case.label, case.drawn) if case.label else read_header(case.images[0])).shape
        except DataError:
            continue
        depths.append(shape[2] if len(shape) > 2 else 1)
    return 2 if depths and max(depths) == 1 else 3


def _channels_in_one_file(cases: tuple[Case, ...], dimensions: int) -> int:
    counts: Counter[int] = Counter()
    for case in cases:
        try:
            counts[split_shape(case.images[0], read_header(case.images[0]).shape, dimensions)[1]] += 1
        except DataError:
            continue
    return counts.most_common(1)[0][0] if counts else 1
