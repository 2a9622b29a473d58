"""Envelopes, bounds, doubling and bad input of certificate-guided pruning."""

import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foliax.search import cgp
from foliax.search.cgp import cover as covers

CONFIG = cgp.Config(dim=2, capacity=24, boxes=512, splits=16)
KEY = jax.random.key(0)


def with_bounds(x, mean, r, lipschitz=1.0, **config):
  """A state whose arms have the given means and radii."""
  x = jnp.asarray(x, jnp.result_type(float)).reshape(len(mean), -1)
  mean, r = jnp.asarray(mean, x.dtype), jnp.asarray(r, x.dtype)
  count = len(mean)
  config = cgp.Config(**{"dim": x.shape[1], "capacity": count, "boxes": 512, **config})
  state = cgp.init(config, KEY, lipschitz=lipschitz, sigma=1.0)
  put = lambda old, new: old.at[:count].set(new)
  return state._replace(
    x=put(state.x, x),
    s=put(state.s, mean),
    n=put(state.n, 1),
    k=jnp.asarray(count, jnp.int32),
    upper=put(state.upper, mean + r),
    lower=put(state.lower, mean - r),
  )


def from_root(state):
  """The state with a cover that starts from the whole box, refined."""
  fresh = covers.root(*state.cover.lo.shape, state.x.dtype)
  fresh = covers.split(fresh, state.x, state.upper, state.L, cgp.lower_bound(state), 1)
  return cgp.refine(state._replace(cover=fresh), splits=64, rounds=40, tolerance=1e-4)


@functools.partial(jax.jit, static_argnames="count")
def observed(key, count, lipschitz=1.0, sigma=0.1):
  """A state of CONFIG after `count` calls at random points of a random cone."""
  state = cgp.init(CONFIG, key, lipschitz=lipschitz, sigma=sigma)
  peak = jax.random.uniform(jax.random.fold_in(key, 1), (2,))

  def step(state, i):
    k = jax.random.fold_in(key, i + 2)
    x = jax.random.uniform(k, (2,))
    noise = sigma * jax.random.normal(jax.random.fold_in(k, 0))
    y = -lipschitz * jnp.linalg.norm(x - peak) + noise
    return cgp.tell(state, x, -1, y), None

  return jax.lax.scan(step, state, jnp.arange(count))[0]


# A worked example in one dimension.


def two_arms():
  return with_bounds([0.2, 0.8], [0.5, 0.2], [0.05, 0.1])


def test_known_values_of_the_one_dimensional_example():
  state = two_arms()
  at = lambda x: jnp.asarray([[x]])
  np.testing.assert_allclose(cgp.lower_bound(state), 0.45, atol=1e-6)
  np.testing.assert_allclose(cgp.upper_env(at(0.5), state)[0], [0.60], atol=1e-6)
  np.testing.assert_allclose(cgp.upper_env(at(0.8), state)[0], [0.30], atol=1e-6)
  np.testing.assert_allclose(cgp.slack(at(0.5), state), [0.35], atol=1e-6)
  upper = cgp.box_upper(at(0.7), at(0.9), state)
  np.testing.assert_allclose(upper, [0.40], atol=1e-6)
  assert upper[0] < cgp.lower_bound(state)


def test_certificate_of_the_one_dimensional_example():
  state = from_root(two_arms())
  certificate = cgp.certificate(state)
  np.testing.assert_allclose(certificate.upper, 0.75, atol=1e-6)
  np.testing.assert_allclose(certificate.gap, 0.30, atol=1e-6)
  np.testing.assert_allclose(certificate.x_hat, [0.2], atol=1e-6)
  X = (jnp.arange(20_000)[:, None] + 0.5) / 20_000
  np.testing.assert_allclose(cgp.certificate(state, X).active_frac, 0.70, atol=1e-4)
  inside = X[cgp.upper_env(X, state)[0] >= cgp.lower_bound(state)]
  assert inside.min() < 1e-3
  gap = (inside > 0.65 + 1e-4) & (inside < 0.95 - 1e-4)
  assert not gap.any()
  assert 0.70 <= certificate.active_frac <= 1.0


