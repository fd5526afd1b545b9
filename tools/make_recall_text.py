"""Write synthetic documents in which what comes later can be predicted only from what came before.

A small teacher trained on plain text alone learns little in-context recall, so that there would be none to lose in distillation.  These
documents state facts about invented names and ask for them again, repeat passages of random words, and continue patterns.

    python tools/make_recall_text.py --output recall.jsonl.gz --num_documents 5000 --words_from text.jsonl.gz
"""

import collections
import contextlib
import gzip
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from megahedge.data.find_sources import iterate_texts
from megahedge.utils.cli import Count, parse_options, run_main
from megahedge.utils.errors import InputError
from megahedge.utils.files import atomic_write, check_output, disk_errors_explained
from megahedge.utils.logging import get_logger

_DEFAULT_WORDS = """
apple arrow autumn basket beach bell bird blanket boat book bottle branch bread bridge brother button candle castle chair child
church circle city clay cloud coat copper corner cotton country cousin curtain dance daughter desert dinner doctor door dream
dress drum dust eagle evening farmer feather fence field finger fire fish flower forest friend garden gate glass gold grain grass
hammer harbor heart hill honey horse house island journey jacket kettle kitchen ladder lamp lantern leaf letter library lion
market meadow milk mirror morning mountain music needle night ocean orange oven paper pencil picture pillow planet pocket pond
potato queen rabbit rain river road rope salt school season shadow sheep ship shoulder silver sister snow soldier song spoon
spring stone story street summer sun table teacher thread tower tree valley village violin wagon wall water wheel whistle window
winter wolf wood wool yard
""".split()  # noqa: SIM905 (140 quoted words are harder to read)
_ONSETS = "b br c ch cl d dr f fl g gr h j k l m n p pr qu r s sh sl st t th tr v w z".split()  # noqa: SIM905
_VOWELS = "a e i o u ai ea ee ia io oa ou".split()  # noqa: SIM905
_CODAS = ["", "", "l", "m", "n", "nd", "r", "rn", "s", "st", "t", "x"]
_WORDS_KEPT = 3000
_LEAST_CHARACTERS, _MOST_CHARACTERS = 1000, 2000

logger = get_logger(__name__)


@dataclass(frozen=True)
class RecallConfig:
    """Options of tools/make_recall_text.py."""

    output: str
    """File to write: .jsonl or .jsonl.gz"""
    num_documents: Count = 5000
    """Documents of 1 to 2 KB each"""
    seed: int = 1234
    """Document i depends on the seed, i, the words and the kinds alone"""
    words_from: tuple[str, ...] = ()
    """Text whose most frequent words are used, in any form that preprocess_owt.py reads; a built-in list where none is given"""
    kinds: tuple[str, ...] = ("codes", "places", "passages", "glossary", "lists", "pairs")
    """Kinds of documents, all equally frequent; there is also `cycles`, one short phrase over and over, for a model to read first"""
    overwrite: bool = False
    """Replace a file that is already there"""

    def __post_init__(self):
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds:
            raise InputError(f"--kinds={' '.join(unknown) or 'nothing'} is not known; use some of {' '.join(KINDS)}")
        if not self.output.endswith((".jsonl", ".jsonl.gz")):
            raise InputError(f"--output={self.output!r} must end in .jsonl or .jsonl.gz")
        if self.num_documents < 1:
            raise InputError(f"--num_documents={self.num_documents} must be at least 1")


