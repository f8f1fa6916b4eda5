"""Ends the process that ranks are forked from with the last test of a file: other tests look at what children there are."""

from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker

import pytest


@pytest.fixture(scope="module", autouse=True)
def _no_fork_server_afterwards() -> Iterator[None]:
    yield
    # Of the standard library's own tests
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
