"""Where training batches come from: the order of samples, the cutting of patches, and the sources that put them together."""

from fasttrain.batches.loader_source import LoaderSource, ended_worker
from fasttrain.batches.order import Order

__all__ = ["LoaderSource", "Order", "ended_worker"]
