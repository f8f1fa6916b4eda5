"""Owns the anatomy of one made CT-like volume, in which shape and place tell the organs apart and intensity does not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import ndimage

_AIR, _FAT, _BONE, _MARROW = -1000.0, -95.0, 420.0, 180.0
_BODY_MM = np.array([62.0, 54.0, 105.0])
_EXTENT_MM = np.array([140.0, 122.0, 140.0])
_CAVITY = 0.78
_RIM_MM = 3.0
_NOISE_HU = 15.0


@dataclass(frozen=True, eq=False)
class PhantomVolume:
    """`image` int16 in HU and `label` uint8 (1 the liver, 2 both kidneys), [x, y, z]; `affine` 4×4 to RAS mm."""

    image: np.ndarray
    label: np.ndarray
    affine: np.ndarray


def make_phantom(seed: int, number: int) -> PhantomVolume:
    """The same volume for the same (seed, number).

    Wall muscle and a spleen have the liver's HU, and bowel, psoas and loose nodes the kidneys', each in several times the
    organ's volume; both means are drawn from one range. So no window of intensities segments an organ. Every second volume or
    so is stored with flipped axes (LPS, LAS), its affine saying so.
    """
    rng = np.random.default_rng([seed, number])
    canvas = _Canvas(rng)
    canvas.paint_body()
    canvas.paint_bowel()
    canvas.paint_organs()
    canvas.paint_spine()
    return _stored(canvas, flips=((), (0, 1), (), (0,))[number % 4])


class _Canvas:
    """The volume while it is painted. Places are mm from the middle: x to the right, y to the front, z upwards."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        in_plane = round(float(rng.uniform(1.8, 2.15)), 2)
        self.spacing = np.array([in_plane, in_plane, round(float(rng.uniform(1.75, 2.45)), 2)])
        shape = np.clip(np.rint(_EXTENT_MM / self.spacing).astype(int), 56, 80)
        axes = [(np.arange(n, dtype=np.float32) - np.float32((n - 1) / 2)) * np.float32(s)
                for n, s in zip(shape, self.spacing, strict=True)]  # fmt: skip
        self.axes = axes
        self.x, self.y, self.z = np.meshgrid(*axes, indexing="ij", sparse=True)
        self.image = np.full(tuple(shape), _AIR, dtype=np.float32)
        self.label = np.zeros(tuple(shape), dtype=np.uint8)
        self.liver_hu, self.kidney_hu = rng.uniform(35.0, 75.0, 2)
        self.size = float(rng.uniform(0.95, 1.05))
        self.shift = rng.uniform(-3.0, 3.0, 3) * np.array([1.0, 1.0, 0.0])

    def jitter(self, mm: float) -> np.ndarray:
        return self.rng.uniform(-mm, mm, 3)

    def paint_body(self) -> None:
        """Wall muscle with streaks around a cavity filled with fat."""
        radius = self._radius(np.zeros(3), _BODY_MM)
        phase, pitch = self.rng.uniform(0, 6.3), self.rng.uniform(0.35, 0.5)
        streaks = 18.0 * np.sin(pitch * (self.x + self.y) + phase) * np.cos(pitch * (self.z - self.y))
        self.image[:] = np.where(radius < 1.0, self.liver_hu + streaks, self.image)
        self.image[radius < _CAVITY**2] = _FAT

    def paint_bowel(self) -> None:
        """Winding tubes and loose nodes of the kidneys' HU, all in front of them."""
        for _ in range(5):
            place = self.rng.uniform((-32, -2, -62), (32, 30, 50))
            heading = self.rng.normal(size=3)
            radius = self.rng.uniform(5.0, 7.0)
            for _ in range(30):
                heading += 0.6 * self.rng.normal(size=3)
                heading /= np.linalg.norm(heading)
                place = np.clip(place + 3.5 * heading, (-34, -4, -66), (34, 32, 60))
                content = self.kidney_hu + self.rng.normal(0, 6.0)
                self._fill(place, np.full(3, radius), content, within_cavity=True)
        for _ in range(3):
            place = self.rng.uniform((-30, 4, -55), (30, 26, 50))
            self._rimmed(place, np.array([10.0, 9.0, 14.0]) * self.rng.uniform(0.75, 1.1), self.kidney_hu)

    def paint_organs(self) -> None:
        """Spleen (a distractor), psoas, liver and kidneys; later ones lie over earlier ones."""
        self._rimmed(np.array([-27.0, 0.0, 22.0]) + self.jitter(4), np.array([13.0, 15.0, 17.0]), self.liver_hu)
        for side in (-1.0, 1.0):
            self._fill(np.array([side * 15.0, -27.0, -20.0]), np.array([7.0, 7.0, 90.0]), self.kidney_hu)
        liver = np.array([27.0, 22.0, 30.0]) * self.size * self.rng.uniform(0.93, 1.07, 3)
        self._rimmed(np.array([17.0, 8.0, 18.0]) + self.jitter(5), liver, self.liver_hu, value=1, bumps=0.14)
        for side in (-1.0, 1.0):
            kidney = np.array([10.5, 10.0, 17.0]) * self.size * self.rng.uniform(0.92, 1.08, 3)
            place = np.array([side * 29.0, -19.0, -14.0 - 3.0 * side]) + self.jitter(3)
            self._rimmed(place, kidney, self.kidney_hu, value=2, bumps=0.06)

    def paint_spine(self) -> None:
        """The landmark: vertebrae with softer discs, behind the cavity."""
        centre = self.shift + np.array([0.0, -36.0, 0.0])
        distance = (self.x - centre[0]) ** 2 + (self.y - centre[1]) ** 2
        disc = np.abs(((self.z + self.rng.uniform(0, 26)) % 26.0) - 13.0) < 2.5
        bone = np.where(distance > 9.0**2, _BONE, _MARROW)
        column = np.broadcast_to((distance < 11.0**2), self.image.shape)
        self.image[column] = np.where(disc, 90.0, bone)[column]
        self.label[column] = 0

    def _radius(self, place: np.ndarray, semi: np.ndarray) -> np.ndarray:
        dx, dy, dz = ((axis - c) / s for axis, c, s in zip((self.x, self.y, self.z), place, semi, strict=True))
        return np.asarray(dx * dx + dy * dy + dz * dz)

    def _box(self, place: np.ndarray, semi: np.ndarray) -> tuple[slice, ...]:
        return tuple(
            slice(int(np.searchsorted(axis, c - s)), int(np.searchsorted(axis, c + s, side="right")))
            for axis, c, s in zip(self.axes, place, semi, strict=True)
        )

    def _fill(self, place: np.ndarray, semi: np.ndarray, hu: float, within_cavity: bool = False) -> None:
        place = place + self.shift
        box = self._box(place, semi)
        x, y, z = self.x[box[0]], self.y[:, box[1]], self.z[:, :, box[2]]
        inside = sum(((a - c) / s) ** 2 for a, c, s in zip((x, y, z), place, semi, strict=True)) < 1.0
        if within_cavity:
            cavity = sum((a / s) ** 2 for a, s in zip((x, y, z), _BODY_MM * _CAVITY, strict=True)) < 0.92
            inside &= cavity
        self.image[box][inside] = hu

    def _rimmed(self, place: np.ndarray, semi: np.ndarray, hu: float, value: int = 0, bumps: float = 0.0) -> None:
        """An ellipsoid, its surface bent by slow waves, in a thin rim of fat, so that its edge shows on any ground."""
        place = place + self.shift
        box = self._box(place, (semi + _RIM_MM) * 1.15)
        axes = (self.x[box[0]], self.y[:, box[1]], self.z[:, :, box[2]])
        offsets = [axis - c for axis, c in zip(axes, place, strict=True)]
        tilt = float(self.rng.uniform(-0.25, 0.25))
        dx, dy, dz = offsets[0] + tilt * offsets[2], offsets[1] - tilt * offsets[0], offsets[2]
        radius = np.sqrt((dx / semi[0]) ** 2 + (dy / semi[1]) ** 2 + (dz / semi[2]) ** 2)
        waves = self.rng.uniform(-1.6, 1.6, (3, 3)) / semi
        phases = self.rng.uniform(0, 6.3, 3)
        bent = sum(np.sin(w[0] * dx + w[1] * dy + w[2] * dz + p) for w, p in zip(waves, phases, strict=True))
        radius = radius + bumps / 2 * bent
        body = self._radius(np.zeros(3), _BODY_MM * 0.93)[box] < 1.0
        self.image[box][(radius < 1.0 + _RIM_MM / semi.mean()) & body] = _FAT
        self.label[box][(radius < 1.0 + _RIM_MM / semi.mean()) & body] = 0
        inside = (radius < 1.0) & body
        self.image[box][inside] = hu
        self.label[box][inside] = value


def _stored(canvas: _Canvas, flips: tuple[int, ...]) -> PhantomVolume:
    """Partial volume, noise, and the memory order of the file."""
    image = ndimage.gaussian_filter(canvas.image, 0.55, mode="nearest", truncate=3.0)
    image += canvas.rng.standard_normal(image.shape, dtype=np.float32) * np.float32(_NOISE_HU)
    stored = np.clip(np.rint(image), -1024, 3071).astype(np.int16)
    affine = np.diag([*canvas.spacing, 1.0])
    affine[:3, 3] = [axis[0] for axis in canvas.axes]
    label = canvas.label
    for axis in flips:
        affine[:3, 3] += affine[:3, axis] * (stored.shape[axis] - 1)
        affine[:3, axis] *= -1
        stored, label = np.flip(stored, axis), np.flip(label, axis)
    return PhantomVolume(stored, label, affine)
