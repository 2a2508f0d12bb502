"""From a caption to token ids: CLIP's own byte-pair tokenizer, or any `tokenizers` file."""

import gzip
import html
import json
import re
from collections.abc import Callable, Sequence
from hashlib import blake2b
from importlib.resources import files
from itertools import chain, pairwise
from pathlib import Path
from typing import Protocol

import ftfy
import numpy as np
import regex
from ftfy.badness import is_bad

from pennyclip.base.errors import RequestError
from pennyclip.data.order import I64

# Text that ftfy leaves as it is: ASCII without "&" (HTML entities) and without control characters
# other than white space; and a line of common Latin, unless its letters look wrongly decoded.
PLAIN = re.compile(r"[\t\n\f\r -%'-~]*")
LATIN = re.compile(
    r"[ -%'-~\u00a1-\u00ac\u00ae-\u0131\u0134-\u0148\u014a-\u017f\u2013\u2014\u2026\u2212]*"
)

# What ftfy takes for wrongly decoded is at most five letters long and not all ASCII: of a longer
# run of ASCII, both ends are enough to see it.
ASCII_RUN = re.compile(r"([\x00-\x7f]{8})[\x00-\x7f]+([\x00-\x7f]{8})")

# How CLIP cuts a cleaned caption into words (Radford et al. 2021, the released tokenizer).
WORDS = regex.compile(
    r"<start_of_text>|<end_of_text>|'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+",
    regex.IGNORECASE,
)
# The same for a chunk of lower-case ASCII, where the standard library's faster engine will do.
ASCII_WORDS = re.compile(
    r"<start_of_text>|<end_of_text>|'s|'t|'re|'ve|'m|'ll|'d|[a-z]+|[0-9]|[^\sa-z0-9]+"
)

CACHE_SIZE = 1 << 18  # entries, about 45 MB. chosen: holds the words of most sets of captions
CACHE_LENGTH = 48  # letters of the longest text that is kept. chosen: longer than nearly all words


class Tokenizer(Protocol):
    """What turns a caption into token ids."""

    context_length: int
    """Longest caption that the text tower takes, in tokens, start and end tokens included."""
    vocab_size: int
    """One more than the largest id: the rows that the token embedding needs."""
    fingerprint: str
    """blake2b of all that decides the ids; the context length is not part of it."""

    def encode(self, text: str) -> list[int]:
        """The whole caption with its start and end tokens, never truncated."""
        ...


def truncate(ids: list[int], length: int) -> list[int]:
    """At most `length` >= 1 ids of a whole caption; the last one stays its end token."""
    return ids if len(ids) <= length else [*ids[: length - 1], ids[-1]]


