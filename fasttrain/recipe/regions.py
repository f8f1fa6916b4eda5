"""Owns what `data.regions` mean: overlapping sets of classes, a channel of the network each, and the way back to classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fasttrain.recipe.network_spec import Fault

if TYPE_CHECKING:
    from fasttrain.recipe.data_spec import DataSpec

MOST_REGIONS = 30
"""Each is a bit of a 32-bit number on a GPU."""


@dataclass(frozen=True)
class Regions:
    """Overlapping regions in the recipe's order. `members`: of each the class indices that it holds; `written`: the class index
    that a voxel of it becomes, unless a later region has the voxel too.

    `written` is the first of the region's values that is in no later region, as BraTS and nnU-Net have it: of {whole: [1, 2, 3],
    core: [2, 3], enhancing: [3]} a voxel of the whole becomes 1, of the core 2, of the enhancing part 3. Where later regions
    hold all of them, it is the first of its values.

    `exact`: (bits, class index) of what a voxel becomes whose regions are those of a class, though drawing would make another of
    it: bit n of `bits` stands for region n. Regions that lie inside each other have none; of {a: [1, 2], b: [2, 3]} a voxel of b
    alone is 3. A network that is right about every region so scores 1 in all of them, however they overlap.
    """

    names: tuple[str, ...]
    members: tuple[tuple[int, ...], ...]
    written: tuple[int, ...]
    exact: tuple[tuple[int, int], ...] = ()

    def last_of(self, class_index: int) -> int:
        """The number, from 1 on, of the last region that holds a class; 0 for none."""
        holding = [number for number, inside in enumerate(self.members, start=1) if class_index in inside]
        return holding[-1] if holding else 0


def regions_of(data: DataSpec) -> Regions | None:
    """The regions of a valid recipe; None where it has none and classes exclude each other."""
    if not data.regions:
        return None
    places = {value: index for index, value in enumerate(data.class_values)}
    members = [tuple(places[value] for value in values) for values in data.regions.values()]
    written = []
    for number, inside in enumerate(members):
        later = {index for other in members[number + 1 :] for index in other}
        own = [index for index in inside if index not in later]
        written.append((own or list(inside))[0])
    return Regions(tuple(data.regions), tuple(members), tuple(written), _exact(members, written))


def _exact(members: list[tuple[int, ...]], written: list[int]) -> tuple[tuple[int, int], ...]:
    bits: dict[int, int] = {}
    for number, inside in enumerate(members):
        for index in inside:
            bits[index] = bits.get(index, 0) | 1 << number
    found: dict[int, int] = {}
    for index, own in sorted(bits.items()):
        drawn = written[own.bit_length() - 1]
        if bits[drawn] != own:
            found.setdefault(own, index)
    return tuple(found.items())


def faults_of_regions(data: DataSpec) -> Iterator[Fault]:
    """What is wrong with `data.regions`, for labels of class values."""
    place = ("data", "regions")
    if len(data.regions) > MOST_REGIONS:
        yield place, f"are {len(data.regions)}, and there is room for {MOST_REGIONS}; leave some out"
    declared = ", ".join(f"{value} {name}" for value, name in sorted(data.classes.items()))
    for name, values in data.regions.items():
        here = (*place, name)
        if not name.strip():
            yield here, "has a blank name, by which its scores could not be told; name it"
        if not values:
            yield here, "has no label value; list those that it is made of, or leave it out"
        for value in dict.fromkeys(values):
            if value == 0:
                yield here, "holds 0, the background, which is in no region; take it out"
            elif value == data.ignore_label:
                yield here, f"holds {value}, the ignore label, whose voxels are not learnt; take it out"
            elif value not in data.classes:
                yield (
                    here,
                    f"holds {value}, which is no value of data.classes ({declared}); declare it there or take it out",
                )
            if values.count(value) > 1:
                yield here, f"holds {value} twice; once is enough"
    yield from _faults_between(data)


def _faults_between(data: DataSpec) -> Iterator[Fault]:
    """Of regions that are sound by themselves: two alike, one that a later one hides, and classes that are in none."""
    place, regions = ("data", "regions"), list(data.regions.items())
    for number, (name, values) in enumerate(regions):
        here = (*place, name)
        for other, others in regions[:number]:
            if other.strip().casefold() == name.strip().casefold():
                yield here, f"has the name of another region, {other!r}; name one of them otherwise"
            if values and set(values) == set(others):
                yield here, f"holds the same values as {other}, so that both are one region; leave one out"
        for other, others in regions[number + 1 :]:
            if values and set(values) < set(others):
                yield (
                    here,
                    f"lies wholly inside {other}, which comes after it and would be drawn over it in predictions; put {name} "
                    f"after {other}",
                )
                break
    inside = {value for _, values in regions for value in values}
    for value, name in sorted(data.classes.items()):
        if regions and value not in inside:
            yield (
                place,
                f"hold no {value} ({name}), which would be background; add it to a region, or map it to 0 with "
                f"data.label_map: {{{value}: 0}} and take it out of data.classes",
            )
