"""Owns how MONAI is loaded: without the large packages that it takes names from and that few of its parts ever call.

`import monai` loads all of MONAI, and for single functions scipy, matplotlib, and torchvision, transformers, pandas and the like
where they are installed: more than half of its seconds. MONAI asks for such names by one function, `optional_import`. While a
finder of ours is in place, that function gives stand-ins for names of the packages in `LATER`, which load them when they are
first used. Where such a package is missing, MONAI behaves as ever: it has stand-ins of its own for that, which raise.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

TYPE_CHECKING = False  # typing's own would have to be loaded before signals are answered
if TYPE_CHECKING:
    from typing import Any

LATER = (
    "h5py",
    "matplotlib",
    "optuna",
    "pandas",
    "pydicom",
    "requests",
    "scipy",
    "skimage",
    "sklearn",
    "tensorboard",
    "tensorboardX",
    "torch.utils.tensorboard",
    "torchvision",
    "transformers",
)
"""Packages that MONAI can do without until a part of it is used; no exception class is taken from any of them."""
LEFT_OUT = ("ignite",)
"""Packages that MONAI derives classes from as it is loaded, so that they cannot wait, and that nothing here uses: with
pytorch-ignite comes half of torch.distributed and its sympy. This process does not find them, unless it has loaded them before.
"""
_NEEDS = {"torch.utils.tensorboard": "tensorboard"}
_PYPLOT = "matplotlib.pyplot"


def name_the_user() -> None:
    """Gives a name to a user without an entry among the accounts, as containers run programs: MONAI and torch's compiler ask for
    it while they are loaded, and fail where there is none.
    """
    if not hasattr(os, "getuid") or any(name in os.environ for name in ("LOGNAME", "USER", "LNAME", "USERNAME")):
        return
    try:
        import pwd

        pwd.getpwuid(os.getuid())
    except (ImportError, KeyError):
        os.environ["USER"] = f"uid{os.getuid()}"


class Later:
    """Stands in for what `take` gives, and takes it when it is called, asked for an attribute, subclassed or compared with."""

    __slots__ = ("_real", "_take")
    __spec__ = None

    def __init__(self, take: Callable[[], Any]) -> None:
        self._take: Callable[[], Any] | None = take
        self._real: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(_real(self), name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _real(self)(*arguments, **named)

    def __getitem__(self, key: Any) -> Any:
        return _real(self)[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(_real(self))

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, _real(self))

    def __subclasscheck__(self, other: type) -> bool:
        return issubclass(other, _real(self))

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (_real(self),)

    def __reduce__(self) -> tuple[Any, ...]:
        # Where it goes, the real one is meant
        return _itself, (_real(self),)


def _itself(real: Any) -> Any:
    return real


def _real(later: Later) -> Any:
    take = later._take
    if take is not None:
        # Two threads may both take it, and get the same
        later._real = take()
        later._take = None
    return later._real


class _Finder:
    """Finds the two modules of MONAI that decide, and nothing else."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The usual spec with a loader of ours; None, which leaves it to others, for any other module or kind of file."""
        loader = _LOADERS.get(name)
        spec = PathFinder.find_spec(name, path, target) if loader is not None else None
        if spec is None or loader is None or type(spec.loader) is not SourceFileLoader:
            return None
        spec.loader = loader(spec.loader.name, spec.loader.path)
        return spec


class _OptionalImport(SourceFileLoader):
    """Of `monai.utils.module`: its `optional_import` becomes one that takes later what can be taken later."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        at_once = module.optional_import

        def optional_import(module: str, *rest: Any, **named: Any) -> tuple[Any, bool]:
            package = module.partition(".")[0]
            if package in LEFT_OUT and package not in sys.modules:
                # By which Python says that it is not to be found
                sys.modules[package] = None  # type: ignore[assignment]
                try:
                    return at_once(module, *rest, **named)
                finally:
                    del sys.modules[package]
            if not _can_wait(module, *rest, **named):
                return at_once(module, *rest, **named)

            def take() -> Any:
                # A part of a package is its attribute once it is imported: by another module of MONAI, where none waits
                part = f"{module}.{named.get('name') or (rest[2] if len(rest) > 2 else '')}"
                if _findable(part):
                    import_module(part)
                return at_once(module, *rest, **named)[0]

            return Later(take), True

        optional_import.__doc__ = at_once.__doc__
        module.optional_import = optional_import  # type: ignore[attr-defined]


class _Pyplot(SourceFileLoader):
    """Of `monai.utils.jupyter_utils`, the one module that imports pyplot itself."""

    def exec_module(self, module: ModuleType) -> None:
        if "matplotlib" in sys.modules or not _findable(_PYPLOT):
            super().exec_module(module)
            return
        package = ModuleType("matplotlib")
        package.pyplot = Later(lambda: import_module(_PYPLOT))  # type: ignore[attr-defined]
        stand_ins: dict[str, Any] = {"matplotlib": package, _PYPLOT: package.pyplot}
        sys.modules.update(stand_ins)
        try:
            super().exec_module(module)
        finally:
            for name, stand_in in stand_ins.items():
                if sys.modules.get(name) is stand_in:
                    del sys.modules[name]


_LOADERS = {"monai.utils.module": _OptionalImport, "monai.utils.jupyter_utils": _Pyplot}


def spare_imports() -> None:
    """Puts the finder in place, once; a MONAI that is loaded already stays as it is."""
    if not any(isinstance(finder, type) and finder is _Finder for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder)


def _can_wait(
    module: str,
    version: str = "",
    version_checker: Callable[..., bool] | None = None,
    name: str = "",
    *rest: Any,
    **named: Any,
) -> bool:
    """Whether it is of those that are taken later, is not loaded anyway, and is installed in the version that is asked for.

    `rest` and `named` are what no name in `LATER` is asked with: an error text of its own, or to serve as a base class.
    """
    package = next((one for one in LATER if module == one or module.startswith(f"{one}.")), None)
    if package is None or rest or named or module in sys.modules or not _findable(module):
        return False
    if not version:
        return _findable(_NEEDS.get(package, package))
    try:
        # Without its parts a package is small
        whole = import_module(package)
    except Exception:
        return False
    return version_checker is not None and version_checker(whole, version)


def _findable(module: str) -> bool:
    """Whether the module's file is there; nothing is imported."""
    path: Sequence[str] | None = None
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:end]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
        if path is None:
            return end == len(parts)
    # A folder without __init__.py is no package that MONAI takes
    return spec is not None and spec.origin is not None
