"""The experiment on the decoder: small runs give verdicts, and the other side answers."""

import json
import pathlib
import sys

import numpy as np
import pytest
from foliax.experiments import language, storage
from foliax.experiments.context import Context

COMMITTED = pathlib.Path(__file__).parents[2] / "results" / "language.json"


def synthetic(**changes):
  seconds = {"foliax 1": [0.02, 0.021, 0.019], "read": [0.02, 0.021, 0.02]}
  seconds |= {"foliax 8": [0.04, 0.041, 0.04], "foliax 32": [0.1, 0.1, 0.11]}
  seconds |= {"foliax prefill": [0.5, 0.52, 0.49], "transformers prefill": [1.0, 1.1, 1.0]}
  seconds |= {f"transformers {b}": [0.2, 0.21, 0.2] for b in language.BATCHES}
  results = {
    "parity": {"logits": [1e-4, 3e-4], "scale": 30.0, "same text": [True, True]},
    "cache": {"cached": 2e-5, "rolled back": 0.0, "scale": 30.0},
    "speed": {"seconds": seconds, "weight bytes": 4e8, "read bytes": 4e8},
    "adaptations": [
      {"before": [3.0, 3.2, 2.9, 3.1], "after": [2.5, 2.8, 2.6, 2.5], "training": [3.0, 2.8]}
    ],
  }
  return results | changes


def verdicts(results):
  return {c.id: c.verdict for c in language.claims(results)}


def test_good_measurements_hold_and_absent_ones_are_not_measured():
  found = verdicts(synthetic())
  assert found.pop("L1") == "not measured"
  assert set(found.values()) == {"holds"}, found
  without = synthetic()
  del without["parity"]
  assert verdicts(without)["P1"] == "not measured"


@pytest.mark.parametrize(
  ("claim", "change"),
  [
    ("P1", {"parity": {"logits": [1e-4, 3e-3], "scale": 30.0, "same text": [True, True]}}),
    ("P2", {"parity": {"logits": [1e-4], "scale": 30.0, "same text": [True, False]}}),
    ("C1", {"cache": {"cached": 2e-4, "rolled back": 0.0, "scale": 30.0}}),
    ("C2", {"cache": {"cached": 2e-5, "rolled back": 1e-6, "scale": 30.0}}),
    (
      "F1",
      {"adaptations": [{"before": [3.0, 3.1, 3.2], "after": [3.1, 3.3, 3.4], "training": [3.0]}]},
    ),
  ],
)
def test_each_claim_can_fail(claim, change):
  assert verdicts(synthetic(**change))[claim] == "fails"


def test_speed_claims_fail_when_slow():
  slow = synthetic()
  seconds = slow["speed"]["seconds"]
  for name in ("foliax 1", "foliax 8", "foliax 32", "foliax prefill"):
    seconds[name] = [10.0, 10.1, 10.2]
  found = verdicts(slow)
  assert [found[c] for c in ("D1", "D8", "D32", "D512", "M1")] == ["fails"] * 5


@pytest.mark.slow
def test_a_smoke_run_measures_what_needs_no_other_library(tmp_path):
  config = language.get_config("smoke")
  config.timing_repeats, config.seeds, config.lora_steps = 2, 1, 3
  results = language.run(config, Context(tmp_path))
  found = {c.id: c for c in language.claims(storage.round_trip(results))}
  assert found["C1"].verdict == "holds"
  assert found["C2"].verdict == "holds"
  assert found["P1"].verdict == "not measured"
  figures = language.figures(storage.round_trip(results))
  assert list(figures) == list(language.CAPTIONS)


def test_adapters_learn_a_text_that_repeats_itself(tmp_path, monkeypatch):
  config = language.get_config("smoke")
  config.learning_rate, config.lora_steps, config.rows = 3e-2, 25, 4
  monkeypatch.setattr(language, "_text", lambda _: tuple(np.tile([5, 9, 200, 7], 300).tolist()))
  result = language._adapt(config, Context(tmp_path), 0)
  assert max(result["after"]) < min(result["before"])


def test_a_request_that_fails_is_answered_with_the_reason(tmp_path, monkeypatch):
  config = language.get_config("smoke")
  config.peers_python = sys.executable  # has no transformers
  monkeypatch.setattr(language.pretrained, "fetch", lambda _: tmp_path / "none.gguf")
  with pytest.raises(RuntimeError, match="load: ModuleNotFoundError"):
    language._Peer(config)


@pytest.fixture(scope="module")
def document():
  return json.loads(COMMITTED.read_text())


def test_committed_claims_follow_from_committed_results(document):
  again = [claim.as_dict() for claim in language.claims(document["results"])]
  for now, then in zip(again, document["claims"], strict=True):
    measured, stored = now.pop("statistic"), then.pop("statistic")
    assert now == then
    assert (measured is None) == (stored is None)
    # Releases of scipy round the bootstrap differently.
    assert (measured or {}) == pytest.approx(stored or {}, rel=1e-3, abs=1e-6)
  assert not document["provenance"]["commit"].endswith("changes")


def test_committed_results_come_from_the_laptop_configuration(document):
  config = language.get_config("laptop").to_dict()
  assert config == document["config"] | {"peers_python": ""}
