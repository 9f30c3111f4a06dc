"""Help in plain text with the options in groups.

Typer groups options only in the boxes that rich draws, and those cut long flags short. Here the
same groups (`rich_help_panel`) become sections.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

__all__ = ["GroupedCommand"]


class GroupedCommand(TyperCommand):
    """A command whose help has a section a group, its general options last."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections, in the order in which their first options were declared."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        general: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                sections["Arguments"].append(record)
            elif group := getattr(parameter, "rich_help_panel", None):
                sections.setdefault(group, []).append(record)
            else:
                general.append(record)
        for title, records in {**sections, "Options": general}.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
