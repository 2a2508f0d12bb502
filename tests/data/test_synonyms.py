"""Reading WordNet's database files."""

from pathlib import Path

import pytest

from pennyclip.base.errors import RequestError
from pennyclip.data.synonyms import Synonyms


def test_the_most_frequent_sense_counts(wordnet: Path) -> None:
    synonyms = Synonyms(wordnet)
    assert synonyms.of("dog") == ("domestic dog", "Canis familiaris")  # 42 as noun, 2 as verb
    assert synonyms.of("can") == ("tin", "put up")  # 1 as noun, 7 as verb
    assert synonyms.of("large") == ("big",)
    assert synonyms.of("big") == ("large",)  # without WordNet's mark of where it may stand
    assert synonyms.of("about") == ()  # an adverb
    assert synonyms.of("who") == ()  # never seen in texts
    assert synonyms.of("zebra") == ()


@pytest.mark.parametrize(
    ("word", "choice", "expected"),
    [
        ("dog", 0.0, "domestic dog"),
        ("dog", 0.999, "Canis familiaris"),
        ("(dog)...", 0.4, "(domestic dog)..."),
        ("Dog", 0.0, "Dog"),
        ("dogs", 0.0, "dogs"),
        ("dog's", 0.0, "dog's"),
        ("dog2", 0.0, "dog2"),
        ("--", 0.0, "--"),
        ("", 0.0, ""),
    ],
)
def test_replacing_a_word(word: str, choice: float, expected: str, wordnet: Path) -> None:
    assert Synonyms(wordnet).replace(word, choice) == expected


def test_without_counts_the_noun_comes_first(wordnet: Path, tmp_path: Path) -> None:
    for file in wordnet.glob("[id]*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert Synonyms(tmp_path).of("can") == ("tin",)


def test_another_folder_is_refused(wordnet: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"has no index\.noun.*wordnet-base"):
        Synonyms(tmp_path)
    for file in wordnet.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "index.verb").write_text("colourless green ideas\n")
    with pytest.raises(RequestError, match=r"index\.verb is no index of WordNet's: 'colourless"):
        Synonyms(tmp_path)
    (tmp_path / "index.verb").write_bytes((wordnet / "index.verb").read_bytes())
    for line in ("dog", "dog%1:05:00:: 1 often", "dog 1 42"):
        (tmp_path / "cntlist.rev").write_text(line + "\n")
        with pytest.raises(RequestError, match=r"cntlist\.rev has no counts of WordNet's: 'dog"):
            Synonyms(tmp_path)


def test_debians_wordnet() -> None:
    folder = Path("/usr/share/wordnet")
    if not folder.is_dir():
        pytest.skip("Debian's package wordnet-base is not installed")
    synonyms = Synonyms(folder)
    assert synonyms.of("car") == ("auto", "automobile", "machine", "motorcar")
    assert synonyms.of("woman") == ("adult female",)
    assert synonyms.of("it") == ()