# Laws of the envelopes.


@hypothesis.given(seed=st.integers(0, 1000), count=st.integers(1, 20))
@hypothesis.settings(max_examples=25, deadline=None)
def test_upper_envelope_is_lipschitz_and_below_every_arm(seed, count):
  state = observed(jax.random.key(seed), 20)
  X = jax.random.uniform(jax.random.key(seed + 1), (64, 2))
  U = cgp.upper_env(X, state)[0]
  distance = jnp.linalg.norm(X[:, None] - X[None], axis=-1)
  assert (abs(U[:, None] - U[None]) <= state.L * distance + 1e-5).all()
  assert (cgp.upper_env(state.x, state)[0] <= state.upper + 1e-6)[: state.k].all()


@hypothesis.given(seed=st.integers(0, 1000))
@hypothesis.settings(max_examples=15, deadline=None)
def test_order_of_the_arms_changes_nothing(seed):
  state = observed(jax.random.key(seed), 20)
  order = jax.random.permutation(jax.random.key(seed + 1), CONFIG.capacity)
  shuffled = state._replace(x=state.x[order], upper=state.upper[order], lower=state.lower[order])
  X = jax.random.uniform(jax.random.key(seed + 2), (64, 2))
  np.testing.assert_array_equal(cgp.upper_env(X, state)[0], cgp.upper_env(X, shuffled)[0])
  assert cgp.lower_bound(state) == cgp.lower_bound(shuffled)


@hypothesis.given(seed=st.integers(0, 1000), again=st.booleans())
@hypothesis.settings(max_examples=25, deadline=None)
def test_another_call_never_raises_the_upper_nor_lowers_the_lower_bound(seed, again):
  state = observed(jax.random.key(seed), 20)
  X = jax.random.uniform(jax.random.key(seed + 1), (64, 2))
  x, repeat = (state.x[3], 3) if again else (X[0], -1)
  y = jax.random.normal(jax.random.key(seed + 2))
  after = cgp.tell(state, x, repeat, y)
  assert (cgp.upper_env(X, after)[0] <= cgp.upper_env(X, state)[0]).all()
  assert (cgp.lower_env(X, after) >= cgp.lower_env(X, state)).all()
  assert cgp.lower_bound(after) >= cgp.lower_bound(state)
  assert cgp.certificate(after).upper <= cgp.certificate(state).upper


@hypothesis.given(seed=st.integers(0, 10_000), degenerate=st.booleans())
@hypothesis.settings(max_examples=25, deadline=None)
def test_box_bound_is_above_the_envelope_everywhere_in_the_box(seed, degenerate):
  state = observed(jax.random.key(seed), 20)
  corners = jax.random.uniform(jax.random.key(seed + 1), (2, 1, 2))
  lo, hi = corners.min(0), corners.max(0)
  hi = lo if degenerate else hi
  points = lo + (hi - lo) * jax.random.uniform(jax.random.key(seed + 2), (10_000, 2))
  U = cgp.upper_env(points, state)[0]
  bound = cgp.box_upper(lo, hi, state)[0]
  assert bound >= U.max()
  if degenerate:
    np.testing.assert_allclose(bound, U.max(), rtol=1e-5, atol=1e-6)


@hypothesis.given(seed=st.integers(0, 10_000))
@hypothesis.settings(max_examples=15, deadline=None)
def test_cover_bounds_the_maximum_and_contains_the_active_set(seed):
  key = jax.random.key(seed)
  state = observed(key, 20)
  for rounds in (3, 30):
    state = cgp.refine(state, splits=16, rounds=rounds)
    certificate = cgp.certificate(state)
    X = jax.random.uniform(jax.random.fold_in(key, rounds), (4096, 2))
    U = cgp.upper_env(X, state)[0]
    assert certificate.upper >= U.max()
    active = X[certificate.lower <= U]
    live = covers.live(state.cover, certificate.lower)
    inside = (active[:, None] >= state.cover.lo) & (active[:, None] <= state.cover.hi)
    assert (inside.all(-1) & live).any(-1).all()
    assert certificate.active_frac >= (certificate.lower <= U).mean() - 1e-6


