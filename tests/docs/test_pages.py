"""The README and the pages of docs/: their code runs, and what they name exists."""

import pathlib
import re
import runpy

import pytest
from foliax.experiments import cli, scoreboard
from foliax.search import cgp

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def blocks(name):
  return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text("utf-8"), re.DOTALL)


def block(name, word):
  """The first piece of code of a page in which a word occurs."""
  return next(code for code in blocks(name) if word in code)


def execute(code, **names):
  namespace = {"__name__": "__main__", **names}
  exec(compile(code, "<page>", "exec"), namespace)
  return namespace


@pytest.mark.slow
def test_the_loop_of_the_readme_finds_a_good_setting(capsys):
  state = execute(block("README.md", "cgp"))["state"]
  assert float(cgp.means(state).max()) > 0.95  # chance is 0.1, most of the box is below 0.5
  assert "valid=Array(False" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/language.md"])
def test_the_chat_of_a_page_answers(page, capsys):
  execute(block(page, "Generator"))
  assert "Paris" in capsys.readouterr().out


@pytest.mark.preflight
def test_the_preflight_of_the_readme_compiles(capsys):
  execute(block("README.md", "preflight"))
  assert "v5e-1: compiles" in capsys.readouterr().out


@pytest.mark.slow
def test_the_loops_of_the_search_page_run():
  code = blocks("docs/search.md")
  first = execute(code[0])
  assert float(cgp.certificate(first["state"]).gap) <= 0.1
  last = execute("".join(code[1:]), **first)
  assert int(last["state"].t) == 5


def test_the_experiment_of_the_runner_page_runs(tmp_path, monkeypatch, capsys):
  (tmp_path / "my_project").mkdir()
  (tmp_path / "my_project" / "coin.py").write_text(blocks("docs/runner.md")[0], "utf-8")
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.chdir(tmp_path)
  assert cli.main(["run", "my_project.coin:smoke"]) == 0
  assert "C1" in capsys.readouterr().out
  assert (tmp_path / "runs" / "coin-smoke" / "report.html").exists()


def test_the_forms_of_the_kernel_page_agree():
  import jax.numpy as jnp
  import numpy as np
  from foliax.kernels_pallas.dispatch import GPU_KERNELS
  from jax.experimental.pallas import tpu as pltpu

  softsign = execute(blocks("docs/kernels.md")[0])["softsign"]
  x = jnp.linspace(-2, 2, 1500)
  simulators = [pltpu.InterpretParams()]
  if GPU_KERNELS:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    simulators.append(plgpu.InterpretGPUParams())
  for simulator in simulators:
    got = softsign(x, implementation="pallas", interpret=simulator)
    np.testing.assert_allclose(got, x / (1 + abs(x)), rtol=1e-6)


def test_the_readme_has_a_place_for_the_scoreboard():
  text = (ROOT / "README.md").read_text("utf-8")
  assert scoreboard.insert(text, scoreboard.load(ROOT / "results"))


@each_page
def test_linked_files_exist(page):
  links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text("utf-8"))
  missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
  assert not missing


@each_page
def test_named_commands_exist(page):
  text = page.read_text("utf-8")
  commands = set(re.findall(r"[`|/]foliax ([a-z]+)", text))
  assert commands <= set(cli._COMMANDS)
  makefile = (ROOT / "Makefile").read_text("utf-8")
  targets = {t for line in re.findall(r"^make ([a-z ]+)|`make ([a-z ]+)", text, re.M) for t in line}
  for target in " ".join(targets).split():
    assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_names_on_the_search_page_are_exported():
  text = (ROOT / "docs" / "search.md").read_text("utf-8")
  named = set(re.findall(r"\bcgp\.(\w+)", text)) - {"html"}
  rows = re.findall(r"^\|[^|]*\|[^|]*\| (.*) \|$", text.split("## Using it")[0], re.MULTILINE)
  named |= {n for row in rows for n in re.findall(r"`(\w+)[`(]", row)}
  assert {"upper_env", "ask", "HYBRID"} <= named
  assert named <= set(cgp.__all__)


@pytest.mark.slow
def test_figures_are_drawn_and_every_page_shows_what_is_drawn(tmp_path):
  runpy.run_path(str(ROOT / "docs" / "figures.py"))["main"](tmp_path)
  drawn = {path.name for path in tmp_path.iterdir()}
  assert drawn == {path.name for path in (ROOT / "docs" / "figures").iterdir()}
  shown = {n for page in PAGES for n in re.findall(r"figures/([\w-]+\.svg)", page.read_text())}
  assert shown == drawn
