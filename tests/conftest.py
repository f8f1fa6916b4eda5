"""Fixtures of all tests: the tiny recipe, its phantoms, one run of it that tests only look at, and a cache folder apart."""

import os
import signal
from pathlib import Path

import pytest
from tiny_recipe import TINY

from fasttrain import load_recipe, train
from fasttrain.data.sources.phantom import ensure_phantoms
from fasttrain.engine.run import RunResult
from fasttrain.recipe.data_spec import PhantomSource

# Under nohup it is ignored, which every process of the tests would inherit
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def phantoms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phantoms")
    ensure_phantoms(PhantomSource(kind="phantom", cases=TINY["data.source.cases"]), folder)
    return folder


@pytest.fixture(scope="session")
def tiny_values() -> dict:
    """The settings that make the demo recipe tiny."""
    return dict(TINY)


@pytest.fixture(scope="session")
def tiny():
    """Resolves the tiny recipe with further settings."""

    def resolved(**more: object):
        return load_recipe("demo", {**TINY, **{key.replace("__", "."): value for key, value in more.items()}})

    return resolved


@pytest.fixture(scope="session")
def whole_run(tiny, phantoms: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """The tiny recipe, trained without an interruption."""
    return train(tiny(), data=phantoms, run=tmp_path_factory.mktemp("runs") / "whole", device="cpu")


@pytest.fixture(scope="session", autouse=True)
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory):
    """Volumes and compiled code of tests stay out of the user's cache folder."""
    former = os.environ.get("FASTTRAIN_CACHE")
    os.environ["FASTTRAIN_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if former is None:
        del os.environ["FASTTRAIN_CACHE"]
    else:
        os.environ["FASTTRAIN_CACHE"] = former


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked `gpu` is skipped where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