def test_refined_cover_is_as_sharp_as_its_tolerance():
  state = cgp.refine(observed(jax.random.key(3), 20), splits=16, tolerance=1e-2)
  certificate = cgp.certificate(state)
  best = state.cover.value.max()
  assert certificate.upper - best <= 1.01e-2 * certificate.gap
  grid = jnp.stack(jnp.meshgrid(*[jnp.linspace(0, 1, 401)] * 2), -1).reshape(-1, 2)
  U = cgp.upper_env(grid, state)[0].max()
  np.testing.assert_allclose(certificate.upper, U, atol=2e-2 * float(certificate.gap))


def test_dead_boxes_and_a_full_cover_stay_sound():
  config = cgp.Config(dim=2, capacity=24, boxes=8, splits=4)
  state = observed(jax.random.key(5), 20)
  state = state._replace(cover=covers.root(8, 2, state.x.dtype))
  state = cgp.refine(state, splits=config.splits, rounds=50)
  U = cgp.upper_env(jax.random.uniform(KEY, (4096, 2)), state)[0]
  assert cgp.certificate(state).upper >= U.max()


# Statistics.


def test_confidence_intervals_fail_no_more_often_than_delta():
  runs, most, delta = 2000, 200, 0.05
  y = jax.random.normal(KEY, (runs, most))
  n = jnp.arange(1, most + 1)
  r = cgp.radius(n, 1.0, delta, 1)
  failed = (abs(jnp.cumsum(y, -1) / n) > r).any(-1).mean()
  assert failed <= delta
  # The union bound is not so loose that the test could not fail.
  assert (abs(jnp.cumsum(y, -1) / n) > r / 3).any(-1).mean() > delta


def test_radius_without_noise_or_without_observations():
  np.testing.assert_array_equal(cgp.radius(jnp.asarray([1, 5]), 0.0, 0.05, 10), [0, 0])
  assert jnp.isinf(cgp.radius(jnp.asarray(0), 1.0, 0.05, 10))
  np.testing.assert_allclose(
    cgp.radius(jnp.asarray(4), 2.0, 0.05, 10),
    2 * np.sqrt(2 * np.log(np.pi**2 / 3 * 10 * 16 / 0.05) / 4),
    rtol=1e-6,
  )


def test_mean_and_spread_of_an_arm_are_those_of_its_observations():
  y = np.random.default_rng(0).normal(3.0, 0.5, 12).astype(np.float32)
  state = cgp.init(CONFIG, KEY, sigma=0.5)
  state = cgp.tell(state, [0.5, 0.5], -1, y[0])
  for value in y[1:]:
    state = cgp.tell(state, [0.5, 0.5], 0, value)
  np.testing.assert_allclose(cgp.means(state)[0], y.mean(), rtol=1e-6)
  np.testing.assert_allclose(state.m2[0], ((y - y.mean()) ** 2).sum(), rtol=1e-4)
  assert (state.n[0], state.k, state.t) == (12, 1, 12)


def test_unknown_noise_is_estimated_from_replicates_and_never_certified():
  sigma = 0.3
  objective = lambda x, key: -jnp.linalg.norm(x - 0.3) + sigma * jax.random.normal(key)
  states, _ = jax.lax.map(
    lambda key: cgp.run(key, objective, CONFIG, 60, lipschitz=1.0, sigma=None),
    jax.random.split(KEY, 8),
  )
  assert not states.sigma_known.any()
  assert not jax.vmap(cgp.certificate)(states).valid.any()
  assert (jnp.maximum(states.n - 1, 0).sum(-1) >= 4).all()
  np.testing.assert_allclose(states.sigma.mean(), sigma, rtol=0.25)


# The Lipschitz constant.


def test_doubling_known_values():
  state = with_bounds([0.0, 0.1], [0.0, 1.0], [0.1, 0.1])
  doubled = cgp.double_L(state)
  assert (float(doubled.L), int(doubled.doublings)) == (8.0, 3)
  assert not doubled.inconsistent
  assert cgp.certificate(doubled).upper == jnp.inf  # nothing stays pruned


