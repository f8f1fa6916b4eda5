"""Owns which addresses an archive may come from, and how one is written in a message."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import SplitResult, urlsplit, urlunsplit
from urllib.request import url2pathname

from fasttrain.errors import DataError, RecipeError


def check_address(address: str) -> None:
    """RecipeError for anything but an http, https or file address that can be used as it is."""
    parts = _split(address)
    if parts.scheme not in ("http", "https", "file"):
        path = Path(address).expanduser()
        meant = f"; for a file write {path.absolute().as_uri()}" if not parts.scheme and path.exists() else ""
        raise RecipeError(f"--from {address} is no address that begins with https://, http:// or file://{meant}")
    if any(char <= " " or char > "~" for char in address):
        raise RecipeError(
            f"--from {address!r} holds blanks or other characters that an address writes as %20 and the like"
        )
    if parts.username is not None or parts.password is not None:
        raise RecipeError(
            f"--from {shown(address)} carries a user's name or password, which is not taken; "
            "download the archive by other means and give it as file://"
        )
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise RecipeError(f"--from {address} is no file of this machine; write file:///absolute/path")
    elif not parts.hostname:
        raise RecipeError(f"--from {address} names no server")


def local_file(address: str) -> Path | None:
    """The file that a `file://` address means, None for a server's; DataError where there is no such file."""
    parts = _split(address)
    if parts.scheme != "file":
        return None
    path = Path(url2pathname(parts.path))
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"{path} (from --from) {found}; the archive of the set is expected there")
    return path


def shown(address: str) -> str:
    """The address without what may be secret: a user's name and password, and the query of a signed link."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


def _split(address: str) -> SplitResult:
    try:
        parts = urlsplit(address)
        parts.port  # noqa: B018 - read for the ValueError of a port that is none
        return parts
    except ValueError as error:
        raise RecipeError(f"--from {address!r} is no address: {error}") from error
