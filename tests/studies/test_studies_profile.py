"""`profile`: what is concluded from given figures, its parts on a real run, the command, and what it refuses."""

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_machine import run_with
from tiny_recipe import TINY

from fasttrain import ranges
from fasttrain.cli.main import run
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.errors import RecipeError
from fasttrain.studies.choice import of_ceiling
from fasttrain.studies.profiling import nsys
from fasttrain.studies.profiling.cards import CARDS, Parted, card_named, project, project_counted, read_prices
from fasttrain.studies.profiling.kernels import breakdown, covered, kind_of
from fasttrain.studies.profiling.marks import unmarked_errors
from fasttrain.studies.profiling.parts import PartTimes
from fasttrain.studies.profiling.verdict import (
    Evidence,
    best_two,
    changed,
    data_changes,
    judge,
    most_to_gain,
    validation_changes,
)
from fasttrain.telemetry.events import Progress


def evidence(**more: object) -> Evidence:
    """A step of 100 ms, all of it convolutions, with its batch made between the steps in 1 ms."""
    values = {
        "real": 0.101, "same": 0.1, "loader": 0.001, "steps_per_epoch": 10, "validating": 0.0, "kinds": {"conv": 1.0},
        "on_gpu": False, "workers": 0, "cpus": 2, "step_cpu": 0.2, "made": 0.001, "made_cpu": 0.001,
    }  # fmt: skip
    return Evidence(**{**values, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "bound"),
    [
        ({}, "compute-bound"),
        ({"real": 0.4, "loader": 0.3}, "data-bound"),
        # Slower than it should be, but the loader alone is not what takes long
        ({"real": 0.15, "loader": 0.05}, "compute-bound"),
        ({"validating": 1.2}, "validation-bound"),
        ({"validating": 0.9}, "compute-bound"),
        ({"on_gpu": True, "kinds": {"conv": 0.6, "idle": 0.4}}, "launch-bound"),
        # What a CPU does outside of torch's operations is no launching
        ({"kinds": {"conv": 0.6, "idle": 0.4}}, "compute-bound"),
        ({"kinds": {"conv": 0.4, "norm": 0.3, "pointwise": 0.3}}, "bandwidth-bound"),
    ],
)
def test_the_verdict_goes_by_what_takes_longest(more: dict, bound: str) -> None:
    verdict = judge(evidence(**more))
    assert verdict.bound == bound
    assert verdict.evidence


def test_workers_hide_what_their_cpus_have_time_for() -> None:
    sleeping = evidence(real=0.5, loader=0.4, made=0.4, made_cpu=0.001)
    change = data_changes(sleeping)[0]
    assert change.setting == "data.workers: 4"
    assert change.gain == pytest.approx(0.5 / 0.1005 - 1, rel=0.01)
    # Batches that take all of a CPU leave less of two for the step
    working = evidence(real=0.5, loader=0.4, made=0.4, made_cpu=0.4)
    assert data_changes(working)[0].gain == pytest.approx(0.5 / 0.3 - 1)


def test_what_other_processes_took_is_no_gain_of_data() -> None:
    noisy = evidence(real=0.15, same=0.1, loader=0.001)
    assert data_changes(noisy)[0].gain < 0.02
    assert most_to_gain(noisy)["data that took no time"] < 0.02


def test_volumes_in_memory_spare_the_reading_alone() -> None:
    reading = evidence(real=0.4, loader=0.3, made=0.3, made_cpu=0.3)
    kept = next(one for one in data_changes(reading, cached=0.05) if one.setting == "data.cache.kind: memory")
    assert kept.gain == pytest.approx(0.4 / 0.15 - 1)


def test_a_step_is_no_faster_than_its_loader() -> None:
    fed = evidence(real=0.1, same=0.1, loader=0.08, workers=1, made=0.08)
    assert fed.with_step(0.5) == pytest.approx(0.08)
    assert evidence().with_step(0.5) == pytest.approx(0.0505 + 0.0005, rel=0.02)


def test_the_two_best_changes_are_those_of_epochs() -> None:
    found = evidence(validating=1.0)
    changes = [changed(found, "a", 0.1, ""), changed(found, "b", 0.05, ""), *validation_changes(found, 2)]
    assert [one.setting for one in best_two(changes)] == ["b", "validation.every: 4"]
    assert best_two([changed(found, "a", 0.1005, "")]) == []


def test_cards_are_known_by_their_drivers_names() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100 PCIe", "NVIDIA A100-SXM4-80GB": "A100 80GB",
        "Tesla T4": "T4", "NVIDIA L40S": "L40S", "NVIDIA GeForce RTX 3090": "RTX 3090", "AMD EPYC": None, "NVIDIA L40": None,
    }  # fmt: skip
    found = {name: card_named(name) for name in names}
    assert {name: card and card.name for name, card in found.items()} == names