def test_two_values_at_one_point_are_inconsistent_and_do_not_double():
  state = with_bounds([0.5, 0.5], [0.0, 1.0], [0.1, 0.1])
  doubled = cgp.double_L(state)
  assert doubled.inconsistent
  assert doubled.L == 1.0
  assert not cgp.certificate(doubled).valid
  with pytest.raises(ValueError, match="noise_inconsistent"):
    cgp.check(doubled)
  cgp.check(two_arms())


@hypothesis.given(seed=st.integers(0, 1000), start=st.floats(0.01, 50.0))
@hypothesis.settings(max_examples=20, deadline=None)
def test_doubling_stops_below_twice_the_true_constant_or_never_starts(seed, start):
  true = 2.0
  state = observed(jax.random.key(seed), 20, true, 0.05)
  on_good_event = ~state.inconsistent
  doubled = cgp.double_L(state._replace(L=jnp.asarray(start, state.L.dtype)))
  assert max(2 * true, start) >= doubled.L or not on_good_event
  proven, distance = cgp.pair_slopes(doubled.x, doubled.upper, doubled.lower)
  assert (proven <= doubled.L * distance + 1e-4).all()


def test_learned_constant_never_exceeds_twice_the_true_one_without_noise():
  objective = lambda x, key: jnp.sin(3 * x[0]) + jnp.cos(2 * x[1])
  true = 13**0.5
  run = lambda start: cgp.run(KEY, objective, CONFIG, 24, lipschitz=start, sigma=0.0, lip_status=2)
  states, history = jax.lax.map(run, jnp.asarray([0.1, 0.5, 2.0]))
  assert (2 * true >= states.L).all()
  assert (jnp.asarray([0.1, 0.5, 0.0]) < states.L).all()
  assert not history.certificate.valid.any()
  assert (jnp.diff(history.L, axis=1) >= 0).all()


@pytest.mark.parametrize("status", ["known", "assumed"])
def test_a_constant_that_the_data_contradict_is_reported(status):
  state = cgp.init(CONFIG, KEY, lipschitz=0.5, sigma=0.0, lip_status=status)
  state = cgp.tell(state, [0.1, 0.1], -1, 0.0)
  state = cgp.tell(state, [0.2, 0.1], -1, 1.0)
  assert state.inconsistent
  assert state.L == 0.5
  assert not cgp.certificate(state).valid


def test_probes_pull_the_pair_nearest_to_contradicting_the_constant():
  config = cgp.Config(dim=1, capacity=4, probe_every=2)
  state = cgp.init(config, KEY, lipschitz=1.0, sigma=0.2, lip_status="learned")
  for x, y in ((0.5, 0.0), (0.6, 0.5), (0.9, 0.4), (0.1, 0.2)):
    state = cgp.tell(state, [x], -1, y)
  _, x, repeat = cgp.ask(state, config)
  assert int(repeat) in (0, 1)
  assert float(x[0]) == pytest.approx(0.5 + 0.1 * int(repeat))


# Bad input.


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("lipschitz", 0.0), ("lipschitz", -1.0), ("lipschitz", np.nan), ("delta", 0.0), ("delta", 1.0),
    ("sigma", -0.1), ("sigma", np.inf), ("kappa", 0.5), ("lip_status", "sure"),
  ],
)  # fmt: skip
def test_hyperparameters_outside_their_range_are_refused(field, value):
  with pytest.raises(ValueError, match=f"{field} is .*; it must be"):
    cgp.init(CONFIG, KEY, **{field: value})


@pytest.mark.parametrize("field", ["dim", "capacity", "boxes", "initial"])
def test_sizes_below_one_are_refused(field):
  with pytest.raises(ValueError, match=f"{field} is 0"):
    cgp.Config(**{"dim": 2, field: 0})


