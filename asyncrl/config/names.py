"""Names of options: listing them, and refusing others with the nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, create_model
from pydantic.fields import FieldInfo

from asyncrl.config.refusals import refuse_name
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

__all__ = ["check_name", "option_names", "options"]


def options() -> Iterator[tuple[str, FieldInfo]]:
    """Every option as (dotted name, pydantic field), in the order of the schema."""
    for name, field in Config.model_fields.items():
        group = field.annotation
        if isinstance(group, type) and issubclass(group, BaseModel):
            for inner, inner_field in group.model_fields.items():
                yield f"{name}.{inner}", inner_field
        else:
            yield name, field


def option_names() -> list[str]:
    """Dotted names of all options."""
    return [name for name, _ in options()]


def check_name(name: str) -> None:
    """Raises unless ``name`` is an option.

    Raises:
        UnsupportedError: left out on purpose, with the reason and the nearest that works.
        ConfigError: unknown, with the nearest names.
    """
    known = option_names()
    if name in known or name.startswith("task.dataset_args"):
        return
    refuse_name(name)
    leaf = name.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    leaves = difflib.get_close_matches(leaf, {k.rsplit(".", 1)[-1] for k in known}, n=1, cutoff=0.7)
    near += [k for k in known if k.rsplit(".", 1)[-1] in leaves and k not in near]
    hint = f"; did you mean {' or '.join(near)}?" if near else "; `asyncrl config` lists every option"
    raise ConfigError(f"unknown option {name}{hint}", option=name)


def range_text(field: FieldInfo) -> str:
    """The limits of an option in words: choices, or an interval; empty when any value of its type will do."""
    schema: dict[str, Any] = _json_schema(field)
    if "enum" in schema:
        return " | ".join(str(choice) for choice in schema["enum"])
    low = [f">= {schema['minimum']:g}"] if "minimum" in schema else []
    low += [f"> {schema['exclusiveMinimum']:g}"] if "exclusiveMinimum" in schema else []
    high = [f"<= {schema['maximum']:g}"] if "maximum" in schema else []
    high += [f"< {schema['exclusiveMaximum']:g}"] if "exclusiveMaximum" in schema else []
    return ", ".join(low + high) or str(schema.get("type", ""))


def _json_schema(field: FieldInfo) -> dict[str, Any]:
    definition: Any = (field.annotation, field)
    schema: dict[str, Any] = create_model("Option", value=definition).model_json_schema()["properties"]["value"]
    return schema
