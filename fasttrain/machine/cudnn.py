"""Owns what is known of cuDNN's versions: those with which torch runs 3D convolutions in 16 bits several times slower."""

from __future__ import annotations

import re

SLOW_FROM, SLOW_BELOW = 90800, 91500
"""As `torch.backends.cudnn.version()` counts: 9.8 up to 9.14. torch passes over cuDNN there for contiguous 3D convolutions in
fp16 and bf16 with kernels larger than a voxel (`use_cudnn` in its ATen/native/Convolution.cpp): measured, four times slower.
"""


SLOW = "torch runs 3D convolutions in fp16 and bf16 about four times slower with it unless the layout is channels-last"


def is_slow(version: int | None) -> bool:
    """Whether torch takes a slow way with this version; None: there is no cuDNN."""
    return version is not None and SLOW_FROM <= version < SLOW_BELOW


def slow_cudnn(version: int | None) -> str | None:
    """What is slow with this version of cuDNN and what to install instead, as a sentence; None where nothing is."""
    if version is None or not is_slow(version):
        return None
    return (
        f"cuDNN {version_text(version)} is one of those (9.8 to 9.14) that torch passes over for 3D convolutions in fp16 and "
        "bf16 unless the layout is channels-last, which makes them about four times slower; install a torch with cuDNN 9.15 or "
        "later, such as 2.11 for CUDA 13 (`pip install 'torch>=2.11' --index-url https://download.pytorch.org/whl/cu130`), or "
        "beside torch 2.9.1 or later a newer cuDNN alone (`pip install 'nvidia-cudnn-cu12>=9.15'`, for CUDA 13 nvidia-cudnn-cu13)"
    )


def version_text(version: int) -> str:
    """`9.10.2` of 91002, as cuDNN 9 counts; `8.9.7` of 8907, as those before did."""
    if version < 90000:
        return f"{version // 1000}.{version // 100 % 10}.{version % 100}"
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def newer_cudnn() -> str:
    """The command that brings a cuDNN without that fault; loads torch."""
    import torch

    major = (torch.version.cuda or "13").partition(".")[0]
    if tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:3]) >= (2, 9, 1):
        return f"pip install 'nvidia-cudnn-cu{major}>=9.15'"
    return (
        f"pip install 'torch>=2.11' --index-url https://download.pytorch.org/whl/cu{'130' if major == '13' else '126'}"
    )
