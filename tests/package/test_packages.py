"""What is in the repository is in the package, and arrives wherever it is installed."""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv

import pytest

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {
  "foliax": "lib",
  "foliax.envs": "envs",
  "foliax.experiments": "experiments",
  "foliax.kernels_pallas": "kernels_pallas",
}


def named(path, root):
  """Import name of a module at `path` below package `root`; of its package for `__init__.py`."""
  parts = path.with_suffix("").parts
  return ".".join([root, *(part for part in parts if part != "__init__")])


def modules(root, pattern="*.py"):
  return {
    named(path.relative_to(root / folder), name)
    for name, folder in FOLDERS.items()
    for path in (root / folder).rglob(pattern)
  }


def test_every_package_in_the_tree_is_listed():
  assert sorted(CONFIG["tool"]["setuptools"]["packages"]) == sorted(modules(ROOT, "__init__.py"))


def test_version_is_that_of_the_package():
  import foliax

  assert foliax.__version__ == CONFIG["project"]["version"]
  assert f"version: {foliax.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_folder_with_modules_is_a_package():
  for folder in FOLDERS.values():
    for path in (ROOT / folder).rglob("*.py"):
      assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py"


def test_every_data_file_is_of_a_kind_that_is_packaged():
  packaged = CONFIG["tool"]["setuptools"]["package-data"]["*"]
  for folder in FOLDERS.values():
    for path in (ROOT / folder).rglob("*"):
      if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts:
        assert any(path.match(pattern) for pattern in packaged), f"{path} would be left out"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
  """A copy, because a build writes beside what it builds and may pick up an earlier build."""
  copy = tmp_path_factory.mktemp("source")
  for name in ("pyproject.toml", "README.md", "LICENSE"):
    shutil.copy(ROOT / name, copy)
  for folder in FOLDERS.values():
    shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
  return copy


def run(*command):
  # Without the path of this checkout, which an inherited PYTHONPATH may hold.
  environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
  done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


IMPORT_ALL = """
import importlib, importlib.metadata, pathlib, pkgutil
import foliax
names = {"foliax"} | {m.name for m in pkgutil.walk_packages(foliax.__path__, "foliax.")}
# In an editable install these lie elsewhere than in the folder of foliax.
for package in ("foliax.envs", "foliax.experiments", "foliax.kernels_pallas"):
  path = importlib.import_module(package).__path__
  names |= {package} | {m.name for m in pkgutil.walk_packages(path, package + ".")}
for name in names:
  importlib.import_module(name)
importlib.metadata.entry_points(group="console_scripts")["foliax"].load()
print(foliax.__file__, *sorted(names))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_installed_into_an_empty_environment_every_module_imports(kind, source, tmp_path):
  home = tmp_path / "venv"
  venv.create(home, with_pip=False)
  python = str(home / "bin" / "python")
  pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
  what = ["--editable", str(source)]
  if kind == "wheel":
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source))
    what = [str(next(tmp_path.glob("*.whl")))]
  # The dependencies are the ones installed here, by path alone: .pth files found along that path,
  # such as that of an editable foliax, are not followed.
  packages = next((home / "lib").glob("python*")) / "site-packages"
  (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
  install = [*pip, "--python", python, "install", "--no-deps", "--no-index", "--no-build-isolation"]
  run(*install, *what)
  # Not in the checkout, whose folders could be imported by accident.
  where, *names = run(python, "-P", "-W", "ignore", "-c", IMPORT_ALL).split()
  expected = home if kind == "wheel" else source
  assert pathlib.Path(where).resolve().is_relative_to(expected.resolve())
  assert set(names) == modules(source)
