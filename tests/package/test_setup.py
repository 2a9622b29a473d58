"""The interpreter and the environment that `make` sets up, against machines that are made up."""

import pathlib
import shutil
import stat
import subprocess

import pytest

SCRIPTS = pathlib.Path(__file__).parents[2] / ".ci"


class Machine:
  """A PATH and a HOME with the interpreters that a test puts there."""

  def __init__(self, home):
    self.home = home
    self.folder = home / "bin"
    self.folder.mkdir(parents=True)
    for name in ("sh", "ls", "sort", "cat", "cksum", "dirname", "basename", "mkdir", "rm", "tr"):
      (self.folder / name).symlink_to(shutil.which(name))

  def script(self, path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path

  def python(self, version, *, name=None, folder=None, has_venv=True, pip="exit 0"):
    """An interpreter of `version` that makes environments whose pip runs the commands `pip`."""
    body = f"""
case "$*" in
  *"print("*) echo {version} ;;
  *"import venv"*) exit {0 if has_venv else 1} ;;
  "-m venv "*)
    mkdir -p "$3/bin"
    cat "$0" >"$3/bin/python"
    chmod +x "$3/bin/python" ;;
  "--version") echo "Python {version}" ;;
  "-m pip install"*) echo "$*" >>"{self.home}/installs"; {pip} ;;
esac
"""
    return self.script((folder or self.folder) / (name or f"python{version}"), body)

  def shim(self, version):
    """What pyenv puts on PATH for a version that only another environment has."""
    message = f"pyenv: python{version}: command not found"
    return self.script(self.folder / f"python{version}", f'echo "{message}" >&2; exit 127')

  def run(self, script, *arguments, cwd=None, **environment):
    return subprocess.run(
      ["/bin/sh", str(script), *arguments],
      env={"PATH": str(self.folder), "HOME": str(self.home), **environment},
      capture_output=True,
      text=True,
      cwd=cwd,
      check=False,
    )

  def choose(self, *arguments, **environment):
    return self.run(SCRIPTS / "python", *arguments, **environment)


@pytest.fixture
def machine(tmp_path):
  machine = Machine(tmp_path / "home")
  (machine.folder / "chmod").symlink_to(shutil.which("chmod"))
  return machine


def test_newest_supported_python_is_chosen(machine):
  for version in ("3.10", "3.11", "3.12", "3.13"):
    path = machine.python(version)
  assert machine.choose().stdout == f"{path}\n"


def test_shim_that_fails_is_skipped(machine):
  machine.shim("3.13")
  machine.shim("3.12")
  path = machine.python("3.11")
  assert machine.choose().stdout == f"{path}\n"


def test_interpreter_behind_a_shim_is_found_in_the_folders_of_pyenv(machine, tmp_path):
  machine.shim("3.13")
  versions = machine.home / ".pyenv" / "versions"
  for patch in ("3.13.2", "3.13.10"):
    machine.python("3.13", folder=versions / patch / "bin")
  newest = versions / "3.13.10" / "bin" / "python3.13"
  assert machine.choose().stdout == f"{newest}\n"
  elsewhere = tmp_path / "elsewhere"
  versions.parent.rename(elsewhere)
  moved = elsewhere / "versions" / "3.13.10" / "bin" / "python3.13"
  assert machine.choose(PYENV_ROOT=str(elsewhere)).stdout == f"{moved}\n"


def test_second_interpreter_of_a_name_is_tried_when_the_first_fails(machine, tmp_path):
  machine.shim("3.12")
  path = machine.python("3.12", folder=tmp_path / "later")
  found = machine.choose(PATH=f"{machine.folder}:{tmp_path / 'later'}")
  assert found.stdout == f"{path}\n"


def test_python3_alone_is_enough_when_it_is_new_enough(machine):
  path = machine.python("3.12", name="python3")
  assert machine.choose().stdout == f"{path}\n"


@pytest.mark.parametrize("version", ["2.7", "3.9", "3.10"])
def test_only_older_python_is_an_error_that_says_what_is_needed(machine, version):
  machine.python(version, name="python3")
  done = machine.choose()
  assert done.returncode == 1
  assert done.stdout == ""
  assert "needs Python 3.11 or newer" in done.stderr


def test_python_without_venv_is_passed_over_or_named(machine):
  bare = machine.python("3.13", has_venv=False)
  done = machine.choose()
  assert done.returncode == 1
  assert str(bare) in done.stderr
  assert "apt install python3-venv" in done.stderr
  path = machine.python("3.11")
  assert machine.choose().stdout == f"{path}\n"


def test_wanted_version_alone_is_searched(machine):
  machine.python("3.13")
  done = machine.choose("3.11")
  assert done.returncode == 1
  assert "needs Python 3.11," in done.stderr


class TestEnvironment:
  """In a checkout of its own, with interpreters that only write down what pip was asked."""

  @pytest.fixture
  def checkout(self, tmp_path):
    checkout = tmp_path / "checkout"
    shutil.copytree(SCRIPTS, checkout / ".ci")
    (checkout / "pyproject.toml").write_text("first")
    return checkout

  @pytest.fixture
  def ensure(self, machine, checkout):
    def ensure(extras="dev", checkout=checkout, **environment):
      return machine.run(checkout / ".ci" / "environment", ".venv", extras, **environment)

    return ensure

  @pytest.fixture
  def installs(self, machine):
    record = machine.home / "installs"
    return lambda: record.read_text().splitlines() if record.exists() else []

  def test_is_made_and_filled_once(self, machine, ensure, installs):
    machine.python("3.12")
    done = ensure()
    assert done.returncode == 0, done.stderr
    assert "python3.12" in done.stdout
    assert installs() == ["-m pip install --quiet --editable .[dev]"]
    assert ensure().stdout == ""
    assert len(installs()) == 1

  def test_gets_another_extra_without_being_made_anew(self, machine, ensure, installs, checkout):
    machine.python("3.12")
    ensure("experiments")
    (checkout / ".venv" / "kept").touch()
    ensure("dev")
    assert [line.split()[-1] for line in installs()] == [".[experiments]", ".[dev]"]
    assert (checkout / ".venv" / "kept").exists()

  def test_is_filled_again_when_the_requirements_change(self, machine, ensure, installs, checkout):
    machine.python("3.12")
    ensure()
    (checkout / "pyproject.toml").write_text("second")
    ensure()
    assert len(installs()) == 2

  def test_that_exists_is_kept(self, machine, ensure, checkout):
    machine.python("3.13")
    machine.python("3.12", name="python", folder=checkout / ".venv" / "bin")
    (checkout / ".venv" / "kept").touch()
    assert "making" not in ensure().stdout
    assert (checkout / ".venv" / "kept").exists()

  def test_whose_install_failed_is_tried_again(self, machine, ensure, installs):
    machine.python("3.12", pip="exit 1")
    assert ensure().returncode != 0
    machine.python("3.12")
    done = ensure()
    assert done.returncode == 0, done.stderr
    assert len(installs()) == 2

  def test_whose_install_was_killed_is_made_anew(self, machine, ensure, installs, checkout):
    machine.python("3.12", pip="kill -9 $PPID")
    assert ensure().returncode != 0
    (checkout / ".venv" / "half-installed").touch()
    machine.python("3.12")
    assert "interrupted" in ensure().stdout
    assert not (checkout / ".venv" / "half-installed").exists()
    assert len(installs()) == 2

  def test_whose_interpreter_is_gone_is_made_anew(self, machine, ensure, checkout):
    machine.python("3.12")
    ensure()
    (checkout / ".venv" / "bin" / "python").unlink()
    assert "does not run" in ensure().stdout
    assert ensure().stdout == ""

  def test_of_a_checkout_that_moved_is_made_anew(self, machine, ensure, checkout, tmp_path):
    machine.python("3.12")
    ensure()
    moved = tmp_path / "moved"
    checkout.rename(moved)
    assert f"the checkout was at {checkout}" in ensure(checkout=moved).stdout
    assert ensure(checkout=moved).stdout == ""

  def test_uses_the_interpreter_that_is_asked_for(self, machine, ensure):
    machine.python("3.13")
    chosen = machine.python("3.11")
    assert str(chosen) in ensure(PYTHON=str(chosen)).stdout

  def test_without_any_interpreter_says_so_and_leaves_nothing(self, ensure, checkout):
    done = ensure()
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
    assert not (checkout / ".venv").exists()


def test_make_without_python_stops_with_the_message(tmp_path, machine):
  checkout = tmp_path / "checkout"
  shutil.copytree(SCRIPTS, checkout / ".ci")
  shutil.copy(SCRIPTS.parent / "Makefile", checkout)
  make = shutil.which("make")
  if make is None:
    pytest.skip("no make on PATH")
  for target in ("test", "reproduce"):
    done = machine.run("-c", f"cd {checkout} && {make} {target}")
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
