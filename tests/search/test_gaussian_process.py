"""Gaussian process regression: known answers, invariances, and what bad input does."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foliax.search import gaussian_process as gp
from jax.test_util import check_grads

KEY = jax.random.key(0)


def make_data(n=12, d=3, capacity=16, seed=0, dtype=np.float32, noise=0.05):
  """A smooth function seen through noise, padded with rubbish up to `capacity`."""
  rng = np.random.default_rng(seed)
  x = rng.uniform(size=(n, d))
  y = np.sin(5 * x).sum(-1) + noise * rng.normal(size=n)
  variance = noise**2 / rng.integers(1, 5, size=n)
  padding = max(capacity - n, 0)
  x = np.concatenate([x, rng.uniform(size=(padding, d))])
  y = np.concatenate([y, rng.normal(size=padding)])
  variance = np.concatenate([variance, rng.uniform(size=padding)])
  mask = jnp.arange(n + padding) < n
  return *(jnp.asarray(array, dtype) for array in (x, y, variance)), mask


def make_params(d=3, dtype=jnp.float32, **changes):
  values = {
    "log_lengthscale": jnp.log(jnp.linspace(0.3, 0.9, d)).astype(dtype),
    "log_amplitude": jnp.asarray(0.2, dtype),
    "log_nugget": jnp.asarray(-jnp.inf, dtype),
    "offset": jnp.asarray(0.5, dtype),
    "scale": jnp.asarray(1.5, dtype),
    "ok": jnp.asarray(True),
  }
  return gp.GPParams(**(values | changes))


def scikit_learn_model(params, x, y, variance):
  from sklearn.gaussian_process import GaussianProcessRegressor
  from sklearn.gaussian_process.kernels import ConstantKernel, Matern

  scale, offset = float(params.scale), float(params.offset)
  kernel = ConstantKernel((scale * np.exp(float(params.log_amplitude))) ** 2) * Matern(
    np.exp(np.asarray(params.log_lengthscale)), nu=2.5
  )
  model = GaussianProcessRegressor(kernel, alpha=np.asarray(variance), optimizer=None)
  return model.fit(np.asarray(x), np.asarray(y) - offset)


def test_values_agree_with_scikit_learn():
  with jax.enable_x64(True):
    x, y, variance, mask = make_data(dtype=np.float64)
    params = make_params(dtype=jnp.float64)
    queries = jax.random.uniform(KEY, (40, 3), jnp.float64)
    model = scikit_learn_model(params, x[:12], y[:12], variance[:12])
    mean, deviation = model.predict(np.asarray(queries), return_std=True)
    got_mean, got_variance = gp.predict(gp.condition(params, x, y, variance, mask), queries)
    np.testing.assert_allclose(got_mean, mean + 0.5, rtol=1e-8)
    np.testing.assert_allclose(got_variance, deviation**2, rtol=1e-7)
    got = gp.log_marginal_likelihood(params, x, y, variance, mask)
    np.testing.assert_allclose(got, model.log_marginal_likelihood_value_, rtol=1e-9)


def test_float32_agrees_with_float64():
  x, y, variance, mask = make_data(n=100, capacity=128)
  queries = jax.random.uniform(KEY, (50, 3))
  mean, deviation2 = gp.predict(gp.condition(make_params(), x, y, variance, mask), queries)
  with jax.enable_x64(True):
    x, y, variance, queries = (jnp.asarray(v, jnp.float64) for v in (x, y, variance, queries))
    exact = gp.predict(gp.condition(make_params(dtype=jnp.float64), x, y, variance, mask), queries)
  np.testing.assert_allclose(mean, exact[0], atol=5e-3)
  np.testing.assert_allclose(deviation2, exact[1], atol=5e-4)


def test_marginal_likelihood_gradient_agrees_with_finite_differences():
  with jax.enable_x64(True):
    x, y, variance, mask = make_data(capacity=16, dtype=np.float64)
    params = make_params(dtype=jnp.float64, log_nugget=jnp.asarray(-3.0, jnp.float64))
    names = ["log_lengthscale", "log_amplitude", "log_nugget", "offset"]

    def value(free):
      return gp.log_marginal_likelihood(params._replace(**free), x, y, variance, mask)

    free = {name: getattr(params, name) for name in names}
    check_grads(value, (free,), order=1, modes=["rev"], rtol=1e-6)
    by_data = lambda y: gp.log_marginal_likelihood(params, x, jnp.asarray(y), variance, mask)
    check_grads(by_data, (jnp.asarray(y),), order=1, modes=["rev"], rtol=1e-6)


def test_matern_is_smooth_at_zero():
  value, slope = jax.vmap(jax.value_and_grad(gp.matern52))(jnp.asarray([0.0, 1e-12, 1e-4]))
  np.testing.assert_allclose(value, [1.0, 1.0, 1.0 - 5 / 6 * 1e-4], rtol=1e-5)
  assert np.isfinite(slope).all()


@pytest.mark.parametrize("rubbish", [0.3, np.nan, -np.inf, -1e30])
def test_padding_changes_nothing(rubbish):
  x, y, variance, mask = make_data(n=16)
  pad = lambda array: jnp.concatenate([array, jnp.full((4, *array.shape[1:]), rubbish)])
  padded = pad(x), pad(y), pad(variance), jnp.arange(20) < 16
  queries = jax.random.uniform(KEY, (20, 3))
  params = gp.fit(x, y, variance, mask, key=KEY)
  other = gp.fit(*padded, key=KEY)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-5), params, other)
  mean, deviation2 = gp.predict(gp.condition(params, x, y, variance, mask), queries)
  got = gp.predict(gp.condition(params, *padded), queries)
  np.testing.assert_allclose(got[0], mean, atol=2e-5)
  np.testing.assert_allclose(got[1], deviation2, atol=2e-5)


def test_values_that_are_not_finite_are_left_out():
  x, y, variance, mask = make_data()
  bad = y.at[3].set(jnp.nan), variance.at[5].set(-1.0), x.at[7, 0].set(jnp.nan)
  params = make_params()
  queries = jax.random.uniform(KEY, (9, 3))
  got = gp.predict(gp.condition(params, bad[2], bad[0], bad[1], mask), queries)
  without = mask & ~jnp.isin(jnp.arange(16), jnp.asarray([3, 5, 7]))
  expected = gp.predict(gp.condition(params, x, y, variance, without), queries)
  np.testing.assert_array_equal(got[0], expected[0])
  np.testing.assert_array_equal(got[1], expected[1])


@pytest.mark.parametrize(("a", "b"), [(3.0, -7.0), (-0.25, 100.0)])
def test_affine_change_of_output_changes_nothing_but_the_unit(a, b):
  with jax.enable_x64(True):
    x, y, variance, mask = make_data(capacity=16, dtype=np.float64)
    queries = jax.random.uniform(KEY, (20, 3), jnp.float64)
    one = gp.fit(x, y, variance, mask, key=KEY)
    two = gp.fit(x, a * y + b, a**2 * variance, mask, key=KEY)
    np.testing.assert_allclose(one.log_lengthscale, two.log_lengthscale, rtol=1e-6)
    mean, deviation2 = gp.predict(gp.condition(one, x, y, variance, mask), queries)
    got = gp.predict(gp.condition(two, x, a * y + b, a**2 * variance, mask), queries)
    np.testing.assert_allclose(got[0], a * mean + b, rtol=1e-6)
    np.testing.assert_allclose(got[1], a**2 * deviation2, rtol=1e-6, atol=1e-9)


def test_replicates_equal_their_mean():
  with jax.enable_x64(True):
    params = make_params(dtype=jnp.float64)
    x, y, _, _ = make_data(n=3, capacity=3, dtype=np.float64)
    repeated = jnp.repeat(x, 4, 0), jnp.repeat(y, 4) + jnp.tile(jnp.asarray([-1, 1, 2, -2.0]), 3)
    queries = jax.random.uniform(KEY, (9, 3), jnp.float64)
    four = gp.condition(params, *repeated, jnp.full(12, 0.4), jnp.ones(12, bool))
    one = gp.condition(params, x, y, jnp.full(3, 0.1), jnp.ones(3, bool))
    for got, expected in zip(gp.predict(four, queries), gp.predict(one, queries), strict=True):
      np.testing.assert_allclose(got, expected, rtol=1e-8)


def test_fit_finds_the_input_that_does_not_matter():
  rng = np.random.default_rng(1)
  x = jnp.asarray(rng.uniform(size=(60, 2)), jnp.float32)
  y = jnp.sin(8 * x[:, 0])
  variance, mask = jnp.full(60, 1e-4), jnp.ones(60, bool)
  many = gp.fit(x, y, variance, mask, key=KEY)
  assert many.log_lengthscale[1] > many.log_lengthscale[0] + 0.7
  assert bool(many.ok)


def test_fit_never_ends_below_its_start():
  x, y, variance, mask = make_data()
  start = make_params()
  fitted = gp.fit(x, y, variance, mask, key=KEY, init=start, restarts=1)
  start = fitted._replace(log_lengthscale=start.log_lengthscale, log_amplitude=start.log_amplitude)
  assert gp.log_posterior(fitted, x, y, variance, mask) >= gp.log_posterior(
    start, x, y, variance, mask
  )


def test_nugget_finds_noise_that_was_not_declared():
  x, y, variance, mask = make_data(n=80, d=1, noise=0.3, seed=3)
  fitted = gp.fit(x, y, 0 * variance, mask, key=KEY, nugget=True)
  deviation = float(fitted.scale * jnp.exp(0.5 * fitted.log_nugget))
  assert 0.2 < deviation < 0.4
  assert gp.fit(x, y, variance, mask, key=KEY).log_nugget == -jnp.inf


def test_no_data_gives_the_prior():
  x, y, variance, _ = make_data()
  empty = jnp.zeros(16, bool)
  params = gp.fit(x, y, variance, empty, key=KEY)
  mean, deviation2 = gp.predict(gp.condition(params, x, y, variance, empty), x)
  np.testing.assert_allclose(mean, 0.0, atol=1e-6)
  np.testing.assert_allclose(deviation2, 1.0, rtol=1e-5)


def test_outputs_that_do_not_vary_are_fitted_without_a_nan():
  x, _, variance, mask = make_data()
  params = gp.fit(x, jnp.full(16, 1e3), variance, mask, key=KEY)
  mean, deviation2 = gp.predict(gp.condition(params, x, jnp.full(16, 1e3), variance, mask), x)
  np.testing.assert_allclose(mean, 1e3)
  assert np.isfinite(deviation2).all()
  assert float(params.scale) == 1.0


def test_a_covariance_that_cannot_be_factorised_is_flagged_not_spread():
  x = jnp.zeros((16, 3))
  y, mask = jnp.linspace(0, 1, 16), jnp.ones(16, bool)
  # An amplitude so large that the covariance overflows.
  params = make_params(log_amplitude=jnp.asarray(60.0))
  posterior = gp.condition(params, x, y, jnp.zeros(16), mask)
  assert not bool(posterior.ok)
  mean, _ = gp.predict(posterior, x)
  np.testing.assert_array_equal(mean, params.offset)
  # A fit that starts there ends elsewhere.
  assert bool(gp.fit(x, y, jnp.full(16, 0.1), mask, key=KEY, init=params).ok)


def test_likelihood_of_an_indefinite_covariance_is_minus_infinity_with_zero_gradient():
  indefinite = jnp.asarray([[1.0, 2.0], [2.0, 1.0]])
  value, gradients = jax.value_and_grad(gp._log_density, argnums=(0, 1))(
    indefinite, jnp.ones(2), jnp.asarray(2.0)
  )
  assert value == -jnp.inf
  for gradient in gradients:
    np.testing.assert_array_equal(gradient, 0.0)


def test_fit_gradients_and_duplicates_stay_finite_in_float32():
  x = jnp.tile(jnp.asarray([[0.2, 0.4, 0.0], [0.2, 0.4, 0.0]]), (8, 1))
  y, mask = jnp.arange(16.0) % 3, jnp.ones(16, bool)
  params = gp.fit(x, y, jnp.zeros(16), mask, key=KEY)
  assert all(np.isfinite(leaf).all() for leaf in (params.log_lengthscale, params.log_amplitude))


@pytest.mark.parametrize("arguments", [{"steps": 0}, {"restarts": 0}])
def test_fit_refuses_counts_below_one(arguments):
  with pytest.raises(ValueError, match="at least 1"):
    gp.fit(*make_data(), key=KEY, **arguments)


def test_incremental_posterior_equals_the_batch_form():
  with jax.enable_x64(True):
    x, y, variance, mask = make_data(n=14, capacity=20, dtype=np.float64)
    params = make_params(dtype=jnp.float64)
    candidates = jnp.concatenate([jax.random.uniform(KEY, (30, 3), jnp.float64), x[:5]])
    # The first six rows at once, at scattered places; the others one by one.
    scattered = jnp.asarray([1, 4, 7, 9, 13, 19])
    at = lambda array: jnp.zeros((20, *array.shape[1:])).at[scattered].set(array[:6])
    known = jnp.zeros(20, bool).at[scattered].set(True)
    state = gp.candidates_posterior(params, candidates, at(x), at(y), at(variance), known)
    step = lambda state, row: (gp.observe(state, *row), state.mean)
    state, _ = jax.lax.scan(step, state, (x[6:14], y[6:14], variance[6:14]))
    mean, deviation2 = gp.predict(gp.condition(params, x, y, variance, mask), candidates)
    np.testing.assert_allclose(state.mean, mean, rtol=1e-10)
    np.testing.assert_allclose(state.variance, deviation2, rtol=1e-9, atol=1e-12)
    assert int(state.count) == 14
    assert bool(state.ok)


def test_incremental_posterior_stays_close_in_float32_over_many_steps():
  x, y, variance, mask = make_data(n=256, d=2)
  params = make_params(d=2)
  candidates = jax.random.uniform(KEY, (64, 2))
  state = gp.candidates_posterior(params, candidates, x, y, variance, jnp.zeros(256, bool))
  state, _ = jax.lax.scan(lambda s, row: (gp.observe(s, *row), None), state, (x, y, variance))
  mean, deviation2 = gp.predict(gp.condition(params, x, y, variance, mask), candidates)
  np.testing.assert_allclose(state.mean, mean, atol=2e-3)
  np.testing.assert_allclose(state.variance, deviation2, atol=2e-4)


def test_observations_without_a_value_or_without_room_leave_the_posterior():
  x, y, variance, mask = make_data(n=4, capacity=4)
  state = gp.candidates_posterior(make_params(), x, x, y, variance, mask.at[3].set(False))
  same = gp.observe(state, x[3], jnp.asarray(jnp.nan), variance[3])
  assert bool(same.ok)
  jax.tree.map(np.testing.assert_array_equal, same, state)
  full = gp.observe(state, x[3], y[3], variance[3])
  over = gp.observe(full, x[0], y[0], variance[0])
  assert bool(full.ok)
  assert not bool(over.ok)
  jax.tree.map(np.testing.assert_array_equal, over._replace(ok=full.ok), full)


def test_everything_runs_under_vmap():
  batch = [make_data(seed=seed) for seed in range(3)]
  x, y, variance, mask = (jnp.stack(arrays) for arrays in zip(*batch, strict=True))
  keys = jax.random.split(KEY, 3)
  fit = lambda x, y, v, m, key: gp.fit(x, y, v, m, key=key, steps=5)
  params = jax.vmap(fit)(x, y, variance, mask, keys)
  mean, _ = jax.vmap(gp.predict)(jax.vmap(gp.condition)(params, x, y, variance, mask), x)
  state = jax.vmap(gp.candidates_posterior)(params, x, x, y, variance, mask)
  np.testing.assert_allclose(state.mean, mean, atol=1e-3)
  one = gp.fit(*batch[1], key=keys[1], steps=5)
  np.testing.assert_allclose(params.log_lengthscale[1], one.log_lengthscale, rtol=1e-3)


def test_confidence_schedule_known_answers():
  # 2 log(pi^2 / (6 * 0.1)) and 2 log(100 * pi^2 / (6 * 0.1))
  np.testing.assert_allclose(gp.ucb_beta(1, 0.1), 5.60055, rtol=1e-5)
  np.testing.assert_allclose(gp.ucb_beta(jnp.asarray([1, 10]), 0.1), [5.60055, 14.81089], rtol=1e-5)
  np.testing.assert_allclose(
    gp.upper_confidence_bound(jnp.asarray([1.0]), jnp.asarray([0.25]), 4.0), [2.0]
  )


def test_expected_improvement_agrees_with_sampling_and_handles_certainty():
  mean, variance = jnp.asarray([0.0, 0.5, 1.5, -3.0]), jnp.asarray([1.0, 0.04, 0.0, 0.0])
  draws = np.asarray(mean) + np.sqrt(variance) * np.random.default_rng(0).normal(size=(400000, 4))
  got = gp.expected_improvement(mean, variance, 0.4)
  np.testing.assert_allclose(got, np.maximum(draws - 0.4, 0).mean(0), atol=3e-3)
  gradient = jax.grad(lambda v: gp.expected_improvement(mean, v, 0.4).sum())(variance)
  assert np.isfinite(gradient).all()


TWO_FITS_AT_ONCE = """
import threading, sys
import jax, jax.numpy as jnp
from foliax.search import gaussian_process as gp

n = 128
x = jax.random.uniform(jax.random.key(0), (n, 2))
data = (x, jnp.sin(5 * x).sum(-1), jnp.full(n, 0.01), jnp.ones(n, bool))
fit = lambda: gp.fit(*data, key=jax.random.key(1), steps=30).scale.block_until_ready()
fit()
threads = [threading.Thread(target=lambda: [fit() for _ in range(6)]) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def test_fits_in_two_threads_do_not_wait_for_each_other_for_ever():
  subprocess.run([sys.executable, "-c", TWO_FITS_AT_ONCE], check=True, timeout=120)
