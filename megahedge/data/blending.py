"""Several corpora with weights as one stream of samples, without an index.

Corpora are merged two at a time, along the Huffman tree of their weights.  Between two corpora of weights a and b the first has served
floor(q * a / (a + b) + 1/2) of the first q samples: within 1/2 of its share at every q.  So the blend of a position is a handful of
divisions, is exact (weights are fractions), and does not depend on how long the run is.  A level's deviation shrinks with the ratio of the
weights on the way down, and in a Huffman tree these grow at least as fast as Fibonacci's numbers: a corpus is at most 1 sample off its
share with two or three corpora, and less than 1.7 with any number.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megahedge.utils.errors import InputError


@dataclass(frozen=True)
class _Node:
    """A corpus, or a merge of two nodes."""

    weight: Fraction
    corpus: int | None = None
    children: tuple["_Node", "_Node"] | None = None

    def first_count(self, position: int) -> int:
        """How many of this node's first `position` samples come from its first child."""
        share = self.children[0].weight / self.weight
        return (2 * position * share.numerator + share.denominator) // (2 * share.denominator)


class Blend:
    """Maps a position of the blended stream to (corpus, position within that corpus).

    weights: positive numbers, one a corpus; only their ratios matter.
    Raises InputError for none, or one that is not positive and finite.
    """

    def __init__(self, weights: Sequence[float]):
        if not weights:
            raise InputError("a blend needs at least one corpus")
        nodes = [_Node(_fraction(weight), corpus) for corpus, weight in enumerate(weights)]
        order = itertools.count()  # makes the tree a function of the weights and their order where weights are equal
        heap = [(node.weight, next(order), node) for node in nodes]
        heapq.heapify(heap)
        while len(heap) > 1:
            (_, _, light), (_, _, heavy) = heapq.heappop(heap), heapq.heappop(heap)
            merged = _Node(light.weight + heavy.weight, children=(heavy, light))
            heapq.heappush(heap, (merged.weight, next(order), merged))
        self._root = heap[0][2]
        self.shares = [float(node.weight / self._root.weight) for node in nodes]

    def locate(self, position: int) -> tuple[int, int]:
        """(corpus, k): the sample at `position` is the corpus's k-th."""
        node = self._root
        while node.children:
            before = node.first_count(position)
            takes_first = node.first_count(position + 1) > before
            node = node.children[0 if takes_first else 1]
            position = before if takes_first else position - before
        return node.corpus, position

    def counts(self, num_samples: int) -> list[int]:
        """How many of the first `num_samples` samples each corpus serves."""
        counts = [0] * len(self.shares)
        stack = [(self._root, num_samples)]
        while stack:
            node, count = stack.pop()
            if node.children:
                first = node.first_count(count)
                stack += [(node.children[0], first), (node.children[1], count - first)]
            else:
                counts[node.corpus] = count
        return counts


def _fraction(weight: float) -> Fraction:
    """The decimal number that a user wrote, not its binary neighbour."""
    try:
        valid = 0 < float(weight) < float("inf")  # before the fraction, which is exact whatever the exponent
    except ValueError:
        valid = False
    if not valid:
        raise InputError(f"--data_path: the blend weight {weight} must be a positive number")
    return Fraction(str(weight))


def parse_data_path(data_path: str | Sequence[str]) -> list[tuple[float, str]]:
    """(weight, prefix) of each corpus in `PREFIX`, `0.7 A 0.3 B` or the same as a list.

    Raises InputError for weights without prefixes, or a prefix given twice.
    """
    words = [data_path] if isinstance(data_path, str) else list(data_path)
    if len(words) == 1:
        single = words[0].strip()
        words = single.split() if _is_number(single.split(" ")[0]) else [single]
    if len(words) == 1 and words[0]:
        return [(1.0, words[0])]
    weights, prefixes = words[0::2], words[1::2]
    if not words[0:1] or len(weights) != len(prefixes) or not all(map(_is_number, weights)):
        raise InputError(f"--data_path={' '.join(words)!r}: write one prefix, or a weight before each: 0.7 A 0.3 B")
    repeated = {prefix for prefix in prefixes if prefixes.count(prefix) > 1}
    if repeated:
        raise InputError(f"--data_path names {sorted(repeated)[0]} twice; add up its weights instead")
    for weight in weights:
        _fraction(weight)
    return [(float(weight), prefix) for weight, prefix in zip(weights, prefixes, strict=True)]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
