"""The report in a real browser: no errors, no requests, everything visible, no sideways scroll."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright import sync_api
from synthetic_run import SCRIPT, make_dataset, make_run

from pennyclip.report import write_comparison, write_report

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
