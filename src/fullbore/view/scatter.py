"""Points of two quantities, as text and as SVG: what is best in both forms a staircase."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from fullbore.view.units import plain

__all__ = ["Point", "scatter_svg", "scatter_text"]

_COLUMNS, _ROWS = 64, 14
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _EDGE = 860, 420, 70, 50, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point, less being better in x and y. front: whether no other is better in both.

    label: what it is.
    """

    x: float
    y: float
    front: bool
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """From a quantity to a share, 0 to 1, of the picture's width or height."""

    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> _Axis:
        low, high = min(values), max(values)
        room = (high - low) * 0.04 or abs(high) * 0.04 or 1.0
        return _Axis(low=low - room, high=high + room)

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)

    def ticks(self, at_most: int) -> list[float]:
        """Round values at even distances, no more than so many."""
        rough = (self.high - self.low) / at_most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.9999)
        first = math.ceil(self.low / step)
        return [step * k for k in range(first, math.floor(self.high / step) + 1)]


def scatter_text(points: Sequence[Point], *, x: str, y: str) -> str:
    """The points as characters: * for the front, · for others."""
    across, up = _Axis.of([p.x for p in points]), _Axis.of([p.y for p in points])
    grid = [[" "] * _COLUMNS for _ in range(_ROWS)]
    for point in sorted(points, key=lambda p: p.front):
        column = min(_COLUMNS - 1, int(across.share(point.x) * _COLUMNS))
        row = min(_ROWS - 1, int(up.share(point.y) * _ROWS))
        grid[_ROWS - 1 - row][column] = "*" if point.front else "·"
    labels = [plain(up.high, digits=3), *[""] * (_ROWS - 2), plain(up.low, digits=3)]
    width = max(map(len, labels))
    lines = [
        f"{label:>{width}} │{''.join(row).rstrip()}"
        for label, row in zip(labels, grid, strict=True)
    ]
    left, right = plain(across.low, digits=3), plain(across.high, digits=3)
    base = " " * width + " └" + "─" * _COLUMNS
    foot = " " * (width + 2) + left + right.rjust(_COLUMNS - len(left))
    return "\n".join(
        [f"{y} (*: none is better in both)", *lines, base, foot, f"{x:>{width + 2 + _COLUMNS}}"]
    )


def scatter_svg(points: Sequence[Point], *, x: str, y: str, title: str) -> str:
    """The points as an SVG element; each says what it is when it is pointed at."""
    across, up = _Axis.of([p.x for p in points]), _Axis.of([p.y for p in points])

    def at(point: Point) -> tuple[float, float]:
        return _place(across, point.x, up, point.y)

    front = sorted((p for p in points if p.front), key=lambda p: p.x)
    dots = "".join(_dot(point, at(point)) for point in sorted(points, key=lambda p: p.front))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}" '
        'style="width:100%;height:auto;font:12px system-ui,sans-serif">'
        f"<title>{escape(title)}</title>{_axes(across, up, x, y)}"
        f'<path d="{_stairs([at(p) for p in front])}" fill="none" stroke="#2f6bd0"/>{dots}</svg>'
    )


def _place(across: _Axis, x: float, up: _Axis, y: float) -> tuple[float, float]:
    right = _LEFT + across.share(x) * (_WIDTH - _LEFT - _EDGE)
    return right, _EDGE + (1 - up.share(y)) * (_HEIGHT - _BOTTOM - _EDGE)


def _dot(point: Point, at: tuple[float, float]) -> str:
    color, size = ("#2f6bd0", 5) if point.front else ("#8a93a0", 4)
    return (
        f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{size}" fill="{color}">'
        f"<title>{escape(point.label)}</title></circle>"
    )


def _stairs(corners: Sequence[tuple[float, float]]) -> str:
    if not corners:
        return ""
    path = [f"M{corners[0][0]:.1f} {corners[0][1]:.1f}"]
    path += [f"H{right:.1f}V{down:.1f}" for right, down in corners[1:]]
    return "".join(path)


def _axes(across: _Axis, up: _Axis, x: str, y: str) -> str:
    parts = []
    for value in across.ticks(8):
        right, _ = _place(across, value, up, up.low)
        parts.append(
            f'<text x="{right:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle" '
            f'fill="currentColor">{plain(value, digits=6)}</text>'
        )
    for value in up.ticks(6):
        _, down = _place(across, across.low, up, value)
        parts.append(
            f'<text x="{_LEFT - 8}" y="{down + 4:.1f}" text-anchor="end" '
            f'fill="currentColor">{plain(value, digits=6)}</text>'
            f'<path d="M{_LEFT} {down:.1f}H{_WIDTH - _EDGE}" stroke="currentColor" opacity=".12"/>'
        )
    frame = f"M{_LEFT} {_EDGE}V{_HEIGHT - _BOTTOM}H{_WIDTH - _EDGE}"
    parts.append(f'<path d="{frame}" fill="none" stroke="currentColor" opacity=".5"/>')
    parts.append(
        f'<text x="{_WIDTH - _EDGE}" y="{_HEIGHT - 8}" text-anchor="end" fill="currentColor">'
        f'{escape(x)}</text><text x="8" y="12" fill="currentColor">{escape(y)}</text>'
    )
    return "".join(parts)
