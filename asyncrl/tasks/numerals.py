"""Numbers inside text: thousands separators, signs, decimals, and the ``#### 42`` of GSM8K."""

from __future__ import annotations

import re
from decimal import Decimal

__all__ = ["after_marker", "last_number", "whole_number"]

_MARKER = "####"
_MAX_DIGITS = 400
_BODY = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_WHOLE = re.compile(rf"([-+\u2212]?)\s?\$?({_BODY})")
_INSIDE = re.compile(rf"(?<![\w.])([-+\u2212]?)\$?({_BODY})")


def after_marker(text: str) -> str:
    """The text after the last ``####``, or all of it, without outer white space.

    Example:
        >>> after_marker("6 * 7 = 42\\n#### 42 ")
        '42'
    """
    return text.rpartition(_MARKER)[2].strip()


def whole_number(text: str) -> Decimal | None:
    """The number that the whole text is, or None.

    Example:
        >>> whole_number(" 4,000 "), whole_number("-$2.50"), whole_number("4 apples")
        (Decimal('4000'), Decimal('-2.50'), None)
    """
    match = _WHOLE.fullmatch(text.strip())
    return _value(match) if match else None


def last_number(text: str) -> Decimal | None:
    """The first number after the last ``####``, or else the last number of the text.

    Example:
        >>> last_number("so 3 + 4 = 7."), last_number("#### 1,234 because 5"), last_number("none")
        (Decimal('7'), Decimal('1234'), None)
    """
    if _MARKER in text:
        match = _INSIDE.search(text.rpartition(_MARKER)[2])
        return _value(match) if match else None
    matches = list(_INSIDE.finditer(text))
    return _value(matches[-1]) if matches else None


def _value(match: re.Match[str]) -> Decimal | None:
    sign, digits = match.groups()
    if len(digits) > _MAX_DIGITS:
        return None
    value = Decimal(digits.replace(",", ""))
    return value if sign in ("", "+") else -value
