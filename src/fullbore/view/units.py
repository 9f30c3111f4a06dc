"""How times and amounts are printed in pictures: one unit a picture, round ticks.

Everything inside Fullbore is in seconds and bytes; only what a person reads is scaled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["ByteUnit", "TimeUnit", "amount", "byte_unit", "plain", "ticks", "time_unit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUnit:
    """A unit of time: its symbol, and how many seconds it lasts."""

    symbol: str
    seconds: float

    def number(self, time_s: float, *, digits: int = 9) -> str:
        """A time in this unit, without the symbol, to so many significant digits."""
        return plain(time_s / self.seconds, digits=digits)


_UNITS = tuple(
    TimeUnit(symbol=symbol, seconds=seconds)
    for symbol, seconds in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteUnit:
    """A unit of memory: its symbol, and how many bytes it has."""

    symbol: str
    size: int


_BYTE_UNITS = tuple(
    ByteUnit(symbol=symbol, size=size)
    for symbol, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
)


def time_unit(extent_s: float) -> TimeUnit:
    """The unit in which a time axis of this length has readable numbers."""
    return next((unit for unit in _UNITS if extent_s >= unit.seconds), _UNITS[-1])


def byte_unit(size_bytes: float) -> ByteUnit:
    """The binary unit in which so many bytes are a readable number."""
    return next((unit for unit in _BYTE_UNITS if abs(size_bytes) >= unit.size), _BYTE_UNITS[-1])


def plain(value: float, *, digits: int) -> str:
    """A number to so many significant digits, never with an exponent, without trailing zeros."""
    if value == 0.0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text


def ticks(extent_s: float, *, at_most: int) -> list[float]:
    """Round times 0, step, 2 step, … within the extent, at most so many (at least 0 itself)."""
    rough = extent_s / max(1, at_most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= rough * 0.9999)
    return [index * step for index in range(math.floor(extent_s / step * 1.0001) + 1)]


def amount(value: float, unit: str) -> str:
    """A curve's value with its unit: bytes in the binary unit that suits, else the number."""
    if unit != "bytes":
        return plain(value, digits=4)
    chosen = byte_unit(value)
    return f"{plain(value / chosen.size, digits=4)} {chosen.symbol}"
