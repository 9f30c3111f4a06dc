"""The colours of the pictures, one definition for terminal, SVG and HTML.

One hue a kind, told apart by people with any usual colour vision and legible on light and dark
ground alike. A rank's further stages are lighter shades of the same hue.
"""

from __future__ import annotations

from fullbore.ir import Kind

__all__ = [
    "CURVE",
    "IDLE_DARK",
    "IDLE_LIGHT",
    "IDLE_TERMINAL",
    "LABELS",
    "ink",
    "rgb",
    "shade",
    "shades_of",
]

_HUES = {
    Kind.F: "#2f6bd0",
    Kind.B: "#e07b1f",
    Kind.I: "#c2336f",
    Kind.W: "#177f5e",
    Kind.R: "#9159e6",
    Kind.OFFLOAD: "#5f6410",
    Kind.RELOAD: "#a8a32a",
    Kind.SEND_F: "#2f6bd0",
    Kind.RECV_F: "#7fa6e6",
    Kind.SEND_B: "#e07b1f",
    Kind.RECV_B: "#efb57f",
}
LABELS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward, input gradient",
    Kind.W: "backward, weight gradient",
    Kind.R: "recomputation of a forward",
    Kind.OFFLOAD: "copy to the host",
    Kind.RELOAD: "copy back from the host",
    Kind.SEND_F: "send of an activation",
    Kind.RECV_F: "wait for an activation",
    Kind.SEND_B: "send of a gradient",
    Kind.RECV_B: "wait for a gradient",
}
CURVE = "#8a63d2"
IDLE_LIGHT, IDLE_DARK, IDLE_TERMINAL = "#e4e7ec", "#2b313a", "#585f69"
_LIGHTEST = 0.5  # how far the last chunk is mixed with white
_DARK_INK, _LIGHT_INK = "#0d1520", "#ffffff"


def shade(kind: Kind, *, chunk: int, chunks: int) -> str:
    """The colour "#rrggbb" of a kind in a rank's chunk-th stage of `chunks`."""
    if kind >= Kind.OFFLOAD or chunks <= 1:
        return _HUES[kind]
    share = _LIGHTEST * chunk / (chunks - 1)
    mixed = (round(part + (255 - part) * share) for part in rgb(_HUES[kind]))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def shades_of(kind: Kind, chunks: int) -> list[str]:
    """The two ends of a kind's shades for a legend, or the one colour that it has."""
    ends = [shade(kind, chunk=chunk, chunks=chunks) for chunk in (0, chunks - 1)]
    return list(dict.fromkeys(ends))


def ink(ground: str) -> str:
    """The colour of text on a ground "#rrggbb": of black and white the one that reads better."""
    luminance = _luminance(ground)
    on_white = 1.05 / (luminance + 0.05)
    on_black = (luminance + 0.05) / (_luminance(_DARK_INK) + 0.05)
    return _LIGHT_INK if on_white >= on_black else _DARK_INK


def rgb(color: str) -> tuple[int, ...]:
    """Red, green and blue of "#rrggbb", 0 to 255 each."""
    return tuple(bytes.fromhex(color[1:]))


def _luminance(color: str) -> float:
    """Relative luminance as WCAG 2.2 defines it."""
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in (value / 255 for value in rgb(color))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
