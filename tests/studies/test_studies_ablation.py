"""`ablate`: which trials are made in which turns, what the table says of them, and the command on real trials."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from made_trials import GIB, MadeTrials
from tiny_recipe import TINY

from fasttrain.cli.main import run
from fasttrain.engine.stop import Stopped
from fasttrain.errors import DataError, OutOfMemoryError, RecipeError
from fasttrain.recipe import Recipe, resolve
from fasttrain.studies.ablation.ablate import Ablation
from fasttrain.studies.ablation.switches import SWITCHES, read_only
from fasttrain.studies.ablation.table import document, left_out, markdown, not_tried, records, shown_rows, write_tables
from fasttrain.studies.study_folder import UNFINISHED
from fasttrain.studies.task import LOOK, Outcome, Task

PLAN = {
    "amp": "bf16", "channels_last": True, "fused_layers": True, "cuda_graphs": True, "compile": False, "tf32": True,
    "fused_optimizer": True, "cache": "gpu", "workers": 4, "pin_memory": True, "copy_stream": True,
}  # fmt: skip


class Machine(MadeTrials):
    """An H100 on which each trial takes ten seconds of `now`; each switch that is on gives a tenth more."""

    def __init__(self, gpu: bool = True, **change: Any) -> None:
        super().__init__(**change)
        self.gpu = gpu
        self.now = 0.0

    def run(self, task: Task, name: str, limit_seconds: float) -> Outcome:
        self.asked.append((name, task))
        title = name.split("-", 1)[1] if task.kind != LOOK else name
        if title in self.change:
            if isinstance(self.change[title], Exception):
                raise self.change[title]
            return self.change[title]
        if task.kind == LOOK:
            found = self.machine() | {"torch": "2.11", "cudnn": "9.19"}
            return Outcome("done", {"machine": found if self.gpu else {**found, "gpu_bytes": None}})
        self.now += 10.0
        plan = self.planned(Recipe.model_validate_json(task.recipe))
        rate = 100.0 * 1.1 ** sum(value not in (False, "off", "none", 0) for value in plan.values())
        return Outcome(
            "done",
            {
                "rate": rate, "repeats": [rate * 0.99, rate, rate * 1.01], "reserved_bytes": 2 * GIB, "start_seconds": 3.0,
                "plan": plan, "reasons": {"cuda_graphs": "compile is on"}, "warnings": [],
            },
            seconds=10.0,
        )  # fmt: skip

    @staticmethod
    def planned(recipe: Recipe) -> dict[str, Any]:
        """As a plan follows what is set, with graphs off where the compiler is on."""
        plan = dict(PLAN)
        for key in ("amp", "channels_last", "fused_layers", "cuda_graphs", "compile", "tf32", "fused_optimizer"):
            asked = getattr(recipe.acceleration, key)
            if asked != "auto":
                plan[key] = asked if key == "amp" else asked == "on"
        for key in ("pin_memory", "copy_stream"):
            if getattr(recipe.data, key) != "auto":
                plan[key] = getattr(recipe.data, key) == "on"
        if recipe.data.cache.kind not in ("auto", "memory"):
            plan["cache"] = recipe.data.cache.kind
        if recipe.data.workers != "auto":
            plan["workers"] = recipe.data.workers
        plan["cuda_graphs"] &= not plan["compile"]
        return plan


def study(machine: Machine, budget: float = 10_000.0, **more: Any) -> Ablation:
    return Ablation(
        resolve("demo"), None, "auto", machine, budget, 60.0, lambda event: None, clock=lambda: machine.now, **more
    )


def by_name(made: Ablation) -> dict[str, dict[str, Any]]:
    return {record["setting"]: record for record in records(made)}


def test_each_switch_is_off_alone_and_on_alone() -> None:
    machine = Machine()
    made = study(machine)
    made.run()
    rows = by_name(made)
    assert rows["as decided"]["of_base"] == rows["plain"]["of_base"] == 1.0
    for name in ("amp", "channels_last", "fused_layers", "cuda_graphs", "tf32", "fused_optimizer", "cache"):
        assert rows[f"{name} off"]["of_base"] == pytest.approx(1 / 1.1), name
        # Some cannot be on without another
        needs = name in ("fused_layers", "cuda_graphs")
        assert rows[f"{name} on"]["of_base"] == pytest.approx(1.21 if needs else 1.1), name
        assert ("which it needs" in rows[f"{name} on"]["note"]) == needs
        assert rows[f"{name} off"]["apart"], name
    assert rows["compile on"]["of_base"] == pytest.approx(1.1)
    assert "off as it is decided" in rows["compile off"]["note"]
    assert "the GPU, which cuts" in rows["pin_memory off"]["note"]
    assert rows["plain"]["memory_gib"] == 2.0
    assert rows["plain"]["trials"] > rows["amp off"]["trials"] == 4
    changed = {name: dict(row.changed) for name, row in ((row.name, row) for row in made.rows)}
    assert changed["amp on"] == {"acceleration.amp": "bf16"}
    assert changed["amp off"] == {"acceleration.amp": "off"}


def test_trials_take_turns_and_later_ones_choose_nothing_anew() -> None:
    machine = Machine()
    made = study(machine)
    made.run()
    names = [name.split("-", 1)[1] for name, task in machine.asked if task.kind != LOOK]
    # What each gives to the run as it is decided comes first, then what it gives alone, and nothing comes twice before that
    every = len(set(names))
    assert len(set(names[:every])) == every
    plain = names.index("plain")
    assert names[0] == "as-decided"
    assert all(name.endswith("-off") for name in names[1:plain])
    assert all(name.endswith("-on") for name in names[plain + 1 : every])
    # Compiling takes as long as several others
    assert names[every - 1] == "compile-on"
    # The references come again within a round, and no setting comes a third time before all others came twice
    assert names[every : every + 2] == ["as-decided", "plain"]
    again = names.index("amp-off", every)
    assert "plain" in names[again : again + 9]
    assert names.index("amp-off", again + 1) > max(names.index(name, every) for name in set(names))
    later = [Recipe.model_validate_json(task.recipe) for name, task in machine.asked if name.endswith("as-decided")][1:]
    assert {one.acceleration.amp for one in later} == {"bf16"}


def test_a_short_budget_leaves_out_what_it_has_no_room_for() -> None:
    machine = Machine()
    made = study(machine, budget=65.0)
    made.run()
    assert machine.now <= 75.0
    rows = by_name(made)
    assert rows["amp off"]["patches_per_second"]
    assert "raise --budget" in rows["fused_optimizer on"]["note"]
    assert made.ended == "the time for trials is over"


def test_which_budget_would_have_had_room_is_told() -> None:
    machine = Machine()
    made = study(machine, budget=65.0)
    made.run()
    rows = [row for row in made.rows if not row.skipped]
    # Ten seconds each, 45 more to compile, and room for the last one to begin
    needed, what = made.needed() or (0.0, "")
    assert (needed, what) == (10.0 * len(rows) + 45.0 + 10.0, "every row once")
    assert any(
        f"`--budget {math.ceil(needed / 60)}m` would have had room for every row once" in line
        for line in left_out(made)
    )
    assert document(made)["seconds_for_all"] == needed
    assert left_out(made)[0] in markdown(made)
    enough = study(Machine(), budget=needed)
    enough.clock = lambda: enough.trials.now  # type: ignore[attr-defined]
    enough._began = 0.0
    enough.run()
    assert all(row.outcomes for row in enough.rows if not row.skipped)
    needed, what = enough.needed() or (0.0, "")
    assert what == "4 trials of every row"
    assert needed > 30.0 * len(rows)
    # Where nothing was left out nothing is said
    whole = study(machine)
    whole.run()
    assert left_out(whole) == []
    assert document(whole)["seconds_for_all"] is None


def test_a_first_trial_that_compiles_kernels_may_take_longer() -> None:
    limits: dict[str, list[float]] = {}

    class Noting(Machine):
        def run(self, task: Task, name: str, limit_seconds: float) -> Outcome:
            limits.setdefault(name.partition("-")[2], []).append(limit_seconds)
            return super().run(task, name, limit_seconds)

    made = study(Noting())
    made.run()
    assert limits["fused_layers-on"] == [120.0, 60.0, 60.0, 60.0]
    assert limits["amp-off"][:2] == [120.0, 60.0]
    assert limits["as-decided"][:2] == [120.0, 60.0]
    # Nothing of these is compiled
    assert limits["fused_layers-off"][0] == limits["plain"][0] == limits["tf32-on"][0] == 60.0
    assert limits["compile-on"][0] == 120.0
    limits.clear()
    study(Noting(gpu=False)).run()
    assert limits["amp-off"][0] == limits["as-decided"][0] == 60.0


def test_a_machine_without_a_gpu_is_told_once() -> None:
    made = study(Machine(gpu=False))
    made.run()
    assert any(sentence.endswith("(there is no GPU)") and "tf32 on" in sentence for sentence in not_tried(made))
    assert not any(row[0] == "tf32 on" for row in shown_rows(made))


def test_trials_that_fail_are_rows_and_the_rest_is_measured() -> None:
    machine = Machine(**{
        "amp-off": Outcome("memory", faults=("out",), exit_code=5),
        "tf32-off": Outcome("hung", faults=("ended after 60 s",)),
        "cache-off": Outcome("failed", faults=("no disk",), exit_code=6),
    })  # fmt: skip
    made = study(machine)
    made.run()
    rows = by_name(made)
    assert rows["amp off"]["note"] == "out of memory"
    assert rows["tf32 off"]["note"] == "ended after 60 s"
    assert rows["cache off"]["note"] == "no disk"
    assert rows["fused_layers off"]["patches_per_second"]
    # What failed once is not tried again
    assert [name.endswith("amp-off") for name, _ in machine.asked].count(True) == 1


def test_what_follows_from_a_switch_or_could_not_be_applied_is_said() -> None:
    class Stubborn(Machine):
        def planned(self, recipe: Recipe) -> dict[str, Any]:  # type: ignore[override]
            plan = Machine.planned(recipe)
            fused = plan["fused_layers"] and plan["channels_last"]
            return {**plan, "fused_layers": fused, "cuda_graphs": False}

    made = study(Stubborn())
    made.run()
    rows = by_name(made)
    assert rows["channels_last off"]["note"] == "with it fused_layers off"
    assert rows["cuda_graphs on"]["note"].endswith("could not be applied: compile is on")
    assert rows["amp off"]["note"] == ""


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (Outcome("memory", faults=("the GPU ran out of memory",), exit_code=5), OutOfMemoryError),
        (Outcome("failed", faults=("case_1 is cut short",), exit_code=3), DataError),
    ],
)
def test_where_the_decided_run_fails_its_error_is_the_end(outcome: Outcome, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        study(Machine(**{"as-decided": outcome})).run()
    with pytest.raises(kind):
        study(Machine(look=outcome)).run()


def test_a_stop_leaves_the_table_so_far(tmp_path: Path) -> None:
    made = study(Machine(**{"channels_last-off": Stopped()}))
    made.found = lambda: write_tables(made, tmp_path)
    with pytest.raises(Stopped):
        made.run()
    with open(tmp_path / "ablate.csv", newline="") as stream:
        found = {row["setting"]: row for row in csv.DictReader(stream)}
    assert float(found["amp off"]["patches_per_second"]) > 0
    assert found["channels_last off"]["patches_per_second"] == ""
    assert json.dumps(document(made), allow_nan=False)


def test_rates_that_overlap_are_said_to() -> None:
    machine = Machine()
    made = study(machine, only=("amp",))
    made.run()
    for row in made.rows:
        for one in row.outcomes:
            one.values["repeats"] = [50.0, 400.0]
    assert by_name(made)["amp off"]["apart"] is False
    assert "within the spread" in markdown(made)


def test_switches_are_named() -> None:
    assert read_only(None) is None
    assert read_only(["amp,tf32", "cache"]) == ("amp", "tf32", "cache")
    with pytest.raises(RecipeError, match="did you mean"):
        read_only(["ampp"])
    with pytest.raises(RecipeError, match="there are amp"):
        read_only([","])
    resolve("demo", {switch.key: switch.off for switch in SWITCHES})


def words(data: Path, out: Path, *more: str) -> list[str]:
    sets = [word for key, value in TINY.items() for word in ("--set", f"{key}={json.dumps(value).strip(chr(34))}")]
    return ["ablate", "--recipe", "demo", "--device", "cpu", "--data", str(data), "--out", str(out), *sets, *more]


@pytest.mark.slow
def test_the_command_measures_and_writes_its_table(
    phantoms: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTTRAIN_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        run(words(phantoms, out, "--only", "channels_last", "--budget", "5s", "--json"))
    assert ended.value.code in (0, None)
    found = json.loads(capsys.readouterr().out)
    rows = {row["setting"]: row for row in found["rows"]}
    assert rows["as decided"]["patches_per_second"] > 0
    assert rows["as decided"]["memory_gib"] > 0
    assert rows["as decided"]["start_seconds"] > 0
    assert (out / "ablate.png").read_bytes().startswith(b"\x89PNG")
    assert "| plain |" in (out / "ablate.md").read_text()
    with open(out / "ablate.csv", newline="") as stream:
        assert [row["setting"] for row in csv.DictReader(stream)] == list(rows)


@pytest.mark.slow
def test_ctrl_c_keeps_the_table(phantoms: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "FASTTRAIN_CACHE": str(tmp_path / "cache"), "PYTHONPATH": os.getcwd()}
    out = tmp_path / "out"
    command = [sys.executable, "-m", "fasttrain", *words(phantoms, out)]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline and not (out / "ablate.csv").exists():
        time.sleep(0.1)
    assert (out / UNFINISHED).exists()
    process.send_signal(signal.SIGINT)
    shown, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"as decided" in shown
    assert told.endswith(b"the table holds what was measured until then; the same command begins it anew\n")
    assert json.loads((out / "ablate.json").read_text())["status"] == "stopped"
    more = ("--only", "channels_last", "--budget", "1s")
    again = [sys.executable, "-m", "fasttrain", *words(phantoms, out, *more)]
    subprocess.run(again, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=120)
    assert json.loads((out / "ablate.json").read_text())["status"] == "done"
    assert not (out / UNFINISHED).exists()


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (("--only", "nothing"), 2),
        (("--budget", "soon"), 2),
        (("--set", "network.features=[4]"), 2),
        (("--device", "cuda:9"), 4),
    ],
)
def test_what_cannot_be_asked_is_refused(phantoms: Path, tmp_path: Path, more: tuple[str, ...], code: int) -> None:
    with pytest.raises(SystemExit) as ended:
        run(words(phantoms, tmp_path / "out", *more))
    assert ended.value.code == code
