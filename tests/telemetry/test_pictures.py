"""The picture of a case: which way up, in which proportions and colours, under which name; odd names and odd shapes."""

import subprocess
import sys
import warnings
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from fasttrain.errors import StorageError
from fasttrain.telemetry.pictures import (
    CasePicture,
    Plane,
    class_colours,
    draw_case,
    drop_pictures,
    grey_window,
    picture_name,
    upright,
    write_picture,
)


def plane(shape=(12, 9), spacing=(1.0, 1.0), toward=("R", "A"), classes: int = 1) -> Plane:
    rng = np.random.default_rng(0)
    label = rng.integers(0, classes + 1, shape).astype(np.uint8)
    return Plane(rng.normal(size=shape).astype(np.float32), label, np.roll(label, 1, 0), spacing, toward)


def picture(*planes: Plane, case: str = "case_1", names: tuple[str, ...] = ("liver",)) -> CasePicture:
    return CasePicture(case, "worst", 10, planes, names, tuple(0.5 for _ in names))


def marked(*place: int, shape=(6, 4), toward=("R", "A")) -> Plane:
    """An image with one bright pixel."""
    image = np.zeros(shape, np.float32)
    image[place] = 1
    return Plane(image, image.astype(np.uint8), image.astype(np.uint8), (1.0, 2.0), toward)


@pytest.mark.parametrize(
    ("toward", "place", "seen"),
    [
        (("R", "A"), (5, 3), (0, 3)),  # far right and front: on the left of the picture, at its top
        (("L", "A"), (5, 3), (5, 3)),
        (("L", "P"), (5, 3), (5, 0)),
        (("A", "S"), (5, 3), (0, 3)),
        (("P", "I"), (5, 3), (5, 0)),
        (("S", "R"), (5, 3), (0, 5)),  # the upward axis is stored first
        (("I", "P"), (0, 3), (3, 5)),
    ],
)
def test_a_plane_is_turned_to_radiologists_order(toward, place, seen) -> None:
    shown = upright(marked(*place, toward=toward))
    for array in (shown.image, shown.label, shown.prediction):
        assert tuple(int(index) for index in np.argwhere(array)[0]) == seen
    assert shown.toward[0] in "LP"
    assert shown.toward[1] in "AS"
    assert shown.spacing_mm == ((1.0, 2.0) if shown.image.shape == (6, 4) else (2.0, 1.0))


def drawn(one: CasePicture):
    figure = draw_case(one)
    FigureCanvasAgg(figure).draw()
    return figure


def test_planes_stand_in_millimetres_with_their_sides_named() -> None:
    flat = plane(shape=(20, 10), spacing=(1.0, 5.0), toward=("R", "S"))
    figure = drawn(picture(plane((20, 30)), flat, plane((30, 10), (1.0, 5.0), ("A", "S"))))
    assert [axes.get_title() for axes in figure.axes] == ["axial", "coronal", "sagittal"]
    for axes, (width, height) in zip(figure.axes, [(20, 30), (20, 50), (30, 50)], strict=True):
        box = axes.get_window_extent()
        assert box.height / box.width == pytest.approx(height / width, rel=0.02)
        assert axes.images[0].get_extent() == [0, width, 0, height]
    assert [text.get_text() for text in figure.axes[0].texts] == ["R", "L", "P", "A"]
    assert [text.get_text() for text in figure.axes[2].texts] == ["A", "P", "I", "S"]


def test_outlines_are_solid_for_the_label_dashed_for_the_prediction_and_closed_at_the_edge() -> None:
    label, prediction = np.zeros((8, 8), np.uint8), np.zeros((8, 8), np.uint8)
    label[:3, :3], prediction[5:, 5:] = 1, 1
    one = Plane(np.ones((8, 8), np.float32), label, prediction, (1.0, 1.0), ("L", "A"))
    dashed, solid = drawn(picture(one)).axes[0].collections
    assert solid.get_linestyle()[0][1] is None
    assert dashed.get_linestyle()[0][1] is not None
    (outline,) = [path.vertices for path in solid.get_paths()]
    assert outline.min() <= 0.0
    assert outline.max() == pytest.approx(3.0)
    assert (outline[0] == outline[-1]).all()
    assert dashed.get_paths()[0].vertices.min() == pytest.approx(5.0)
    tint = drawn(picture(one)).axes[0].images[1].get_array()
    assert np.array_equal(tint[..., 3] > 0, prediction.T > 0)


def test_the_legend_has_every_class_with_its_dice() -> None:
    one = CasePicture("case", "best", 3, (plane(classes=2),), ("liver", "_kidney"), (0.8125, None))
    texts = [text.get_text() for text in drawn(one).legends[0].get_texts()]
    assert texts == ["0.812  liver", "–  _kidney", "label", "prediction (filled)"]
    title = drawn(one).get_suptitle()
    assert "best case of epoch 3" in title
    assert "0.812" in title


