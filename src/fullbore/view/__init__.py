"""Pictures of timelines: the terminal grid, SVG, the HTML report and Perfetto traces.

A picture knows timelines and nothing else, so a prediction and a measurement are drawn alike.
Import the drawer that is wanted (`from fullbore.view import svg`): each brings its own library.
"""

from fullbore.view.panel import Panel

__all__ = ["Panel"]
