"""What ``asyncrl engines`` prints: each engine as it is in this environment, and what is refused when options are read.

Loads without torch; an engine whose module does not import shows why.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.config.refusals import REFUSED_VALUES, Refusal
from asyncrl.learner.registry import EngineRegistry

__all__ = ["EngineRow", "as_json", "as_text", "engine_rows"]

_VALUES = ("learner.engine", "learner.device", "learner.attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """One engine class here.

    Attributes:
        backend: value of ``learner.engine``.
        model_types: what it is registered for; empty where its module does not import.
        devices: of its keys, with the vendor where one is named.
        import_error: the true error and the extra to install; empty where the module imports.
        models, layouts, refused: what the class declares (:class:`~asyncrl.learner.capabilities.Capabilities`).
    """

    backend: str
    model_types: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    import_error: str = ""
    models: str = ""
    layouts: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()


def engine_rows() -> list[EngineRow]:
    """Imports every backend; a row for each class that registered itself, and one for each module that does not import."""
    return [row for backend in EngineRegistry.backends() for row in _rows_of(backend)]


def as_text(rows: list[EngineRow]) -> str:
    """The matrix for people."""
    return "".join(f"{title}\n" + "".join(f"  {line}\n" for line in lines) for title, lines in (*map(_block, rows), _refused_values()))


def as_json(rows: list[EngineRow]) -> dict[str, Any]:
    """The same as plain values: ``engines``, and ``refused`` by ``option=value``."""
    refused = {f"{option}={value}": asdict(refusal) for option, value, refusal in _values()}
    return {"engines": [asdict(row) for row in rows], "refused": refused}


def _rows_of(backend: str) -> list[EngineRow]:
    error = EngineRegistry.load(backend)
    keys = EngineRegistry.keys(backend)
    if not keys:
        return [EngineRow(backend=backend, import_error=error)]
    rows = []
    for engine in dict.fromkeys(map(EngineRegistry.engine_of, keys)):
        own = [key for key in keys if EngineRegistry.engine_of(key) is engine]
        rows.append(
            EngineRow(
                backend=backend,
                model_types=tuple(dict.fromkeys(key.model_type for key in own)),
                devices=tuple(dict.fromkeys(f"{key.device} ({key.vendor})" if key.vendor else key.device for key in own)),
                import_error=error,
                models=engine.capabilities.models,
                layouts=engine.capabilities.layouts,
                refused=engine.capabilities.refused,
            )
        )
    return rows


def _block(row: EngineRow) -> tuple[str, list[str]]:
    imports = f"imports      {'no: ' + row.import_error if row.import_error else 'yes'}"
    if not row.model_types:
        return f"learner.engine={row.backend}", [imports]
    return f"learner.engine={row.backend}", [
        f"registered   {', '.join(row.model_types)} on {', '.join(row.devices)}",
        imports,
        f"models       {row.models}",
        f"layouts      {', '.join(row.layouts)}",
        *(f"refused      {_line(refusal.combination, refusal)}" for refusal in row.refused),
    ]


def _values() -> list[tuple[str, str, Refusal]]:
    return [(option, value, refusal) for option in _VALUES for value, refusal in REFUSED_VALUES[option].items()]


def _refused_values() -> tuple[str, list[str]]:
    together: dict[tuple[str, Refusal], list[str]] = {}
    for option, value, refusal in _values():
        together.setdefault((option, refusal), []).append(value)
    return "refused values", [_line(f"{option}={', '.join(values)}", refusal) for (option, refusal), values in together.items()]


def _line(what: str, refusal: Refusal) -> str:
    return f"{what}: {refusal.reason}; nearest that works: {refusal.nearest}"
