"""The file of tuned settings: for what it holds, and the reasons it gives where it does not."""

import json
from pathlib import Path

import pytest

from fasttrain.errors import RecipeError, StorageError
from fasttrain.recipe import resolve
from fasttrain.studies.lock import check_place, lock_record, matters, tuned, write_lock

H100 = {
    "device": "cuda:0",
    "device_name": "NVIDIA H100",
    "cpus": 16,
    "gpu_bytes": 80 << 30,
    "gpu_free_bytes": 79 << 30,
    "driver": "580.1",
    "torch": "2.11.0",
    "cudnn": 91900,
}
CPU = {**H100, "device": "cpu", "device_name": "EPYC", "gpu_bytes": None, "gpu_free_bytes": None, "driver": None}


def recipe(**more: object):
    return resolve("demo", {key.replace("__", "."): value for key, value in more.items()})


@pytest.fixture
def kept(tmp_path: Path):
    """Writes a lock for the demo recipe and gives the cache folder."""

    def written(machine=H100, settings=None, needed: int | None = 10 << 30, ranks: int = 1, **more: object) -> Path:
        settings = {"training.batch_size": 8, "data.workers": 3} if settings is None else settings
        record = lock_record(recipe(**more), machine, settings, {"needed_bytes": needed, "trials": []}, ranks)
        (tmp_path / "run").mkdir(exist_ok=True)
        write_lock(record, tmp_path / "run" / "lock.json", tmp_path / "cache")
        return tmp_path / "cache"

    return written


def test_it_is_applied_where_it_holds(kept) -> None:
    found, told = tuned(recipe(), H100, kept())
    assert (found.recipe.training.batch_size, found.recipe.data.workers) == (8, 3)
    assert found.origins["training", "batch_size"] == found.origins["data", "workers"] == "tuned"
    assert "training.batch_size=8" in told


@pytest.mark.parametrize(
    "more",
    [
        {"training__epochs": 77},
        {"training__seed": 5},
        {"optimizer__learning_rate": 0.1},
        {"output__keep": 9},
        {"training__batch_size": 3},
        {"data__workers": 1},
        {"schedule": {"kind": "constant"}},
    ],
)
def test_what_speed_does_not_hang_on_may_change(kept, more: dict) -> None:
    folder = kept()
    # As a recipe's own value: what is set beside --tuned is another matter
    changed = recipe(**more)
    plain = type(changed)(changed.recipe, dict.fromkeys(changed.origins, "recipe"), changed.source)
    assert tuned(plain, H100, folder)[0].recipe.training.batch_size == 8


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"patch__size": [64, 64, 64]}, "patch.size was [48, 48, 48] and is [64, 64, 64]"),
        ({"network__features": [8, 16, 32, 64]}, "network.features was [16, 32, 64, 96] and is [8, 16, 32, 64]"),
        ({"acceleration__amp": "off"}, "acceleration.amp was auto and is off"),
        ({"augment__noise__probability": 0.9}, "augment.noise.probability was 0.2 and is 0.9"),
        ({"optimizer__kind": "sgd", "optimizer__momentum": 0.9}, "optimizer.kind was adamw and is sgd"),
        ({"data__samples_per_case": 4}, "data.samples_per_case was 2 and is 4"),
    ],
)
def test_another_recipe_is_refused_with_what_differs(kept, more: dict, reason: str) -> None:
    with pytest.raises(RecipeError) as caught:
        tuned(recipe(**more), H100, kept())
    assert reason in str(caught.value)
    assert "`fasttrain tune-batch` measures anew" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device_name": "NVIDIA A100"}, "the machine's device_name was NVIDIA H100 and is NVIDIA A100"),
        ({"driver": "590.2"}, "the machine's driver was 580.1 and is 590.2"),
        ({"torch": "2.12.0"}, "the machine's torch was 2.11.0 and is 2.12.0"),
        ({"cudnn": 92000}, "the machine's cudnn was 91900 and is 92000"),
        ({"gpu_bytes": 40 << 30}, "the machine's gpu_bytes was"),
        ({"gpu_free_bytes": 4 << 30}, "it needs 10.0 GiB of the GPU's memory and 4.0 GiB are free"),
    ],
)
def test_another_machine_is_refused_with_what_differs(kept, change: dict, reason: str) -> None:
    with pytest.raises(RecipeError) as caught:
        tuned(recipe(), {**H100, **change}, kept())
    assert reason in str(caught.value)


