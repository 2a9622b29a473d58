"""The experiment on certificate-guided pruning: its claims can fail; its results are committed."""

import copy
import json
import math
import pathlib

import pytest
from foliax.experiments import cgp, claims, figures, registry, run
from foliax.experiments.context import Context

COMMITTED = pathlib.Path(__file__).parents[2] / "results" / "cgp.json"


@pytest.fixture(scope="module")
def document():
  return json.loads(COMMITTED.read_text())


def verdicts(results):
  return {claim.id: claim.verdict for claim in cgp.claims(results)}


def test_committed_claims_follow_from_committed_results(document):
  again = [claim.as_dict() for claim in cgp.claims(document["results"])]
  for now, then in zip(again, document["claims"], strict=True):
    # Releases of scipy round the bootstrap differently.
    assert now.pop("statistic") == pytest.approx(then.pop("statistic"), rel=1e-3, abs=1e-6)
    assert now == then
  assert document["scale"] == "laptop"
  assert not document["provenance"]["commit"].endswith("changes")


def test_committed_results_come_from_the_laptop_configuration(document):
  config = registry.load("cgp").get_config("laptop").to_dict()
  committed = document["config"] | {"peers_python": ""}
  assert json.loads(json.dumps(config)) == committed


def test_every_arm_has_the_same_calls_and_seeds(document):
  results, config = document["results"], document["config"]
  for setting, arms in results["settings"].items():
    assert set(arms) == set(cgp.arms_at(float(setting.split()[1])))
    for arm in arms.values():
      assert len(arm["regret"]) == config["seeds"]
      assert {len(row) for row in arm["regret"]} == {len(results["steps"])}
  assert results["steps"][-1] == config["horizon"]
  for arms in results["tuning"].values():
    for tuned in arms.values():
      assert len(tuned) == config["tuning_seeds"]
      assert {one["calls"][-1] for one in tuned} == {config["tuning_calls"]}


def spoil(results):
  """Results of a method that does everything wrong."""
  results = copy.deepcopy(results)
  for coverage in results["coverage"].values():
    coverage["contained"] = coverage["bracketed"] = coverage["runs"] // 2
  for arms in results["settings"].values():
    worse = [[value + 1.0 for value in row] for row in arms["random"]["regret"]]
    arms["cgp"]["regret"] = worse
    arms["hybrid"]["regret"] = [[value + 1.0 for value in row] for row in worse]
    arms["cgp"]["final gap"] = [value + 1.0 for value in arms["random"]["final gap"]]
    arms["cgp"]["volume"] = [0.5 * value for value in arms["cgp"]["volume"]]
    arms["adaptive-0.25"]["flagged"] = [False] * len(arms["adaptive-0.25"]["flagged"])
  results["stopping"]["regret"] = [1.0] * len(results["stopping"]["regret"])
  results["stopping"]["calls"] = [results["steps"][-1]] * len(results["stopping"]["calls"])
  weight = results["distance weight"]
  weight["1.0"], weight["0.0"] = [v / 2 for v in weight["0.0"]], weight["0.0"]
  for name, arms in results["high"].items():
    factor = 2.0 if name.endswith("-10") else 0.5
    arms["trust region"] = [factor * value for value in arms["random"]]
  for arms in results["tuning"].values():
    for one in arms["adaptive"]:
      one["accuracy"] = [0.1 for _ in one["accuracy"]]
  results["speed"] = {name: [1.0] * 5 for name in ("cgp", "botorch-qnei")}
  results["speed"]["optuna-tpe"] = [0.5] * 5
  return results


def test_every_claim_can_fail(document):
  spoiled = verdicts(spoil(document["results"]))
  assert set(spoiled) == {claim["id"] for claim in document["claims"]}
  assert {name: verdict for name, verdict in spoiled.items() if verdict != "fails"} == {}


def test_speed_against_botorch_is_not_measured_without_it(document):
  results = copy.deepcopy(document["results"])
  results["speed"] = {name: results["speed"][name] for name in ("cgp", "optuna-tpe")}
  claim = next(c for c in cgp.claims(results) if c.id == "S1")
  assert claim.verdict == "not measured"
  assert "peers_python" in claim.note


def test_figures_of_the_committed_results_have_captions(document):
  with figures.style():
    drawn = cgp.figures(document["results"])
  assert list(drawn) == list(cgp.CAPTIONS)


def test_checkpoints_are_increasing_and_end_at_the_horizon():
  for horizon in (1, 2, 24, 300, 1000):
    steps = cgp.checkpoints(horizon)
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (1, horizon)


@pytest.mark.slow
def test_the_smoke_scale_runs_to_verdicts_and_a_report(tmp_path):
  config = cgp.get_config("smoke")
  document, before = run.run("cgp", "smoke", config, tmp_path)
  assert not before
  assert {claim["id"] for claim in document["claims"]} >= {"R1", "R2", "R3", "R4", "R6", "R7"}
  assert all(claim["verdict"] in claims.VERDICTS for claim in document["claims"])
  assert (tmp_path / "report.html").exists()
  assert len(list((tmp_path / "figures").glob("*.svg"))) == len(cgp.CAPTIONS) - 1  # without BoTorch
  for arms in document["results"]["settings"].values():
    for arm in cgp.ARMS:
      assert all(math.isfinite(gap) for gap in arms[arm]["final gap"])
  # Whatever was stored is not measured again.
  assert run.run("cgp", "smoke", config, tmp_path)[1]


def test_a_tuning_run_that_is_stopped_continues_with_the_same_numbers(tmp_path, monkeypatch):
  config = cgp.get_config("smoke")

  class Task:
    name = "bowl"

    def __init__(self, calls):
      self.left = calls

    def evaluate(self, x, seed):
      if self.left == 0:
        raise KeyboardInterrupt
      self.left -= 1
      return 1.0 - float((x[0] - 0.3) ** 2 + (x[1] - 0.6) ** 2) + 0.01 * (seed % 7)

    def truth(self, x):
      return float(x[0])

  whole = cgp._tune(config, Context(tmp_path / "whole"), Task(99), "adaptive", 0)
  stopped = Context(tmp_path / "stopped", save_seconds=0)
  with pytest.raises(KeyboardInterrupt):
    cgp._tune(config, stopped, Task(5), "adaptive", 0)
  resumed = cgp._tune(
    config, Context(tmp_path / "stopped"), Task(config.tuning_calls - 5), "adaptive", 0
  )
  assert resumed == whole
