"""The command `filter` on a small dataset, with a small model of random weights as scorer."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from pennyclip.base.errors import RequestError
from pennyclip.cli import main
from pennyclip.commands.filter.rules import Rules, first_of_each
from pennyclip.commands.filter.score import Scorer
from pennyclip.commands.filter.similar import distinct
from pennyclip.commands.filter.subset import filter_dataset
from pennyclip.config.file import to_toml
from pennyclip.config.keys import ClipText, Config, ImageTower, Model, Stage
from pennyclip.data.index import Dataset
from pennyclip.data.loader import load_images
from pennyclip.data.prepare import prepare
from pennyclip.evaluation.encoder import load
from pennyclip.model.clip import CLIP
from pennyclip.model.image import ImageTower as Tower
from pennyclip.model.text_clip import ClipTextTower
from pennyclip.weights.checkpoint import write_model


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint; its weights are random, so that its scores are many different numbers."""
    torch.manual_seed(0)
    image = ImageTower(name="test_vit", image_size=64)
    text = ClipText(width=32, layers=1, heads=2, context_length=24)
    folder = tmp_path_factory.mktemp("scorer") / "checkpoint"
    folder.mkdir()
    model = CLIP(Model(image=image, text=text, embed_dim=16))
    write_model(folder, model, None, {"step": 1, "score": None, "dataset": ""})
    return folder