class Writer:
    """Draws the parts of one document."""

    def __init__(self, seed: int, index: int, words: list[str]):
        self.random = random.Random(f"{seed}/{index}")
        self.vocabulary = words

    def name(self) -> str:
        """An invented proper name of two or three syllables."""
        syllables = [self.random.choice(_ONSETS) + self.random.choice(_VOWELS) for _ in range(self.random.choice((1, 2)))]
        last = self.random.choice(_ONSETS) + self.random.choice(_VOWELS) + self.random.choice(_CODAS)
        return ("".join(syllables) + last).capitalize()

    def names(self, count: int) -> list[str]:
        """Distinct names."""
        names = {}
        while len(names) < count:
            names[self.name()] = None
        return list(names)

    def words(self, count: int) -> list[str]:
        """Words, with repeats."""
        return self.random.choices(self.vocabulary, k=count)

    def distinct_words(self, count: int) -> list[str]:
        """Words, each once."""
        return self.random.sample(self.vocabulary, count)

    def numbers(self, count: int) -> list[str]:
        """Distinct numbers of three to five digits, so that none can be told from another."""
        low = self.random.choice((100, 1000, 10000))
        return [str(number) for number in self.random.sample(range(low, 10 * low), count)]

    def shuffled(self, items) -> list:
        """A shuffled copy."""
        items = list(items)
        self.random.shuffle(items)
        return items

    def sentence(self, low: int = 6, high: int = 16) -> str:
        """Random words with a capital and a full stop."""
        return " ".join(self.words(self.random.randint(low, high))).capitalize() + "."


_FACTS = (
    ("The code of {key} is {value}.", "What is the code of {key}? {value}."),
    ("{key} keeps number {value}.", "Which number does {key} keep? {value}."),
    ("Room {value} belongs to {key}.", "{key} has room {value}."),
    ("The telephone number of {key} is {value}.", "To reach {key}, call {value}."),
    ("{key}: {value}", "{key}? {value}"),
)
_PLACES = (
    ("{key} lives in {value}.", "In {value} lives {key}."),
    ("{key} travelled to {value} last year.", "The traveller who went to {value} was {key}."),
    ("The mayor of {value} is called {key}.", "{key} is the mayor of {value}."),
    ("{key} was born in {value}.", "Where was {key} born? In {value}."),
    ("{key} sells {word} in {value}.", "Who sells {word} in {value}? It is {key}."),
)


def codes(writer: Writer) -> Iterator[str]:
    """Names with numbers, asked for again in random order, some of them several times."""
    count = writer.random.randint(4, 10)
    pairs = list(zip(writer.names(count), writer.numbers(count), strict=True))
    fact, question = writer.random.choice(_FACTS)
    yield from (fact.format(key=key, value=value) for key, value in pairs)
    while True:
        if writer.random.random() < 0.3:
            yield writer.sentence()
        key, value = writer.random.choice(pairs)
        yield question.format(key=key, value=value)


def places(writer: Writer) -> Iterator[str]:
    """Who is where, told as prose, then retold from the other end in another order."""
    count = writer.random.randint(4, 8)
    facts = list(zip(writer.names(count), writer.names(count), writer.distinct_words(count), strict=True))
    first, second = writer.random.choice(_PLACES)
    yield " ".join(first.format(key=key, value=value, word=word) for key, value, word in facts)
    while True:
        for template in (second, first):
            yield " ".join(template.format(key=key, value=value, word=word) for key, value, word in writer.shuffled(facts))


def passages(writer: Writer) -> Iterator[str]:
    """A passage of random words, repeated word for word with other sentences between."""
    passage = " ".join(writer.sentence(8, 20) for _ in range(writer.random.randint(2, 4)))
    opening = writer.random.choice(("Read this aloud:", "The letter said:", "Copy the lines:", ""))
    while True:
        yield f"{opening} {passage}".strip()
        if writer.random.random() < 0.5:
            yield writer.sentence()


def glossary(writer: Writer) -> Iterator[str]:
    """A word list of an invented language, then sentences translated with it word by word."""
    count = writer.random.randint(6, 12)
    meanings = dict(zip(writer.distinct_words(count), (name.lower() for name in writer.names(count)), strict=True))
    yield from (f"{foreign} means {word}." for word, foreign in meanings.items())
    while True:
        words = writer.random.choices(list(meanings), k=writer.random.randint(3, 6))
        yield f"{' '.join(words)} = {' '.join(meanings[word] for word in words)}"


