"""The report in a real browser: no errors, no requests, everything visible, no sideways scroll."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright import sync_api
from synthetic_run import SCRIPT, make_dataset, make_run

from pennyclip.data.index import Dataset
from pennyclip.data.prepare import prepare
from pennyclip.reporting import write_comparison, write_dataset_page, write_report
from pennyclip.reporting.filtered import Drawn, write_filter_page

CHROMIUM = Path("/usr/bin/chromium")
OPTIONS = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run"]
OPTIONS += [f"disable-{name}" for name in ("background-networking", "component-update", "sync")]


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    if not CHROMIUM.is_file():
        reason = f"{CHROMIUM} is not there: install Debian's package chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_api.sync_playwright() as playwright:
        launch = playwright.chromium.launch
        browser = launch(executable_path=str(CHROMIUM), args=[f"--{name}" for name in OPTIONS])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("browser")
    data = make_dataset(folder / "clipart")
    first = make_run(folder / "first", data)
    second = make_run(folder / ("a-run-with-a-very-long-name-" + "x" * 60), data, 3e-3)
    both = write_comparison([first, second], folder / "both.html")
    return {"one": write_report(first), "long name": write_report(second), "both": both}


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", ["one", "long name", "both"])
def test_page(browser: sync_api.Browser, pages: dict[str, Path], name: str, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    said: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    url = pages[name].as_uri()
    page.goto(url, wait_until="networkidle")

    assert said == []
    assert [r for r in requests if not r.startswith("data:image/jpeg")] == [url]
    assert page.title().endswith("pennyclip report" if name != "both" else "pennyclip")
    assert page.evaluate("document.scripts.length") == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    figures = page.evaluate(
        "[...document.querySelectorAll('svg')].map(f => f.getBoundingClientRect().width)"
    )
    assert len(figures) == (2 if name == "both" else 8)
    assert min(figures) > 300
    labels = page.locator("svg text").all_text_contents()
    assert "step" in labels
    assert any("chance, ln 256" in label for label in labels) == (name != "both")
    if name != "both":
        widths = page.evaluate("[...document.images].map(i => i.naturalWidth)")
        assert widths == [256] * 12
        assert SCRIPT in page.locator("article").first.inner_text()
        assert page.locator("h2").all_inner_texts() == [
            "Results", "What the model sees", "Curves", "Events", "Data", "Loaded weights",
            "Configuration", "Machine, versions, parameters",
        ]  # fmt: skip
        assert not page.locator("pre").is_visible()
        page.locator("summary", has_text="config.toml").click()
        assert "clip_norm = 1.0" in page.locator("pre").inner_text()
    page.close()


@pytest.fixture(scope="module")
def messy_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures twice in two sizes, a repeated caption, refused files, markup in captions."""
    folder = tmp_path_factory.mktemp("messy")
    lines = []
    for i in range(24):
        coarse = np.random.default_rng(i).integers(0, 256, (9, 9, 3), np.uint8)
        picture = Image.fromarray(coarse).resize((300, 260), Image.Resampling.BICUBIC)
        picture.save(folder / f"{i}.png")
        lines.append({"image": f"{i}.png", "captions": [f"{SCRIPT} number {i}", "w" * 300]})
        if i < 3:
            picture.resize((150, 130)).save(folder / f"small-{i}.jpg", quality=70)
            lines.append({"image": f"small-{i}.jpg", "captions": [f"smaller {i}"]})
        if i < 2:
            (folder / f"broken-{i}.jpg").write_text("no picture <b>")
            lines.append({"image": f"broken-{i}.jpg", "captions": ["x"]})
    lines += [{"image": f"{i}.png", "captions": ["again"]} for i in range(4)]
    table = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "captions.jsonl").write_text(table)
    prepare([folder / "captions.jsonl"], folder / "dataset", workers=1, quiet=True, val_share=0.2)
    return folder / "dataset"


@pytest.mark.parametrize("width", [1280, 400])
def test_pages_of_a_dataset_and_of_a_filter(
    browser: sync_api.Browser, messy_dataset: Path, width: int
) -> None:
    dataset = Dataset(messy_dataset)
    train = dataset.subset("train")
    scores = np.linspace(0.5, -0.1, len(train), dtype=np.float32)
    drawn = Drawn(train, scores, len(train) // 2, [(int(train[1]), int(train[0]), 0.99)])
    steps = [
        {"rule": "rows of train", "dropped": None, "left": len(train)},
        {"rule": "the best 50%", "dropped": len(train) - len(train) // 2, "left": len(train) // 2},
    ]
    filtered = write_filter_page(dataset, "best", steps, drawn, messy_dataset / "best.html")
    for file, titles in (
        (
            write_dataset_page(messy_dataset),
            ["Sources", "Refused", "Duplicates", "Captions", "Pictures", "Pairs drawn at random"],
        ),
        (
            filtered,
            ["Rules", "Scores", "Around the cut", "From the worst to the best", "Similar pictures"],
        ),
    ):
        page = browser.new_page(viewport={"width": width, "height": 900})
        said: list[str] = []
        page.on("console", lambda message, said=said: said.append(message.text))
        page.on("pageerror", lambda error, said=said: said.append(str(error)))
        page.goto(file.as_uri(), wait_until="networkidle")
        assert said == []
        assert page.evaluate("document.scripts.length") == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert [t for t in page.locator("h2").all_inner_texts() if "chance" not in t] == titles
        shown = page.evaluate("[...document.images].map(i => i.naturalWidth)")
        assert min(shown) >= 100
        assert SCRIPT in page.locator("article").first.inner_text()
        page.close()


def test_a_dataset_s_page_says_what_is_in_it(messy_dataset: Path) -> None:
    text = write_dataset_page(messy_dataset).read_text(encoding="utf-8")
    assert "Nearly equal pictures, 3 groups" in text
    assert "not a picture" in text
    assert "captions.jsonl:2" in text or "broken-0.jpg" in text
    assert re.search(r"<td>again</td><td class=.number.>4<", text)
    assert write_dataset_page(messy_dataset).read_text(encoding="utf-8") == text
