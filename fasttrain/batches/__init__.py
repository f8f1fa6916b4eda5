"""Where training batches come from: the order of samples, the cutting of patches, and the sources that put them together."""

from fasttrain.batches.loader_source import LoaderSource, Loading, ended_worker
from fasttrain.batches.order import Order, WindowOrder

__all__ = ["Loading", "LoaderSource", "Order", "WindowOrder", "ended_worker"]
