"""Importing foliax is cheap, and an extra is needed only by what uses it."""

import contextlib
import functools
import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
from foliax import extras
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CONFIG = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())


def child(code):
  done = subprocess.run(
    [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  return done.stdout.split()


def core():
  """Names of the distributions that the core brings with it, whatever extras are installed."""
  seen, todo = set(), list(CONFIG["project"]["dependencies"])
  while todo:
    requirement = Requirement(todo.pop())
    name = canonicalize_name(requirement.name)
    if name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
      continue
    seen.add(name)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      todo += importlib.metadata.requires(name) or []
  return seen


@functools.cache
def modules_of_extras():
  """Top-level modules that only an extra brings, of those that are installed."""
  declared = CONFIG["project"]["optional-dependencies"].values()
  names = {canonicalize_name(Requirement(text).name) for extra in declared for text in extra}
  found = set()
  for name in names - core() - {"foliax"}:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      files = importlib.metadata.distribution(name).files or []
      found |= {file.parts[0].removesuffix(".py") for file in files}
  return {module for module in found if module.isidentifier()}


def loaded_by(module, *, beyond):
  """Top-level modules that importing `module` loads and importing `beyond` does not."""
  before, after = (
    set(child(f"import sys, {name}; print(*{{name.split('.')[0] for name in sys.modules}})"))
    for name in (beyond, module)
  )
  assert "foliax" in after
  return after - before


def test_import_takes_less_than_a_second_on_top_of_jax():
  code = "import jax; from time import time; start = time(); import foliax; print(time() - start)"
  assert float(child(code)[0]) < 1


def test_import_of_the_package_alone_loads_neither_jax_nor_an_extra():
  assert not loaded_by("foliax", beyond="sys") & (modules_of_extras() | {"jax", "numpy", "flax"})


@pytest.mark.parametrize("module", ["foliax.search.cgp", "foliax.training.preflight"])
def test_import_of_a_method_or_the_substrate_loads_no_extra(module):
  # What JAX and flax load by themselves because it happens to be there is not foliax's doing.
  assert not loaded_by(module, beyond="jax, flax, optax") & modules_of_extras()


def test_modules_of_extras_are_known():
  assert {"matplotlib", "sklearn", "hypothesis"} & modules_of_extras()
  assert not {"jax", "numpy", "scipy", "flax"} & modules_of_extras()


def test_missing_extra_is_one_line_that_names_it():
  with pytest.raises(ModuleNotFoundError) as caught:
    extras.require("no_such_module.part", "experiments")
  message = str(caught.value)
  assert "no_such_module.part" in message
  assert "pip install 'foliax[experiments]'" in message
  assert "\n" not in message


def test_failure_inside_an_installed_extra_is_not_taken_for_a_missing_one(tmp_path, monkeypatch):
  (tmp_path / "broken_extra.py").write_text("import also_missing")
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ModuleNotFoundError, match="'also_missing'"):
    extras.require("broken_extra", "experiments")


def test_every_extra_that_code_asks_for_exists():
  root = pathlib.Path(__file__).parents[2]
  known = set(CONFIG["project"]["optional-dependencies"])
  for folder in ("lib", "envs", "experiments", "kernels_pallas"):
    for path in (root / folder).rglob("*.py"):
      asked = re.findall(r"""require\(\s*["'][\w.]+["'],\s*["'](\w+)["']""", path.read_text())
      assert set(asked) <= known, path
