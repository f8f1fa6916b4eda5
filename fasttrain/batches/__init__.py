"""Where training batches come from: the order of samples, the cutting of patches, and the sources that put them together."""

from fasttrain.batches.boxes import slot_count
from fasttrain.batches.loader_source import LoaderSource, Loading
from fasttrain.batches.order import Order, WindowOrder
from fasttrain.batches.resident_source import ResidentSource
from fasttrain.batches.resident_volumes import Resident, box_bytes, fill, slot_bytes
from fasttrain.batches.worker_watch import ended_worker

__all__ = [
    "Loading",
    "LoaderSource",
    "Order",
    "Resident",
    "ResidentSource",
    "WindowOrder",
    "box_bytes",
    "ended_worker",
    "fill",
    "slot_bytes",
    "slot_count",
]
