"""Write figures and paths as a reader wants them."""

from __future__ import annotations

from pathlib import PurePath


def write_count(number: int) -> str:
    """Write a whole number with commas.

    Args:
        number: any size.
    """
    return f"{number:,}"


def write_large(number: float) -> str:
    """Write a number with three digits and a letter for thousands, millions or billions.

    Args:
        number: not negative.
    """
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:,.0f}"


def write_percent(fraction: float) -> str:
    """Write a share so that little is not taken for nothing, nor almost all for all.

    Args:
        fraction: from 0 to 1.
    """
    if 0 < fraction < 0.0005:
        return "< 0.1%"
    if 0.9995 <= fraction < 1:
        return "> 99.9%"
    return f"{fraction:.1%}"


def shorten_path(path: str) -> str:
    """Keep the last parts of a long path.

    Args:
        path: a file.
    """
    parts = PurePath(path).parts
    return path if len(parts) <= 4 else "/".join(("…", *parts[-3:]))
