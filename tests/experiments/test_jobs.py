"""A training job runs once in its work directory, and says in one line what is wrong with it."""

import json
import pathlib

import pytest
from foliax.experiments import cli, decoder, preflight, registry
from foliax.training.preflight import TARGETS

ROOT = pathlib.Path(__file__).parents[2]
SMALL = ["--config.steps=2", "--config.steps_per_call=2", "--config.sequence=16"]
SMALL += ["--config.rows=2", "--config.warmup=1", "--config.evaluate_batches=1"]


def test_job_trains_once_and_shows_its_numbers(tmp_path, capsys):
  command = ["train", "decoder:smoke", f"--workdir={tmp_path}", *SMALL]
  assert cli.main(command) == 0
  shown = capsys.readouterr().out
  document = json.loads((tmp_path / "results.json").read_text())
  assert document["results"]["steps"] == 2
  assert document["results"]["tokens"] == 2 * 2 * 16
  assert document["provenance"]["versions"]["jax"]
  assert f"held_out_loss           {document['results']['held_out_loss']}" in shown

  written = (tmp_path / "results.json").stat().st_mtime_ns
  assert cli.main(command) == 0
  assert capsys.readouterr().out == shown
  assert (tmp_path / "results.json").stat().st_mtime_ns == written

  assert cli.main([*command, "--config.steps=4"]) == 2
  assert "config.steps: 2 there, 4 here" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ("decodre:smoke", "unknown job 'decodre'; did you mean decoder?"),
    ("decoder:big", "unknown scale 'big'"),
    ("decoder:smoke --config.model=gpt", "model is 'gpt'; allowed: tiny, llama-1b, qwen3-8b"),
    ("decoder:smoke --config.mesh.model=3", "model is 3, but there are"),
    ("decoder:smoke --config.text=/no/such/text", "it must be a file, or a folder"),
    ("decoder:smoke --config.sequence=10000000", "less than one row"),
    ("foliax.experiments.cgp:smoke", "is no training job: it lacks train"),
  ],
)
def test_mistake_is_one_line_and_exit_code_2(arguments, message, tmp_path, capsys):
  assert cli.main(["train", *arguments.split(), f"--workdir={tmp_path}"]) == 2
  said = capsys.readouterr().err.splitlines()
  assert message in said[-1]


def test_committed_reports_are_of_pods_that_compile_and_fit():
  reports = json.loads((ROOT / "results" / "preflight" / "decoder.json").read_text())
  page = (ROOT / "docs" / "training.md").read_text()
  cases = [case for _, case in preflight.cases(["decoder"])]
  found = [(r["case"], r["target"]) for r in reports]
  assert set(found) <= {(c.name, *c.targets) for c in cases}
  compiled = {(case.split()[0], target) for case, target in found}
  models = ("llama-1b", "qwen3-8b")
  assert compiled >= {(name, target) for name in models for target in ("v5e-256", "h200x8")}
  for report in reports:
    assert report["ok"], report
    held = report["argument_bytes"] + report["output_bytes"] + report["temp_bytes"]
    held -= report["alias_bytes"]
    assert held <= report["device_bytes"]
    name, mesh, rows, _, _, tokens, _ = report["case"].replace(",", "").split()
    shown = f"| {name} | {report['target']} | {mesh} | {rows} x {tokens} | {held / 2**30:.1f} |"
    assert shown in page
    assert report["device_bytes"] == TARGETS[report["target"]].device_bytes
    # Donated state is reused: nearly all that goes in comes out in its place.
    assert report["alias_bytes"] > 0.9 * report["argument_bytes"]


def test_some_pods_are_always_compiled_one_for_each_compiler():
  platforms = [
    TARGETS[case.targets[0]].platform
    for _, case in preflight.cases([])
    if "rows of" in case.name and not case.takes_minutes
  ]
  assert sorted(platforms) == ["cuda", "tpu"]


def test_jobs_are_listed_with_how_to_run_them(capsys):
  assert cli.main(["list"]) == 0
  shown = capsys.readouterr().out
  assert decoder.TITLE in shown
  assert "foliax train JOB:SCALE" in shown
  assert set(registry.JOBS) == {"decoder"}
