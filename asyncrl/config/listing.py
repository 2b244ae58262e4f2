"""The table that ``asyncrl config`` prints."""

from __future__ import annotations

import json

from asyncrl.config.names import options, range_text
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

__all__ = ["listing"]


def listing(group: str = "") -> str:
    """Every option with default, range, unit and meaning, one line each.

    Args:
        group: only options of this group; empty: all.

    Raises:
        ConfigError: no such group, with the valid ones.
    """
    rows = []
    for name, field in options():
        if group and name.partition(".")[0] != group:
            continue
        unit = (field.json_schema_extra or {}).get("unit", "") if isinstance(field.json_schema_extra, dict) else ""
        rows.append((name, json.dumps(field.default), range_text(field), str(unit), field.description or ""))
    if not rows:
        raise ConfigError(f"there is no group {group!r}; the groups are {', '.join(Config.model_fields)}")
    heads = ("option", "default", "range", "unit", "meaning")
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(4)]
    lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in [heads, *rows]]
    return "\n".join(line.rstrip() for line in lines) + "\n"