@pytest.fixture
def data(small_dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_dataset, tmp_path / "data"))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many pictures and captions have gone through the trunks."""
    counts = {"image": 0, "text": 0}
    for kind, key in ((Tower, "image"), (ClipTextTower, "text")):
        original = kind.features

        def counted(self, inputs, *others, of=original, key=key):  # type: ignore[no-untyped-def]
            counts[key] += len(inputs)
            return of(self, inputs, *others)

        monkeypatch.setattr(kind, "features", counted)
    return counts


def expected_scores(data: Path, scorer: Path) -> np.ndarray:
    """By the encoder, a row at a time, in float32."""
    dataset, encoder = Dataset(data), load(scorer)
    scores = []
    for row in range(len(dataset)):
        images = load_images(dataset, np.array([row]), 64)
        texts = encoder.encode_text(dataset.captions(row))
        scores.append(float((texts @ encoder.encode_image(images)[0]).mean()))
    return np.array(scores)


def test_the_best_scored_stay_and_a_second_cut_computes_no_embedding(
    data: Path, scorer: Path, passes: dict[str, int]
) -> None:
    dataset = Dataset(data)
    train = dataset.subset("train")
    kept = filter_dataset(data, "best", score=str(scorer), keep=0.3)
    assert passes == {"image": len(dataset), "text": int(dataset.rows["captions"].sum())}
    passes.update(image=0, text=0)

    scores = expected_scores(data, scorer)
    rows = dataset.subset("best")
    assert len(rows) == kept.rows == round(0.3 * len(train))
    assert set(rows) <= set(train)
    assert rows.tolist() == sorted(rows)
    gone = np.setdiff1d(train, rows)
    assert scores[rows].min() > scores[gone].max() - 1e-3  # float16

    passes.update(image=0, text=0)
    middle = float(np.median(scores[train]))
    filter_dataset(data, "half", score=str(scorer), threshold=middle)
    filter_dataset(data, "apart", score=str(scorer), keep=0.9, max_similarity=0.99)
    assert passes == {"image": 0, "text": 0}
    half = dataset.subset("half")
    assert abs(len(half) - len(train) / 2) <= 1
    assert scores[half].min() >= middle - 1e-3
    page = (data / "keep" / "best.html").read_text(encoding="utf-8")
    assert page.count("<img") >= 8
    assert "<svg" in page
    assert "Around the cut" in page


def test_a_scorer_that_has_seen_the_rows_is_named(data: Path, scorer: Path) -> None:
    """By its run's folder: the dataset by fingerprint or place, the rows by the run's subset."""
    dataset = Dataset(data)
    train = dataset.subset("train")
    filter_dataset(data, "long", rules=Rules(min_words=5))
    own = len(dataset.subset("long"))
    assert 0 < own < len(train)
    for number, (there, fingerprint, seen) in enumerate(
        (("/elsewhere", dataset.fingerprint, own), (str(data), "", own), ("/elsewhere", "", 0))
    ):
        run = data.parent / f"run-{number}"
        shutil.copytree(scorer, run / "checkpoints/step_000001")
        model = load(scorer).model.config
        config = Config(model=model, stages=(Stage(epochs=1),), data=there, subset="long")
        (run / "config.toml").write_text(to_toml(config))
        meta = run / "checkpoints/step_000001/meta.json"
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"dataset": fingerprint}))
        done = filter_dataset(data, f"best-{number}", score=str(run), keep=0.5)
        page = Path(done.page).read_text(encoding="utf-8")
        said = f"the model was trained on {seen} of these {len(train)} rows"
        assert (said in " ".join(done.notes), said in page) == (bool(seen), bool(seen))
    dev = filter_dataset(data, "dev-best", union=("dev",), score=str(data.parent / "run-0"), keep=1)
    assert not any("trained on" in line for line in dev.notes)


def test_rows_that_stay_are_told_for_each_source(data: Path, scorer: Path) -> None:
    both = data.parent / "both"
    (data / "pictures").mkdir()
    for number in range(10):
        noise = np.random.default_rng(number).integers(0, 256, (80, 80, 3), np.uint8)
        Image.fromarray(noise).save(data / f"pictures/{number}.png")
        (data / f"pictures/{number}.txt").write_text(f"noise {number}")
    prepare([data / "shards", data / "pictures"], both, workers=1, quiet=True)
    dataset = Dataset(both)
    done = filter_dataset(both, "best", score=str(scorer), keep=0.5)
    train, rows = dataset.subset("train"), dataset.subset("best")
    end = dataset.meta["sources"][0]["rows"][1]
    counts = [(int((some < end).sum()), int((some >= end).sum())) for some in (train, rows)]
    assert [(one["first"], one["left"]) for one in done.sources] == list(zip(*counts, strict=True))
    assert [Path(one["path"]).name for one in done.sources] == ["shards", "pictures"]
    assert 0 < len(rows) < len(train)
    first, left = done.sources[1]["first"], done.sources[1]["left"]
    assert f"  pictures  {left:>10} of {first} left" in str(done).splitlines()
    page = Path(done.page).read_text(encoding="utf-8")
    assert f'<td>pictures</td><td class="number">{first}</td><td class="number">{left}' in page
    again = filter_dataset(both, "best", score=str(scorer), keep=0.5)
    assert (again.already_done, again.sources) == (True, done.sources)
    one = filter_dataset(data, "best", score=str(scorer), keep=0.5)
    assert "of each source" not in str(one)
    assert "Sources" not in Path(one.page).read_text(encoding="utf-8")


def test_killed_between_two_shards_it_goes_on(
    data: Path, scorer: Path, passes: dict[str, int]
) -> None:
    prepare([data / "shards"], data.parent / "shards", shard_size=40, workers=1, quiet=True)
    dataset = Dataset(data.parent / "shards")
    assert len(dataset.meta["shards"]) == 4

    def stop(what: str, done: int, total: int) -> None:
        if what == "image embeddings" and done == 80:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        filter_dataset(dataset.path, "a", score=str(scorer), keep=0.5, progress=stop)
    assert passes == {"image": 80, "text": 0}
    assert "a" not in dataset.subsets()
    filter_dataset(dataset.path, "a", score=str(scorer), keep=0.5)
    assert passes == {"image": len(dataset), "text": int(dataset.rows["captions"].sum())}
    again = Scorer.open(dataset, str(scorer), "best", lambda *_: None)
    np.testing.assert_allclose(again.rows(), expected_scores(dataset.path, scorer), atol=2e-3)
    assert all(part.dtype == np.float16 for part in again.images.parts)
    assert not list((dataset.path / "embeddings").rglob("*.tmp"))


def test_similar_pictures_go_and_the_better_scored_of_two_stays(data: Path, scorer: Path) -> None:
    dataset = Dataset(data)
    limit = 0.98
    done = filter_dataset(data, "apart", score=str(scorer), max_similarity=limit)
    rows, train = dataset.subset("apart"), dataset.subset("train")
    found = Scorer.open(dataset, str(scorer), "best", lambda *_: None)
    scores = found.rows()
    # By brute force, the best first: a row stays unless it is too close to one that stays.
    stay: list[int] = []
    for row in train[np.argsort(-scores[train], kind="stable")].tolist():
        own = F.normalize(found.images.take(np.array([row])))
        others = F.normalize(found.images.take(np.array(stay, np.int64))) if stay else own[:0]
        if not (others @ own.T > limit).any():
            stay.append(row)
    assert rows.tolist() == sorted(stay)
    said: list[tuple[str, int, int]] = []
    ranked = train[np.argsort(-scores[train], kind="stable")]
    mask, twins = distinct(  # several blocks meet several parts
        found.images, ranked, limit, found.device, lambda *a: said.append(a), block=16, part=7
    )
    assert 4 * 7 < len(stay) < len(train)
    assert ranked[mask].tolist() == stay
    assert said[0] == ("rows compared", 16, len(train))
    assert said[-1] == ("rows compared", len(train), len(train))
    gone = np.setdiff1d(train, rows)
    assert sorted(row for row, _, _ in twins) == gone.tolist()
    for row, kept, cosine in twins:
        assert kept in stay
        pair = F.normalize(found.images.take(np.array([row, kept])))
        assert abs(float(pair[0] @ pair[1]) - cosine) < 1e-5
        assert cosine > limit
    assert done.steps[-1]["dropped"] == len(gone)


def test_text_and_size_rules_count_what_they_drop(data: Path) -> None:
    dataset = Dataset(data)
    rules = Rules(min_words=5, min_characters=30, min_side=200, max_aspect=2.0)
    done = filter_dataset(data, "plain", rules=rules)
    kept = []
    for row, entry in zip(dataset.subset("train").tolist(), dataset.keys(dataset.subset("train")),
                          strict=True):  # fmt: skip
        short, long = sorted((entry["width"], entry["height"]))
        texts = entry["captions"]
        if (
            any(len(text.split()) >= 5 for text in texts)
            and any(len(text) >= 30 for text in texts)
            and short >= 200
            and long <= 2 * short
        ):
            kept.append(row)
    assert dataset.subset("plain").tolist() == kept
    assert [step["dropped"] is None for step in done.steps] == [True] + 4 * [False]
    assert sum(step["dropped"] or 0 for step in done.steps) == done.steps[0]["left"] - len(kept)
    assert 0 < len(kept) < done.steps[0]["left"]


def test_union_intersection_and_repeats(data: Path) -> None:
    dataset = Dataset(data)
    train, dev = dataset.subset("train"), dataset.subset("dev")
    done = filter_dataset(data, "both", union=("train", "dev"))
    assert dataset.subset("both").tolist() == sorted([*train, *dev])
    assert done.notes == [f"warning: {len(dev)} of the rows are held out in 'dev'"]
    filter_dataset(data, "wide", rules=Rules(min_words=5))
    filter_dataset(data, "again", union=("both",), intersect=("wide", "train"))
    assert dataset.subset("again").tolist() == dataset.subset("wide").tolist()

    groups = np.array([7, 3, 7, 7, 3, 1])
    assert first_of_each(groups, 1).tolist() == [True, True, False, False, False, True]
    assert first_of_each(groups, 2).tolist() == [True, True, True, False, True, True]


def test_the_same_again_is_a_no_op_and_another_is_refused(data: Path) -> None:
    first = filter_dataset(data, "long", rules=Rules(min_words=4))
    files = {f: f.stat().st_mtime_ns for f in (data / "keep").iterdir()}
    again = filter_dataset(data, "long", rules=Rules(min_words=4))
    assert again.already_done
    assert (again.rows, again.steps) == (first.rows, first.steps)
    assert {f: f.stat().st_mtime_ns for f in (data / "keep").iterdir()} == files
    with pytest.raises(RequestError, match=r"'long' already.*min_words.*another --name"):
        filter_dataset(data, "long", rules=Rules(min_words=5))


def test_what_can_be_refused_is_refused_before_anything_is_scored(
    data: Path, scorer: Path, passes: dict[str, int]
) -> None:
    filter_dataset(data, "long", rules=Rules(min_words=4))
    shutil.copy(data / "keep/dev.parquet", data / "keep/own.parquet")
    for name, intersect, message in (
        ("long", (), r"'long' already.*different: keep, min_words, score"),
        ("own", (), "'own' already"),
        ("best", ("nobody",), "no subset 'nobody'"),
    ):
        with pytest.raises(RequestError, match=message):
            filter_dataset(data, name, intersect=intersect, score=str(scorer), keep=0.5)
    assert passes == {"image": 0, "text": 0}
    filter_dataset(data, "best", score=str(scorer), keep=0.5)
    other = load(scorer).model
    with torch.no_grad():
        other.visual.head.proj.weight.mul_(2)
    (folder := data.parent / "other").mkdir()
    write_model(folder, other, None, {"step": 1, "score": None, "dataset": ""})
    with pytest.raises(RequestError, match=r"'best' already.*different: score"):
        filter_dataset(data, "best", score=str(folder), keep=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "val", "--min-words", "3"], "none of the splits"),
        (["--name", "a/b", "--min-words", "3"], "expected letters"),
        (["--name", "a"], "would keep every row"),
        (["--name", "a", "--keep", "0.3"], "need a model: add --score"),
        (["--name", "a", "--score", "run"], "add --keep 0.5"),
        (["--name", "a", "--score", "run", "--keep", "0.3", "--threshold", "0.2"], "one of them"),
        (["--name", "a", "--score", "run", "--keep", "30"], "from 0 to 1"),
        (["--name", "a", "--min-words", "500"], "nothing is left after"),
        (["--name", "a", "--min-words", "3", "--union", "nobody"], "no subset 'nobody'"),
    ],
)
def test_what_makes_no_sense_is_refused(
    small_dataset: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["filter", str(small_dataset), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (small_dataset / "keep" / "a.parquet").exists()


def test_the_command_answers_in_json(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["filter", str(data), "--name", "basic", "--min-words", "3", "--max-aspect", "3"]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rows"] == len(Dataset(data).subset("basic")) == told["steps"][-1]["left"]
    assert Path(told["page"]).is_file()
