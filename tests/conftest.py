"""What several tests need: the data sets that lie beside the repository, and a small one."""

import json
import os
from pathlib import Path

import hypothesis
import pytest

from pennyclip.data.prepare import prepare

hypothesis.settings.register_profile("unhurried", deadline=None)  # machines are shared
hypothesis.settings.load_profile("unhurried")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder `../shared`. Where it is absent the test is skipped; in CI, absence fails."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        reason = f"no data beside the repository: {folder.name}/ is absent"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return folder


@pytest.fixture(scope="session")
def small_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 pictures of examples/clipart, prepared: about 100 to train on, some dev, some val."""
    lines = (ROOT / "examples/clipart/captions.jsonl").read_text(encoding="utf-8").splitlines()
    source = tmp_path_factory.mktemp("source") / "captions.jsonl"
    pairs = [json.loads(line) for line in lines[::11]]
    for pair in pairs:
        pair["image"] = str(ROOT / "examples/clipart" / pair["image"])
    source.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    out = tmp_path_factory.mktemp("small") / "dataset"
    prepare([str(source)], out, dev_share=0.1, workers=1)
    return out


@pytest.fixture(scope="session")
def wordnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in WordNet's format. By part of speech: words that share a sense, how often it was
    seen in texts as the first one's, and whether any of them was."""
    senses = {
        "noun": [("dog domestic_dog Canis_familiaris", 42), ("tin can", 1), ("who WHO", 0)],
        "verb": [("run operate go", 5), ("can tin put_up", 7), ("dog chase tail", 2)],
        "adj": [("big large(a)", 9), ("red ruddy", 3)],
        "adv": [("about approximately", 55), ("red redly", 1)],
    }
    folder = tmp_path_factory.mktemp("wordnet")
    licence = "  1 This line stands for the licence.\n"
    counts = []
    for number, (part, groups) in enumerate(senses.items(), start=1):
        data, index = licence, [licence]
        for words, seen in groups:
            names = words.split()
            offset = len(data)
            fields = " ".join(f"{name} 0" for name in names)
            data += (
                f"{offset:08d} 03 {part[0]} {len(names):02x} {fields} 001 @ 00000000 n 0000 | \n"
            )
            for name in (name.lower().split("(")[0] for name in names):
                index.append(f"{name} {part[0]} 1 1 @ 1 {int(seen > 0)} {offset:08d}  \n")
                if seen:
                    counts.append(f"{name}%{number}:00:00:: 1 {seen}\n")
        (folder / f"data.{part}").write_text(data)
        (folder / f"index.{part}").write_text("".join(index))
    (folder / "cntlist.rev").write_text("".join(sorted(counts)))
    return folder
