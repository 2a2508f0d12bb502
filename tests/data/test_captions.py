from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa

from pennyclip.data.captions import (
    SAMPLE,
    caption_sizes,
    repeated,
    sample,
    token_notes,
    tokens_per_word,
)
from pennyclip.data.index import Dataset
from pennyclip.data.text import ClipTokenizer
from pennyclip.data.tokens import TokenStore

ENGLISH = ["A dog runs across the green meadow while two children watch from the garden fence."]
GERMAN = ["Ein Hund läuft über die grüne Wiese, während zwei Kinder vom Gartenzaun aus zuschauen."]
CHINESE = ["一只狗在绿色的草地上奔跑，两个孩子在花园的篱笆旁观看。"]


def test_tokens_a_word_tell_a_language_that_the_tokenizer_hardly_knows(
    small_dataset: Path,
) -> None:
    tokenizer = ClipTokenizer(77)
    assert tokens_per_word(["a cat", "!"], tokenizer) == 1.0
    assert tokens_per_word(ENGLISH, tokenizer) < 1.4
    assert tokens_per_word(GERMAN, tokenizer) > 2.2
    tokens = TokenStore.open(Dataset(small_dataset), tokenizer)
    assert token_notes(tokens, tokenizer, 77, ENGLISH) == []
    for captions in (GERMAN, CHINESE):
        (warning,) = token_notes(tokens, tokenizer, 77, captions)
        assert warning.startswith("warning: ")
        assert "multilingual-text" in warning


def test_truncated_captions_are_told(small_dataset: Path) -> None:
    tokenizer = ClipTokenizer(77)
    tokens = TokenStore.open(Dataset(small_dataset), tokenizer)
    count = int((np.diff(tokens.starts) > 8).sum())
    (note,) = token_notes(tokens, tokenizer, 8, ENGLISH)
    assert note.startswith(f"captions: {count} of {len(tokens)} truncated")


def test_sizes_are_python_s(small_dataset: Path) -> None:
    dataset = Dataset(small_dataset)
    texts = [text for row in range(len(dataset)) for text in dataset.captions(row)]
    sizes = caption_sizes(dataset)
    assert sizes.words.tolist() == [len(text.split()) for text in texts]
    assert sizes.characters.tolist() == [len(text) for text in texts]


def test_repeated_captions_are_counted_as_groups_compare_them() -> None:
    texts = ["a dog", "A  Dog ", "cat", "a DOG", "cat", "once"]
    assert repeated(pa.chunked_array([texts]), 5) == [("a dog", 3), ("cat", 2)]
    assert repeated(pa.chunked_array([texts[:1]]), 5) == []


def test_a_sample_is_spread_over_the_rows(small_dataset: Path) -> None:
    dataset = Dataset(small_dataset)
    rows = dataset.subset("train")
    assert sample(dataset, rows) == [dataset.captions(int(row))[0] for row in rows]
    many = SimpleNamespace(captions=lambda row: [str(row), "another"])
    chosen = np.array(sample(many, np.arange(10 * SAMPLE) + 7), int)  # type: ignore[arg-type]
    assert len(chosen) == SAMPLE
    assert (chosen[0], chosen[-1]) == (7, 10 * SAMPLE + 6)
    assert set(np.diff(chosen)) == {10, 11}
