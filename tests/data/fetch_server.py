"""Tiny archives shaped as the Decathlon's, and a real HTTP server on loopback that can be made to fail in known ways."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CASES = 3
Entry = tuple[str, bytes] | tarfile.TarInfo


def set_files(megabytes: float = 0.2, cases: int = CASES) -> dict[str, bytes]:
    """File → bytes of a set of about that size; volumes are noise, as compressed ones are."""
    names = [f"case_{number:03}.nii.gz" for number in range(cases)]
    size = int(megabytes * 1e6 / cases)
    files = {f"imagesTr/{name}": os.urandom(size) for name in names}
    files |= {f"labelsTr/{name}": os.urandom(100) for name in names}
    files["imagesTs/case_100.nii.gz"] = os.urandom(50)
    document = {
        "name": "Made",
        "labels": {"0": "background", "1": "made"},
        "numTraining": cases,
        "training": [{"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"} for name in names],
        "test": ["./imagesTs/case_100.nii.gz"],
    }
    return {"dataset.json": json.dumps(document).encode(), **files}


def tar_of(entries: list[Entry], mode: str = "w") -> bytes:
    """A tar of (name, bytes) pairs and of entries without bytes."""
    blob = io.BytesIO()
    with tarfile.open(fileobj=blob, mode=mode) as tar:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                tar.addfile(entry)
            else:
                info = tarfile.TarInfo(entry[0])
                info.size, info.mtime = len(entry[1]), 1_500_000_000
                tar.addfile(info, io.BytesIO(entry[1]))
    return blob.getvalue()


def set_archive(files: dict[str, bytes], top: str = "Task09_Spleen/", more: list[Entry] | None = None) -> bytes:
    """The files below a top folder, as the Decathlon's archives have them, with macOS's leavings."""
    entries: list[Entry] = [(f"{top}{name}", blob) for name, blob in files.items()]
    entries += [(f"{top}imagesTr/._case_000.nii.gz", b"mac"), (f"{top}._dataset.json", b"mac")]
    return tar_of([*entries, *(more or [])])


def md5(blob: bytes) -> str:
    return hashlib.md5(blob).hexdigest()


def contents(folder: Path) -> dict[str, bytes]:
    """What a fetched folder holds, without the note of where it came from."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".fasttrain-fetched.json"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@dataclass
class Server:
    """What is served, how, and what was asked. `faults` are used up, one a request, before answers become sound."""

    blob: bytes
    etag: str | None = '"one"'
    last_modified: str | None = None
    ranges: bool = True
    length: bool = True
    content_type: str = "application/x-tar"
    seconds_a_block: float = 0.0
    block: int = 16384
    faults: list[Callable[[BaseHTTPRequestHandler], int | None]] = field(default_factory=list)
    asked: list[dict[str, str]] = field(default_factory=list)
    sent: int = 0
    port: int = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/Task09_Spleen.tar"


def drop_after(count: int) -> Callable[[BaseHTTPRequestHandler], int | None]:
    """A fault: the connection ends after that many bytes of the body."""
    return lambda _: count


def answer(code: int, **headers: str) -> Callable[[BaseHTTPRequestHandler], int | None]:
    """A fault: only a status."""

    def send(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return send


@contextmanager
def serving(blob: bytes, **how: object) -> Iterator[Server]:
    """A server of one archive for as long as the scope lasts."""
    state = Server(blob, **how)  # type: ignore[arg-type]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append(dict(self.headers.items()))
            limit: int | None = None
            if state.faults:
                limit = state.faults.pop(0)(self)
                if limit is None:
                    return
            _send(self, state, limit)

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    state.port = http.server_address[1]
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        http.shutdown()
        http.server_close()
        thread.join(5)


def _send(handler: BaseHTTPRequestHandler, state: Server, limit: int | None) -> None:
    blob, start, status = state.blob, 0, 200
    wanted = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
    condition = handler.headers.get("If-Range")
    if wanted and state.ranges and condition in (None, state.etag, state.last_modified):
        start, status = int(wanted[1]), 206
        if start >= len(blob):
            answer(416, Content_Range=f"bytes */{len(blob)}")(handler)
            return
    handler.send_response(status)
    handler.send_header("Content-Type", state.content_type)
    for name, value in (("ETag", state.etag), ("Last-Modified", state.last_modified)):
        if value is not None:
            handler.send_header(name, value)
    if state.length:
        handler.send_header("Content-Length", str(len(blob) - start))
    if status == 206:
        handler.send_header("Content-Range", f"bytes {start}-{len(blob) - 1}/{len(blob)}")
    handler.end_headers()
    end = len(blob) if limit is None else min(start + limit, len(blob))
    try:
        for first in range(start, end, state.block):
            piece = blob[first : min(first + state.block, end)]
            handler.wfile.write(piece)
            state.sent += len(piece)
            time.sleep(state.seconds_a_block)
    except OSError:
        pass
    handler.close_connection = True
