"""Owns the way of a public data set from a server to a folder that can be trained on."""

from fasttrain.data.fetch.fetching import Fetched, fetch
from fasttrain.data.fetch.http import Patience
from fasttrain.data.fetch.watcher import Watcher, size_text

__all__ = ["Fetched", "Patience", "Watcher", "fetch", "size_text"]