@pytest.mark.parametrize("y", [np.nan, np.inf, -np.inf])
def test_a_failed_call_is_spent_and_changes_no_bound(y):
  state = observed(jax.random.key(1), 10)
  new = cgp.tell(state, [0.25, 0.75], -1, y)
  assert (new.t, new.dropped) == (state.t + 1, state.dropped + 1)
  again = cgp.tell(state, state.x[2], 2, y)
  assert (again.t, again.dropped, again.k) == (state.t + 1, state.dropped + 1, state.k)
  X = jax.random.uniform(KEY, (64, 2))
  for after in (new, again):
    np.testing.assert_array_equal(cgp.upper_env(X, after)[0], cgp.upper_env(X, state)[0])
    np.testing.assert_array_equal(after.lower, state.lower)
    np.testing.assert_array_equal(after.cover.bound, state.cover.bound)
    assert np.isfinite(after.s).all()


def test_proposals_keep_away_from_calls_that_failed():
  state = cgp.init(CONFIG, KEY, sigma=0.0)
  asked = []
  for _ in range(6):
    state, x, repeat = cgp.ask(state, CONFIG)
    asked.append(np.asarray(x))
    state = cgp.tell(state, x, repeat, np.nan)
  apart = np.linalg.norm(np.stack(asked)[:, None] - np.stack(asked)[None], axis=-1)
  assert (apart + np.eye(6) > 0.05).all()
  assert cgp.certificate(state).gap == jnp.inf


@pytest.mark.parametrize(
  ("x", "repeat", "y", "message"),
  [
    ([0.5, 1.5], -1, 0.0, "outside the unit box"),
    ([0.5, np.nan], -1, 0.0, "outside the unit box"),
    ([0.5], -1, 0.0, "x has shape"),
    ([0.5, 0.5], 7, 0.0, "repeat_idx is 7"),
    ([0.5, 0.5], -2, 0.0, "repeat_idx is -2"),
    ([0.5, 0.5], -1, [0.0, 1.0], "y has shape"),
  ],
)
def test_observations_that_make_no_sense_are_refused(x, repeat, y, message):
  with pytest.raises(ValueError, match=message):
    cgp.tell(cgp.init(CONFIG, KEY), x, repeat, y)


def test_the_same_inside_jit_is_counted_and_dropped():
  state = cgp.init(CONFIG, KEY)
  for x, repeat in (([0.5, 1.5], -1), ([0.5, 0.5], 7)):
    after = jax.jit(cgp.tell)(state, jnp.asarray(x), repeat, 1.0)
    assert (after.t, after.dropped, after.k) == (1, 1, 0)
    np.testing.assert_array_equal(after.upper, state.upper)


def test_a_full_search_only_repeats():
  config = cgp.Config(dim=2, capacity=3)
  state = cgp.init(config, KEY, sigma=0.0)
  for i in range(8):
    state, x, repeat = cgp.ask(state, config)
    assert (int(repeat) == -1) == (i < 3)
    state = cgp.tell(state, x, repeat, float(-abs(x[0] - 0.3)))
  assert (state.k, state.t, state.dropped) == (3, 8, 0)
  with pytest.raises(ValueError, match=r"all 3 arms are open"):
    cgp.tell(state, [0.1, 0.1], -1, 0.0)


@hypothesis.given(
  values=hnp.arrays(
    np.float32, 12, elements=st.floats(-1e6, 1e6, width=32) | st.sampled_from([np.nan, np.inf])
  )
)
@hypothesis.settings(max_examples=25, deadline=None)
def test_any_values_leave_a_usable_state(values):
  state = cgp.init(CONFIG, KEY, lipschitz=1.0, sigma=0.1)
  for i, y in enumerate(values):
    x = jnp.asarray([(i % 4) / 4, (i // 4) / 4])
    state = cgp.tell(state, x, -1, y)
  assert (state.t, state.k) == (12, 12)
  for leaf in (state.s, state.m2, state.L, state.sigma):
    assert np.isfinite(leaf).all()
  assert not np.isnan(cgp.certificate(state).gap)
  state, x, _ = cgp.ask(state, CONFIG)
  assert ((x >= 0) & (x <= 1)).all()
