"""A whole study of batch sizes on a GPU that is made up: margins, finalists, validation's memory, and every way to fail."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from made_trials import GIB, MadeTrials, sizes

from fasttrain.cli.tune_table import print_batches
from fasttrain.errors import DataError, FasttrainError, MachineError, OutOfMemoryError, RecipeError
from fasttrain.recipe import Recipe, resolve
from fasttrain.studies.batch_study import BatchStudy
from fasttrain.studies.measuring import Measuring
from fasttrain.studies.options import Options
from fasttrain.studies.settings_study import SettingsStudy
from fasttrain.studies.task import STEPS, Outcome, Task


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
    assert (found.alone(), found.document()["compared"]) == (None, True)


def test_one_size_for_want_of_time_is_not_called_a_choice(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    trials = MadeTrials()
    run = trials.run

    def slow(*arguments: Any) -> Outcome:
        now[0] += 100.0
        return run(*arguments)

    trials.run = slow  # type: ignore[method-assign]
    options = Options(budget_seconds=50.0)
    found = BatchStudy(resolve("demo"), Measuring(None, "auto", trials, options, clock=lambda: now[0]))
    found.run()
    assert [point.batch_size for point in found.points] == [2]
    print_batches(found)
    out = capsys.readouterr().out
    assert (
        "batch 2 was not chosen among others: time was over before a second size was measured; a larger --budget" in out
    )
    assert "chosen: " not in out
    assert "taken: batch 2" in out
    assert found.document()["compared"] is False
    # One that was asked for alone is no such case
    alone = study(MadeTrials(), sizes=(2,))
    alone.run()
    assert alone.alone() is None


def test_the_effect_on_training_is_told() -> None:
    found = study(MadeTrials(), {"training.batch_policy": "scale_sqrt"}, sizes=(2, 8), prefer="largest")
    found.run()
    effect = found.effect()
    assert effect.batch_size == (2, 8)
    assert effect.learning_rate == (0.003, 0.006)
    assert effect.patches == (480, 1920)
    assert found.gain() == pytest.approx(found.chosen.rate / MadeTrials().rate(2) - 1)


def test_ranks_share_a_step_and_the_recipe_that_is_measured_is_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    trials = MadeTrials()
    sets = {"training.batch_policy": "scale_linear", "optimizer.learning_rate": 0.001}
    found = study(trials, sets, ranks=2, sizes=(2, 4))
    found.run()
    asked = {name: Recipe.model_validate_json(task.recipe) for name, task in trials.asked}
    assert {task.ranks for _, task in trials.asked} == {2}
    assert [task.processes for _, task in trials.asked] == [1, 2, 2, 2]
    # Twice as many patches a step as of one rank, and as large a rate; a batch that is twice the recipe's doubles it again
    assert asked["batch-2"].optimizer.learning_rate == 0.002
    assert asked["batch-4"].optimizer.learning_rate == 0.004
    assert found.chosen is not None
    assert found.chosen.batch_size == 4
    assert found.settings == {"training.batch_size": 4}
    effect = found.effect()
    assert effect is not None
    assert (effect.effective_batch, effect.learning_rate) == ((4, 8), (0.002, 0.004))
    alone = study(MadeTrials(), sets, sizes=(2, 4))
    alone.run()
    assert found.measuring.most == alone.measuring.most // 2
    # As many patches/s of all ranks together, so that an epoch of as many samples takes as long
    steps = 10
    assert found.chosen.values["epoch_seconds"] == pytest.approx(steps * 4 * 2 / found.chosen.rate)
    document = found.document()
    assert document["ranks"] == 2
    assert document["with_ranks"].startswith("2 ranks × 4 patches = 8 a step; the learning rate 0.002 → 0.004")
    print_batches(found)
    shown = capsys.readouterr().out
    assert "batch a rank" in shown
    assert "patches/s of 2 ranks" in shown
    assert "memory of the fullest" in shown


def test_a_rank_that_runs_out_of_memory_is_a_row_that_names_it() -> None:
    short = Outcome("memory", faults=("the GPU ran out of memory",), exit_code=5, rank=1)
    found = study(MadeTrials(**{"batch-4": short}), ranks=2, sizes=(2, 4, 8))
    found.run()
    assert [(point.batch_size, point.reason) for point in found.points] == [(2, "ok"), (4, "out of memory (rank 1)")]
    assert found.document()["trials"][1]["rank"] == 1
    assert "memory ends at batch 4" in found.document()["sweep_ended"]


def test_volumes_in_parts_on_several_gpus_are_judged_together() -> None:
    # A quarter of them on each of four GPUs: all are there, and the margin is asked for
    parts = {"plan": {"resident_bytes": GIB // 2, "cards": 4}}
    assert by_size_of_one(MadeTrials(patch_gib=4.8, **parts)) == "margin"


def test_keep_effective_has_ranks_measure_their_parts_alone() -> None:
    sets = {"training.batch_policy": "keep_effective", "training.batch_size": 8}
    trials = MadeTrials()
    found = study(trials, sets, ranks=2)
    found.run()
    assert set(by_size(found)) <= {1, 2, 4}
    for name, task in trials.asked:
        training = Recipe.model_validate_json(task.recipe).training
        if task.kind == STEPS:
            assert f"batch-{training.batch_size}" == name
            assert 2 * training.batch_size * training.accumulate == 8
    with pytest.raises(RecipeError, match="a rank's share of 2 is no multiple of 8"):
        study(MadeTrials(), sets, ranks=2, sizes=(8,)).run()
    with pytest.raises(RecipeError, match="3 ranks cannot share evenly"):
        study(MadeTrials(), sets, ranks=3).run()


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


def test_sizes_beyond_one_pass_over_the_cases_are_refused_without_a_word_of_memory() -> None:
    with pytest.raises(RecipeError, match="--batch-sizes 512,1024: one pass over the training cases has 400 patches"):
        study(MadeTrials(), sizes=(512, 1024)).run()
    found = study(MadeTrials(patch_gib=0.01), sizes=(4, 512))
    found.run()
    assert by_size(found) == {4: "ok"}


def test_a_set_smaller_than_the_recipes_batch_under_keep_effective_begins_at_a_part_of_it() -> None:
    sets = {"training.batch_policy": "keep_effective", "training.batch_size": 512}
    found = study(MadeTrials(patch_gib=0.01), sets)
    found.run()
    assert set(by_size(found)) <= {2**power for power in range(9)}  # 400 patches, of which 256 divide 512
    assert 256 in by_size(found)


def test_a_hung_size_ends_a_list_of_sizes_too() -> None:
    trials = MadeTrials(patch_gib=0.1, **{"batch-4": Outcome("hung", faults=("ended after 120 s",))})
    found = study(trials, sizes=(1, 4, 8))
    found.run()
    assert by_size(found) == {1: "ok", 4: "hung"}
    assert found.sweep.ended == "batch 4 was ended at its time limit"


def test_where_no_finalist_compiles_a_smaller_size_that_does_is_taken() -> None:
    memory = Outcome("memory", faults=("the GPU ran out of memory",), exit_code=5)
    fails = {f"batch-{size}-compiled": memory for size in (8, 16)}
    found = study(MadeTrials(would_compile=True, **fails), sizes=(2, 4, 8, 16))
    found.run()
    assert [(point.batch_size, point.status) for point in found.compiled] == [(16, "memory"), (8, "memory"), (4, "ok")]
    assert found.chosen.batch_size == 4
    every = {f"batch-{size}-compiled": memory for size in (2, 4, 8, 16)}
    with pytest.raises(OutOfMemoryError, match="batch 2 compiled: out of memory; set acceleration.compile=off"):
        study(MadeTrials(would_compile=True, **every), sizes=(2, 4, 8, 16)).run()


def test_what_no_patch_size_mends_is_told_by_the_trials_own_sentence() -> None:
    fault = "data.cache.kind: memory needs 90.0 GiB, and this machine has 2.0 GiB; take disk"
    trials = MadeTrials(patch_gib=1e6)
    run = trials.run

    def short(task: Task, name: str, limit_seconds: float) -> Outcome:
        outcome = run(task, name, limit_seconds)
        return outcome if outcome.done else Outcome("memory", faults=(fault,), exit_code=5)

    trials.run = short  # type: ignore[method-assign]
    with pytest.raises(OutOfMemoryError, match="nor does a much smaller patch: data.cache.kind: memory needs 90.0 GiB"):
        study(trials).run()


def test_each_trial_is_told_of_when_it_is_over() -> None:
    seen: list[int] = []
    found = study(MadeTrials(would_compile=True), sizes=(2, 4))
    found.found = lambda: seen.append(len(found.points))
    found.run()
    assert seen == [1, 2, 3, 4]


CEILINGS = {"patch_flops": 1e12, "patch_bytes": 1e10, "peak_flops": 7e14, "peak_bandwidth": 3e12}


@pytest.mark.parametrize(
    ("change", "by", "told"),
    [
        ({}, "bandwidth", "move about 600 GB/s, 20% of what a copy reaches"),
        ({"peak_flops": 1e14}, "compute", "compute 60 TFLOP/s, 60% of what a matrix product reaches on this GPU"),
        ({"patch_bytes": 4e10}, "bandwidth", "move about 2.4 TB/s, 80% of what a copy reaches"),
        ({"patch_bytes": 1e9}, "kernels", "compute 60 TFLOP/s, 9% of"),
        (
            {"peak_flops": 5e13, "peak_flops_spread": 0.2},
            "compute",
            "compute 60 TFLOP/s, no less than what a matrix product reaches on this GPU, whose own rate scatters by ±20%",
        ),
        ({"nothing": 0}, "device", "the GPU's own speed, computing or memory bandwidth"),
    ],
)
def test_the_nearer_ceiling_is_the_limit(change: dict, by: str, told: str) -> None:
    # A flat rate of 60 patches/s, so that neither memory nor the set is what holds it back
    values = {} if "nothing" in change else {**CEILINGS, **change}
    trials = MadeTrials(rate=lambda size: 60.0, patch_gib=0.1)
    found = study(trials, sizes=(2, 4, 8))
    first = trials.steps

    def steps(size: int, held: float, compiled: bool) -> dict[str, Any]:
        return {**first(size, held, compiled), "ceilings": values}

    trials.steps = steps  # type: ignore[method-assign]
    found.run()
    limit = found.document()["limit"]
    assert limit["by"] == by
    assert told in limit["why"]
    assert [task.ceilings for _, task in trials.asked if task.kind == STEPS] == [True, False, False]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    from fasttrain.studies.picture import draw_sweep

    found = study(MadeTrials())
    found.run()
    path = draw_sweep(found.points, found.chosen, tmp_path / "batch.png", "demo on H100", 80 * GIB)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert draw_sweep([], None, tmp_path / "none.png", "", None) is None
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize(("recipe", "sizes_of_a_pass", "tried"), [("brain-tumor-2d", 1760, 16), ("heart", 3, 3)])
def test_cases_in_slices_have_more_than_one_patch_each(recipe: str, sizes_of_a_pass: int, tried: int) -> None:
    """Three cases: whole volumes give a batch of three at most, slices as many as an epoch has."""
    resolved = resolve(recipe, {"training.batch_size": 16})
    few = {**asdict(sizes(resolved.recipe)), "training_cases": 3, "samples_per_case": 1, "steps_per_epoch": 110}

    look = Outcome("done", values={"machine": MadeTrials().machine(), "sizes": few})
    found = BatchStudy(resolved, Measuring(None, "auto", MadeTrials(look=look), Options()))
    found.run()
    assert found.measuring.most == sizes_of_a_pass
    assert max(by_size(found)) >= tried
    assert (16 in by_size(found)) is (tried == 16)
