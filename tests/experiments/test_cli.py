"""The command says what is wrong in one line, and does what it was told."""

import json
import pathlib
import subprocess
import sys

import pytest
from foliax.experiments import cli, registry

HERE = pathlib.Path(__file__).parent
WALK = "outside.random_walk"


@pytest.fixture(autouse=True)
def _importable(monkeypatch, tmp_path):
  monkeypatch.syspath_prepend(str(HERE))
  monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """A finished run of the small experiment, with five claims of four verdicts."""
  folder = tmp_path_factory.mktemp("walk") / "run"
  sys.path.insert(0, str(HERE))
  try:
    assert cli.main(["run", f"{WALK}:smoke", f"--workdir={folder}"]) == 0
  finally:
    sys.path.remove(str(HERE))
  return folder


def test_run_directory_holds_everything(finished):
  assert json.loads((finished / "config.json").read_text())["config"]["steps"] == 40
  document = json.loads((finished / "results.json").read_text())
  assert document["method"] == WALK
  assert document["scale"] == "smoke"
  assert [c["verdict"] for c in document["claims"]] == [
    "holds", "fails", "undecided", "undecided", "not measured",
  ]  # fmt: skip
  origin = document["provenance"]
  assert origin["seeds"] == {"seeds": 4}
  assert {"jax", "numpy", "foliax", "python"} <= origin["versions"].keys()
  assert origin["devices"]
  assert any((finished / "tensorboard").iterdir())
  assert any((finished / "checkpoints" / "walk").iterdir())
  assert {p.name for p in (finished / "figures").iterdir()} == {"paths.svg", "ends.svg"}
  assert (finished / "report.html").stat().st_size > 10_000


def test_identical_commands_give_identical_results(finished, tmp_path):
  assert cli.main(["run", f"{WALK}:smoke", f"--workdir={tmp_path / 'again'}"]) == 0
  both = [json.loads((d / "results.json").read_text()) for d in (finished, tmp_path / "again")]
  assert both[0].pop("provenance") != both[1].pop("provenance")
  assert both[0] == both[1]
  for name in ("paths.svg", "ends.svg"):
    drawings = [(d / "figures" / name).read_bytes() for d in (finished, tmp_path / "again")]
    assert drawings[0] == drawings[1]


def test_finished_run_is_not_repeated_and_shows_its_verdicts(finished, capsys):
  before = (finished / "results.json").read_bytes()
  assert cli.main(["run", f"{WALK}:smoke", f"--workdir={finished}"]) == 0
  out = capsys.readouterr().out
  assert "finished already" in out
  assert "1 holds, 1 fails, 2 undecided, 1 not measured" in out
  assert "✗ fails         W2" in out
  assert "nobody asked them" in out
  assert (finished / "results.json").read_bytes() == before


def test_damaged_results_are_made_again_from_the_stages(finished, tmp_path):
  import shutil

  shutil.copytree(finished, tmp_path / "run")
  whole = json.loads((finished / "results.json").read_text())
  (tmp_path / "run" / "results.json").write_bytes((finished / "results.json").read_bytes()[:-99])
  steps = (tmp_path / "run" / "steps.log").read_text()
  assert cli.main(["run", f"{WALK}:smoke", f"--workdir={tmp_path / 'run'}"]) == 0
  again = json.loads((tmp_path / "run" / "results.json").read_text())
  assert again["results"] == whole["results"]
  assert (tmp_path / "run" / "steps.log").read_text() == steps


def test_another_configuration_in_the_same_directory_is_refused_by_field(finished, capsys):
  flags = ["--config.steps=41", "--config.walk.reflect"]
  assert cli.main(["run", f"{WALK}:smoke", f"--workdir={finished}", *flags]) == 2
  error = capsys.readouterr().err
  assert "config.steps: 40 there, 41 here" in error
  assert "config.walk.reflect: false there, true here" in error


def test_a_directory_without_results_of_work_takes_a_corrected_configuration(tmp_path, capsys):
  bad = ["run", f"{WALK}:smoke", "--workdir=a", "--config.secret_failure=bad input"]
  assert cli.main(bad) == 2
  error = capsys.readouterr().err
  assert error.count("\n") == 1
  assert "stopped: ValueError: drift must be smaller than everything" in error
  assert "ValueError" in (tmp_path / "a" / "error.txt").read_text()
  assert cli.main(["run", f"{WALK}:smoke", "--workdir=a", "--config.steps=3"]) == 0
  assert not (tmp_path / "a" / "error.txt").exists()


