"""The real tuning tasks: deterministic in the seed, noisy across seeds, honest about bad input."""

import functools

import numpy as np
import pytest
from foliax.experiments import tuning

load = functools.cache(tuning.load)
GOOD = {"svm-breast-cancer": (0.625, 0.375), "svm-digits": (0.75, 0.375)}


@pytest.mark.parametrize("name", tuning.NAMES)
def test_an_evaluation_is_fixed_by_its_seed_and_varies_across_seeds(name):
  task = load(name)
  first = [task.evaluate(GOOD[name], seed) for seed in range(6)]
  assert first == [tuning.load(name).evaluate(GOOD[name], seed) for seed in range(6)]
  assert len(set(first)) > 1


@pytest.mark.parametrize("name", tuning.NAMES)
def test_good_hyper_parameters_beat_bad_ones(name):
  task = load(name)
  # Smallest C with the widest gamma: every row is its own support vector.
  assert task.evaluate(GOOD[name], 0) > 0.85
  assert task.evaluate((0.0, 1.0), 0) < task.evaluate(GOOD[name], 0) - 0.2


def test_evaluation_agrees_with_scikit_learns_own_pipeline():
  from sklearn.model_selection import StratifiedKFold, cross_val_score
  from sklearn.pipeline import make_pipeline
  from sklearn.preprocessing import StandardScaler
  from sklearn.svm import SVC

  task = load("svm-digits")
  model = make_pipeline(StandardScaler(), SVC(C=10.0, gamma=10**-2.5))
  splitter = StratifiedKFold(3, shuffle=True, random_state=7)
  scores = cross_val_score(model, task.features, task.labels, cv=splitter)
  x = (0.6, 0.5)
  assert task.hyper_parameters(x) == pytest.approx({"C": 10.0, "gamma": 10**-2.5})
  assert task.evaluate(x, 7) == pytest.approx(scores.mean(), abs=1e-12)
  assert task.evaluate(x, 7, folds=1) == pytest.approx(scores[0], abs=1e-12)


def test_truth_is_the_mean_over_seeds_of_its_own_and_is_remembered(monkeypatch):
  task = tuning.load("svm-digits")
  seeds = []
  monkeypatch.setattr(task, "evaluate", lambda x, seed: seeds.append(seed) or float(len(seeds)))
  assert task.truth((0.5, 0.5)) == task.truth(np.array([0.5, 0.5]))
  assert task.truth((0.5, 0.5)) == pytest.approx((tuning.TRUTH_SEEDS + 1) / 2)
  assert len(set(seeds)) == tuning.TRUTH_SEEDS
  assert min(seeds) >= 1_000_000


def test_survey_finds_noise_slope_and_the_best_point():
  task = tuning.load("svm-digits")
  noise = iter(np.random.default_rng(0).normal(0, 0.1, size=5 * 5 * 40))
  task.evaluate = lambda x, seed: 2 * x[0] - (x[1] - 0.5) ** 2 + next(noise)
  survey = tuning.survey(task, points=5, repeats=40)
  assert survey["noise"] == pytest.approx(0.1, rel=0.1)
  assert survey["slope"] == pytest.approx(2.0, abs=0.3)
  assert survey["best_x"][0] == 1.0


@pytest.mark.parametrize("x", [(0.5,), (0.5, 0.5, 0.5), (-0.01, 0.5), (0.5, 1.01), (np.nan, 0.5)])
def test_points_outside_the_square_are_refused(x):
  task = load("svm-digits")
  with pytest.raises(ValueError, match=r"two numbers in \[0, 1\]"):
    task.evaluate(x, 0)
  with pytest.raises(ValueError, match=r"two numbers in \[0, 1\]"):
    task.truth(x)


def test_other_bad_input_says_what_is_allowed():
  with pytest.raises(ValueError, match="svm-digits"):
    tuning.load("svm-iris")
  with pytest.raises(ValueError, match="folds must be 1 to 3"):
    load("svm-digits").evaluate((0.5, 0.5), 0, folds=4)
