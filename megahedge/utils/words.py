"""Lists as error messages say them."""

from collections.abc import Iterable


def either(values: Iterable) -> str:
    """`1, 2 or 4`."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def divisors(count: int, most: int = 12) -> list[int]:
    """The divisors of `count` in rising order, the first `most` of them."""
    return [size for size in range(1, count + 1) if count % size == 0][:most]


def ranks_have(ranks: list[int], most: int = 8) -> str:
    """`rank 3 has`; `ranks 1, 3 have`, the first `most` of them."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {', '.join(map(str, ranks[:most]))}{' and more' if len(ranks) > most else ''} have"
