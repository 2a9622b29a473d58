"""Every notebook is the pair of its script, and runs from top to bottom."""

import os
import pathlib

import pytest

jupytext = pytest.importorskip("jupytext", reason="needs the colab extra")

FOLDER = pathlib.Path(__file__).parents[2] / "colab"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))


def cells(path):
  return [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells]


def test_every_notebook_has_a_script():
  assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_notebook_says_what_its_script_says(name):
  fix = f"jupytext --sync colab/{name}.py"
  assert cells(FOLDER / f"{name}.ipynb") == cells(FOLDER / f"{name}.py"), fix


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_notebook_runs_at_smoke_scale(name, tmp_path, monkeypatch):
  import nbclient

  monkeypatch.setenv("FOLIAX_SCALE", "smoke")
  monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
  notebook = jupytext.read(FOLDER / f"{name}.py")
  client = nbclient.NotebookClient(
    notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
  )
  client.execute(env=dict(os.environ))
