"""A whole study of batch sizes on a GPU that is made up: margins, finalists, validation's memory, and every way to fail."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fasttrain.engine.planning.sizes import Sizes
from fasttrain.errors import DataError, FasttrainError, MachineError, OutOfMemoryError, RecipeError
from fasttrain.recipe import Recipe, resolve
from fasttrain.studies.batch_study import BatchStudy
from fasttrain.studies.measuring import Measuring
from fasttrain.studies.options import Options
from fasttrain.studies.settings_study import SettingsStudy
from fasttrain.studies.task import LOOK, STEPS, Outcome, Task

GIB = 1 << 30


class MadeTrials:
    """Answers for a GPU of 80 GiB: a patch holds `patch_gib`, and a batch b runs at rate(b); all that was asked is noted."""

    def __init__(
        self,
        rate: Callable[[int], float] = lambda size: 100 * size / (size + 2),
        patch_gib: float = 4.0,
        free_gib: float = 79.0,
        **change: Any,
    ) -> None:
        self.rate = rate
        self.patch_gib = patch_gib
        self.free_gib = free_gib
        self.change = change
        self.asked: list[tuple[str, Task]] = []

    def run(self, task: Task, name: str, limit_seconds: float) -> Outcome:
        recipe = Recipe.model_validate_json(task.recipe)
        self.asked.append((name, task))
        if name in self.change:
            return self.change[name]
        if task.kind == LOOK:
            return Outcome("done", {"machine": self.machine(), "sizes": asdict(sizes(recipe))})
        size = recipe.training.batch_size
        share = recipe.patch.size[0] * recipe.patch.size[1] * recipe.patch.size[2] / 48**3
        held = size * self.patch_gib * share
        if recipe.acceleration.activation_checkpointing == "on":
            held *= 0.5
        if task.kind == STEPS and held < self.free_gib:
            return Outcome("done", self.steps(size, held, task.compiled))
        if task.kind != STEPS and held + 3 * recipe.validation.window.batch_size < self.free_gib:
            held += 3 * recipe.validation.window.batch_size
            seconds = 2.0 / recipe.validation.window.batch_size + (recipe.validation.stitching == "cpu")
            return Outcome(
                "done",
                {**self.steps(size, held, False), "case": "c", "validation_seconds": seconds, "summed_on": "cuda"},
            )
        return Outcome("memory", faults=("the GPU ran out of memory",), exit_code=5)

    def machine(self) -> dict[str, Any]:
        free = int(self.free_gib * GIB)
        return {"device": "cuda:0", "device_name": "H100", "cpus": 16, "gpu_bytes": 80 * GIB, "gpu_free_bytes": free}

    def steps(self, size: int, held: float, compiled: bool) -> dict[str, Any]:
        rate = self.rate(size) * (1.2 if compiled else 1.0)
        plan = {"activation_checkpointing": False, "cache": "gpu", "workers": 0, "resident_bytes": GIB}
        return {
            "rate": rate,
            "spread": 0.001,
            "repeats": [rate] * 5,
            "wait_share": 0.0,
            "steps_per_epoch": 10,
            "reserved_bytes": int(held * GIB),
            "free_bytes": int(self.free_gib * GIB),
            "would_compile": self.change.get("would_compile", False),
            "plan": {**plan, **self.change.get("plan", {})},
        }

    def close(self) -> None: ...


def sizes(recipe: Recipe) -> Sizes:
    return Sizes(
        100, 10, 0, 4, recipe.training.batch_size, 1, recipe.training.batch_size, 10, 5, 50, 2 * GIB, 0, 0, GIB
    )


def study(trials: MadeTrials, sets: dict | None = None, **options: Any) -> BatchStudy:
    return BatchStudy(resolve("demo", sets or {}), Measuring(None, "auto", trials, Options(**options)))


def by_size(found: BatchStudy) -> dict[int, str]:
    return {point.batch_size: point.status for point in found.points}


def test_the_margin_is_kept_and_told() -> None:
    found = study(MadeTrials())
    found.run()
    assert by_size(found)[16] == "ok"  # 64 of 79 GiB
    assert by_size(found)[18 if 18 in by_size(found) else 32] in ("margin", "memory")
    assert found.chosen.values["reserved_bytes"] <= (79 - 0.08 * 80) * GIB
    assert found.document()["limit"]["by"] == "memory"


def test_what_leaves_less_than_the_margin_is_measured_and_not_taken() -> None:
    found = study(MadeTrials(patch_gib=4.8), sizes=(8, 16), prefer="largest")
    found.run()
    assert by_size(found) == {8: "ok", 16: "margin"}  # 76.8 of 79 GiB
    assert "less than the margin of 6.4 GiB" in found.points[1].reason
    assert found.chosen.batch_size == 8
    none = study(MadeTrials(patch_gib=4.8), sizes=(16,))
    with pytest.raises(OutOfMemoryError, match=r"no batch size leaves the margin of 8%.*lower --margin"):
        none.run()


def test_with_most_of_the_card_held_by_others_the_choice_is_made_from_what_is_free() -> None:
    found = study(MadeTrials(free_gib=32.0))
    found.run()
    assert by_size(found)[8] == "memory"
    assert found.chosen.values["reserved_bytes"] <= (32 - 6.4) * GIB


def test_volumes_that_fill_the_memory_left_to_them_are_no_want_of_it() -> None:
    tiers = {"plan": {"resident_bytes": GIB // 2}}
    assert by_size_of_one(MadeTrials(patch_gib=4.8, **tiers)) == "ok"
    assert by_size_of_one(MadeTrials(patch_gib=4.8)) == "margin"


def by_size_of_one(trials: MadeTrials) -> str:
    found = study(trials, sizes=(1, 16))
    found.measuring.look(found.resolved)
    found.sweep_batches()
    return by_size(found)[16]


def test_only_the_two_finalists_compile() -> None:
    trials = MadeTrials(would_compile=True)
    found = study(trials)
    found.run()
    compiled = [task for _, task in trials.asked if task.kind == STEPS and task.compiled]
    assert len(compiled) == 2
    assert found.chosen.compiled
    assert found.chosen.rate == pytest.approx(1.2 * trials.rate(found.chosen.batch_size))
    plain = MadeTrials()
    study(plain).run()
    assert not any(task.compiled for _, task in plain.asked)


def test_validation_without_memory_takes_fewer_windows_before_epoch_1() -> None:
    trials = MadeTrials(rate=lambda size: 1.0 * size, patch_gib=4.0)
    found = study(trials, {"validation.window.batch_size": 8}, sizes=(1, 16), prefer="largest")
    found.run()
    assert found.chosen.batch_size == 16
    assert found.settings == {"training.batch_size": 16, "validation.window.batch_size": 2}
    assert found.validation.window_batch == 2


def test_validation_goes_to_the_cpu_where_fewer_windows_do_not_help() -> None:
    memory = Outcome("memory", faults=("the GPU ran out of memory",), exit_code=5)
    trials = MadeTrials(**{f"validation-{windows}-auto": memory for windows in (4, 2, 1)})
    found = study(trials, sizes=(2,))
    found.run()
    assert found.settings == {"validation.window.batch_size": 1, "validation.stitching": "cpu"}
    hopeless = MadeTrials(
        **{f"validation-{windows}-auto": memory for windows in (4, 2, 1)}, **{"validation-1-cpu": memory}
    )
    with pytest.raises(OutOfMemoryError, match="validating the largest case failed: the GPU ran out of memory"):
        study(hopeless, sizes=(2,)).run()


def test_nothing_fits_is_exit_5_with_an_estimate_and_two_settings_that_were_tried() -> None:
    trials = MadeTrials(patch_gib=150.0)
    with pytest.raises(OutOfMemoryError) as caught:
        study(trials).run()
    told = str(caught.value)
    assert told.startswith("not even a batch of 1 patch of [48, 48, 48] fits into the 79.0 GiB that H100 has free")
    assert "so it would hold up to 150.0 GiB" in told
    assert "either of these fits, as measured: patch.size=[" in told
    assert told.endswith("or acceleration.activation_checkpointing=on")


def test_where_one_setting_or_none_would_fit_that_is_said() -> None:
    with pytest.raises(
        OutOfMemoryError, match=r"this fits, as measured: patch\.size=\[\d+,\d+,\d+\]; else take a smaller"
    ):
        study(MadeTrials(patch_gib=200.0)).run()
    with pytest.raises(OutOfMemoryError, match="nor does a much smaller patch"):
        study(MadeTrials(patch_gib=10000.0)).run()


@pytest.mark.parametrize(("code", "kind"), [(1, FasttrainError), (4, MachineError)], ids=["a bug", "the machine"])
def test_a_trial_that_fails_otherwise_ends_the_sweep_with_its_error_and_log(code: int, kind: type[Exception]) -> None:
    broken = Outcome(
        "failed", faults=("an illegal memory access was met",), exit_code=code, log="runs/x/tune/trials/batch-4.log"
    )
    trials = MadeTrials(**{"batch-4": broken})
    found = study(trials)
    with pytest.raises(kind) as caught:
        found.run()
    assert caught.value.exit_code == code
    assert str(caught.value) == (
        "the trial of batch 4 failed: an illegal memory access was met; its log is runs/x/tune/trials/batch-4.log"
    )
    assert [point.batch_size for point in found.points] == [2]
    assert found.document()["trials"][0]["status"] == "ok"


def test_faults_of_the_data_are_told_as_they_are() -> None:
    faults = ("a.nii.gz: unreadable", "b.nii.gz: unreadable")
    with pytest.raises(DataError) as caught:
        study(MadeTrials(look=Outcome("failed", faults=faults, exit_code=3))).run()
    assert caught.value.faults == faults


def test_a_hung_trial_is_a_row_and_where_all_hang_the_error_says_so() -> None:
    hung = Outcome("hung", faults=("ended after 120 s",))
    found = study(MadeTrials(**{"batch-8": hung}))
    found.run()
    assert next(point for point in found.points if point.batch_size == 8).reason == "ended after 120 s"
    with pytest.raises(MachineError, match="no trial came to its end within 120 s"):
        study(MadeTrials(**{f"batch-{size}": hung for size in (1, 2)})).run()


def test_the_budget_bounds_the_sweep() -> None:
    now = [0.0]
    trials = MadeTrials()
    run = trials.run

    def slow(*arguments: Any) -> Outcome:
        now[0] += 20.0
        return run(*arguments)

    trials.run = slow  # type: ignore[method-assign]
    found = BatchStudy(
        resolve("demo"), Measuring(None, "auto", trials, Options(budget_seconds=50.0), clock=lambda: now[0])
    )
    found.run()
    assert found.sweep.ended == "the time for trials is over"
    assert len(found.points) == 2


def test_the_effect_on_training_is_told() -> None:
    found = study(MadeTrials(), {"training.batch_policy": "scale_sqrt"}, sizes=(2, 8), prefer="largest")
    found.run()
    effect = found.effect()
    assert effect.batch_size == (2, 8)
    assert effect.learning_rate == (0.003, 0.006)
    assert effect.patches == (480, 1920)
    assert found.gain() == pytest.approx(found.chosen.rate / MadeTrials().rate(2) - 1)


def test_keep_effective_refuses_sizes_that_are_no_part() -> None:
    with pytest.raises(RecipeError, match="keep_effective keeps 2 patches a step"):
        study(MadeTrials(), {"training.batch_policy": "keep_effective"}, sizes=(3,)).run()


def test_settings_beyond_the_batch_are_taken_where_they_gain() -> None:
    found = study(MadeTrials(), sizes=(2, 8))
    found.run()
    wide = SettingsStudy(found)
    wide.run()
    # Windows halve the made time each doubling, until the memory's margin ends it; sums on the CPU cost a second
    assert found.settings["validation.window.batch_size"] == 8
    assert "validation.stitching" not in found.settings
    assert [one.value for one in wide.tried if one.setting == "data.cache.kind"] == ["gpu", "memory"]
    assert "workers and prefetch: patches are cut on the GPU" in wide.notes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prefer": "fastest"}, "--prefer fastest: there is no such preference"),
        ({"margin": 1.5}, "--margin 1.5: should be a share"),
        ({"margin": -0.1}, "--margin -0.1: should be a share"),
        ({"trials": 0}, "--trials 0: should be at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        Options(**options)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    from fasttrain.studies.picture import draw_sweep

    found = study(MadeTrials())
    found.run()
    path = draw_sweep(found.points, found.chosen, tmp_path / "batch.png", "demo on H100", 80 * GIB)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert draw_sweep([], None, tmp_path / "none.png", "", None) is None
    assert not (tmp_path / "none.png").exists()