def test_the_number_of_cpus_counts_on_a_cpu_alone(kept) -> None:
    folder = kept(CPU, needed=None)
    with pytest.raises(RecipeError, match="cpus was 16 and is 8"):
        tuned(recipe(), {**CPU, "cpus": 8}, folder)
    assert tuned(recipe(), {**H100, "cpus": 8}, kept())[0].recipe.training.batch_size == 8


def test_what_was_tuned_for_several_ranks_is_for_as_many_alone(kept) -> None:
    folder = kept(ranks=2)
    assert tuned(recipe(), H100, folder, 2)[0].recipe.training.batch_size == 8
    with pytest.raises(RecipeError) as caught:
        tuned(recipe(), H100, folder)
    assert "it was measured with 2 ranks, and 1 trains here; `fasttrain tune-batch` measures anew" in str(caught.value)
    with pytest.raises(RecipeError) as caught:
        tuned(recipe(), H100, folder, 4)
    assert "it was measured with 2 ranks, and 4 train here; `fasttrain tune-batch --gpus 4` measures anew" in str(
        caught.value
    )
    # One for each number lies beside the other
    kept(settings={"training.batch_size": 5})
    assert [tuned(recipe(), H100, folder, ranks)[0].recipe.training.batch_size for ranks in (1, 2)] == [5, 8]


def test_one_of_before_there_were_ranks_is_for_one(kept) -> None:
    folder = kept()
    path = next((folder / "tuned").glob("*.json"))
    record = json.loads(path.read_text())
    del record["ranks"]
    path.write_text(json.dumps(record))
    assert tuned(recipe(), H100, folder)[0].recipe.training.batch_size == 8
    with pytest.raises(RecipeError, match="measured with 1 rank, and 2 train here"):
        tuned(recipe(), H100, folder, 2)


def test_nothing_was_tuned_yet(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="nothing was tuned on this machine yet"):
        tuned(recipe(), H100, tmp_path)


def test_of_another_recipe_it_is_said_that_nothing_was_tuned_for_it(kept) -> None:
    with pytest.raises(RecipeError) as caught:
        tuned(resolve("hippocampus"), H100, kept())
    assert str(caught.value) == (
        "--tuned: nothing was tuned for hippocampus on this machine yet, but for demo; `fasttrain tune-batch` measures it"
    )
    # By another name it is the same
    renamed = recipe(name="mine")
    plain = type(renamed)(renamed.recipe, dict.fromkeys(renamed.origins, "recipe"), renamed.source)
    assert tuned(plain, H100, kept())[0].recipe.training.batch_size == 8


def test_a_value_that_is_set_beside_it_is_refused(kept) -> None:
    with pytest.raises(RecipeError, match=r"--set training\.batch_size and --tuned both decide it"):
        tuned(recipe(training__batch_size=4), H100, kept())


def test_the_policy_is_that_of_the_recipe_that_is_trained(kept) -> None:
    linear = recipe(training__batch_policy="scale_linear")
    assert tuned(linear, H100, kept())[0].recipe.optimizer.learning_rate == pytest.approx(3e-3 * 4)


def test_under_keep_effective_the_effective_batch_matters(kept) -> None:
    policy = {"training__batch_policy": "keep_effective"}
    folder = kept(settings={"training.batch_size": 1}, **policy)
    assert tuned(recipe(**policy), H100, folder)[0].recipe.training.accumulate == 2
    with pytest.raises(RecipeError, match="training.effective_batch was 2 and is 12"):
        tuned(recipe(training__accumulate=6, **policy), H100, folder)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"format": 1}', '{"format": 99}', "\x00" * 50],
)
def test_a_damaged_lock_is_none(kept, text: str) -> None:
    folder = kept()
    (folder / "tuned" / "zz.json").write_text(text)
    assert tuned(recipe(), H100, folder)[0].recipe.training.batch_size == 8


