"""Writes DICOM series, segmentations and structure sets with known values, as scanners and planning systems do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.sequence import Sequence as Items
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, RTStructureSetStorage, generate_uid

AXIAL = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
CORONAL = (1.0, 0.0, 0.0, 0.0, 0.0, -1.0)
OBLIQUE = (0.96, 0.28, 0.0, -0.28, 0.96, 0.0)
ORIGIN = (-30.0, -20.0, 5.0)


def uid_of(name: str) -> str:
    """The same for the same name, so that files written twice are equal."""
    return generate_uid(entropy_srcs=[name])


def write_series(
    folder: Path,
    stored: np.ndarray,
    name: str = "ct",
    *,
    orientation: Sequence[float] = AXIAL,
    origin: Sequence[float] = ORIGIN,
    spacing: tuple[float, float] = (0.75, 0.5),
    step: float = 3.0,
    slope: float | Sequence[float] = 1.0,
    intercept: float | Sequence[float] = -1024.0,
    number: int = 3,
    description: str = "",
    patient: str = "p1",
    syntax: str = ExplicitVRLittleEndian,
    change: Callable[[int, Dataset], None] = lambda place, dataset: None,
) -> list[Path]:
    """Writes `stored` [slice, row, column] as one file a slice, named so that the order of names is not that of the slices.

    spacing: PixelSpacing (between rows, between columns); step: between slices, along the normal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    normal = np.cross(orientation[:3], orientation[3:])
    names = np.random.default_rng(1).permutation(len(stored))
    paths = []
    for place, pixels in enumerate(stored):
        dataset = _dataset(CTImageStorage, uid_of(f"{name} {place}"), syntax)
        dataset.PatientID, dataset.PatientName = patient, f"{patient}^"
        dataset.StudyInstanceUID, dataset.SeriesInstanceUID = uid_of(f"study {patient}"), uid_of(name)
        dataset.FrameOfReferenceUID = uid_of(f"frame {patient}")
        dataset.Modality, dataset.SeriesNumber, dataset.SeriesDescription = "CT", number, description or name
        dataset.InstanceNumber = place + 1
        dataset.ImagePositionPatient = [f"{one:.9g}" for one in np.array(origin) + normal * step * place]
        dataset.ImageOrientationPatient = [f"{one:.9g}" for one in orientation]
        dataset.PixelSpacing, dataset.SliceThickness = list(spacing), step
        dataset.Rows, dataset.Columns = pixels.shape
        dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
        dataset.BitsAllocated = dataset.BitsStored = pixels.dtype.itemsize * 8
        dataset.HighBit, dataset.PixelRepresentation = dataset.BitsStored - 1, int(pixels.dtype.kind == "i")
        dataset.RescaleSlope = slope[place] if isinstance(slope, Sequence) else slope
        dataset.RescaleIntercept = intercept[place] if isinstance(intercept, Sequence) else intercept
        dataset.PixelData = pixels.tobytes()
        change(place, dataset)
        path = folder / f"IM{names[place]:04d}.dcm"
        dataset.save_as(path, enforce_file_format=True)
        paths.append(path)
    return paths


def compress(path: Path, syntax: str) -> None:
    """Compresses the pixels of a file without loss."""
    dataset = pydicom.dcmread(path)
    dataset.compress(syntax, generate_instance_uid=False)
    dataset.save_as(path)


def change_file(path: Path, **attributes: Any) -> None:
    """Sets attributes of a file; None removes one."""
    dataset = pydicom.dcmread(path)
    for name, value in attributes.items():
        if value is None:
            delattr(dataset, name)
        else:
            setattr(dataset, name, value)
    dataset.save_as(path)


