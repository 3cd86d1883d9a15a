"""The page of 'annulus run --report' in a real browser: Chromium, by playwright, or skipped in words."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from support import HANG

RUNS = {
    "causal": ["--ranks", "4", "--causal", "--schedule", "ring"],
    "gather": ["--ranks", "6", "--schedule", "gather", "--repeat", "3"],
    "alone": ["--ranks", "1", "--no-backward"],
    "many": ["--ranks", "30", "--pattern", "dense", "--schedule", "gather"],
}


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="the package playwright is not installed"
    )
    with sync_api.sync_playwright() as playwright:
        path = playwright.chromium.executable_path
        if not pathlib.Path(path).exists():
            path = shutil.which("chromium")  # a distribution's
        if path is None:
            pytest.skip("Chromium is not installed: 'playwright install chromium' does that")
        chromium = playwright.chromium.launch(executable_path=path)
        yield chromium
        chromium.close()


@pytest.mark.parametrize("name", RUNS)
def test_the_page_opens_without_an_error_and_shows_everything(
    name: str, browser, tool: str, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "report.html"
    command = [tool, "run", "--tokens", "480", "--heads", "2", "--head-dim", "16"]
    subprocess.run(
        [*command, *RUNS[name], "--report", str(path)],
        check=True,
        timeout=HANG,
        stdout=subprocess.DEVNULL,
    )
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page = context.new_page()
    problems: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    assert problems == []
    assert [url for url in requests if not url.startswith("data:")] == [path.as_uri()]

    ranks = int(RUNS[name][1])
    assert page.title() == f"annulus run: {ranks} rank" + ("s" if ranks > 1 else "")
    assert page.locator("#balance .bar").count() == ranks
    assert page.locator("#memory .bar").count() == ranks
    assert page.locator(".tile").count() >= 5
    assert page.locator("#warning").is_hidden()
    rows = page.locator("#links tr").count()
    assert rows == {"alone": 0, "many": 30}.get(name, ranks + 1)
    # Nothing wider than the page.
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")

    # Something is drawn, in more than a few colours, and pointing at it tells what it is.
    colours = page.evaluate(
        """() => {
          const canvas = document.getElementById("canvas");
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const found = new Set();
          for (let i = 0; i < data.length; i += 4) found.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
          return found.size;
        }"""
    )
    assert colours > 5
    target = page.evaluate(
        """() => {
          const row = rows.find((one) => data.kinds[one.kind] === "compute");
          const event = row.events.reduce((a, b) => (b[4] > a[4] ? b : a));
          return [toX(event[3] + event[4] / 2), row.y + row.height / 2];
        }"""
    )
    box = page.locator("#canvas").bounding_box()
    page.mouse.move(box["x"] + target[0], box["y"] + target[1])
    tip = page.locator("#tip")
    assert tip.is_visible()
    assert tip.inner_text().startswith("rank 0, compute: ")

    # Zoom in where the mouse is, then back.
    before = page.evaluate("view.to - view.from")
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    page.wait_for_function("view.to - view.from < end")
    page.click("#all")
    assert page.evaluate("view.to - view.from") == before
    assert problems == []
    context.close()
