"""How long a dataset's captions are, which of them repeat, and whether a tokenizer suits them."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pennyclip.data.index import Dataset
from pennyclip.data.order import I64
from pennyclip.data.text import Tokenizer
from pennyclip.data.tokens import TokenStore

SAMPLE = 2000  # captions. chosen: their mean is within 3 % of all captions'
UNUSUAL = 2.0
"""Tokens a word above which a tokenizer hardly suits the captions. Measured with CLIP's and BERT's
English vocabularies: English 1.2 to 1.4, lists of keywords up to 1.8, French and Spanish 1.6 (not
told apart), German 2.4, Finnish 3, Russian 6, Chinese, which has no spaces, 27 and more."""


@dataclass(frozen=True)
class Sizes:
    """[captions] of all, in the order of their numbers."""

    words: I64
    characters: I64


def caption_sizes(dataset: Dataset) -> Sizes:
    """Words and characters of every caption."""
    captions = pc.list_flatten(dataset.table("captions")["captions"])
    words = pc.list_value_length(pc.utf8_split_whitespace(pc.utf8_trim_whitespace(captions)))
    return Sizes(
        words.to_numpy().astype(np.int64), pc.utf8_length(captions).to_numpy().astype(np.int64)
    )


def repeated(captions: pa.ChunkedArray, most: int) -> list[tuple[str, int]]:
    """The captions that occur most often, more than once, in lower case with single spaces."""
    plain = pc.utf8_lower(pc.utf8_trim_whitespace(captions))
    plain = pc.replace_substring_regex(plain, r"\s+", " ")
    counts = pc.value_counts(plain)
    values, numbers = counts.field("values"), counts.field("counts")
    order = np.argsort(-numbers.to_numpy(), kind="stable")[:most].tolist()
    return [(values[i].as_py(), numbers[i].as_py()) for i in order if numbers[i].as_py() > 1]


def tokens_per_word(captions: list[str], tokenizer: Tokenizer) -> float:
    """How many tokens a tokenizer makes of a word, on the whole."""
    own = len(tokenizer.encode(""))
    tokens = sum(len(tokenizer.encode(text)) - own for text in captions)
    return tokens / max(1, sum(len(text.split()) for text in captions))


def token_notes(
    tokens: TokenStore, tokenizer: Tokenizer, context_length: int, captions: list[str]
) -> list[str]:
    """What people should know before a run: captions that are cut, and a language that hardly fits.

    Args:
        tokens: of all captions of the dataset.
        captions: some of them.
    """
    notes = []
    if tokens.truncated(context_length)[0]:
        notes.append(tokens.truncation_report(context_length))
    ratio = tokens_per_word(captions, tokenizer)
    if ratio > UNUSUAL:
        notes.append(
            f"warning: {ratio:.1f} tokens a word, where English has 1.3: the tokenizer hardly "
            "knows the captions' language, and its text tower has hardly seen it. The recipe "
            "multilingual-text reads about a hundred languages."
        )
    return notes


def sample(dataset: Dataset, rows: I64) -> list[str]:
    """The first captions of rows spread evenly over some."""
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(SAMPLE, len(rows))).astype(int))
    return [dataset.captions(int(row))[0] for row in rows[chosen]]