def test_a_hundred_classes_have_colours_of_their_own_and_fit() -> None:
    colours = class_colours(117)
    assert len(colours) == 117
    assert min(np.abs(np.subtract(*pair)).max() for pair in combinations(colours, 2)) > 0.01
    assert min(np.linalg.norm(np.subtract(*pair)) for pair in combinations(colours[:16], 2)) > 0.25
    assert all(max(colour) - min(colour) > 0.25 for colour in colours)  # none is as grey as the image
    names = tuple(f"a structure with a very long name, number {index}" for index in range(117))
    figure = drawn(picture(plane((30, 30), classes=117), names=names))
    assert "93 more classes" in figure.legends[0].get_texts()[-1].get_text()
    assert max(figure.get_size_inches()) < 14


def test_the_grey_window_ignores_outliers_and_what_was_filled_in() -> None:
    image = np.full((100, 100), -1000.0, np.float32)
    image[:50] = np.linspace(0, 100, 5000).reshape(50, 100)
    image[0, :3] = [90000.0, np.nan, np.inf]
    low, high = grey_window([Plane(image, image, image, (1, 1), ("R", "A"))])
    assert 0 <= low < 2
    assert 98 < high <= 101


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_an_image_without_contrast_is_drawn(value: float) -> None:
    low, high = grey_window([Plane(np.full((4, 4), value), np.zeros((4, 4)), np.zeros((4, 4)), (1, 1), ("R", "A"))])
    assert high > low


@pytest.mark.parametrize("shapes", [[(1, 1)], [(512, 512), (512, 1), (512, 1)], [(1, 40), (1, 40), (40, 40)]])
def test_odd_shapes_are_drawn_without_a_warning(tmp_path: Path, shapes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        toward = [("R", "A"), ("R", "S"), ("A", "S")]
        planes = [plane(shape, toward=way) for shape, way in zip(shapes, toward, strict=False)]
        assert write_picture(picture(*planes), tmp_path).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("name", ["a$\\frac$", "肝脏", "_x", "sub/../../case 1", "n" * 300, "é" * 300])
def test_odd_names_of_case_and_class_are_drawn_under_a_name_that_a_folder_can_hold(tmp_path: Path, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = write_picture(picture(plane(), case=name, names=(name,)), tmp_path / "pictures")
    assert path.parent == tmp_path / "pictures"
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert path.name.startswith("epoch_0010_worst_")


def test_a_usual_name_stays_as_it_is() -> None:
    assert picture_name(10, "worst", "hippocampus_001") == "epoch_0010_worst_hippocampus_001.png"
    assert picture_name(12345, "median", "a-b.c_1") == "epoch_12345_median_a-b.c_1.png"
    assert picture_name(None, "worst-1", "a") == "folds_worst-1_a.png"


def test_pictures_of_dropped_epochs_go_and_nothing_else(tmp_path: Path) -> None:
    for name in ("epoch_0002_worst_a.png", "epoch_0003_best_b.png", "epoch_0010_best_c.png", "mine.png"):
        (tmp_path / name).touch()
    assert drop_pictures(tmp_path, 3, 3) == 1
    assert drop_pictures(tmp_path, 3) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch_0002_worst_a.png", "mine.png"]
    assert drop_pictures(tmp_path / "missing", 1) == 0


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "pictures").touch()
    with pytest.raises(StorageError, match="pictures cannot be made"):
        write_picture(picture(plane()), tmp_path / "pictures")


def test_pyplot_stays_out_and_matplotlib_waits_until_a_picture_is_drawn(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; import numpy as np\n"
        "from fasttrain.telemetry.pictures import CasePicture, Plane, write_picture\n"
        "assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules\n"
        "zeros = np.zeros((4, 4), np.uint8)\n"
        "plane = Plane(zeros, zeros, zeros, (1.0, 1.0), ('R', 'A'))\n"
        "write_picture(CasePicture('a', 'only', 1, (plane,), ('b',), (None,)), Path(sys.argv[1]))\n"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)


def test_ignored_pixels_are_veiled_and_no_class() -> None:
    label = np.zeros((12, 9), np.uint8)
    label[2:5, 2:5], label[8:] = 1, 255
    ignored = label == 255
    names = tuple(f"c{n}" for n in range(254))
    one = Plane(np.ones((12, 9), np.float32), label, np.zeros_like(label), (1.0, 1.0), ("R", "A"), ignored)
    figure = drawn(picture(one, names=names))
    veil = figure.axes[0].images[2].get_array()
    shown = upright(one)
    assert shown.ignored is not None
    assert np.array_equal(veil[..., 3] > 0, shown.ignored.T)
    assert np.array_equal(shown.ignored, shown.label == 255)
    red, green, blue = veil[veil[..., 3] > 0][0, :3]
    assert red == green == blue  # grey is no class's colour
    assert len(figure.axes[0].collections) == 1  # the outline of class 1 alone
    assert "ignored" in [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("ignored", [None, np.zeros((12, 9), bool)])
def test_nothing_is_said_of_ignored_pixels_where_there_are_none(ignored) -> None:
    """255 is the last of 255 classes where nothing says otherwise."""
    label = np.zeros((12, 9), np.uint8)
    label[8:] = 255
    one = Plane(np.ones((12, 9), np.float32), label, np.zeros_like(label), (1.0, 1.0), ("R", "A"), ignored)
    figure = drawn(picture(one, names=tuple(f"c{n}" for n in range(255))))
    assert len(figure.axes[0].images) == 2
    assert len(figure.axes[0].collections) == 1
    assert "ignored" not in [text.get_text() for text in figure.legends[0].get_texts()]