def test_a_projection_scales_each_part_by_what_sets_its_pace() -> None:
    here = card_named("NVIDIA H100 80GB HBM3")
    assert here is not None
    parted = Parted(computing=0.06, moving=0.03, staying=0.01)
    found = {one.card: one for one in project(parted, here, "bf16", True, (100, 2.0, 3), {"H200": 4.0})}
    assert "H100" not in found
    h200 = found["H200"]
    assert h200.step_seconds == pytest.approx(0.06 + 0.03 * 3350 / 4800 + 0.01)
    assert h200.epoch_seconds == pytest.approx(100 * h200.step_seconds + 2.0 * 3350 / 4800)
    assert h200.cost == pytest.approx(h200.run_hours * 4.0)
    assert found["A100 80GB"].cost is None
    # Where the host is too slow for it, a faster card gains nothing
    fed = {one.card: one for one in project(Parted(0.06, 0.03, 0.01, 0.1), here, "bf16", True, (1, 0.0, 1), {})}
    assert fed["B200"].step_seconds == 0.1
    counted = {one.card: one for one in project_counted(989e9, 3350e6, (1, 5.0, 1), {})}
    assert counted["H100"].step_seconds == pytest.approx(0.002)
    assert len(counted) == len(CARDS)


def test_prices_are_of_known_cards() -> None:
    assert read_prices(["h100=2.99", "A100 80GB=1.5"]) == {"H100": 2.99, "A100 80GB": 1.5}
    with pytest.raises(RecipeError) as refused:
        read_prices(["H10=2", "H100=cheap", "H200=-1"])
    assert len(refused.value.faults) == 3
    assert "did you mean" in refused.value.faults[0]


def test_no_share_of_a_ceiling_is_above_all_of_it() -> None:
    assert of_ceiling(0.43, 0.1, "a copy reaches") == "43% of what a copy reaches"
    assert (
        of_ceiling(1.19, 0.3, "a copy reaches") == "no less than what a copy reaches, whose own rate scatters by ±30%"
    )


@pytest.mark.parametrize(
    ("name", "on_gpu", "kind"),
    [
        ("sm90_xmma_fprop_implicit_gemm", True, "conv"),
        ("void cudnn::nchwToNhwcKernel", True, "layout"),
        ("Memcpy HtoD", True, "copy"),
        ("elementwise_kernel", True, "pointwise"),
        ("aten::mkldnn_convolution", False, "conv"),
        ("aten::native_batch_norm", False, "norm"),
        ("aten::copy_", False, "copy"),
        ("aten::mul", False, "pointwise"),
    ],
)
def test_kinds_go_by_names(name: str, on_gpu: bool, kind: str) -> None:
    assert kind_of(name, on_gpu) == kind


def test_idle_is_what_no_span_covers() -> None:
    assert covered([(0, 2), (1, 3), (5, 6)]) == (4, 6)
    assert covered([]) == (0.0, 0.0)


def test_a_step_of_convolutions_is_seen_as_that(tmp_path: Path) -> None:
    conv, image = torch.nn.Conv3d(8, 8, 3, padding=1), torch.randn(1, 8, 24, 24, 24)
    found = breakdown(lambda: conv(image).sum().backward(), steps=2, on_gpu=False, trace=tmp_path / "trace.json")
    assert max(found.kinds, key=lambda kind: found.kinds[kind]) == "conv"
    assert sum(found.kinds.values()) + found.idle == pytest.approx(found.whole, rel=0.05)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_the_profilers_marks_are_left_out_and_its_errors_are_not(capfd: pytest.CaptureFixture[str]) -> None:
    breakdown(lambda: torch.ones(3).sum(), steps=1, on_gpu=False)
    assert capfd.readouterr().err == ""
    with unmarked_errors():
        os.write(2, b"USDT:2026-01-01 profiler_start\nERROR:2026-01-01 CUPTI_ERROR_INSUFFICIENT_PRIVILEGES\n")
    assert capfd.readouterr().err == "ERROR:2026-01-01 CUPTI_ERROR_INSUFFICIENT_PRIVILEGES\n"
    os.write(2, b"USDT: as it was before\n")
    assert capfd.readouterr().err == "USDT: as it was before\n"


def test_a_part_counts_without_the_parts_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 10.0])
    monkeypatch.setattr("fasttrain.studies.profiling.parts.time.perf_counter", lambda: next(clock))
    times = PartTimes(on_gpu=False)
    with ranges.listening(times), ranges.part("cut"), ranges.part("read"):
        pass
    assert times.host == {"read": 2.0, "cut": 8.0}
    with ranges.part("cut"):
        pass  # nobody listens any more
    assert times.host["cut"] == 8.0
    # So that a run without a profile makes nothing for it
    assert ranges.part("cut") is ranges.part("read")


def words(phantoms: Path, out: Path, *more: str) -> list[str]:
    sets = [word for key, value in TINY.items() for word in ("--set", f"{key}={json.dumps(value).strip(chr(34))}")]
    return ["profile", "--recipe", "demo", "--device", "cpu", "--data", str(phantoms), "--out", str(out), *sets, *more]


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch, phantoms: Path, tmp_path: Path) -> Callable[..., int]:
    """Calls the command in this process; the exit code."""
    monkeypatch.setattr("fasttrain.cli.profile_command.limit_threads", lambda count: None)
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path / "cache"))

    def call(*more: str, out: Path | None = None) -> int:
        with pytest.raises(SystemExit) as ended:
            run(words(phantoms, out or tmp_path / "out", *more))
        return int(ended.value.code or 0)

    return call


