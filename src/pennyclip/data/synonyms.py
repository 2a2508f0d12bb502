"""Synonyms of English words, from a folder with WordNet's database files.

    index.noun  one line a word: its senses, the most frequent first, as offsets into data.noun
    data.noun   one line a sense: the words that have it
    cntlist.rev how often each sense was seen in tagged texts

and the same for verb, adj and adv. The format is described in WordNet's manual page wndb(5WN). Read
here rather than by nltk, which opens files only inside its own data folders and wants a file,
lexnames, that Debian's package leaves out.
"""

import os
import re
from functools import lru_cache
from pathlib import Path

from pennyclip.base.errors import RequestError

PARTS = ("noun", "verb", "adj", "adv")
"""The files' names; their order is that of the numbers 1 to 4 in cntlist.rev's keys."""

WORD = re.compile(r"(\W*)([a-z]{3,})(\W*)")
"""A word with the punctuation on its sides. With a capital it may be a name ("John", who would
become a lavatory), with two letters an abbreviation ("it", information technology)."""


class Synonyms:
    """Finds the words that share another's most frequent sense; safe from several threads.

    Known are nouns, verbs and adjectives in their base form ("dog", not "dogs"). Left alone are
    words mostly used as adverbs ("in", "about": in captions, most are prepositions) and those whose
    senses were never counted in texts ("who", for the World Health Organization).

    Args:
        folder: with WordNet's files, as unpacked, or as Debian's `wordnet-base` installs them.

    Raises:
        RequestError: a file is missing, or is none of WordNet's.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        folder = Path(folder)
        needed = [f"{kind}.{part}" for part in PARTS for kind in ("index", "data")]
        missing = [name for name in needed if not (folder / name).is_file()]
        if missing:
            raise RequestError(
                f"{folder} has no {missing[0]}: expected a folder with WordNet's database files "
                f"({', '.join(needed[:2])}, ...). Debian's package wordnet-base brings one, "
                "/usr/share/wordnet; set augment.wordnet to yours."
            )
        self._files = [os.open(folder / f"data.{part}", os.O_RDONLY) for part in PARTS]
        seen = _times_seen(folder / "cntlist.rev")
        best: dict[str, tuple[int, int, int]] = {}  # word: times seen, part, offset of the sense
        for part, name in enumerate(PARTS):
            with (folder / f"index.{name}").open(encoding="latin-1") as lines:
                for line in lines:
                    if line.startswith("  "):  # the licence
                        continue
                    try:
                        word, _, senses, *rest = line.split()
                        tagged, first = int(rest[-int(senses) - 1]), int(rest[-int(senses)])
                    except (ValueError, IndexError):
                        raise RequestError(
                            f"{folder}/index.{name} is no index of WordNet's: {line[:60]!r}. "
                            "Take the whole folder of one version."
                        ) from None
                    count = seen.get((word, part), 0)
                    if tagged > 0 and count > best.get(word, (-1,))[0]:
                        best[word] = count, part, first
        adverb = PARTS.index("adv")
        self._senses = {w: (part, at) for w, (_, part, at) in best.items() if part != adverb}
        self._of = lru_cache(1 << 16)(self._read)

    def __del__(self) -> None:
        for descriptor in getattr(self, "_files", []):
            os.close(descriptor)

    def of(self, word: str) -> tuple[str, ...]:
        """Other words and phrases for a word's most frequent sense; none for an unknown word."""
        return self._of(word)

    def replace(self, word: str, choice: float) -> str:
        """One of a word's synonyms, in its punctuation; the word as it is, if it has none.

        Args:
            word: perhaps with punctuation on its sides.
            choice: in [0, 1), which of them.
        """
        found = WORD.fullmatch(word)
        others = self.of(found[2]) if found else ()
        if found is None or not others:
            return word
        return found[1] + others[int(choice * len(others))] + found[3]

    def _read(self, word: str) -> tuple[str, ...]:
        if word not in self._senses:
            return ()
        part, offset = self._senses[word]
        line = os.pread(self._files[part], 4096, offset).decode("latin-1").split("\n")[0]
        fields = line.split(" ")
        count = int(fields[3], 16)
        names = [re.sub(r"\(\w+\)$", "", name) for name in fields[4 : 4 + 2 * count : 2]]
        return tuple(name.replace("_", " ") for name in names if name.lower() != word)


def _times_seen(file: Path) -> dict[tuple[str, int], int]:
    """How often the first sense of each word of each part of speech was seen, where known."""
    seen: dict[tuple[str, int], int] = {}
    if not file.is_file():
        return seen
    with file.open(encoding="latin-1") as lines:
        for line in lines:
            try:
                key, number, count = line.split()
                word, _, sense = key.partition("%")
                part = int(sense[0])
                if number == "1":  # part 5: an adjective that stands with another
                    seen[word, PARTS.index("adj") if part == 5 else part - 1] = int(count)
            except (ValueError, IndexError):
                raise RequestError(
                    f"{file} has no counts of WordNet's: {line[:60]!r}. Take the whole folder of "
                    "one version, or remove this file."
                ) from None
    return seen
