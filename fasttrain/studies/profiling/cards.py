"""Owns what makers publish of other cards, and what a measured step would take on them: an estimate, never a measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fasttrain.errors import RecipeError
from fasttrain.recipe.names import did_you_mean


@dataclass(frozen=True)
class Card:
    """half, tf32, single: published TFLOP/s without sparsity of bf16 or fp16 (with float32 sums) on tensor cores, of TF32 and of
    float32; gbs: GB/s of the memory; bf16: whether it has that type; words: what its name has where a driver tells it.
    """

    name: str
    half: float
    tf32: float
    single: float
    gbs: float
    words: tuple[str, ...]
    bf16: bool = True

    def tflops(self, amp: str, tf32: bool) -> float:
        """Of a precision as the plan has it; bf16 on a card without it runs as fp16."""
        if amp != "off":
            return self.half
        return self.tf32 if tf32 else self.single


# Sources: NVIDIA's data sheets of the T4, V100 (SXM2), A10, L4, L40S, A100 (SXM), H100 (PCIe and SXM), H200 (SXM) and HGX B200,
# and its white papers on Ampere GA102 (RTX 3090) and Ada (RTX 4090), all at nvidia.com. Where a sheet has figures with sparsity,
# half of them stand here. Cards without TF32 have their float32 rate in its place.
CARDS = (
    Card("T4", 65, 8.1, 8.1, 320, ("T4",), bf16=False),
    Card("V100", 125, 15.7, 15.7, 900, ("V100",), bf16=False),
    Card("RTX 3090", 71, 35.6, 35.6, 936, ("RTX 3090",)),
    Card("RTX 4090", 165, 82.6, 82.6, 1008, ("RTX 4090",)),
    Card("A10", 125, 62.5, 31.2, 600, ("A10",)),
    Card("L4", 121, 60, 30.3, 300, ("L4",)),
    Card("L40S", 362, 183, 91.6, 864, ("L40S",)),
    Card("A100 40GB", 312, 156, 19.5, 1555, ("A100", "40GB")),
    Card("A100 80GB", 312, 156, 19.5, 2039, ("A100", "80GB")),
    Card("H100 PCIe", 756, 378, 51, 2000, ("H100", "PCIe")),
    Card("H100", 989, 494, 67, 3350, ("H100",)),
    Card("H200", 989, 494, 67, 4800, ("H200",)),
    Card("B200", 2250, 1100, 75, 8000, ("B200",)),
)


@dataclass(frozen=True)
class Parted:
    """A step in seconds by what sets its pace: the rate of arithmetic, the memory's bandwidth, and neither, which stays.

    feeding: what the host needs for its batches while the step runs. A step takes no less.
    """

    computing: float
    moving: float
    staying: float
    feeding: float = 0.0


@dataclass(frozen=True)
class Projection:
    """What a card would take by its published figures. cost: of the whole run, in USD, where a price was given."""

    card: str
    step_seconds: float
    epoch_seconds: float
    run_hours: float
    cost: float | None = None


def card_named(device_name: str) -> Card | None:
    """The card of a driver's name; None for one that is not in the table, and for a CPU."""
    words = device_name.upper().replace("-", " ").split()
    text = f" {' '.join(words)} "
    found = [card for card in CARDS if all(f" {word.upper()} " in text for word in card.words)]
    return max(found, key=lambda card: len(card.words), default=None)


def project(
    parted: Parted,
    here: Card,
    amp: str,
    tf32: bool,
    epoch: tuple[int, float, int],
    prices: Mapping[str, float],
) -> list[Projection]:
    """Every other card. epoch: steps, seconds of validation an epoch, and how many epochs a run has.

    Arithmetic goes by the cards' rates, moved bytes and validation by their bandwidth.
    """
    found = []
    for card in CARDS:
        if card is not here:
            rates, bandwidths = here.tflops(amp, tf32) / card.tflops(amp, tf32), here.gbs / card.gbs
            seconds = parted.computing * rates + parted.moving * bandwidths + parted.staying
            found.append(_projection(card, max(seconds, parted.feeding), epoch, bandwidths, prices))
    return found


def project_counted(
    flops: float, moved: float, epoch: tuple[int, float, int], prices: Mapping[str, float]
) -> list[Projection]:
    """By the counted work of a step alone, where this machine's own rates are not published: what a card takes at best, in half
    precision, with its arithmetic and its memory at their published rates. Validation is left out.
    """
    times = [(card, flops / (card.half * 1e12) + moved / (card.gbs * 1e9)) for card in CARDS]
    return [_projection(card, seconds, (epoch[0], 0.0, epoch[2]), 1.0, prices) for card, seconds in times]


def _projection(
    card: Card, seconds: float, epoch: tuple[int, float, int], validation: float, prices: Mapping[str, float]
) -> Projection:
    steps, validating, epochs = epoch
    whole = steps * seconds + validating * validation
    hours = whole * epochs / 3600
    price = prices.get(card.name)
    return Projection(card.name, seconds, whole, hours, None if price is None else hours * price)


def read_prices(texts: Sequence[str]) -> dict[str, float]:
    """`H100=2.99` → {card: USD an hour}; raises RecipeError for a card that is not in the table, and for what is no price."""
    names, prices, faults = {card.name.lower(): card.name for card in CARDS}, {}, []
    for text in texts:
        name, _, number = text.rpartition("=")
        known = names.get(name.strip().lower())
        if known is None:
            hint = did_you_mean(name.strip(), tuple(names.values()))
            faults.append(f"--price {text}: there is no card {name.strip()!r} in the table{hint}")
            continue
        try:
            prices[known] = float(number)
        except ValueError:
            prices[known] = -1.0
        if not 0 <= prices[known] < 1e6:
            faults.append(f"--price {text}: should be CARD=USD an hour, such as H100=2.99")
    if faults:
        raise RecipeError(faults)
    return prices