def test_a_whole_profile_on_a_cpu(
    profiled: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profiled("--price", "H100=3") == 0
    shown = capsys.readouterr().out
    for text in (
        "real data",
        "loader alone",
        "forward",
        "verdict: ",
        "ESTIMATE",
        "USD",
        "trace: ",
        "validation: ",
        "a copy reaches",
    ):
        assert text in shown
    assert "GPU ms" not in shown
    found = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert found["verdict"]["bound"] in ("compute-bound", "bandwidth-bound", "validation-bound")
    parts = found["parts"]
    assert {"forward", "backward", "optimiser"} <= set(parts["host_seconds"])
    assert {"cut", "augment"} <= set(parts["making_batches"]["parts"])
    assert {"read", "decode", "preprocess"} <= set(parts["reading_a_case"])
    assert parts["gpu_seconds"] == {}
    assert found["three_runs"]["real_data"]["seconds"] > found["three_runs"]["loader_alone"]["seconds"]
    assert found["validation"]["cases"] == 2
    assert found["other_cards"]["estimate"] is True
    priced = next(one for one in found["other_cards"]["cards"] if one["card"] == "H100")
    assert priced["cost"] == pytest.approx(priced["run_hours"] * 3)
    named = {event.get("name") for event in json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]}
    assert {"cut", "augment", "forward", "backward", "optimiser"} <= named


@pytest.mark.parametrize(
    ("more", "code", "told"),
    [
        (("--set", "network.features=[4]"), 2, "network"),
        (("--set", "acceleration.amp=fp16"), 4, "fp16 needs a GPU"),
        (("--price", "H101=2"), 2, "no card 'H101'"),
        (("--nsys",), 4, "Nsight Systems is not installed"),
        (("--device", "cuda:7"), 4, "cuda"),
    ],
)
def test_what_cannot_be_profiled_is_refused(
    profiled: Callable[..., int],
    more: tuple[str, ...],
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(nsys.shutil, "which", lambda name: None)
    assert profiled(*more) == code
    assert told in capsys.readouterr().err


def test_data_that_is_not_there_and_folders_that_hold_something(
    profiled: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert profiled("--set", "data.source={kind: decathlon}", "--data", str(tmp_path / "empty")) == 3
    assert not (tmp_path / "out").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert profiled(out=tmp_path / "full") == 2
    assert "not empty" in capsys.readouterr().err


def test_a_disk_that_takes_half_of_the_trace_is_told_and_keeps_nothing(phantoms: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f"import sys; from fasttrain.cli.main import run; sys.argv[1:] = {words(phantoms, disk / 'out')!r}; run()"
    done = run_with(
        f"import os, sys\ntry: {script}\nfinally: print(os.listdir({str(disk)!r}))",
        before=f"mount -t tmpfs -o size=200k tmpfs {shlex.quote(str(disk))} &&",
        namespace=True,
    )
    assert done.returncode == 6, done.stderr
    assert "trace.json cannot be written: the disk took only a part of it" in done.stderr
    assert done.stdout == "[]\n"


def test_memory_that_runs_out_is_told_as_that(profiled: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("fasttrain.engine.step.Step._pass", full)
    assert profiled() == 5


def test_a_stop_ends_it_between_two_parts(tiny: Callable, phantoms: Path, tmp_path: Path) -> None:
    from fasttrain.studies.profiling.profile import profile

    stop = StopRequest()
    stop.ask("a test", 130)
    with pytest.raises(Stopped):
        profile(tiny().recipe, phantoms, "cpu", tmp_path, lambda event: None, stop)


def test_a_stop_ends_the_three_runs_after_their_turn(tiny: Callable, phantoms: Path, tmp_path: Path) -> None:
    from fasttrain.studies.profiling.profile import profile

    stop, turns = StopRequest(), []

    def emit(event: object) -> None:
        if isinstance(event, Progress) and event.what == "three runs in turns":
            turns.append(event.done)
            if event.done == 2:
                stop.ask("a test", 130)

    with pytest.raises(Stopped):
        profile(tiny().recipe, phantoms, "cpu", tmp_path, emit, stop)
    assert turns == [0, 1, 2]


def test_nsight_systems_is_given_the_steps_alone(tmp_path: Path, tiny: Callable, phantoms: Path) -> None:
    program = tmp_path / "nsys"
    program.write_text(
        '#!/bin/sh\nfor word in "$@"; do case $word in --output=*) out=${word#--output=};; esac; done\n'
        'while [ "$1" != "${1#-}" ] || [ "$1" = profile ]; do shift; done\n"$@" || exit $?\ntouch $out.nsys-rep\n'
    )
    program.chmod(0o755)
    assert nsys.run_nsys(str(program), tiny().recipe, phantoms, "cpu", tmp_path) == tmp_path / "nsys.nsys-rep"
