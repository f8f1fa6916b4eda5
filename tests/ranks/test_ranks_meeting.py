"""Ranks that cannot meet say what is in the way, and those of different versions or data do not train."""

import os
import socket
import threading
from collections.abc import Iterator

import pytest
from ranks_running import free_port, in_ranks
from torch.distributed import HashStore

from fasttrain.engine import agreeing
from fasttrain.engine.agreeing import check_cases, check_versions
from fasttrain.errors import DataError, LostRankError, MachineError
from fasttrain.machine import meeting
from fasttrain.machine.meeting import meet
from fasttrain.machine.patience import within
from fasttrain.machine.place import Place, place, without_place
from fasttrain.machine.ranks import Joined


@pytest.fixture(autouse=True)
def _at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port at which something else listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        yield other.getsockname()[1]


def test_a_port_that_is_taken_is_named_by_the_first(taken: int) -> None:
    with pytest.raises(
        MachineError, match=rf"MASTER_PORT {taken} is taken by another program on .* give all ranks another, such as"
    ):
        meet(Place(0, 2, 0, 2))


def test_a_port_of_another_program_is_named_by_the_others(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_TO_ANSWER_SECONDS", 1.0)
    with pytest.raises(
        MachineError, match=f"rank 1: what listens at 127.0.0.1:{taken} .* does not answer as rank 0 does"
    ):
        meet(Place(1, 2, 1, 2))


def test_an_address_where_nothing_listens_is_told_and_then_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    port, told = free_port(), []
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(meeting, "_TELL_AFTER_SECONDS", 0.3)
    monkeypatch.setattr(meeting, "_TO_LISTEN_SECONDS", 1.0)
    with pytest.raises(
        MachineError,
        match=f"rank 1 cannot reach rank 0 at 127.0.0.1:{port} .*connection refused, for 1 s; start rank 0",
    ):
        meet(Place(1, 2, 1, 2), told.append)
    assert len(told) == 1
    assert "trying again for" in told[0]


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setattr(meeting, "_TELL_AFTER_SECONDS", 0.3)
    monkeypatch.setattr(meeting, "_TO_COME_SECONDS", 1.0)
    raised: list[Exception] = []

    def come(rank: int) -> None:
        try:
            meet(Place(rank, 4, rank, 4), told.append)
        except MachineError as error:
            raised.append(error)

    both = [threading.Thread(target=come, args=(rank,)) for rank in (0, 2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert told == ["waiting for rank 1, 3 of 4 to come, for at most 1 s"]
    assert any("rank 1, 3 of 4 did not come" in str(error) for error in raised)
    assert len(raised) == 2


@pytest.mark.parametrize(("comes", "misses"), [(0, 1), (1, 0)])
def test_a_rank_that_stands_still_beside_those_begun_with_it_is_lost(
    comes: int, misses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, others = HashStore(), []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one start")
    monkeypatch.setattr(meeting, "_TO_COME_TOGETHER_SECONDS", 0.5)
    store.set("here/2", "")
    with pytest.raises(LostRankError, match=rf"rank {misses} of 3 did not come within .* its process is frozen"):
        meeting._wait_for_all(Place(comes, 3, comes, 3), store, others.append)
    # Where some are on another machine, it may still be on its way
    with pytest.raises(TimeoutError):
        within(3.5, lambda: meeting._wait_for_all(Place(comes, 3, comes, 2), store, others.append))


@pytest.mark.parametrize(
    ("name", "value"), [("MASTER_PORT", "http"), ("MASTER_PORT", "70000"), ("MASTER_PORT", ""), ("MASTER_ADDR", "")]
)
def test_no_address_at_all(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv(name, value)
    with pytest.raises(MachineError, match=name):
        meet(Place(0, 2, 0, 2))


def _versions(joined: Joined, other: dict[str, str]) -> str:
    if joined.place.rank == 1:
        own = agreeing.own_versions()
        agreeing.own_versions = lambda: {**own, **other}  # type: ignore[assignment]
    try:
        check_versions(joined)
    except MachineError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("other", [{}, {"monai": "1.5.0", "fasttrain": "0.0.9"}])
def test_ranks_of_other_versions_are_refused_by_all(other: dict[str, str]) -> None:
    told = in_ranks(2, _versions, other)
    assert told[0] == told[1]
    if other:
        assert "rank 1 on" in told[0]
        assert "fasttrain 0.0.9 instead of" in told[0]
        assert "monai 1.5.0 instead of" in told[0]
        assert "torch" not in told[0]
    else:
        assert told[0] == ""


def test_cases_that_hold_other_voxels_are_named() -> None:
    first = {f"case{number}": f"{number:064d}" for number in range(5)}
    check_cases(1, first, first)
    check_cases(1, first, {})
    check_cases(1, first, {**first, "of this machine alone": "0" * 64})
    with pytest.raises(DataError) as caught:
        check_cases(1, first, {**first, "case2": "9" * 64})
    assert "rank 1 on" in str(caught.value)
    assert (
        "1 case of 5 holds other voxels than on rank 0: case2 has the digest 999999999999 instead of 000000000000"
        in str(caught.value)
    )


def test_a_command_of_the_users_own_is_no_rank() -> None:
    of_launcher = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
    of_ours = {"TORCHELASTIC_RUN_ID": "x", "FASTTRAIN_LAUNCHER": "1:/x"}
    given = {**of_launcher, **of_ours, "PATH": os.environ["PATH"], "FASTTRAIN_DATA": "/data"}
    assert not place(given).alone
    left = without_place(given)
    assert place(left).alone
    assert sorted(left) == ["FASTTRAIN_DATA", "PATH"]
