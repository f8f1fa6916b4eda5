"""Limits that a user sets: what they bind and count, how a run ends by them, and how it goes on; and what the whole will take."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fasttrain import train, train_folds
from fasttrain.engine.folds import resume_folds
from fasttrain.engine.limits import Account, Limits, LimitTimer, goes_beyond, spent_before, told_of_limits
from fasttrain.engine.run import RunResult, resume
from fasttrain.engine.stop import Stopped, StopRequest
from fasttrain.engine.validating.expected import validation_in_steps
from fasttrain.errors import RecipeError
from fasttrain.recipe.task import TASKS
from fasttrain.run_folder import RunFolder
from fasttrain.telemetry.attempts import Attempt
from fasttrain.telemetry.events import EpochEnded, Event, Message, RunEnded, RunStarted, StepLogged
from fasttrain.telemetry.metrics_csv import read_metrics


class Heard:
    """Keeps every event, and does something at the n-th of a kind."""

    def __init__(self, then: Callable[[], None] = lambda: None, at: tuple[type, int] = (StepLogged, 7)) -> None:
        self.events: list[Event] = []
        self.then, self.at = then, at

    def on_event(self, event: Event) -> None:
        self.events.append(event)
        kind, number = self.at
        if isinstance(event, kind) and len(self.of(kind)) == number:
            self.then()

    def close(self) -> None: ...

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]


class Clock:
    """Takes the place of the timer of a limit: its time comes when a test says so, however busy the machine is."""

    def __init__(self) -> None:
        self.set: list[tuple[float, Callable[..., None], tuple]] = []

    def __call__(self, seconds: float, function: Callable[..., None], arguments: tuple) -> "Clock":
        self.set.append((seconds, function, arguments))
        return self

    def start(self) -> None: ...

    def cancel(self) -> None:
        self.set.clear()

    def comes(self) -> None:
        """What the newest timer was set for is now."""
        _, function, arguments = self.set[-1]
        function(*arguments)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("fasttrain.engine.limits.threading.Timer", clock)
    return clock


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"max_hours": 0}, "--max-hours 0: should be a number above 0"),
        ({"max_hours": math.nan}, "--max-hours nan"),
        ({"max_cost": -1, "price_per_hour": 2}, "--max-cost -1"),
        ({"max_cost": 5}, "--max-cost 5 needs --price-per-hour P"),
        ({"price_per_hour": math.inf}, "--price-per-hour inf"),
        ({"until_dice": -0.9}, "--until-dice -0.9: should be a number above 0"),
    ],
)
def test_what_can_be_no_limit_is_refused(given: dict[str, float], told: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Limits(**given)
    assert told in str(caught.value)


def test_all_faults_of_the_limits_are_told_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        Limits(max_hours=0, max_cost=3, until_dice=0)
    assert len(caught.value.faults) == 3
    assert Limits(1, 2, 3, 0.9).options == " --max-hours 1 --max-cost 2 --price-per-hour 3 --until-dice 0.9"
    assert Limits().options == ""


def test_the_account_adds_up_attempts_each_at_its_price() -> None:
    earlier = (Attempt(3600, 2.0), Attempt(1800, None))
    account = Account(began=1000.0, price_per_hour=4.0, earlier=earlier, now=lambda: 1000.0 + 900)
    assert account.hours() == pytest.approx(1.75)
    assert account.cost() == pytest.approx(2.0 + 2.0 + 1.0)
    assert account.projected(3600.0) == (pytest.approx(2.75), pytest.approx(9.0))
    assert account.projected(None) == (None, None)
    assert Account(1000.0, None, earlier, lambda: 1900.0).cost() is None
    assert account.record(None)["hours"]["projected"] is None
    assert spent_before(Limits(max_cost=5, price_per_hour=4), account) is not None
    assert spent_before(Limits(max_cost=5.01, price_per_hour=4), account) is None


def test_a_score_is_reached_from_the_side_of_its_task() -> None:
    dice, dose = TASKS["segmentation"], TASKS["dose"]
    for score, by_dice, by_dose in ((0.7, False, True), (0.8, True, True), (0.9, True, False)):
        assert (Limits(until_dice=0.8).reached_by(score, dice) is not None) is by_dice
        assert (Limits(until_dice=0.8).reached_by(score, dose) is not None) is by_dose
    assert Limits(until_dice=0.8).reached_by(math.nan, dose) is None
    assert Limits(until_dice=0.8).reached_by(None, dose) is None
    assert Limits().reached_by(0.1, dose) is None


def test_a_mean_dice_above_1_is_refused_and_a_dose_score_is_not() -> None:
    Limits(until_dice=2.6).check_score(TASKS["dose"])
    Limits(until_dice=1).check_score(TASKS["segmentation"])
    with pytest.raises(RecipeError, match="--until-dice 90: should be above 0 and at most 1, such as 0.9"):
        Limits(until_dice=90).check_score(TASKS["segmentation"])


@pytest.mark.parametrize(("wanted", "goes_on"), [(2.0, True), (2.5, False), (3.0, False)])
def test_a_dose_goes_on_under_a_lower_score(wanted: float, goes_on: bool) -> None:
    ended = {"status": "done", "stopped_by": "--until-dice 2.6", "best": {"metric": "val_dose_score", "value": 2.5}}
    assert goes_beyond(Limits(until_dice=wanted), ended, False) is goes_on


@pytest.mark.parametrize(
    ("limits", "earlier", "reason"),
    [
        (Limits(max_hours=1), (), "--max-hours 1"),
        # Hours are of this process, money of all: 1.5 h at 4 USD were spent before it
        (Limits(max_hours=1, max_cost=8, price_per_hour=4), (Attempt(5400),), "--max-cost 8"),
        (Limits(max_hours=1, max_cost=20, price_per_hour=4), (Attempt(5400),), "--max-hours 1"),
        (Limits(max_hours=3), (Attempt(99999),), None),
        # Of a command that is given over and over, of all attempts
        (Limits(max_hours=2, hours_of_run=True), (Attempt(3600),), "--max-hours 2"),
        (Limits(max_hours=2.1, hours_of_run=True), (Attempt(3600),), None),
        (Limits(until_dice=0.5), (), None),
    ],
)
def test_the_first_limit_to_come_asks_for_the_stop(
    limits: Limits, earlier: tuple[Attempt, ...], reason: str | None
) -> None:
    stop = StopRequest()
    account = Account(time.time() - 3600 * 1.01, limits.price_per_hour, earlier)
    timer = LimitTimer(limits, account, stop)
    until = time.monotonic() + (5 if reason else 0.1)
    while not stop.asked and time.monotonic() < until:
        time.sleep(0.01)
    timer.close()
    assert (stop.reason, stop.exit_code) == (reason, 0)


def test_a_limit_of_ages_is_borne() -> None:
    stop = StopRequest()
    LimitTimer(Limits(max_hours=1e12), Account(time.time()), stop).close()
    assert not stop.asked


ENDED = {"status": "done", "cost": {"run": 5.0}, "hours": {"run": 2.001}, "best": {"value": 0.8}}


def test_hours_that_all_attempts_took_are_spent_like_money() -> None:
    account = Account(1000.0, None, (Attempt(5400), Attempt(1800)), lambda: 1000.0)
    limit, told = spent_before(Limits(max_hours=2, hours_of_run=True), account) or ("", "")
    assert limit == "--max-hours 2"
    assert told == "nothing to do: the run has taken 2.00 h in 2 attempts; to go on, give a --max-hours above that"
    assert spent_before(Limits(max_hours=2.01, hours_of_run=True), account) is None
    assert spent_before(Limits(max_hours=2), account) is None
    assert told_of_limits(Limits(max_hours=3, hours_of_run=True), account) == (
        "ends at the latest by --max-hours 3 of the whole run, 2.00 h of it in 2 earlier attempts"
    )


@pytest.mark.parametrize(
    ("stopped_by", "limits", "asked_for", "goes_on"),
    [
        ("--max-hours 2", Limits(max_hours=2), True, True),
        # The same command in a loop must end
        ("--max-hours 2", Limits(max_hours=2), False, False),
        ("--max-hours 2", Limits(), True, False),
        ("--max-hours 2", Limits(max_hours=2, hours_of_run=True), False, False),
        ("--max-hours 2", Limits(max_hours=3, hours_of_run=True), False, True),
        ("--max-cost 5", Limits(max_cost=5, price_per_hour=1), True, False),
        ("--max-cost 5", Limits(max_cost=9, price_per_hour=1), False, True),
        ("--until-dice 0.8", Limits(until_dice=0.8), False, False),
        ("--until-dice 0.8", Limits(until_dice=0.9), False, True),
        ("--until-dice 0.8", Limits(max_hours=1), True, True),
        ("early stopping, no better for 3 validations", Limits(max_hours=9), True, False),
        (None, Limits(max_hours=9), True, False),
    ],
)
def test_a_wider_limit_lets_a_run_go_on(stopped_by: str | None, limits: Limits, asked_for: bool, goes_on: bool) -> None:
    assert goes_beyond(limits, {**ENDED, "stopped_by": stopped_by}, asked_for) is goes_on


def test_a_run_that_was_cut_short_is_none_that_a_limit_ended() -> None:
    assert not goes_beyond(Limits(max_hours=9), {**ENDED, "status": "stopped", "stopped_by": "--max-hours 2"}, True)


def test_hours_end_a_run_whole_and_it_goes_on_where_a_person_says_so(
    tiny, phantoms: Path, tmp_path: Path, clock: Clock
) -> None:
    run, heard = tmp_path / "run", Heard(clock.comes)
    limits = Limits(max_hours=1.25, price_per_hour=2.0)
    recipe = tiny(training__epochs=6, validation__every=3)
    result = train(
        recipe, data=phantoms, run=run, device="cpu", observers=[heard], limits=limits, began=time.time() - 3600
    )
    summary = result.summary
    assert (result.exit_code, summary["status"], summary["exit_code"]) == (0, "done", 0)
    assert (summary["stopped_by"], summary["steps"], summary["epochs"]) == ("--max-hours 1.25", 7, 1)
    assert clock.set == []
    assert (run / "checkpoints" / "last.pt").exists()
    (started,) = heard.of(RunStarted)
    assert "counted from the start of this process" in started.limits
    (ended,) = heard.of(RunEnded)
    assert ended.resume_command == f"fasttrain resume {run}{limits.options}"
    # From the first epoch on, though none of them has validated
    for event in [*heard.of(StepLogged), *heard.of(EpochEnded)]:
        assert event.projected_hours > 1
        assert event.projected_cost == pytest.approx(2 * event.projected_hours)
    assert summary["attempts"] == 1
    assert summary["cost"]["process"] == pytest.approx(summary["cost"]["run"], rel=1e-3) == pytest.approx(2.0, rel=0.01)

    def steps_after(**more: object) -> int:
        return resume(run, device="cpu", **more).summary["steps"]

    assert steps_after() == summary["steps"]
    assert steps_after(limits=limits, asked_for=False) == summary["steps"]
    # A loop's hours are those of the run, of which one is spent
    looped = {"asked_for": False, "observers": [heard := Heard()]}
    assert steps_after(limits=Limits(max_hours=0.9, hours_of_run=True), **looped) == summary["steps"]
    assert heard.events == []
    # What it cost before counts: one attempt of an hour at 2 USD
    heard = Heard()
    assert steps_after(limits=Limits(max_cost=1.5, price_per_hour=2), observers=[heard]) == summary["steps"]
    assert "the run has cost 2.00 USD in 1 attempt" in heard.of(Message)[0].text
    last = resume(run, device="cpu", limits=Limits(max_hours=1)).summary
    assert (last["status"], last["stopped_by"], last["epochs"]) == ("done", None, 6)
    assert last["attempts"] == 2
    assert last["hours"]["run"] == pytest.approx(1 + last["hours"]["process"], abs=0.01)


def test_a_score_ends_a_run_after_its_checkpoints(tiny, whole_run: RunResult, phantoms: Path, tmp_path: Path) -> None:
    dices = [row["val_dice"] for row in read_metrics(whole_run.run / "metrics.csv")]
    reached = max(range(3), key=lambda epoch: dices[epoch])
    assert dices[reached] > 0
    run = tmp_path / "run"
    limits = Limits(until_dice=dices[reached] - 1e-9)
    result = train(tiny(), data=phantoms, run=run, device="cpu", limits=limits)
    assert (result.exit_code, result.summary["status"], result.summary["epochs"]) == (0, "done", reached + 1)
    assert result.summary["stopped_by"] == limits.options.strip()
    assert result.summary["best"]["value"] == pytest.approx(dices[reached])
    assert (run / "checkpoints" / "last.pt").exists()
    assert (run / "checkpoints" / "best.pt").exists()
    # Cut short and resumed, the score that it had reached needs no further step
    RunFolder(run).reopen()
    again = resume(run, device="cpu", limits=limits).summary
    assert (again["status"], again["steps"], again["stopped_by"]) == (
        "done",
        result.summary["steps"],
        limits.options.strip(),
    )


def test_a_limit_that_comes_before_there_is_a_run_makes_none(tiny, phantoms: Path, tmp_path: Path) -> None:
    stop = StopRequest()
    began = time.time() - 3600
    with pytest.raises(Stopped):
        train(
            tiny(),
            data=phantoms,
            run=tmp_path / "run",
            device="cpu",
            stop=stop,
            limits=Limits(max_hours=0.5),
            began=began,
        )
    assert (stop.reason, stop.exit_code) == ("--max-hours 0.5", 0)
    assert not (tmp_path / "run").exists()


def test_the_last_epoch_is_its_own_reason(tiny, whole_run: RunResult, phantoms: Path, tmp_path: Path) -> None:
    """Where a limit and the end come together, it is the end."""
    last = read_metrics(whole_run.run / "metrics.csv")[0]["val_dice"]
    limits = Limits(until_dice=max(last, 1e-12))
    result = train(tiny(training__epochs=1), data=phantoms, run=tmp_path / "run", device="cpu", limits=limits)
    assert (result.summary["status"], result.summary["stopped_by"]) == ("done", None)


def test_hours_of_all_folds_are_one_limit(tiny, phantoms: Path, tmp_path: Path, clock: Clock) -> None:
    run = tmp_path / "run"
    recipe = tiny(
        data__split={"kind": "kfold", "folds": 3},
        training__epochs=2,
        training__iterations_per_epoch=2,
        validation__every=2,
    )

    def watch(fold: int, folds: int) -> list[Heard]:
        # At the very end of the second, after which the third is not to begin
        return [Heard(clock.comes, (EpochEnded, 2))] if fold == 1 else []

    limits = Limits(max_hours=1.25, price_per_hour=1.0)
    result = train_folds(
        recipe, data=phantoms, run=run, device="cpu", watch=watch, began=time.time() - 3600, limits=limits
    )
    summary = json.loads((run / "summary.json").read_text())
    assert (result.exit_code, summary["exit_code"]) == (0, 0)
    assert (summary["status"], summary["stopped_by"]) == ("done", "--max-hours 1.25")
    assert [(run / f"fold_{fold}" / "recipe.yaml").exists() for fold in range(3)] == [True, True, False]
    assert summary["cost"]["run"] == pytest.approx(1.0, rel=0.01)
    again = resume_folds(run, device="cpu", limits=limits, asked_for=False)
    assert not (run / "fold_2" / "recipe.yaml").exists()
    again = resume_folds(run, device="cpu", limits=Limits(max_hours=1))
    assert (again.summary["status"], again.summary["stopped_by"]) == ("done", None)
    assert [fold["status"] for fold in again.summary["folds"]] == ["done"] * 3


def test_a_validation_is_reckoned_in_steps_by_its_windows(tiny, phantoms: Path) -> None:
    from fasttrain.engine.run import prepare

    recipe = tiny().recipe
    cases = prepare(recipe, phantoms, "cpu").split.validation
    plain = validation_in_steps(cases, recipe)
    assert plain > 0
    assert validation_in_steps(cases * 2, recipe) == pytest.approx(2 * plain)
    mirrored = tiny(validation__mirror=[0, 1]).recipe
    assert validation_in_steps(cases, mirrored) == pytest.approx(4 * plain)
    larger = tiny(training__batch_size=4).recipe
    assert validation_in_steps(cases, larger) == pytest.approx(plain / 2)
