"""Owns getting all bytes of an archive over a connection that breaks: it goes on where it stopped, with patience."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from fasttrain.data.fetch.address import shown
from fasttrain.data.fetch.http import (
    ConnectionLostError,
    Patience,
    RangeRefusedError,
    Reply,
    read_block,
    request,
)
from fasttrain.data.fetch.part import Part, write_all
from fasttrain.data.fetch.watcher import Watcher, size_text
from fasttrain.errors import MachineError
from fasttrain.wording import counted

_BLOCK_BYTES = 1 << 20
_GAIN_BYTES = 1 << 20
"""New bytes after which losses are counted from nought again."""
_LONGEST_WAIT_SECONDS = 30.0


@dataclass
class Download:
    """An archive at an address and what is here of it.

    `check_space` is called with the archive's size in bytes before anything is written, and raises where it will not do.
    `rough_bytes` stands for the size where the server does not tell it.
    """

    address: str
    part: Part
    rough_bytes: int
    patience: Patience
    check_space: Callable[[int], None]
    watcher: Watcher

    def run(self) -> bool:
        """Gets the rest; whether the whole is pieced together from several answers of the server.

        Raises MachineError where the connection is lost too often or the server refuses, StorageError for the disk.
        """
        losses, furthest = 0, self.part.start
        while True:
            try:
                return self._try()
            except ConnectionLostError as loss:
                here = self.part.size
                losses = 1 if here > furthest + _GAIN_BYTES else losses + 1
                furthest = max(furthest, here)
                self._wait(loss, losses)

    def _wait(self, loss: ConnectionLostError, losses: int) -> None:
        retries = self.patience.retries
        if losses > retries:
            here = self.part.start
            kept = f"{size_text(here)} are kept at {self.part.path}; " if here else ""
            raise MachineError(
                f"{shown(self.address)} cannot be fetched, {counted(losses, 'time')} in a row: {loss}; {kept}"
                "run it again to go on, or name a mirror with --from"
            ) from loss
        seconds = min(self.patience.first_wait_seconds * 2 ** (losses - 1), _LONGEST_WAIT_SECONDS)
        self.watcher.say(f"{loss}; trying again in {seconds:g} s ({losses} of {retries})")
        time.sleep(seconds)

    def _try(self) -> bool:
        """One answer read to its end; whether it went on from bytes that were here."""
        reply = self._ask()
        with reply.stream:
            total = reply.identity.size
            self.check_space(self.rough_bytes if total is None else total)
            if reply.start == 0:
                self.part.begin(reply.identity)
            self._receive(reply, total)
        return reply.start > 0

    def _ask(self) -> Reply:
        start = self.part.start
        timeout = self.patience.timeout_seconds
        if start:
            try:
                reply = request(self.address, start, self.part.identity, timeout)
                if reply.start == 0:
                    self.watcher.say("the server sends the file from its beginning; starting over")
                else:
                    self.watcher.say(f"going on after {size_text(start)}")
                return reply
            except RangeRefusedError as refusal:
                self.watcher.say(f"{refusal}; starting over")
        elif self.part.size:
            self.watcher.say(f"{self.part.path} is of another download; starting over")
        try:
            return request(self.address, 0, None, timeout)
        except RangeRefusedError as refusal:
            raise MachineError(f"{shown(self.address)} cannot be fetched: {refusal}") from refusal

    def _receive(self, reply: Reply, total: int | None) -> None:
        done = reply.start
        what = f"downloading {self.part.path.name}"
        if total is None:
            what += " (the server tells no size: a rough one stands for it)"
        with self.part.appending() as stream:
            while total is None or done < total:
                self.watcher.advance(what, done, max(done, self.rough_bytes) if total is None else total)
                block = read_block(reply, _BLOCK_BYTES if total is None else min(_BLOCK_BYTES, total - done))
                if not block:
                    break
                write_all(stream, block)
                done += len(block)
        if total is not None and done < total:
            raise ConnectionLostError(f"the connection ended after {size_text(done)} of {size_text(total)}")
        self.watcher.advance(what, done, max(done, 1))