@pytest.mark.parametrize(
    "settings",
    [{"training.batch_size": 0}, {"training.batch_size": "x"}, {"training.batch_size": True}, {"output.keep": 3}],
)
def test_settings_that_no_study_finds_are_not_taken_from_a_file(kept, settings: dict) -> None:
    folder = kept()
    (path,) = (folder / "tuned").glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "settings": settings}))
    with pytest.raises(
        RecipeError, match=r"--tuned: \S+\.json is damaged or of another fasttrain, and nothing else was tuned here"
    ):
        tuned(recipe(), H100, folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"validation.stitching": "tpu"},
        {"data.workers": -3},
        {"validation.window.batch_size": "many"},
        {"data.cache.kind": []},
    ],
)
def test_values_that_no_recipe_can_have_are_told_with_the_file(kept, settings: dict) -> None:
    folder = kept(settings=settings)
    (path,) = (folder / "tuned").glob("*.json")
    with pytest.raises(RecipeError) as caught:
        tuned(recipe(), H100, folder)
    assert str(caught.value).startswith(f"--tuned: {path} is damaged: {next(iter(settings))}")


@pytest.mark.parametrize(
    ("settings", "more", "reason"),
    [
        # `tune-batch` compares batch sizes with the loader and cache of the recipe, so that these count
        ({"training.batch_size": 8}, {"data__workers": 3}, "data.workers was auto and is 3"),
        ({"training.batch_size": 8}, {"data__cache__kind": "disk"}, "data.cache.kind was memory and is disk"),
        (
            {"training.batch_size": 8},
            {"validation__window__batch_size": 9},
            "validation.window.batch_size was 4 and is 9",
        ),
        # The recipe's own size was the best of all
        ({"data.workers": 3}, {"training__batch_size": 4}, "training.batch_size was 2 and is 4"),
    ],
)
def test_what_it_does_not_set_must_be_as_it_was(kept, settings: dict, more: dict, reason: str) -> None:
    folder = kept(settings=settings)
    assert tuned(recipe(), H100, folder)
    with pytest.raises(RecipeError, match=reason):
        tuned(recipe(**more), H100, folder)


def test_a_later_study_of_a_recipe_takes_the_place_of_the_earlier_one(kept) -> None:
    folder = kept()
    kept(settings={"data.workers": 1})
    assert len(list((folder / "tuned").glob("*.json"))) == 1
    assert tuned(recipe(), H100, folder)[0].recipe.training.batch_size == 2


@pytest.mark.parametrize("obstacle", ["a file", "a full disk"])
def test_a_folder_that_takes_no_lock_is_told_before_anything_is_measured(
    tmp_path: Path, obstacle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_place(tmp_path)
    if obstacle == "a file":
        (tmp_path / "cache").write_text("")
        cache = tmp_path / "cache"
    else:
        cache = tmp_path

        def full(**_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(StorageError, match=r"tuned cannot be written: .*; set FASTTRAIN_CACHE"):
        check_place(cache)


def test_a_pipe_in_the_folder_is_not_waited_for(kept) -> None:
    import os

    folder = kept()
    os.mkfifo(folder / "tuned" / "a.json")
    assert tuned(recipe(), H100, folder)[0].recipe.training.batch_size == 8


def test_the_sections_that_matter_are_named_with_their_keys() -> None:
    found = matters(recipe().recipe)
    assert found["patch.size"] == [48, 48, 48]
    assert not {"training.batch_size", "training.epochs", "name", "output.keep"} & set(found)
    assert not any(key.startswith(("output", "schedule", "data.split")) for key in found)
