"""Owns the names under which stored things lie, by which they are told from files that are not fasttrain's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from fasttrain.machine.cache_folder import cache_folder
from fasttrain.recipe.data_spec import CacheSpec

VOLUME_SUFFIX = ".volume"
VOLUME_MAGIC = b"fasttrain vol 1\n"
NOTE_FILE = "about.json"
LMDB_DATA, LMDB_LOCK = "data.mdb", "lock.mdb"
LMDB_MAGIC = (0xBEEFC0DE).to_bytes(4, "little"), (0xBEEFC0DE).to_bytes(4, "big")
LMDB_MAGIC_AT = 16
"""Where LMDB's first page has its magic number, in the byte order of the machine (lmdb.h: MDB_MAGIC)."""

CHECK_MAGIC = b'{"format": "fasttrain check'
"""How a file of remembered facts begins (data/checking/remembered.py)."""

SET_NAME = re.compile(r"[0-9a-f]{32}")
VOLUME_NAME = re.compile(rf"[0-9a-f]{{32}}{re.escape(VOLUME_SUFFIX)}")
PART_NAME = re.compile(rf"\.[0-9a-f]{{32}}{re.escape(VOLUME_SUFFIX)}\.[0-9a-f]{{8}}\.part")
CHECK_NAME = re.compile(r".+-[0-9a-f]{16}\.json")
DAMAGED_NAME = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{8}\.damaged")


def volumes_folder(spec: CacheSpec, environ: Mapping[str, str], runs: Path) -> Path:
    """Where volumes are stored: `data.cache.folder`, else `volumes` in fasttrain's cache folder for runs that lie in `runs`."""
    if spec.folder is not None:
        return Path(spec.folder).expanduser().absolute()
    return cache_folder(environ, runs)[0] / "volumes"
