"""Measures a training step of the openkbp recipe by batch size, in a share of the card: is a batch of 4 slower a patient than
one of 2?

    python scripts/bench/dose_step.py [--gib 24] [--batches 1 2 4 8] [--amps bf16 fp16] [--cases 200]

Each row: patients/s, milliseconds a step and the memory that it held, with the step in a CUDA graph and without, and where it
does not fit with activation checkpointing; then seconds an epoch of so many cases.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT))

import torch  # noqa: E402

from fasttrain.engine.planning.trial import Candidate, measure  # noqa: E402
from fasttrain.machine.hardware import GIB, survey  # noqa: E402
from fasttrain.recipe import resolve  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=24.0)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--amps", nargs="+", default=["bf16", "fp16"])
    parser.add_argument("--cases", type=int, default=200)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this needs a CUDA device", file=sys.stderr)
        return 4
    hardware = survey("cuda")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(arguments.gib * GIB / total, 1.0))
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    print(f"{hardware.device_name}, {arguments.gib:g} GiB of it")
    for batch in arguments.batches:
        recipe = resolve("openkbp", [f"training.batch_size={batch}"]).recipe
        for amp in arguments.amps:
            for layout, captured, again in (
                (True, True, False),
                (True, False, False),
                (False, False, False),
                (True, False, True),
            ):
                held: dict[Candidate, int] = {}
                way = Candidate(amp, layout, captured=captured)
                seconds = measure(recipe, hardware, [way], again, held=held)
                for found, one in seconds.items():
                    told = f"{found}{' with checkpointing' if again else ''}"
                    print(
                        f"batch {batch}  {told:44}  {batch / one:6.1f} patients/s  {one * 1000:7.1f} ms a step  "
                        f"{held[found] / GIB:5.1f} GiB  {arguments.cases / batch * one:6.1f} s for {arguments.cases} patients",
                        flush=True,
                    )
                if not seconds:
                    print(f"batch {batch}  {way}{' with checkpointing' if again else ''}: does not fit", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
