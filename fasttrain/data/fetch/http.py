"""Owns one request for an archive, whole or from some byte on, and what the server's answer means."""

from __future__ import annotations

import http.client
import re
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from fasttrain.data.fetch.address import shown
from fasttrain.errors import MachineError

_CONTENT_RANGE = re.compile(r"bytes (?:(?P<first>\d+)-\d+|\*)/(?P<total>\d+|\*)")
_PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Answers that another try may turn."""


class ConnectionLostError(Exception):
    """The network or the server failed in a way that another try may mend; the text says how."""


class RangeRefusedError(Exception):
    """The server has nothing from that byte on, or another file than before: only a new start helps."""


@dataclass(frozen=True)
class Patience:
    """How long a fetch puts up with a bad connection.

    `retries` losses in a row with next to nothing gained between them end it; the waits before them double from
    `first_wait_seconds` to half a minute. `timeout_seconds` without a byte is a loss.
    """

    retries: int = 5
    first_wait_seconds: float = 1.0
    timeout_seconds: float = 30.0


@dataclass(frozen=True)
class Identity:
    """What tells a server's file from another that lies there later."""

    etag: str | None
    last_modified: str | None
    size: int | None

    @property
    def validator(self) -> str | None:
        """The value of If-Range; a weak ETag does not promise equal bytes (RFC 9110, 13.1.5)."""
        return self.etag if self.etag is not None and not self.etag.startswith("W/") else self.last_modified

    def differs(self, other: Identity) -> bool:
        """Whether the two are surely not the same file."""
        pairs = ((self.etag, other.etag), (self.last_modified, other.last_modified), (self.size, other.size))
        return any(mine is not None and theirs is not None and mine != theirs for mine, theirs in pairs)


@dataclass(frozen=True)
class Reply:
    """An open answer whose body starts at byte `start` of the file; the caller closes `stream`."""

    stream: http.client.HTTPResponse
    start: int
    identity: Identity


def request(address: str, start: int, known: Identity | None, timeout_seconds: float) -> Reply:
    """Asks for the file from byte `start` on; a server without ranges, or with another file, answers from 0.

    Raises ConnectionLostError for what may pass, RangeRefusedError where it cannot go on from `start`, MachineError for
    what another try will not mend.
    """
    headers = {"User-Agent": "fasttrain", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
        if known is not None and known.validator is not None:
            headers["If-Range"] = known.validator
    try:
        stream = _opener().open(urllib.request.Request(address, headers=headers), timeout=timeout_seconds)
    except urllib.error.HTTPError as error:
        with error:
            raise _of_status(error, address) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _of_failure(error, address) from error
    try:
        return _reply(stream, start, known, address)
    except BaseException:
        stream.close()
        raise


def read_block(reply: Reply, limit: int) -> bytes:
    """What has arrived, at most `limit` bytes; empty at the end. Raises ConnectionLostError."""
    try:
        return reply.stream.read1(limit)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ConnectionLostError(f"the connection was lost ({_cause(error)})") from error


def _opener() -> urllib.request.OpenerDirector:
    # Put together by hand, for the ready-made one also follows ftp, file and data addresses
    opener = urllib.request.OpenerDirector()
    kinds: tuple[type[Any], ...] = (
        urllib.request.ProxyHandler,
        urllib.request.UnknownHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
    )
    for kind in kinds:
        opener.add_handler(kind())
    return opener


def _reply(stream: http.client.HTTPResponse, start: int, known: Identity | None, address: str) -> Reply:
    headers = stream.headers
    if headers.get_content_type() in ("text/html", "application/xhtml+xml"):
        raise MachineError(
            f"{shown(address)} answers with a web page and not an archive; is there a login or a proxy in between? "
            "--from takes the address of a mirror"
        )
    length = headers.get("Content-Length", "")
    size = int(length) if length.isdecimal() else None
    first = 0
    if stream.status == 206:
        first, size = _content_range(headers.get("Content-Range", ""))
    identity = Identity(headers.get("ETag"), headers.get("Last-Modified"), size)
    if first != start and first:
        raise RangeRefusedError(f"the server answered from byte {first} on and not from {start}")
    if stream.status == 206 and known is not None and known.differs(identity):
        raise RangeRefusedError("the server has another file now")
    return Reply(stream, first, identity)


def _content_range(text: str) -> tuple[int, int | None]:
    match = _CONTENT_RANGE.fullmatch(text.strip())
    if match is None or match["first"] is None:
        raise RangeRefusedError(f"the server sent a part without saying which (Content-Range: {text!r})")
    return int(match["first"]), None if match["total"] == "*" else int(match["total"])


def _of_status(error: urllib.error.HTTPError, address: str) -> Exception:
    if error.code == 416:
        return RangeRefusedError("the server has no bytes beyond those that are here")
    answer = f"the server answers {error.code} {http.client.responses.get(error.code, '')}".rstrip()
    if error.code in _PASSING:
        return ConnectionLostError(answer)
    return MachineError(f"{shown(address)} cannot be fetched: {answer}; --from takes the address of a mirror")


def _of_failure(error: Exception, address: str) -> Exception:
    reason = getattr(error, "reason", None)
    cause = reason if isinstance(reason, BaseException) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return MachineError(
            f"{shown(address)} cannot be fetched: the server's certificate is not trusted ({cause.verify_message}); "
            "set SSL_CERT_FILE to the certificates of your network"
        )
    if isinstance(cause, http.client.InvalidURL) or (isinstance(cause, ValueError) and not isinstance(cause, OSError)):
        return MachineError(f"{shown(address)} cannot be fetched: {cause}; check the address, also of a proxy")
    return ConnectionLostError(f"the server cannot be reached ({_cause(cause)})")


def _cause(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "nothing came within the time limit"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())
