"""What a schedule must satisfy, one small function a law, and what its links must carry."""

from fullbore.verify.links import LinkUse, links, window

__all__ = ["LinkUse", "links", "window"]
