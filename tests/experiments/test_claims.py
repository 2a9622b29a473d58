"""Intervals agree with scipy and closed forms, and verdicts follow from them."""

import json
import math

import numpy as np
import pytest
import scipy.stats
from foliax.experiments import claims
from hypothesis import given
from hypothesis import strategies as st

SKEWED = np.random.default_rng(1).exponential(size=25)
OTHER = np.random.default_rng(2).normal(2.0, 0.5, size=25)


def test_mean_interval_is_scipys_bca_bootstrap_at_the_expanded_level():
  # Hesterberg 2015: alpha'/2 = Phi(-sqrt(n / (n - 1)) t_{alpha/2, n-1}).
  half = scipy.stats.norm.cdf(math.sqrt(25 / 24) * scipy.stats.t.ppf(0.025, 24))
  expected = scipy.stats.bootstrap(
    (SKEWED,), np.mean, method="BCa", n_resamples=9999, rng=np.random.default_rng(0),
    confidence_level=1 - 2 * half,
  ).confidence_interval  # fmt: skip
  value, low, high = claims.mean_interval(SKEWED)
  assert value == SKEWED.mean()
  np.testing.assert_allclose((low, high), expected, rtol=1e-12)


def test_mean_interval_of_normal_samples_is_close_to_students():
  x = np.random.default_rng(3).normal(size=400)
  expected = scipy.stats.t.interval(0.95, 399, x.mean(), x.std(ddof=1) / 20)
  np.testing.assert_allclose(claims.mean_interval(x)[1:], expected, atol=0.006)


def test_paired_difference_is_the_mean_of_the_differences():
  assert claims.difference_interval(SKEWED, OTHER) == claims.mean_interval(SKEWED - OTHER)


def test_pairing_removes_what_the_seeds_share():
  shared = np.random.default_rng(4).normal(0, 10, size=30)
  a, b = shared + 0.5, shared + np.random.default_rng(5).normal(0, 0.1, size=30)
  paired = claims.difference_interval(a, b)
  unpaired = claims.difference_interval(a, b, paired=False)
  assert paired.high - paired.low < 0.1 < 5 < unpaired.high - unpaired.low
  assert paired.value == pytest.approx(unpaired.value)


def test_unpaired_difference_is_close_to_welchs_interval():
  a = np.random.default_rng(6).normal(1, 1, size=300)
  b = np.random.default_rng(7).normal(0, 2, size=200)
  expected = scipy.stats.ttest_ind(a, b, equal_var=False).confidence_interval()
  np.testing.assert_allclose(
    claims.difference_interval(a, b, paired=False)[1:], [expected.low, expected.high], atol=0.02
  )


def test_ratio_interval_is_close_to_fiellers():
  rng = np.random.default_rng(8)
  a, b = rng.normal(10, 1, 400), rng.normal(5, 1, 400)
  # Fieller (1954) for independent means.
  g = scipy.stats.norm.ppf(0.975)
  va, vb = a.var(ddof=1) / 400, b.var(ddof=1) / 400
  q, r = b.mean() ** 2 - g**2 * vb, a.mean() * b.mean()
  root = math.sqrt(r**2 - q * (a.mean() ** 2 - g**2 * va))
  interval = claims.ratio_interval(a, b, paired=False)
  np.testing.assert_allclose(interval[1:], [(r - root) / q, (r + root) / q], atol=0.006)
  assert interval.value == pytest.approx(a.mean() / b.mean())


def test_ratio_of_proportional_samples_has_no_width():
  interval = claims.ratio_interval(3 * OTHER, OTHER)
  np.testing.assert_allclose(interval, 3.0, rtol=1e-12)


@pytest.mark.parametrize(
  ("successes", "n", "low", "high"),
  # Closed forms of the exact interval: 1 - (a/2)^(1/n) when nothing succeeds, and its mirror image.
  [(0, 10, 0.0, 1 - 0.025**0.1), (10, 10, 0.025**0.1, 1.0), (100, 100, 0.025**0.01, 1.0)],
)
def test_proportion_interval_has_the_closed_form_at_the_ends(successes, n, low, high):
  expected = (successes / n, low, high)
  np.testing.assert_allclose(claims.proportion_interval(successes, n), expected, atol=1e-12)


def test_proportion_interval_is_given_by_beta_quantiles():
  beta = scipy.stats.beta
  expected = (0.7, beta.ppf(0.025, 21, 10), beta.ppf(0.975, 22, 9))
  np.testing.assert_allclose(claims.proportion_interval(21, 30), expected, rtol=1e-9)