def padded_length(longest: int, limit: int) -> int:
    """`longest` rounded up to 8, so that compiled code meets few lengths; at most `limit`."""
    return min(-(-longest // 8) * 8, limit)


def pad(captions: Sequence[Sequence[int]], limit: int) -> tuple[I64, I64]:
    """Captions of unequal length as one array.

    Args:
        captions: B lists of ids.
        limit: L is the `padded_length` of the longest, never more than this: the tower's context
            length.

    Returns:
        tokens [B, L], filled with 0 behind each caption, and lengths [B]. Only the lengths say
        what is padding: 0 is also CLIP's token for "!".

    Raises:
        ValueError: a caption is longer than L; truncate first.
    """
    lengths = np.array([len(ids) for ids in captions], np.int64)
    longest = int(lengths.max(initial=0))
    width = padded_length(longest, limit)
    if longest > width:
        raise ValueError(f"a caption of {longest} ids does not fit into {width}: truncate first")
    tokens = np.zeros((len(captions), width), np.int64)
    for row, ids in zip(tokens, captions, strict=True):
        row[: len(ids)] = ids
    return tokens, lengths


class ClipTokenizer:
    """CLIP's byte-pair tokenizer (Radford et al. 2021, section 2.4; Sennrich et al. 2016).

    Gives the ids of open_clip's `SimpleTokenizer`, several times faster: words seen before come
    from a cache, and the clean-up of text runs only where it can change something.
    """

    START, END = 49406, 49407

    def __init__(self, context_length: int = 77) -> None:
        self.context_length = context_length
        self.vocab_size = 49408
        packed = files("pennyclip.data").joinpath("bpe", "clip_merges.txt.gz").read_bytes()
        listing = gzip.decompress(packed)
        self.fingerprint = blake2b(b"clip, lower case\n" + listing, digest_size=16).hexdigest()

        # The vocabulary: 256 bytes, the same at a word's end, then the merges in order of rank.
        # A merged pair's id thus stands for its rank, and the least id is the merge to do first.
        self._letters = _byte_letters()
        self._ids = {letter: number for number, letter in enumerate(self._letters.values())}
        self._ids |= {letter + "</w>": number + 256 for letter, number in self._ids.items()}
        self._merges: list[dict[int, int]] = [{} for _ in range(self.vocab_size)]
        for line in listing.decode("utf-8").splitlines():
            left, right = line.split(" ")
            number = len(self._ids)
            self._merges[self._ids[left]][self._ids[right]] = number
            self._ids[left + right] = number
        self._ids |= {"<start_of_text></w>": self.START, "<end_of_text></w>": self.END}
        self._known = _Chunks(self._encode_chunk)

    def encode(self, text: str) -> list[int]:
        """[START, ..., END]: ids of the whole caption."""
        chunks = _clean(text).split()  # no word of WORDS holds white space
        return [self.START, *chain.from_iterable(map(self._known.__getitem__, chunks)), self.END]

    def _encode_chunk(self, chunk: str) -> tuple[int, ...]:
        if not chunk.isascii():
            words = WORDS.findall(chunk)
        elif chunk.isalpha():
            return self._merge(chunk)
        else:
            words = ASCII_WORDS.findall(chunk)
        # A chunk of one word is the word; what is long would only fill the cache.
        known = len(words) > 1 and len(chunk) <= CACHE_LENGTH
        encode = self._known.__getitem__ if known else self._merge
        ids: tuple[int, ...] = ()
        for word in words:
            ids += encode(word)
        return ids

    def _merge(self, word: str) -> tuple[int, ...]:
        letters = word
        if not word.isascii():
            letters = word.encode("utf-8").decode("latin-1").translate(self._letters)
        whole = self._ids.get(letters + "</w>")
        if whole is not None:  # the merges lead to every word of the vocabulary; a test shows it
            return (whole,)
        ids = list(map(self._ids.__getitem__, letters))
        ids[-1] += 256
        merges, none = self._merges, self.vocab_size
        found = [merges[left].get(right, none) for left, right in pairwise(ids)]
        while found and (first := min(found)) < none:
            # The leftmost is enough: what needs the merged pair stands later in the ranks.
            at = found.index(first)
            ids[at] = first
            del ids[at + 1], found[at]
            if at > 0:
                found[at - 1] = merges[ids[at - 1]].get(first, none)
            if at < len(found):
                found[at] = merges[first].get(ids[at + 1], none)
        return tuple(ids)


class _Chunks(dict[str, tuple[int, ...]]):
    """Ids of the chunks met before; of another, they are worked out when it is looked up."""

    def __init__(self, encode: Callable[[str], tuple[int, ...]]) -> None:
        self._encode = encode

    def __missing__(self, chunk: str) -> tuple[int, ...]:
        ids = self._encode(chunk)
        if len(chunk) <= CACHE_LENGTH:  # longer ones, such as links, are hardly met again
            if len(self) >= CACHE_SIZE:
                self.clear()
            self[chunk] = ids
        return ids


def _clean(text: str) -> str:
    """Repaired, unescaped and in lower case, like CLIP's; white space is left for `split`."""
    if text.isascii() and text.isprintable():
        plain = "&" not in text
    elif LATIN.fullmatch(text):
        plain = not _is_bad(text)
    else:
        plain = PLAIN.fullmatch(text) is not None
    if not plain:
        text = ftfy.fix_text(text)
        if "&" in text:
            text = html.unescape(html.unescape(text))
    return text.lower()


def _is_bad(text: str) -> bool:
    """Whether ftfy would take a text for wrongly decoded."""
    return is_bad(ASCII_RUN.sub(r"\1\2", text))


def _byte_letters() -> dict[int, str]:
    """The printable letter that stands for each byte in the merges, in the vocabulary's order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    return letters | {byte: chr(256 + number) for number, byte in enumerate(others)}


class JsonTokenizer:
    """A transformers tokenizer, read from the `tokenizer.json` in its folder (extra `hf`).

    The file's own truncation and padding are switched off.

    Raises:
        RequestError: the `tokenizers` package, the file, or an end token is missing.
    """

    def __init__(self, folder: str | Path, context_length: int) -> None:
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise RequestError(
                "a transformers text tower needs the package `tokenizers`, which is not "
                "installed. Install it with: pip install 'pennyclip[hf]'"
            ) from error
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise RequestError(
                f"expected a transformers tokenizer at {file}, and there is no such file. Give "
                "the folder of a model saved with a fast tokenizer (it holds tokenizer.json)."
            )
        source = file.read_text(encoding="utf-8")
        try:
            self._backend = Backend.from_str(source)
        except Exception as error:  # the library raises plain Exception
            raise RequestError(
                f"{file} is not a tokenizer that `tokenizers` reads: {error}. Save it again with "
                "`save_pretrained`, or update the package."
            ) from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self.context_length = context_length
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        rules = json.loads(source) | {"truncation": None, "padding": None}
        canonical = json.dumps(rules, sort_keys=True).encode()
        self.fingerprint = blake2b(canonical, digest_size=16).hexdigest()

        probe = self._backend.encode("a")
        if not probe.ids or not probe.special_tokens_mask[-1]:
            raise RequestError(
                f"{file} adds no end token behind a caption (such as [SEP] or </s>), and a "
                "caption that is cut to length must keep one. Take an encoder's tokenizer, or "
                "add a post_processor with an end token to the file."
            )

    def encode(self, text: str) -> list[int]:
        """Ids of the whole caption, with what the post-processor adds."""
        return self._backend.encode(text).ids
