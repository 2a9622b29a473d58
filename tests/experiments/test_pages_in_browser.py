"""The report and the scoreboard open in a real browser, light and dark, wide and narrow."""

import io
import itertools
import pathlib
import shutil
import sys

import numpy as np
import pytest
from foliax.experiments import cli, report, run, scoreboard

HERE = pathlib.Path(__file__).parent
SCREENSHOTS = HERE.parents[1] / "build" / "screenshots"
FLAGS = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
  "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
  """Paths of the two kinds of page, made from a run with a claim of every verdict."""
  folder = tmp_path_factory.mktemp("pages")
  sys.path.insert(0, str(HERE))
  try:
    command = ["run", "outside.random_walk:smoke", f"--workdir={folder / 'run'}"]
    assert cli.main(command) == 0
  finally:
    sys.path.remove(str(HERE))
  document = run.finished(folder / "run")
  board = folder / "scoreboard.html"
  board.write_text(scoreboard.page([document, document | {"title": "The same once more"}]))
  return {"report": folder / "run" / "report.html", "scoreboard": board}


@pytest.fixture(scope="module")
def browser():
  from playwright.sync_api import sync_playwright

  path = shutil.which("chromium") or shutil.which("google-chrome")
  with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
    yield browser
    browser.close()


def _open(browser, path, theme="light", width=1100):
  """A page in a fresh profile, and the lists of its errors and of its requests to the network."""
  context = browser.new_context(color_scheme=theme, viewport={"width": width, "height": 900})
  page = context.new_page()
  errors, requests = [], []
  page.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else None)
  page.on("pageerror", lambda error: errors.append(str(error)))
  page.on(
    "request", lambda r: None if r.url.startswith(("file:", "data:")) else requests.append(r.url)
  )
  page.goto(path.as_uri())
  return page, errors, requests


def _screenshot(page, name):
  from PIL import Image

  SCREENSHOTS.mkdir(parents=True, exist_ok=True)
  shot = page.screenshot(full_page=True, path=SCREENSHOTS / f"{name}.png")
  return np.asarray(Image.open(io.BytesIO(shot)).convert("L"), float)


@pytest.mark.parametrize(
  ("kind", "theme", "width"),
  [*itertools.product(("report", "scoreboard"), ("light", "dark"), (1100, 390))],
)
def test_page_opens_without_errors_and_shows_something(pages, browser, kind, theme, width):
  page, errors, requests = _open(browser, pages[kind], theme, width)
  pixels = _screenshot(page, f"{kind}-{theme}-{width}")
  assert errors == []
  assert requests == []
  background = np.median(pixels)
  assert (background > 200) == (theme == "light")
  assert (np.abs(pixels - background) > 40).mean() > 0.01
  assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("theme", "background"), [("light", "white"), ("dark", "#171a20")])
def test_figure_file_brings_its_own_background(pages, browser, theme, background):
  from PIL import Image, ImageColor

  page, errors, _ = _open(browser, pages["report"].parent / "figures" / "paths.svg", theme)
  shot = page.screenshot(path=SCREENSHOTS / f"figure-{theme}.png")
  assert Image.open(io.BytesIO(shot)).convert("RGB").getpixel((2, 2)) == ImageColor.getrgb(
    background
  )
  assert errors == []


def test_an_error_on_a_page_would_be_noticed(tmp_path, browser):
  path = tmp_path / "bad.html"
  path.write_text(
    report.shell("bad", "<script>nothing.here()</script><img src='http://x.invalid/'>")
  )
  page, errors, requests = _open(browser, path)
  page.wait_for_load_state()
  assert any("nothing is not defined" in error for error in errors)
  assert requests == ["http://x.invalid/"]


def test_button_switches_the_theme_and_the_choice_is_remembered(pages, browser):
  page, errors, _ = _open(browser, pages["report"])
  background = "getComputedStyle(document.body).backgroundColor"
  light = page.evaluate(background)
  page.click("#theme")
  dark = page.evaluate(background)
  assert dark != light
  page.reload()
  assert page.evaluate(background) == dark
  page.click("#theme")
  assert page.evaluate(background) == light
  assert errors == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_figures_take_the_colours_of_the_theme(pages, browser, theme):
  page, _, _ = _open(browser, pages["report"], theme)
  colours = page.evaluate("""[...document.querySelectorAll('figure svg text')].map(
    t => getComputedStyle(t).fill)""")
  assert len(colours) > 10
  assert set(colours) == {page.evaluate("getComputedStyle(document.body).color")}


@pytest.mark.parametrize(
  ("kind", "theme"), [*itertools.product(("report", "scoreboard"), ("light", "dark"))]
)
def test_text_has_enough_contrast(pages, browser, kind, theme):
  page, _, _ = _open(browser, pages[kind], theme)
  # WCAG 2.2, 1.4.3: at least 4.5 to 1 for text of ordinary size.
  low = page.evaluate("""() => {
    const rgb = s => s.match(/[\\d.]+/g).map(Number);
    const luminance = c => c.slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
      .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = e => {
      for (; e; e = e.parentElement) {
        const c = rgb(getComputedStyle(e).backgroundColor);
        if (c.length < 4 || c[3] > 0) return c;
      }
    };
    const bad = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    let seen = 0;
    while (walker.nextNode()) {
      const e = walker.currentNode.parentElement;
      if (!walker.currentNode.data.trim() || e.closest('script, style, .skip')) continue;
      const style = getComputedStyle(e);
      const [a, b] = [luminance(rgb(e.closest('svg') ? style.fill : style.color)),
                      luminance(behind(e))].sort();
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      seen += 1;
      if (ratio < 4.5) bad.push([walker.currentNode.data.trim(), ratio]);
    }
    return {seen, bad};
  }""")
  assert low["seen"] > 20
  assert low["bad"] == []


@pytest.mark.parametrize("kind", ["report", "scoreboard"])
def test_page_can_be_read_without_seeing_it(pages, browser, kind):
  page, _, _ = _open(browser, pages[kind])
  for landmark in ("main", "header", "footer", "h1"):
    assert page.locator(landmark).count() == 1
  assert page.evaluate("document.documentElement.lang") == "en"
  unnamed = page.evaluate("""[...document.querySelectorAll('svg')].filter(
    e => !e.closest('[aria-hidden=true]') && !e.hasAttribute('aria-hidden')
      && !e.getAttribute('aria-label')).length""")
  assert unnamed == 0
  levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(h => +h.tagName[1])")
  assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
  duplicates = page.evaluate("""(() => {
    const ids = [...document.querySelectorAll('[id]')].map(e => e.id);
    return ids.filter((id, i) => ids.indexOf(id) !== i);
  })()""")
  assert duplicates == []
  page.keyboard.press("Tab")
  assert page.evaluate("document.activeElement.className") == "skip"
