"""Whole searches: containment, regret, affine invariance, strategies, and runs under transforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foliax.search import benchmarks, cgp
from jax.experimental import io_callback

CONFIG = cgp.Config(dim=2, capacity=40, boxes=1024)
KEYS = jax.random.split(jax.random.key(7), 4)
NEEDLE = benchmarks.get("needle")
STRATEGIES = {
  "cgp": cgp.CGP,
  "hybrid": cgp.HYBRID,
  "trust region": cgp.TRUST_REGION,
  "random": cgp.RANDOM,
  "uniform in A_t": cgp.UNIFORM_ACTIVE,
  "lipo": cgp.LIPO,
  "gp-ucb": cgp.GP_UCB,
}


def noisy_needle(x, key):
  return NEEDLE.function(x) + 0.02 * jax.random.normal(key)


def exact_needle(x, key):
  return NEEDLE.function(x)


def above_optimum(state):
  """U_t at the maximiser, minus l_t: not negative while the maximiser is in A_t."""
  return cgp.upper_env(jnp.asarray(NEEDLE.optimiser), state)[0][0] - cgp.lower_bound(state)


def test_without_noise_the_maximiser_stays_and_the_gap_bounds_the_regret_exactly():
  run = lambda key: cgp.run(
    key, exact_needle, CONFIG, 40, lipschitz=1.0, sigma=0.0, observe=above_optimum
  )
  _, history = jax.lax.map(run, KEYS)
  assert (history.observed >= -1e-6).all()
  regret = NEEDLE.optimum - jax.vmap(jax.vmap(NEEDLE.function))(history.certificate.x_hat)
  assert (regret <= history.certificate.gap + 1e-6).all()
  assert (history.certificate.upper >= NEEDLE.optimum - 1e-6).all()
  assert history.certificate.valid.all()
  assert history.certificate.gap[:, -1].max() < 0.25


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
  run = lambda key: cgp.run(
    key, noisy_needle, CONFIG, 40, lipschitz=1.0, sigma=0.02, observe=above_optimum
  )
  _, history = jax.lax.map(run, jax.random.split(jax.random.key(1), 100))
  assert (history.observed >= 0).all(-1).mean() >= 0.95


@pytest.mark.parametrize("scale", [4.0, 0.25])
def test_scaling_the_objective_scales_the_certificate_and_keeps_the_queries(scale):
  scaled = lambda x, key: scale * noisy_needle(x, key)
  plain, before = cgp.run(KEYS[0], noisy_needle, CONFIG, 40, lipschitz=1.0, sigma=0.02)
  other, after = cgp.run(KEYS[0], scaled, CONFIG, 40, lipschitz=scale, sigma=0.02 * scale)
  np.testing.assert_array_equal(before.x, after.x)
  np.testing.assert_array_equal(before.repeat_idx, after.repeat_idx)
  np.testing.assert_array_equal(scale * plain.upper, other.upper)
  np.testing.assert_array_equal(scale * before.certificate.gap, after.certificate.gap)
  np.testing.assert_array_equal(before.certificate.active_frac, after.certificate.active_frac)


def test_affine_maps_of_the_objective_keep_the_queries():
  with jax.enable_x64(True):
    a, b = 3.0, -7.0
    key = jax.random.key(3)
    mapped = lambda x, key: a * noisy_needle(x, key) + b
    # The centre and the corners are ties, which rounding may break either way: start elsewhere.
    config = cgp.Config(dim=2, capacity=40, boxes=1024, initial=5)
    plain, before = cgp.run(key, noisy_needle, config, 40, lipschitz=1.0, sigma=0.02)
    other, after = cgp.run(key, mapped, config, 40, lipschitz=a, sigma=0.02 * a)
    np.testing.assert_allclose(before.x, after.x, atol=1e-9)
    np.testing.assert_array_equal(before.repeat_idx, after.repeat_idx)
    np.testing.assert_allclose(a * plain.upper + b, other.upper, atol=1e-9)
    np.testing.assert_allclose(
      a * before.certificate.gap, after.certificate.gap, rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_spends_its_calls_and_keeps_the_bracket(name):
  run = lambda key: cgp.run(
    key, noisy_needle, CONFIG, 40, strategy=STRATEGIES[name], lipschitz=1.0, sigma=0.02
  )
  states, history = jax.lax.map(run, KEYS)
  assert (states.t == 40).all()
  assert (states.dropped == 0).all()
  assert ((history.x >= 0) & (history.x <= 1)).all()
  certificates = jax.vmap(cgp.certificate)(jax.lax.map(cgp.refine, states))
  assert (certificates.lower <= NEEDLE.optimum).all()
  assert (certificates.upper >= NEEDLE.optimum).all()
  regret = NEEDLE.optimum - jax.vmap(NEEDLE.function)(certificates.x_hat)
  assert (regret <= certificates.gap).all()
  assert regret.max() < 0.4


def test_a_run_under_vmap_is_the_loop_of_runs():
  run = lambda key: cgp.run(key, noisy_needle, CONFIG, 12, lipschitz=1.0, sigma=0.02)
  together = jax.vmap(run)(KEYS)[1]
  for i, key in enumerate(KEYS):
    alone = run(key)[1]
    np.testing.assert_allclose(together.x[i], alone.x, atol=1e-5)
    np.testing.assert_allclose(together.certificate.gap[i], alone.certificate.gap, rtol=1e-4)


def test_a_run_without_jit_is_the_run_with_it():
  small = cgp.Config(dim=1, capacity=8, boxes=64, splits=4)
  objective = lambda x, key: -abs(x[0] - 0.3) + 0.02 * jax.random.normal(key)
  run = lambda: cgp.run(jax.random.key(0), objective, small, 4, lipschitz=1.0, sigma=0.02)[1]
  compiled = run()
  with jax.disable_jit():
    plain = run()
  np.testing.assert_allclose(plain.x, compiled.x, atol=1e-6)
  np.testing.assert_allclose(plain.certificate.gap, compiled.certificate.gap, rtol=1e-5)


def test_hyperparameters_can_be_swept_by_vmap():
  run = lambda L, sigma: cgp.run(KEYS[0], noisy_needle, CONFIG, 12, lipschitz=L, sigma=sigma)[
    1
  ].certificate.gap[-1]
  gaps = jax.vmap(run)(jnp.asarray([1.0, 2.0, 4.0]), jnp.asarray([0.02, 0.02, 0.02]))
  assert (jnp.diff(gaps) > 0).all()


def test_asking_and_telling_a_python_objective_is_the_same_as_the_scan():
  _, history = cgp.run(KEYS[1], exact_needle, CONFIG, 10, lipschitz=1.0, sigma=0.0)
  state = cgp.init(CONFIG, jax.random.fold_in(KEYS[1], 0), lipschitz=1.0, sigma=0.0)
  for i in range(10):
    state, x, repeat = cgp.ask(state, CONFIG)
    np.testing.assert_allclose(x, history.x[i], atol=1e-6)
    state = cgp.tell(state, x, repeat, float(NEEDLE.function(x)))
  np.testing.assert_allclose(cgp.certificate(state).gap, history.certificate.gap[-1], rtol=1e-5)


def test_a_python_objective_works_inside_the_scan():
  calls = []

  def python(x):
    calls.append(np.asarray(x))
    return np.float32(-abs(float(x[0]) - 0.25))

  def objective(x, key):
    return io_callback(python, jax.ShapeDtypeStruct((), jnp.float32), x, ordered=True)

  state, history = cgp.run(KEYS[0], objective, CONFIG, 8, lipschitz=1.0, sigma=0.0)
  assert len(calls) == int(state.t) == 8
  np.testing.assert_array_equal(np.stack(calls), history.x)


def test_a_run_stops_spending_once_the_gap_is_small_enough():
  target = 0.4
  state, history = cgp.run(
    KEYS[0], exact_needle, CONFIG, 40, lipschitz=1.0, sigma=0.0, target_gap=target
  )
  spent = int(history.spent.sum())
  assert spent == state.t < 40
  assert history.certificate.gap[-1] <= target
  assert (history.certificate.gap[: spent - 1] > target).all()
  assert NEEDLE.optimum - NEEDLE.function(history.certificate.x_hat[-1]) <= target
  assert jnp.isnan(history.x[spent:]).all()


def test_binding_arm_rule_balances_the_two_kinds_of_slack():
  config = cgp.Config(dim=1, capacity=4)
  state = cgp.init(config, KEYS[0], lipschitz=1.0, sigma=0.1)
  state = cgp.tell(state, [0.5], -1, 0.0)
  r = float(state.upper[0] - state.lower[0]) / 2
  for x, opens in ((0.5 + 0.9 * r, False), (min(0.5 + 1.1 * r, 1.0), True)):
    assert (int(cgp.bind(state, jnp.asarray([x]))[1]) == -1) == (opens and x < 1.0)


def test_a_positive_distance_weight_moves_proposals_towards_the_arms():
  ends = {}
  for lam in (0.0, 1.0):
    _, history = cgp.run(KEYS[0], noisy_needle, CONFIG, 40, lipschitz=1.0, sigma=0.02, lam=lam)
    ends[lam] = float(history.certificate.gap[-1])
  assert ends[1.0] > 1.5 * ends[0.0]


def test_hybrid_hands_over_below_one_threshold_and_back_above_another():
  run = lambda enter, leave: cgp.run(
    KEYS[0],
    noisy_needle,
    CONFIG,
    40,
    strategy=cgp.HYBRID,
    memory=_thresholds(enter, leave),
    lipschitz=1.0,
    sigma=0.02,
  )[1]
  never = run(-1.0, -0.5)
  always = run(1e9, 2e9)
  envelopes = cgp.run(KEYS[0], noisy_needle, CONFIG, 40, lipschitz=1.0, sigma=0.02)[1]
  np.testing.assert_allclose(never.x, envelopes.x, atol=1e-6)
  assert not np.allclose(always.x, envelopes.x)
  assert (always.certificate.upper >= NEEDLE.optimum).all()


def _thresholds(enter, leave):
  state = cgp.init(CONFIG, jax.random.fold_in(KEYS[0], 0), lipschitz=1.0, sigma=0.02)
  return cgp.hybrid_init(state, CONFIG, enter=enter, leave=leave)


def test_local_slope_ratio_known_value():
  config = cgp.Config(dim=1, capacity=4)
  state = cgp.init(config, KEYS[0], lipschitz=8.0, sigma=0.0)
  for x, y in ((0.2, 0.0), (0.4, 0.4), (0.8, 0.2)):
    state = cgp.tell(state, [x], -1, y)
  np.testing.assert_allclose(cgp.local_slope_ratio(state), 2.0 / 8.0, rtol=1e-5)


# Trust regions.


def test_a_region_proven_free_of_the_optimum_restarts():
  config = cgp.Config(dim=2, capacity=16, candidates=64)
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
