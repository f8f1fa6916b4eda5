"""MONAI is loaded without the large packages that it hardly uses, and is the same MONAI all the same."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from typing import Any

import pytest

from fasttrain.monai_import import LATER, Later, _can_wait, _Finder, name_the_user, spare_imports

USED = """
import json, pickle, sys
import fasttrain
import monai
waiting = [name for name in ("scipy.signal", "scipy.stats", "scipy.ndimage", "matplotlib", "matplotlib.pyplot", "tensorboard")
           if name in sys.modules]
import numpy as np
import monai.visualize.utils
visualised = monai.visualize.utils.plt.Figure.__module__ == "matplotlib.figure"
from monai.data.ultrasound_confidence_map import hilbert
from monai.metrics.utils import KDTree, distance_transform_edt
from monai.utils import jupyter_utils
from monai.utils.module import OptionalImportError, optional_import
import scipy.ndimage, scipy.signal, scipy.spatial
import matplotlib.pyplot
rng = np.random.default_rng(0)
line, mask = rng.normal(size=64), rng.random((9, 9)) > 0.2
tree = scipy.spatial.KDTree(rng.random((5, 2)))
missing, found = optional_import("no_such_package")
try:
    missing.anything
    raised = False
except OptionalImportError:
    raised = True
print(json.dumps({
    "waiting": waiting,
    "version": monai.__version__,
    "hilbert": bool((hilbert(line) == scipy.signal.hilbert(line)).all()),
    "distance": bool((distance_transform_edt(mask) == scipy.ndimage.distance_transform_edt(mask)).all()),
    "isinstance": [isinstance(tree, KDTree), isinstance(3, KDTree)],
    "pickled": pickle.loads(pickle.dumps(KDTree)) is scipy.spatial.KDTree,
    "pyplot": [jupyter_utils.plt.Figure is matplotlib.pyplot.Figure, visualised],
    "real": sys.modules["matplotlib"].__file__ is not None and sys.modules["matplotlib.pyplot"].__name__,
    "missing": [found, raised],
    "too old": optional_import("scipy.signal", "99.0")[1],
    "loaded": optional_import("scipy.signal")[0] is scipy.signal,
    "base": optional_import("scipy.signal", name="no_such_name")[1],
}))
"""
NAMES = """
import json, sys
if sys.argv[1] == "spared":
    import fasttrain
import monai
names = {}
for name, module in sorted(sys.modules.items()):
    if name == "monai" or name.startswith("monai."):
        names[name] = sorted(key for key in vars(module) if not key.startswith("__"))
print(json.dumps(names))
"""
LATE = """
import monai
from monai.metrics.utils import KDTree
import scipy.spatial
import fasttrain
import monai.handlers
print(KDTree is scipy.spatial.KDTree)
"""


def run(script: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_large_packages_wait_and_are_there_when_they_are_used() -> None:
    import monai

    assert json.loads(run(USED)) == {
        "waiting": [],
        "version": monai.__version__,
        "hilbert": True,
        "distance": True,
        "isinstance": [True, False],
        "pickled": True,
        "pyplot": [True, True],
        "real": "matplotlib.pyplot",
        "missing": [False, True],
        "too old": False,
        "loaded": True,
        "base": False,
    }


def test_monai_has_every_module_and_name_that_it_has_alone() -> None:
    alone, spared = json.loads(run(NAMES, "alone")), json.loads(run(NAMES, "spared"))
    assert len(alone) > 300
    assert spared == alone


def test_a_monai_that_was_loaded_before_stays_as_it_is() -> None:
    assert run(LATE).strip() == "True"


class Shape:
    """Something that is taken later."""

    def __init__(self, sides: int = 0) -> None:
        self.sides = sides

    def __class_getitem__(cls, key: str) -> str:
        return f"of {key}"


def counting(real: Any) -> tuple[Later, list[int]]:
    taken: list[int] = []

    def take() -> Any:
        taken.append(1)
        return real

    return Later(take), taken


def test_a_stand_in_is_what_it_stands_for_and_takes_it_once() -> None:
    later, taken = counting(Shape)
    assert not taken
    assert later(3).sides == 3
    assert later["cards"] == "of cards"
    assert isinstance(Shape(), later)  # type: ignore[arg-type]
    assert not isinstance(3, later)  # type: ignore[arg-type]
    assert issubclass(Shape, later)  # type: ignore[arg-type]
    assert not issubclass(int, later)  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(later)) is Shape
    assert issubclass(_square(later), Shape)
    assert _square(later)().sides == 4
    assert taken == [1]


def _square(later: Any) -> type[Shape]:
    class Square(later):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(4)

    return Square


def test_a_stand_in_for_a_module_gives_its_names_and_its_errors() -> None:
    later, taken = counting(OrderedDict)
    assert later.fromkeys("ab") == {"a": None, "b": None}
    assert list(counting([1, 2])[0]) == [1, 2]
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = later.no_such_name
    failing = Later(lambda: 1 // 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failing()
    assert taken == [1]


@pytest.mark.parametrize(
    ("module", "rest", "waits"),
    [
        ("json", (), False),  # not of the list
        ("scipy_like", (), False),
        ("no_such_package", (), False),
        ("torch.utils.tensorboard_like", (), False),
        ("scipy.no_such_part", (), False),
        ("scipy.constants", (), True),
        ("scipy.constants", ("0.1", lambda module, version: True), True),
        ("scipy.constants", ("9.9", lambda module, version: False), False),
        ("scipy.constants", ("0.1",), False),  # MONAI's own way of comparing is not known here
    ],
)
def test_only_installed_packages_of_the_list_wait(
    module: str, rest: tuple[Any, ...], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another test of this process may have loaded it
    monkeypatch.delitem(sys.modules, "scipy.constants", raising=False)
    assert _can_wait(module, *rest) is waits


def test_what_is_asked_as_a_base_class_or_is_loaded_already_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "scipy.constants", raising=False)
    assert not _can_wait("scipy.constants", as_type="base")
    assert "numpy" not in LATER
    import scipy.spatial  # noqa: F401

    assert not _can_wait("scipy.spatial")


def test_the_finder_is_put_in_place_once_and_finds_two_modules_alone() -> None:
    spare_imports()
    spare_imports()
    assert sys.meta_path.count(_Finder) == 1  # type: ignore[arg-type]
    assert _Finder.find_spec("json") is None
    assert _Finder.find_spec("monai.utils.misc") is None


def test_a_user_without_an_entry_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container has it that runs as a bare number."""
    import getpass
    import pwd

    def no_entry(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    name_the_user()
    assert "USER" not in os.environ, "one that has an entry keeps it"
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    with pytest.raises((KeyError, OSError)):
        getpass.getuser()
    name_the_user()
    assert getpass.getuser() == f"uid{os.getuid()}"
    monkeypatch.setenv("USER", "somebody")
    name_the_user()
    assert getpass.getuser() == "somebody"
