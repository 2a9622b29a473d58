"""Whole searches: containment, regret, affine invariance, strategies, and runs under transforms."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foliax.search import benchmarks, cgp
from jax.experimental import io_callback

CONFIG = cgp.Config(dim=2, capacity=40, boxes=1024)
KEYS = jax.random.split(jax.random.key(7), 4)
STRATEGIES = {
  "cgp": cgp.CGP,
  "hybrid": cgp.HYBRID,
  "trust region": cgp.TRUST_REGION,
  "random": cgp.RANDOM,
  "uniform in A_t": cgp.UNIFORM_ACTIVE,
  "lipo": cgp.LIPO,
  "gp-ucb": cgp.GP_UCB,
}


def needle(x):
  return 1 - jnp.sqrt(((x - jnp.asarray(benchmarks.NEEDLE, x.dtype)) ** 2).sum(-1))


def above_optimum(state):
  """U_t at the maximiser, minus l_t: not negative while the maximiser is in A_t."""
  optimiser = jnp.asarray([benchmarks.NEEDLE], state.x.dtype)
  return cgp.upper_env(optimiser, state)[0][0] - cgp.lower_bound(state)


@functools.partial(jax.jit, static_argnames=("strategy", "initial"))
def runs(
  keys, *, strategy=cgp.CGP, initial=1, scale=1.0, offset=0.0, lipschitz=1.0, sigma=0.02,
  target=0.0, lam=0.0, status=cgp.KNOWN,
):  # fmt: skip
  """40 calls of scale * needle + offset per key, one compilation for all of them."""

  def objective(x, key):
    noise = sigma * jax.random.normal(key, dtype=x.dtype)
    return scale * (needle(x) + noise) + offset

  def one(key):
    return cgp.run(
      key, objective, dataclasses.replace(CONFIG, initial=initial), 40, strategy=strategy,
      lipschitz=scale * lipschitz, sigma=scale * sigma, target_gap=target, lam=lam,
      lip_status=status, observe=above_optimum,
    )  # fmt: skip

  return jax.lax.map(one, keys)


def regret(x_hat):
  return 1.0 - needle(x_hat)


def test_without_noise_the_maximiser_stays_and_the_gap_bounds_the_regret_exactly():
  _, history = runs(KEYS, sigma=0.0)
  certificate = history.certificate
  assert (history.observed >= -1e-6).all()
  assert (regret(certificate.x_hat) <= certificate.gap + 1e-6).all()
  assert (certificate.upper >= 1.0 - 1e-6).all()
  assert certificate.valid.all()
  assert certificate.gap[:, -1].max() < 0.25


@pytest.mark.parametrize("h", [0.1, 0.25])
def test_arms_on_a_grid_leave_a_gap_of_at_most_their_spacing(h):
  config = cgp.Config(dim=1, capacity=16)
  f = lambda x: -2.0 * abs(x - 0.37)
  state = cgp.init(config, jax.random.key(0), lipschitz=2.0, sigma=0.0)
  for x in np.arange(0, 1 + h / 2, h):
    state = cgp.tell(state, [min(x, 1.0)], -1, f(x))
  gap = cgp.certificate(cgp.refine(state)).gap
  assert 0 <= gap <= 2.0 * h + 1e-5


def test_with_noise_the_maximiser_stays_in_at_least_95_of_100_runs():
  _, history = runs(jax.random.split(jax.random.key(1), 100))
  assert (history.observed >= 0).all(-1).mean() >= 0.95


@pytest.mark.parametrize("scale", [4.0, 0.25])
def test_scaling_the_objective_scales_the_certificate_and_keeps_the_queries(scale):
  plain, before = runs(KEYS)
  other, after = runs(KEYS, scale=scale)
  np.testing.assert_array_equal(before.x, after.x)
  np.testing.assert_array_equal(before.repeat_idx, after.repeat_idx)
  np.testing.assert_array_equal(scale * plain.upper, other.upper)
  np.testing.assert_array_equal(scale * before.certificate.gap, after.certificate.gap)
  np.testing.assert_array_equal(before.certificate.active_frac, after.certificate.active_frac)


def test_affine_maps_of_the_objective_keep_the_queries():
  with jax.enable_x64(True):
    keys = jax.random.split(jax.random.key(3), 2)
    # The centre and the corners are ties, which rounding may break either way: start elsewhere.
    plain, before = runs(keys, initial=5)
    other, after = runs(keys, initial=5, scale=3.0, offset=-7.0)
    assert before.x.dtype == jnp.float64
    np.testing.assert_allclose(before.x, after.x, atol=1e-9)
    np.testing.assert_array_equal(before.repeat_idx, after.repeat_idx)
    np.testing.assert_allclose(3.0 * plain.upper - 7.0, other.upper, atol=1e-9)
    np.testing.assert_allclose(3.0 * before.certificate.gap, after.certificate.gap, atol=1e-9)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_spends_its_calls_and_keeps_the_bracket(name):
  states, history = runs(KEYS, strategy=STRATEGIES[name])
  assert (states.t == 40).all()
  assert (states.dropped == 0).all()
  assert ((history.x >= 0) & (history.x <= 1)).all()
  certificates = jax.vmap(cgp.certificate)(jax.lax.map(cgp.refine, states))
  assert (certificates.lower <= 1.0).all()
  assert (certificates.upper >= 1.0).all()
  assert (regret(certificates.x_hat) <= certificates.gap).all()
  assert regret(certificates.x_hat).max() < 0.4


SMALL = cgp.Config(dim=1, capacity=8, boxes=64, splits=4, rounds=2)


def slope(x, key):
  return -abs(x[0] - 0.3) + 0.02 * jax.random.normal(key)


def test_a_run_under_vmap_is_the_loop_of_runs_and_hyperparameters_can_be_swept():
  run = lambda key, lipschitz: cgp.run(key, slope, SMALL, 8, lipschitz=lipschitz, sigma=0.02)[1]
  constants = jnp.asarray([1.0, 2.0, 4.0, 8.0])
  together = jax.vmap(run)(KEYS, constants)
  for i, key in enumerate(KEYS):
    alone = run(key, constants[i])
    np.testing.assert_allclose(together.x[i], alone.x, atol=1e-5)
    np.testing.assert_allclose(together.certificate.gap[i], alone.certificate.gap, rtol=1e-4)
  assert (jnp.diff(together.certificate.gap[:, -1]) > 0).all()


@pytest.mark.slow
def test_a_run_without_jit_is_the_run_with_it():
  run = lambda: cgp.run(jax.random.key(0), slope, SMALL, 3, lipschitz=1.0, sigma=0.02)[1]
  compiled = run()
  with jax.disable_jit():
    plain = run()
  np.testing.assert_allclose(plain.x, compiled.x, atol=1e-6)
  np.testing.assert_allclose(plain.certificate.gap, compiled.certificate.gap, rtol=1e-5)


def test_asking_and_telling_a_python_objective_is_the_same_as_the_scan():
  exact = lambda x, key: -abs(x[0] - 0.3)
  _, history = cgp.run(KEYS[1], exact, SMALL, 8, lipschitz=1.0, sigma=0.0)
  state = cgp.init(SMALL, jax.random.fold_in(KEYS[1], 0), lipschitz=1.0, sigma=0.0)
  for i in range(8):
    state, x, repeat = cgp.ask(state, SMALL)
    np.testing.assert_allclose(x, history.x[i], atol=1e-6)
    state = cgp.tell(state, x, repeat, float(-abs(x[0] - 0.3)))
  np.testing.assert_allclose(cgp.certificate(state).gap, history.certificate.gap[-1], rtol=1e-5)


def test_a_python_objective_works_inside_the_scan():
  calls = []

  def python(x):
    calls.append(np.asarray(x))
    return np.float32(-abs(float(x[0]) - 0.25))

  def objective(x, key):
    return io_callback(python, jax.ShapeDtypeStruct((), jnp.float32), x, ordered=True)

  state, history = cgp.run(KEYS[0], objective, SMALL, 8, lipschitz=1.0, sigma=0.0)
  assert len(calls) == int(state.t) == 8
  np.testing.assert_array_equal(np.stack(calls), history.x)


def test_a_run_stops_spending_once_the_gap_is_small_enough():
  target = 0.4
  states, history = runs(KEYS, sigma=0.0, target=target)
  spent = history.spent.sum(-1)
  np.testing.assert_array_equal(spent, states.t)
  assert (spent < 40).all()
  for i, count in enumerate(np.asarray(spent)):
    gap = history.certificate.gap[i]
    assert (gap[: count - 1] > target).all()
    assert (gap[count - 1 :] <= target).all()
    assert jnp.isnan(history.x[i, count:]).all()
  assert (regret(history.certificate.x_hat[:, -1]) <= target).all()


def test_binding_arm_rule_balances_the_two_kinds_of_slack():
  config = cgp.Config(dim=1, capacity=4)
  state = cgp.init(config, KEYS[0], lipschitz=1.0, sigma=0.1)
  state = cgp.tell(state, [0.5], -1, 0.0)
  r = float(state.upper[0] - state.lower[0]) / 2
  for x, opens in ((0.5 + 0.9 * r, False), (min(0.5 + 1.1 * r, 1.0), True)):
    assert (int(cgp.bind(state, jnp.asarray([x]))[1]) == -1) == (opens and x < 1.0)


def test_a_positive_distance_weight_moves_proposals_towards_the_arms():
  gap = lambda lam: runs(KEYS, lam=lam)[1].certificate.gap[:, -1]
  assert gap(1.0).mean() > 1.5 * gap(0.0).mean()


def test_hybrid_hands_over_below_one_threshold_and_back_above_another():
  @jax.jit
  def with_thresholds(enter, leave):
    config = dataclasses.replace(SMALL, capacity=24)
    key = jax.random.key(2)
    state = cgp.init(config, jax.random.fold_in(key, 0), lipschitz=1.0, sigma=0.02)
    memory = cgp.hybrid_init(state, config)._replace(enter=enter, leave=leave)
    return cgp.run(
      key, slope, config, 24, strategy=cgp.HYBRID, memory=memory, lipschitz=1.0, sigma=0.02
    )[1]

  never, always = with_thresholds(-1.0, -0.5), with_thresholds(1e9, 2e9)
  envelopes = cgp.run(
    jax.random.key(2), slope, dataclasses.replace(SMALL, capacity=24), 24, lipschitz=1.0, sigma=0.02
  )[1]
  np.testing.assert_allclose(never.x, envelopes.x, atol=1e-5)
  assert not np.allclose(always.x, envelopes.x)
  # Whoever proposes, the optimum stays in the bracket.
  assert (always.certificate.upper >= 0.0).all()
  assert (always.certificate.lower <= 0.0).all()


def test_local_slope_ratio_known_value():
  config = cgp.Config(dim=1, capacity=4)
  state = cgp.init(config, KEYS[0], lipschitz=8.0, sigma=0.0)
  for x, y in ((0.2, 0.0), (0.4, 0.4), (0.8, 0.2)):
    state = cgp.tell(state, [x], -1, y)
  np.testing.assert_allclose(cgp.local_slope_ratio(state), 2.0 / 8.0, rtol=1e-5)


# Trust regions.


def test_a_region_proven_free_of_the_optimum_restarts():
  config = cgp.Config(dim=2, capacity=32, candidates=64)
  state = cgp.init(config, KEYS[0], lipschitz=1.0, sigma=0.0)
  memory = cgp.tr_init(state, config, regions=2, r_0=0.05)
  memory = memory._replace(fresh=jnp.asarray([[0.1, 0.1], [0.9, 0.9]]))
  for value in (1.0, 0.0):
    state, memory, x, repeat = cgp.tr_ask(state, memory, config)
    state = cgp.tell(state, x, repeat, value)
    memory = cgp.tr_step(state, memory, config, x, repeat, value)
  upper, empty = cgp.local_certificate(state, memory)
  np.testing.assert_array_equal(empty, [False, True])
  corner = 0.05 * 2**0.5
  np.testing.assert_allclose(upper, [1.0 + corner, corner], rtol=1e-5)
  _, after, _, _ = cgp.tr_ask(state, memory, config)
  np.testing.assert_array_equal(after.certified, [0, 1])
  assert (after.owner[:2] == jnp.asarray([0, -1])).all()


def test_regions_grow_on_success_and_shrink_on_failure():
  config = cgp.Config(dim=2, capacity=32, candidates=64)
  for values, factor in (([0.0, 1.0, 2.0, 3.0], 2.0), ([0.0] + [-1.0] * 5, 0.5)):
    state = cgp.init(config, KEYS[0], lipschitz=1e3, sigma=0.0)
    memory = cgp.tr_init(state, config, regions=1)
    half = memory.half[0]
    for value in values:
      state, memory, x, repeat = cgp.tr_ask(state, memory, config)
      state = cgp.tell(state, x, repeat, value)
      memory = cgp.tr_step(state, memory, config, x, repeat, value)
    np.testing.assert_allclose(memory.half[0], factor * half)


@pytest.mark.parametrize("name", ["cgp", "hybrid", "trust region", "gp-ucb"])
@pytest.mark.slow
def test_no_strategy_insists_on_a_region_where_calls_fail(name):
  failing = lambda x, key: jnp.where(x[0] > 0.5, jnp.nan, x[0] - abs(x[1] - 0.4))
  config = dataclasses.replace(CONFIG, initial=5)
  state, history = cgp.run(
    KEYS[0], failing, config, 40, strategy=STRATEGIES[name], lipschitz=2.0, sigma=0.01
  )
  assert (state.t, state.dropped) == (40, jnp.isnan(history.y).sum())
  failed = history.x[jnp.isnan(history.y)]
  apart = jnp.linalg.norm(failed[:, None] - failed[None], axis=-1) + 9 * jnp.eye(len(failed))
  assert jnp.median(apart.min(-1)) > 0.05
  assert cgp.incumbent(state)[0] <= 0.5
  assert state.lower.max() > 0.2


@pytest.mark.slow
def test_trust_regions_beat_random_search_in_ten_dimensions():
  problem = benchmarks.get("cone-10")
  config = cgp.Config(dim=10, capacity=200, candidates=256)
  objective = lambda x, key: problem.function(x) + 0.02 * jax.random.normal(key)
  regret = {}
  for strategy in (cgp.TRUST_REGION, cgp.RANDOM):
    run = lambda key, strategy=strategy: cgp.run(
      key, objective, config, 200, strategy=strategy, lipschitz=1.0, sigma=0.02
    )[0]
    x_hat = jax.vmap(cgp.incumbent)(jax.lax.map(run, KEYS))
    regret[strategy] = float((problem.optimum - jax.vmap(problem.function)(x_hat)).mean())
  assert regret[cgp.TRUST_REGION] < regret[cgp.RANDOM]


@pytest.mark.slow
def test_six_dimensions_use_candidates_and_stay_sound():
  problem = benchmarks.get("cone-6")
  config = cgp.Config(dim=6, capacity=60, candidates=256, boxes=1024)
  objective = lambda x, key: problem.function(x)
  state, history = cgp.run(KEYS[0], objective, config, 60, lipschitz=1.0, sigma=0.0)
  assert (history.certificate.upper >= problem.optimum).all()
  assert (history.certificate.gap[-1]) < history.certificate.gap[5]
  assert problem.optimum - problem.function(cgp.incumbent(state)) < 0.7