@pytest.mark.parametrize("n", [10, 30])
@pytest.mark.parametrize(("draw", "truth"), [("standard_normal", 0.0), ("exponential", 1.0)])
def test_intervals_cover_the_truth_about_as_often_as_they_say(n, draw, truth):
  rng = np.random.default_rng(9)
  runs = 300
  hits = 0
  for _ in range(runs):
    _, low, high = claims.mean_interval(getattr(rng, draw)(size=n))
    hits += low <= truth <= high
  # 93 % for skewed samples, 94.5 % for normal ones, and three standard errors of the count around.
  assert 0.885 <= hits / runs <= 0.985


def test_one_sample_decides_nothing():
  interval = claims.mean_interval([2.0])
  assert interval == (2.0, -math.inf, math.inf)
  assert claims.claim("A", "s", interval, ">=", 1.0).verdict == "undecided"


def test_identical_samples_have_no_width():
  assert claims.mean_interval([0.25] * 6) == (0.25, 0.25, 0.25)
  assert claims.difference_interval([1.0] * 3, [1.0] * 4, paired=False) == (0.0, 0.0, 0.0)


def test_an_interval_contains_its_value_even_for_one_outlier():
  for x in ([0.0] * 9 + [1.0], [0.0, 0.0, 1e6], [1.0, 1.0, 1.0 + 1e-9]):
    value, low, high = claims.mean_interval(x)
    assert low <= value <= high
    assert math.isfinite(low)
    assert math.isfinite(high)


@given(
  st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=8),
  st.floats(-1e6, 1e6),
  st.sampled_from(claims.RELATIONS),
)
def test_verdict_says_on_which_side_the_whole_interval_lies(ends, threshold, relation):
  low, *_, high = sorted(ends)
  got = claims.claim("A", "s", claims.Interval((low + high) / 2, low, high), relation, threshold)
  ops = {"<=": "__le__", ">=": "__ge__", "<": "__lt__", ">": "__gt__"}
  right = [getattr(x, ops[relation])(threshold) for x in np.linspace(low, high, 7)]
  if got.verdict == "holds":
    assert all(right)
  elif got.verdict == "fails":
    assert not any(right)
  else:
    assert any(right)
    assert not all(right)


@pytest.mark.parametrize(
  ("relation", "verdict"), [("<=", "holds"), (">=", "holds"), ("<", "fails"), (">", "fails")]
)
def test_equality_satisfies_only_the_relations_that_allow_it(relation, verdict):
  assert claims.claim("A", "s", claims.Interval(1, 1, 1), relation, 1).verdict == verdict


def test_what_was_not_measured_is_said_and_kept():
  got = claims.claim("A", "s", None, "<", 1, note="needs the peers")
  assert got.verdict == "not measured"
  assert got.note == "needs the peers"


def test_worst_setting_decides_a_claim_about_all_of_them():
  a, b = claims.Interval(-2, -3, -1), claims.Interval(0.5, -0.5, 1.5)
  assert claims.worst([a, b], "<") == (0.5, -0.5, 1.5)
  assert claims.worst([a, b], ">") == (-2, -3, -1)
  with pytest.raises(ValueError, match="empty"):
    claims.worst([], "<")


@pytest.mark.parametrize("interval", [None, claims.Interval(1.0, -math.inf, math.inf)])
def test_claims_survive_strict_json(interval):
  before = claims.claim("A", "s", interval, "<", 2.0, note="n")
  text = json.dumps(before.as_dict(), allow_nan=False)
  assert claims.Claim.from_dict(json.loads(text)) == before


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: claims.mean_interval([]), "at least one number"),
    (lambda: claims.mean_interval([[1.0]]), r"shape \(1, 1\)"),
    (lambda: claims.mean_interval([1.0, math.nan]), "1 of 2 values that are not finite"),
    (lambda: claims.difference_interval([1.0], [1.0, 2.0]), "pair them by seed"),
    (lambda: claims.ratio_interval([1.0], [0.0]), "must be positive"),
    (lambda: claims.proportion_interval(3, 2), "successes 3 of n 2"),
    (lambda: claims.proportion_interval(0, 0), "n >= 1"),
    (lambda: claims.claim("A", "s", None, "==", 1.0), "relation '=='"),
    (lambda: claims.claim("A", "s", None, "<", math.nan), "threshold nan"),
    (lambda: claims.claim("A", "s", claims.Interval(0, 1, 2), "<", 1), "low <= value <= high"),
  ],
)
def test_bad_input_is_named(call, message):
  with pytest.raises(ValueError, match=message):
    call()
