"""The GPU's allocator: it takes up what the plan decides, before its first use and after; a user's setting stays."""

import os
import subprocess
import sys

import pytest

from fasttrain.machine.allocator import allocator_setting, expand_segments

AFTER_THE_FIRST_USE = """
import torch
from fasttrain.machine.allocator import expand_segments

def grows(mib):
    kept.append(torch.empty(mib << 20, dtype=torch.uint8, device="cuda"))
    return max(torch.cuda.memory_snapshot(), key=lambda one: one["total_size"])["is_expandable"]

kept = []
print(grows(64), end=" ")
expand_segments(True)
print(grows(256), end=" ")
expand_segments(False)
print(grows(1024))
"""


@pytest.mark.gpu
def test_segments_grow_though_the_gpu_was_used_before() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    said = subprocess.run([sys.executable, "-c", AFTER_THE_FIRST_USE], env=environ, capture_output=True, text=True)
    assert said.stdout.split() == ["False", "True", "False"], said.stderr


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_sets_is_told_from_what_fasttrain_does(name: str) -> None:
    environ: dict[str, str] = {}
    expand_segments(True, environ)
    assert allocator_setting(environ) is None
    expand_segments(False, environ)
    assert environ == {}
    environ[name] = "max_split_size_mb:512"
    expand_segments(False, environ)
    assert environ == {name: "max_split_size_mb:512"}
    assert allocator_setting(environ) == f"{name}=max_split_size_mb:512"
