"""A rank learns within a second that another failed, died or was told to stop, and of a frozen one once it has been silent."""

import json
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from fasttrain.engine.stop import StopRequest
from fasttrain.errors import LostRankError, OtherRankError
from fasttrain.machine.place import Place
from fasttrain.machine.rank_watch import RankWatch

LOST_AFTER = 2.0


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return dist.HashStore()


@pytest.fixture
def watches(store: dist.HashStore) -> Iterator[list[RankWatch]]:
    """Of three ranks, in one process."""
    made = [RankWatch(Place(rank, 3, rank, 3), store, lost_after_seconds=LOST_AFTER) for rank in range(3)]
    assert within(1.0, lambda: len(made[0].links.peers) == 2)
    yield made
    for watch in reversed(made):
        watch.close()


def within(seconds: float, found: Callable[[], object]) -> bool:
    until = time.monotonic() + seconds
    while not found() and time.monotonic() < until:
        time.sleep(0.02)
    return bool(found())


@pytest.mark.parametrize("asked", [0, 2])
def test_a_stop_of_one_is_one_of_all(asked: int, watches: list[RankWatch]) -> None:
    stops, heard = [StopRequest() for _ in watches], []
    for watch, stop in zip(watches, stops, strict=True):
        watch.heed(stop, heard.append)
    stops[asked].ask("SIGTERM", 143)
    assert within(1.0, lambda: all(stop.asked for stop in stops))
    assert [(stop.reason, stop.exit_code) for stop in stops] == [("SIGTERM", 143)] * 3
    assert heard.count(143) >= 2
    assert [watch.failure for watch in watches] == [None] * 3


def test_a_stop_before_anyone_heeds_it_is_not_lost(watches: list[RankWatch]) -> None:
    early, late = StopRequest(), StopRequest()
    watches[1].heed(early)
    early.ask("SIGUSR1", 143)
    assert within(1.0, lambda: watches[0]._stop_heard)
    watches[0].heed(late)
    assert late.reason == "SIGUSR1"


def test_the_first_failure_is_known_to_all_and_the_first_rank_ends_the_command(watches: list[RankWatch]) -> None:
    first, second, third = watches
    assert not within(0.3, lambda: first.failure)
    second.links.peers[0].wire.say({"failed": ["the GPU ran out of memory"], "code": 5})
    assert within(1.0, lambda: all(watch.failure for watch in (first, third)))
    for watch in (first, third):
        assert isinstance(watch.failure, OtherRankError)
        assert watch.failure.exit_code == 5
        assert watch.failure.faults == (f"rank 1 on {socket.gethostname()}: the GPU ran out of memory",)
    third.links.peers[0].wire.say({"failed": ["another"], "code": 3})
    time.sleep(0.3)
    assert first.failure.exit_code == 5
    first.over(5)
    assert within(1.0, lambda: (second.over_code, third.over_code) == (5, 5))
    # What comes after the end is none
    assert second.failed(("late",), 1)


def test_a_rank_that_dies_is_lost_at_once(watches: list[RankWatch]) -> None:
    first, second, third = watches
    second.links.peers[0].wire._socket.shutdown(socket.SHUT_RDWR)
    assert within(1.0, lambda: first.failure and third.failure)
    assert isinstance(first.failure, LostRankError)
    assert first.failure.exit_code == 137
    assert first.failure.faults[0].startswith(f"rank 1 on {socket.gethostname()} ended without a word")
    broken = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2423")
    assert first.explain(broken) is first.failure
    assert third.explain(broken) is third.failure


def test_the_first_rank_is_missed_by_the_others(watches: list[RankWatch]) -> None:
    first, second, third = watches
    for peer in list(first.links.peers.values()):
        peer.wire._socket.shutdown(socket.SHUT_RDWR)
    assert within(1.0, lambda: second.first_ended.is_set() and third.first_ended.is_set())
    assert isinstance(second.failure, LostRankError)
    assert second.failure.faults[0].startswith("rank 0 on")
    assert not second.failed(("mine",), 3)


def test_a_frozen_rank_is_lost_once_it_has_been_silent(
    watches: list[RankWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = watches
    began = time.monotonic()
    monkeypatch.setattr(second.links, "say_all", lambda message: None)
    assert within(LOST_AFTER + 2, lambda: first.failure)
    assert LOST_AFTER * 0.4 < time.monotonic() - began < LOST_AFTER + 2
    assert isinstance(first.failure, LostRankError)
    assert first.failure.silent
    assert "has not been heard of for 2 s" in first.failure.faults[0]
    assert within(1.0, lambda: third.failure)


def test_ranks_that_say_nothing_to_do_are_not_lost(watches: list[RankWatch]) -> None:
    time.sleep(LOST_AFTER + 1)
    assert [watch.failure for watch in watches] == [None] * 3


def test_ranks_that_stood_still_together_are_not_lost(watches: list[RankWatch]) -> None:
    first = watches[0]
    now = time.monotonic() + 3600
    first.links.look(now)
    assert first.failure is None
    # Negative control: the same silence while this rank ran; its own thread looks at the true time now and then, in between too
    for _ in range(50):
        first.links.look(now)
        for peer in first.links.peers.values():
            peer.heard_at = now - LOST_AFTER - 1
        first.links.look(now)
        if first.failure is not None:
            break
    assert isinstance(first.failure, LostRankError)


def test_a_rank_that_leaves_in_order_is_not_lost(watches: list[RankWatch]) -> None:
    watches[2].close()
    time.sleep(0.4)
    assert watches[0].failure is None


def test_errors_of_this_rank_alone_are_not_laid_to_others(watches: list[RankWatch]) -> None:
    for error in (RuntimeError("CUDA out of memory"), ValueError("Connection closed by peer"), LostRankError("known")):
        assert watches[0].explain(error) is None


def test_strangers_are_shown_the_door(store: dist.HashStore, watches: list[RankWatch]) -> None:
    port = json.loads(store.get("fasttrain/watch"))["port"]
    for hello in (
        b"GET / HTTP/1.0\r\n\r\n",
        b'{"hello": 1, "token": "no"}\n',
        b"[1]\n",
        b'{"over": 3}\n',
        '{"token": "\u00fc"}\n'.encode(),
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(hello)
            assert stranger.recv(100) == b""
    assert [watch.failure for watch in watches] == [None] * 3
    assert within(0.1, lambda: len(watches[0].links.peers) == 2)


def test_the_last_words_of_a_run_are_called_before_the_end(watches: list[RankWatch]) -> None:
    said: list[object] = []
    with watches[0].ended_by(said.append):
        watches[0]._last_words(LostRankError("gone"))
    watches[0]._last_words(LostRankError("gone"))
    assert [str(error) for error in said] == ["gone"]
    watches[1].links.peers[0].wire.say({"failed": ["no room"], "code": 6})
    assert within(1.0, lambda: watches[0].failure)
    with pytest.raises(OtherRankError, match="no room"), watches[0].ended_by(said.append):
        raise AssertionError("a run must not begin")
