"""Words and bytes behind scored tokens: what turns a loss per token into figures that other tokenizers can be compared by."""

import dataclasses

import numpy as np

from megahedge.data.indexed_dataset import IndexedDataset


@dataclasses.dataclass(frozen=True)
class TextCounts:
    """Size of a text."""

    words: int
    """Runs of characters between white space."""
    text_bytes: int
    """UTF-8 bytes."""


def count_text(dataset: IndexedDataset, start: int, stop: int, tokenizer, eod_id: int | None) -> TextCounts:
    """Words and bytes of the text that tokens start … stop − 1 of the stream stand for.

    Each document is decoded on its own, cut to the range, and again at each EOD inside it; an EOD stands for no text, although its loss
    is scored.  Where the range begins or ends inside a word or a character, the part counts as one (the character as U+FFFD, 3 bytes).
    """
    starts = dataset.document_starts
    cuts = np.unique(np.clip(starts, start, stop))  # range ends included, as the first and last document start lie at or beyond them
    words = text_bytes = 0
    for first, last in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        for ids in _between_eods(dataset.read(first, last - first), eod_id):
            text = tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            words += len(text.split())
            text_bytes += len(text.encode())
    return TextCounts(words, text_bytes)


def _between_eods(tokens: np.ndarray, eod_id: int | None) -> list[np.ndarray]:
    if eod_id is None:
        return [tokens]
    is_eod = tokens == eod_id
    pieces = np.split(tokens, np.flatnonzero(is_eod[1:] != is_eod[:-1]) + 1)
    return [piece for piece in pieces if len(piece) and piece[0] != eod_id]