def write_segmentation(
    path: Path, series: Sequence[Path], masks: Mapping[str, np.ndarray], name: str = "seg", kind: str = "BINARY"
) -> Path:
    """Writes a SEG of {label: mask [slice, row, column]} on the files of a series; empty frames are left out.

    kind: BINARY, FRACTIONAL or LABELMAP, into which masks must not overlap.
    """
    import highdicom as hd
    from pydicom.sr.codedict import codes

    images = [pydicom.dcmread(one) for one in series]
    pixels = np.stack(list(masks.values()), axis=-1).astype(np.uint8)
    if kind == "LABELMAP":
        pixels = (pixels * np.arange(1, len(masks) + 1)).max(axis=-1).astype(np.uint8)
    described = [
        hd.seg.SegmentDescription(
            segment_number=place + 1,
            segment_label=label,
            segmented_property_category=codes.SCT.Organ,
            segmented_property_type=codes.SCT.Liver,
            algorithm_type=hd.seg.SegmentAlgorithmTypeValues.MANUAL,
        )
        for place, label in enumerate(masks)
    ]
    for image in images:
        image.setdefault("StudyDate", "")
        for tag in (
            "StudyTime",
            "AccessionNumber",
            "StudyID",
            "PatientBirthDate",
            "PatientSex",
            "ReferringPhysicianName",
        ):
            image.setdefault(tag, "")
    segmentation = hd.seg.Segmentation(
        source_images=images,
        pixel_array=pixels,
        segmentation_type=kind,
        segment_descriptions=described,
        series_instance_uid=uid_of(name),
        series_number=100,
        sop_instance_uid=uid_of(f"{name} 0"),
        instance_number=1,
        manufacturer="tests",
        manufacturer_model_name="tests",
        software_versions="1",
        device_serial_number="1",
        series_description=name,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    segmentation.save_as(path)
    return path


def write_structures(
    path: Path, series: Sequence[Path], contours: Mapping[str, Sequence[np.ndarray]], name: str = "rtstruct"
) -> Path:
    """Writes an RTSTRUCT of {name of a region: contours [point, xyz in the patient's mm]} drawn on the files of a series."""
    image = pydicom.dcmread(series[0], stop_before_pixels=True)
    dataset = _dataset(RTStructureSetStorage, uid_of(f"{name} 0"), ExplicitVRLittleEndian)
    dataset.Modality, dataset.SeriesInstanceUID, dataset.SeriesDescription = "RTSTRUCT", uid_of(name), name
    dataset.StudyInstanceUID, dataset.PatientID, dataset.SeriesNumber = image.StudyInstanceUID, image.PatientID, 200
    referenced = _item(SeriesInstanceUID=image.SeriesInstanceUID)
    study = _item(RTReferencedSeriesSequence=Items([referenced]))
    frame = _item(FrameOfReferenceUID=image.FrameOfReferenceUID, RTReferencedStudySequence=Items([study]))
    dataset.ReferencedFrameOfReferenceSequence = Items([frame])
    dataset.StructureSetROISequence = Items(
        [_item(ROINumber=place + 1, ROIName=label, ReferencedFrameOfReferenceUID=image.FrameOfReferenceUID)
         for place, label in enumerate(contours)]
    )  # fmt: skip
    dataset.ROIContourSequence = Items(
        [_item(ReferencedROINumber=place + 1, ContourSequence=Items([_contour(points) for points in outlines]))
         for place, outlines in enumerate(contours.values())]
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset.save_as(path, enforce_file_format=True)
    return path


def in_patient(points: np.ndarray, place: int, orientation: Sequence[float] = AXIAL, origin: Sequence[float] = ORIGIN,
               spacing: tuple[float, float] = (0.75, 0.5), step: float = 3.0) -> np.ndarray:  # fmt: skip
    """Points [point, (column, row)] of a slice of `write_series`, in the patient's mm."""
    along_row, along_column = np.array(orientation[:3]), np.array(orientation[3:])
    corner = np.array(origin) + np.cross(along_row, along_column) * step * place
    return corner + points[:, :1] * spacing[1] * along_row + points[:, 1:] * spacing[0] * along_column


def _contour(points: np.ndarray) -> Dataset:
    return _item(
        ContourGeometricType="CLOSED_PLANAR" if len(points) > 2 else "POINT",
        NumberOfContourPoints=len(points),
        ContourData=[f"{one:.8g}" for one in points.ravel()],
    )


def _item(**attributes: Any) -> Dataset:
    item = Dataset()
    for name, value in attributes.items():
        setattr(item, name, value)
    return item


def _dataset(sop_class: str, uid: str, syntax: str) -> Dataset:
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.MediaStorageSOPClassUID, dataset.file_meta.MediaStorageSOPInstanceUID = sop_class, uid
    dataset.file_meta.TransferSyntaxUID = syntax
    dataset.SOPClassUID, dataset.SOPInstanceUID = sop_class, uid
    return dataset
