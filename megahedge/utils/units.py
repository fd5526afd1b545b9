"""Counts as people write them: 1e9, 1B, 300M, 1.5K."""

from megahedge.utils.errors import InputError

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def parse_count(text: str | int | float) -> int:
    """Whole number from `1e9`, `1B`, `300M`, `1_000` or a plain number.

    Raises InputError for anything that is not a whole number.
    """
    if isinstance(text, (int, float)):
        value = float(text)
        number, scale = value, 1
    else:
        stripped = text.strip().replace("_", "")
        suffix = stripped[-1:].upper() if stripped[-1:].isalpha() else ""
        scale = _SUFFIXES.get(suffix)
        try:
            number = float(stripped[: len(stripped) - len(suffix)])
        except ValueError:
            number = None
        if scale is None or number is None:
            raise InputError(f"'{text}' is not a count; write it like 300M, 1B, 1e9 or 1500000")
    exact = round(number * scale) if abs(number) != float("inf") and number == number else None
    if exact is None or abs(number * scale - exact) > 1e-6 * max(1.0, abs(exact)):
        raise InputError(f"'{text}' is not a whole number; write it like 300M, 1B, 1e9 or 1500000")
    return exact


def format_count(count: int | float) -> str:
    """`format_count(1_014_000_000)` is `1.01B`; below a thousand the plain number."""
    for suffix, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if abs(count) >= scale:
            return f"{count / scale:.3g}{suffix}"
    return f"{count:g}"


def format_bytes(count: int) -> str:
    """`format_bytes(3 << 29)` is `1.5 GiB`."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


def format_seconds(seconds: float) -> str:
    """`1d 02:03:04`, without the days where there are none."""
    days, rest = divmod(int(seconds), 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}d {clock}" if days else clock