def test_a_bug_in_an_experiment_is_no_user_error(capsys):
  assert cli.main(["run", f"{WALK}:smoke", "--workdir=a", "--config.secret_failure=bug"]) == 1
  assert "RuntimeError: a bug (traceback in a/error.txt)" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("flags", "field", "value"),
  [
    (["--config.steps=7"], "steps", 7),
    (["--config.steps", "7"], "steps", 7),
    (["--config.drift=2"], "drift", 2.0),
    (["--config.walk.width=(3.0, 4.0)"], "walk.width", (3.0, 4.0)),
    (["--config.walk.reflect=true"], "walk.reflect", True),
    (["--config.walk.reflect"], "walk.reflect", True),
    (["--noconfig.walk.reflect"], "walk.reflect", False),
    (["--config.drift", "-1.5"], "drift", -1.5),
    (["--config.walk.pause_seconds=1e-3"], "walk.pause_seconds", 1e-3),
    (["--config.steps=7", "--config.steps=8"], "steps", 8),
  ],
)
def test_overrides_keep_the_type_of_the_field(flags, field, value):
  config = registry.load(WALK).get_config("smoke")
  config_flags, rest = cli._split_config_flags(flags)
  got = cli.overridden(config, config_flags)
  assert rest == []
  for name in field.split("."):
    got = got[name]
  assert got == value
  assert type(got) is type(value)
  assert config.steps == 40  # the experiment's own configuration is left alone


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ("run cpg:smoke", "unknown method 'cpg'; did you mean cgp?"),
    ("run cgp:smok", "unknown scale 'smok'; write cgp:SCALE with SCALE one of smoke, laptop, pod"),
    ("run cgp", "no scale in 'cgp'"),
    ("run outside.nothing:smoke", "no module named 'outside.nothing'"),
    ("run json.decoder:smoke", "is no experiment: it lacks get_config, run, claims, figures"),
    (f"run {WALK}:laptop", "has no scale laptop: a random walk needs no laptop"),
    (f"run {WALK}:smoke --config.stepps=3", "unknown config field 'stepps'; did you mean steps"),
    (f"run {WALK}:smoke --config.walk=3", "unknown config field 'walk'"),
    (f"run {WALK}:smoke --config.steps=many", "steps"),
    (f"run {WALK}:smoke --config.steps=2.5", "steps"),
    (f"run {WALK}:smoke --config.steps", "has no value"),
    (f"run {WALK}:smoke --workdir=/proc/none/x", "cannot write to the work directory"),
    ("list --config.steps=3", "belongs to foliax run"),
    ("reproduce cpg --scale=smoke", "did you mean cgp?"),
    ("reproduce cgp --scale=small", "unknown scale 'small'"),
    ("scoreboard --add=nowhere", "holds no finished run"),
    ("scoreboard", "there is no README.md"),
    ("preflight envelop", "unknown kernel, experiment or job 'envelop'"),
    ("fetch digit", "unknown input 'digit'; did you mean digits?"),
  ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, message, capsys):
  assert cli.main(arguments.split()) == 2
  error = capsys.readouterr().err
  assert message in error
  assert error.startswith("foliax: ")
  assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["rum"], ["run"], ["run", "cgp:smoke", "--work=x"]])
def test_unusable_arguments_exit_with_two(arguments, capsys):
  with pytest.raises(SystemExit) as stop:
    cli.main(arguments)
  assert stop.value.code == 2
  assert "usage: foliax" in capsys.readouterr().err


def test_reproduce_shows_failing_claims_and_succeeds(capsys, tmp_path):
  assert cli.main(["reproduce", WALK, "--scale=smoke"]) == 0
  out = capsys.readouterr().out
  assert "✗ fails" in out
  assert "report: runs/random_walk-smoke/report.html" in out
  assert (tmp_path / "runs" / "random_walk-smoke" / "results.json").exists()


def test_list_names_every_experiment(capsys, monkeypatch):
  monkeypatch.setattr(registry, "EXPERIMENTS", {"walk": WALK})
  assert cli.main(["list"]) == 0
  out = capsys.readouterr().out
  assert "walk" in out
  assert "Random walks & their <drift>" in out


def _report(target, **fields):
  from foliax.training.preflight import Report

  known = dict.fromkeys(Report._fields) | {"target": target, "ok": True, "seconds": 1.0}
  return Report(**known | {"temp_bytes": 2**20, "device_bytes": 2**34, "collectives": {}} | fields)


def test_preflight_compiles_every_kernel_and_every_pod_config(capsys, monkeypatch, tmp_path):
  seen = []

  def compile_case(function, arguments, target, limits):
    seen.append((target, limits))
    return _report(target)

  monkeypatch.setattr("foliax.training.preflight.preflight", compile_case)
  monkeypatch.setattr(registry, "EXPERIMENTS", {"walk": WALK})
  assert cli.main(["preflight", "--json=report.json"]) == 0
  reports = json.loads((tmp_path / "report.json").read_text())
  assert {r["owner"] for r in reports} >= {"envelope", "walk:pod"}
  assert len(reports) == len(seen)
  assert any(limits for _, limits in seen)  # the envelope's memory bound is passed on
  assert "walk:pod: cumulative sum  v5e-1  ✓ compiles  1" in capsys.readouterr().out
  seen.clear()
  assert cli.main(["preflight", WALK]) == 0
  assert seen == [("v5e-1", {})]


@pytest.mark.parametrize("how", ["report", "missing"])
def test_preflight_fails_when_a_case_fails(capsys, monkeypatch, how):
  def compile_case(function, arguments, target, limits):
    if how == "missing":
      raise ModuleNotFoundError("the compiler is not installed")
    return _report(target, ok=False, error="too much memory")

  monkeypatch.setattr("foliax.training.preflight.preflight", compile_case)
  assert cli.main(["preflight", WALK]) == 1
  out = capsys.readouterr().out
  assert "✗ fails" in out
  assert ("not installed" if how == "missing" else "too much memory") in out


@pytest.mark.preflight
def test_preflight_compiles_for_a_real_target(capsys):
  assert cli.main(["preflight", WALK]) == 0
  assert "cumulative sum  v5e-1  ✓ compiles" in capsys.readouterr().out


def test_fetch_says_size_source_and_licence(capsys):
  assert cli.main(["fetch"]) == 0
  out = capsys.readouterr().out
  assert "features [1797, 64]" in out
  assert "features [569, 30]" in out
  assert out.count("licence:") == out.count("source:") == 2


def test_help_and_import_load_nothing_heavy():
  code = (
    "import sys, foliax.experiments.cli as c\n"
    "try: c.main(['--help'])\n"
    "except SystemExit: pass\n"
    "print([m for m in ('jax', 'numpy', 'matplotlib', 'rich', 'scipy') if m in sys.modules])"
  )
  out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert out.stdout.splitlines()[-1] == "[]"