def lists(writer: Writer) -> Iterator[str]:
    """Several named lists; each is given again whole when its name is called."""
    named = {name: writer.words(writer.random.randint(4, 9)) for name in writer.names(writer.random.randint(2, 4))}
    yield from (f"List {name}: {', '.join(words)}." for name, words in named.items())
    while True:
        name = writer.random.choice(list(named))
        yield f"List {name} again: {', '.join(named[name])}."


def pairs(writer: Writer) -> Iterator[str]:
    """Bare induction: a stream of words in which each key is always followed by its own value."""
    count = writer.random.randint(8, 16)
    words = writer.distinct_words(2 * count)
    followers = list(zip(words[:count], words[count:], strict=True))
    separator = writer.random.choice((" ", ", ", "; "))
    while True:
        yield separator.join(f"{key} {value}" for key, value in writer.shuffled(followers))


def cycles(writer: Writer) -> Iterator[str]:
    """One short phrase over and over.

    For a small model to read first: from these, attention learns within some hundred steps to look for what followed the last time.
    """
    phrase = " ".join(writer.words(writer.random.randint(2, 6)))
    while True:
        yield phrase


KINDS: dict[str, Callable[[Writer], Iterator[str]]] = {
    kind.__name__: kind for kind in (codes, places, passages, glossary, lists, pairs, cycles)
}


def make_document(seed: int, index: int, words: list[str], kinds: tuple[str, ...]) -> str:
    """The document `index`: one of the kinds, lines until it has between 1 and 2 KB."""
    writer = Writer(seed, index, words)
    kind = KINDS[writer.random.choice(kinds)]
    wanted = writer.random.randint(_LEAST_CHARACTERS, _MOST_CHARACTERS)
    joiner = writer.random.choice(("\n", "\n", "\n\n", " "))
    lines, length = [], 0
    for line in kind(writer):
        lines.append(line)
        length += len(line) + len(joiner)
        if length >= wanted:
            break
    return joiner.join(lines)[:_MOST_CHARACTERS]


def frequent_words(inputs: tuple[str, ...]) -> list[str]:
    """The most frequent lower-case words of three to ten letters in a text, alphabetically; the built-in list without a text."""
    if not inputs:
        return _DEFAULT_WORDS
    counts = collections.Counter()
    for text in islice(iterate_texts(inputs, option="words_from"), 2000):
        counts.update(re.findall(r"\b[a-z]{3,10}\b", text))
    by_frequency = sorted(counts, key=lambda word: (-counts[word], word))
    if len(by_frequency) < 100:
        raise InputError(f"--words_from {' '.join(inputs)} has {len(by_frequency)} different words; 100 are needed")
    return sorted(by_frequency[:_WORDS_KEPT])


def _compressed(handle, name: str):
    """The file, gzipped where its name says so; neither the time nor the name of the file goes into the gzip header."""
    if name.endswith(".gz"):
        return gzip.GzipFile(filename="", mode="wb", fileobj=handle, mtime=0)
    return contextlib.nullcontext(handle)


def make_recall_text(config: RecallConfig) -> None:
    """Write `config.num_documents` documents; the same options give the same bytes.

    Raises InputError for an output that exists or cannot be written, and for bad text, RunError for a full disk.
    """
    check_output("output", config.output, config.output, overwrite=config.overwrite)
    words = frequent_words(config.words_from)
    with disk_errors_explained(config.output), atomic_write(config.output) as handle, _compressed(handle, config.output) as out:
        for index in range(config.num_documents):
            out.write(json.dumps({"text": make_document(config.seed, index, words, config.kinds)}).encode() + b"\n")
    logger.info("wrote %s: %d documents", config.output, config.num_documents)


def main() -> None:
    """Entry point."""
    make_recall_text(
        parse_options(RecallConfig, prog="make_recall_text.py", description="Write synthetic documents for in-context recall.")
    )


if __name__ == "__main__":
    run_main(main)
