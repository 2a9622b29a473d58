"""Draws from logits: the filters against a slow reference, the draws against their frequencies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foliax.language.sampling import log_distribution, sample, sampling
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

ROWS, SIZE = 4, 300  # a size that fills no whole number of columns
distribution = jax.jit(log_distribution)
draw = jax.jit(sample)
logit_rows = hnp.arrays(np.float32, (ROWS, SIZE), elements=st.floats(-20, 20, width=32))
shares = st.floats(0.01, 1.0)


def reference(logits, temperature, top_k, top_p, min_p):
  """Probabilities of one row in float64, token by token in the order of their probability."""
  x = logits.astype(np.float64)
  if temperature == 0:
    return np.eye(len(x))[np.argmax(x)]
  p = np.exp((x - x.max()) / temperature)
  p /= p.sum()
  order = sorted(range(len(p)), key=lambda i: -p[i])
  kept = order[: top_k or len(p)]
  total, held, nucleus = sum(p[i] for i in kept), 0.0, []
  for i in kept:
    if held >= top_p * total:
      break
    nucleus.append(i)
    held += p[i]
  kept = [i for i in nucleus if p[i] >= min_p * p.max()]
  q = np.zeros_like(p)
  q[kept] = p[kept]
  return q / q.sum()


@pytest.mark.parametrize(
  ("temperature", "top_k", "top_p", "min_p"),
  [
    (1.0, 0, 1.0, 0.0),
    (0.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 20, 1.0, 0.0),
    (1.0, SIZE + 5, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (2.0, 0, 0.3, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 0.9999, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.0, 0, 1.0, 1.0),
    (0.8, 40, 0.8, 0.02),
  ],
)
def test_distribution_is_that_of_the_reference(temperature, top_k, top_p, min_p):
  rng = np.random.default_rng(0)
  logits = (rng.normal(size=(ROWS, SIZE)) * [[0.3], [1], [3], [8]]).astype(np.float32)
  result = distribution(logits, sampling(ROWS, temperature, top_k, top_p, min_p))
  expected = [reference(row, temperature, top_k, top_p, min_p) for row in logits]
  np.testing.assert_allclose(np.exp(result), expected, rtol=2e-5, atol=1e-9)


def test_options_of_a_row_do_not_touch_the_others():
  logits = jax.random.normal(jax.random.key(1), (ROWS, SIZE)) * 3
  options = [(1.0, 0, 1.0, 0.0), (0.0, 5, 0.5, 0.1), (0.5, 7, 1.0, 0.0), (1.5, 0, 0.8, 0.01)]
  mixed = distribution(logits, sampling(ROWS, *map(jnp.array, zip(*options, strict=True))))
  for i, option in enumerate(options):
    np.testing.assert_array_equal(mixed[i], distribution(logits, sampling(ROWS, *option))[i])


@settings(max_examples=60, deadline=None)
@given(logit_rows, st.integers(0, SIZE), shares, st.floats(0, 1), st.floats(0.01, 10))
def test_likeliest_token_is_always_kept(logits, top_k, top_p, min_p, temperature):
  kept = np.isfinite(distribution(logits, sampling(ROWS, temperature, top_k, top_p, min_p)))
  assert (kept & (logits == logits.max(-1, keepdims=True))).sum(-1).min() >= 1


@settings(max_examples=60, deadline=None)
@given(logit_rows, st.tuples(shares, shares), st.floats(0.1, 10))
def test_larger_share_keeps_more(logits, both, temperature):
  less, more = (
    np.isfinite(distribution(logits, sampling(ROWS, temperature, top_p=p))) for p in sorted(both)
  )
  assert (less <= more).all()


@settings(max_examples=60, deadline=None)
@given(logit_rows, shares, st.integers(1, SIZE))
def test_top_p_keeps_no_less_than_its_share_and_top_k_that_many(logits, top_p, top_k):
  whole = np.exp(distribution(logits, sampling(ROWS)))
  nucleus = np.isfinite(distribution(logits, sampling(ROWS, top_p=top_p)))
  assert ((whole * nucleus).sum(-1) >= top_p - 1e-5).all()
  # Without its lightest tokens it would hold less.
  lightest = np.where(nucleus, whole, np.inf).min(-1, keepdims=True)
  assert ((whole * (nucleus & (whole > lightest * (1 + 1e-6)))).sum(-1) < top_p + 1e-5).all()
  kept = np.isfinite(distribution(logits, sampling(ROWS, top_k=top_k)))
  smallest = np.sort(logits, -1)[:, -top_k]
  assert (kept | (logits < smallest[:, None])).all()


@pytest.mark.parametrize("options", [{}, {"top_p": 0.4}, {"top_k": 4, "top_p": 0.9}])
def test_tokens_of_equal_weight_stay_together(options):
  logits = jnp.tile(jnp.array([0.0, 1.0, 1.0, -1.0, 1.0]), (ROWS, SIZE // 5))
  kept = np.isfinite(distribution(logits, sampling(ROWS, **options)))
  assert (kept[:, 1] == kept[:, 2]).all()
  assert kept[:, 1].all()


def chi_square(counts, probabilities):
  """Statistic of draws, with rare tokens counted as one, and its degrees of freedom."""
  expected = probabilities * counts.sum()
  common = expected >= 5
  pairs = [*zip(counts[common], expected[common], strict=True)]
  if expected[~common].sum() > 0:
    pairs.append((counts[~common].sum(), expected[~common].sum()))
  return sum((c - e) ** 2 / max(e, 1e-9) for c, e in pairs), len(pairs) - 1


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"top_k": 30, "top_p": 0.9}])
def test_frequencies_are_those_of_the_distribution(options):
  logits = jax.random.normal(jax.random.key(2), (1, SIZE)) * 2
  rows, many = jnp.tile(logits, (ROWS, 1)), sampling(ROWS, **options)
  keys = jax.random.split(jax.random.key(3), (2000, ROWS))
  tokens = np.concatenate([draw(rows, some, many).tokens for some in keys])
  q = np.exp(distribution(rows, many)[0])
  counts = np.bincount(tokens, minlength=SIZE)
  assert counts[q == 0].sum() == 0
  statistic, freedom = chi_square(counts, q / q.sum())
  # Five deviations of a chi-square with that many degrees of freedom.
  assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"temperature": 0.5, "top_k": 9}])
def test_log_probs_are_those_of_the_drawn_tokens(options):
  logits = jax.random.normal(jax.random.key(4), (ROWS, SIZE)) * 3
  drawn = draw(logits, jax.random.split(jax.random.key(5), ROWS), sampling(ROWS, **options))
  at = functools.partial(np.take_along_axis, indices=np.asarray(drawn.tokens)[:, None], axis=1)
  np.testing.assert_allclose(
    drawn.log_probs, at(np.asarray(jax.nn.log_softmax(logits)))[:, 0], atol=1e-5
  )
  sampled_from = np.asarray(distribution(logits, sampling(ROWS, **options)))
  np.testing.assert_allclose(drawn.sample_log_probs, at(sampled_from)[:, 0], atol=1e-5)


def test_greedy_takes_the_first_of_equals():
  logits = jnp.zeros((ROWS, SIZE)).at[:, 17].set(2.0).at[:, 140].set(2.0).at[1, 280].set(3.0)
  drawn = draw(logits, jax.random.split(jax.random.key(0), ROWS), sampling(ROWS, 0.0))
  assert drawn.tokens.tolist() == [17, 280, 17, 17]
  assert drawn.sample_log_probs.tolist() == [0.0] * ROWS


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_logits_are_flagged_and_stay_in_their_row(bad):
  logits = jax.random.normal(jax.random.key(6), (ROWS, SIZE))
  keys, options = jax.random.split(jax.random.key(7), ROWS), sampling(ROWS, 0.9, 20, 0.9, 0.01)
  good, spoilt = draw(logits, keys, options), draw(logits.at[2, 5].set(bad), keys, options)
  assert spoilt.ok.tolist() == [True, True, False, True]
  for a, b in zip(good, spoilt, strict=True):
    np.testing.assert_array_equal(np.delete(a, 2), np.delete(b, 2))
  assert 0 <= spoilt.tokens[2] < SIZE


def test_options_do_not_compile_again():
  logits, keys = jnp.zeros((ROWS, SIZE)), jax.random.split(jax.random.key(0), ROWS)
  draw(logits, keys, sampling(ROWS))
  before = draw._cache_size()
  draw(logits, keys, sampling(ROWS, jnp.linspace(0.0, 2.0, ROWS), 3, 0.5, 0.1))
  assert draw._cache_size() == before


@pytest.mark.parametrize(
  ("option", "value"),
  [
    ("temperature", -1.0),
    ("temperature", np.nan),
    ("temperature", np.inf),
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("top_p", np.nan),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", jnp.array([0.1, 0.1, 7.0, 0.1])),
  ],
)
def test_options_out_of_range_are_refused(option, value):
  with pytest.raises(ValueError, match=rf"^{option} is [^\n]*must be[^\n]*$"):
    sampling(ROWS, **{option: value})


def test_options_of_another_number_of_rows_are_refused():
  with pytest.raises(ValueError, match=r"top_p has shape \(3,\) for 4 rows"):
    sampling(4, top_p=jnp.full(3, 0.5))
