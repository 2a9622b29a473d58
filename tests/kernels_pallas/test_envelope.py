"""The envelope of noisy samples under a Lipschitz bound."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foliax.kernels_pallas import envelope as module
from foliax.kernels_pallas.envelope import envelope
from kernel_laws import KernelLaws, Twin


class TestEnvelope(KernelLaws):
  module = module
  operation = "envelope"
  sizes = {"m": (0, 300), "n": (0, 70), "d": (1, 5)}  # noqa: RUF012
  small = {"m": 13, "n": 11, "d": 2}  # noqa: RUF012
  streaming = {"m": 530, "n": 270, "d": 2}  # noqa: RUF012
  edges = ({"m": 128, "n": 8, "d": 1}, {"m": 129, "n": 65, "d": 1}, {"m": 1, "n": 1, "d": 35})
  differentiable = (0, 1, 2, 3, 4)
  batches = (0, (0, None, None, None, None), (None, None, None, 0, None), (0, 0, 0, None, 0))

  def arguments(self, random, dtype, m, n, d):
    uniform = lambda *shape: jnp.asarray(random.uniform(size=shape), dtype)
    offsets = uniform(n)
    return uniform(m, d), uniform(n, d), offsets, jnp.asarray(1.7, dtype), offsets - uniform(n)

  def twins(self, random, queries, arms, upper, lipschitz, lower):
    junk = jnp.asarray(random.uniform(size=(70, arms.shape[1])), arms.dtype)
    extend = lambda x, tail: jnp.concatenate([x, tail.astype(x.dtype)])
    closed = (extend(arms, junk), extend(upper, jnp.full(70, jnp.inf)), lipschitz)
    yield Twin("unopened arms", (queries, *closed, extend(lower, jnp.full(70, -jnp.inf))))
    twice = (extend(arms, arms), extend(upper, upper), lipschitz, extend(lower, lower))
    yield Twin("ties go to the first arm", (queries, *twice))
    more = (extend(queries, junk), arms, upper, lipschitz, lower)
    yield Twin("further queries", more, lambda x: jax.tree.map(lambda y: y[: len(queries)], x))

  def hostile(self, random, queries, arms, upper, lipschitz, lower):
    yield queries, arms, jnp.full_like(upper, jnp.inf), lipschitz, jnp.full_like(lower, -jnp.inf)
    yield queries, arms.at[0].set(jnp.nan), upper.at[1].set(jnp.nan), lipschitz, lower
    yield queries.at[0, 0].set(jnp.nan).at[1].set(jnp.inf), arms, upper, lipschitz, lower
    yield arms, arms, upper, lipschitz, lower
    yield queries, arms[:0], upper[:0], lipschitz, lower[:0]
    yield queries[:0], arms, upper, lipschitz, lower


def _exact(queries, arms, upper, lipschitz, lower):
  queries, arms, upper, lower = (np.asarray(x, np.float64) for x in (queries, arms, upper, lower))
  distances = np.sqrt(((queries[:, None] - arms[None]) ** 2).sum(-1))
  above, below = upper + lipschitz * distances, lower - lipschitz * distances
  return above.min(1), above.argmin(1), below.max(1)


def test_upper_envelope_of_two_arms_on_a_line_by_hand():
  # b = mean + radius and c = mean - radius of (.5, .05) at .2 and (.2, .1) at .8, L = 1.
  arms = jnp.array([[0.2], [0.8]])
  out = envelope(
    jnp.array([[0.5], [0.8], [0.0]]), arms, jnp.array([0.55, 0.3]), 1.0, jnp.array([0.45, 0.1])
  )
  np.testing.assert_allclose(out.upper, [0.6, 0.3, 0.75], atol=1e-6)
  np.testing.assert_array_equal(out.argmin, [1, 1, 0])
  np.testing.assert_allclose(out.lower, [0.15, 0.1, 0.25], atol=1e-6)


@pytest.mark.parametrize(("m", "n", "d"), [(500, 200, 3), (5000, 300, 20), (40, 200_000, 2)])
def test_xla_form_agrees_with_float64(m, n, d):
  args = TestEnvelope().arguments(np.random.default_rng(0), jnp.float32, m, n, d)
  out = envelope(*args)
  upper, argmin, lower = _exact(*args)
  np.testing.assert_allclose(out.upper, upper, atol=3e-6)
  np.testing.assert_allclose(out.lower, lower, atol=3e-6)
  assert np.mean(out.argmin == argmin) > 0.999


@pytest.mark.parametrize("distance", [0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3])
def test_distances_near_zero_keep_their_digits_and_have_finite_gradients(distance):
  random = np.random.default_rng(0)
  arms = random.uniform(0.4, 0.6, (50, 6)).astype(np.float32)
  step = random.normal(size=arms.shape)
  step *= distance / np.linalg.norm(step, axis=1, keepdims=True)
  queries = (arms + step).astype(np.float32)
  # Offsets of zero, so that the result is nothing but L times the distance to the nearest arm.
  zero = jnp.zeros(50)
  args = (jnp.asarray(queries), jnp.asarray(arms), zero, jnp.float32(2.0), zero)
  out = envelope(*args)
  want = 2 * np.linalg.norm(queries.astype(np.float64) - arms.astype(np.float64), axis=1)
  np.testing.assert_allclose(out.upper, want, rtol=1e-6)
  np.testing.assert_allclose(out.lower, -want, rtol=1e-6)
  np.testing.assert_array_equal(out.argmin, np.arange(50))
  gradient = jax.grad(lambda *a: envelope(*a).upper.sum(), (0, 1, 2, 3))(*args)
  assert all(jnp.isfinite(x).all() for x in gradient)
  length = np.linalg.norm(gradient[0], axis=1)
  np.testing.assert_allclose(length, np.where(want > 0, 2.0, 0.0), rtol=1e-5)


def test_results_without_arms_queries_or_lower_offsets_are_defined():
  out = envelope(jnp.ones((3, 2)), jnp.ones((0, 2)), jnp.ones(0), 1.0, jnp.ones(0))
  np.testing.assert_array_equal(out.upper, np.full(3, np.inf))
  np.testing.assert_array_equal(out.argmin, [-1, -1, -1])
  np.testing.assert_array_equal(out.lower, np.full(3, -np.inf))
  assert envelope(jnp.ones((0, 2)), jnp.ones((4, 2)), jnp.ones(4), 1.0).upper.shape == (0,)
  out = envelope(jnp.ones((3, 2)), jnp.ones((4, 2)), jnp.ones(4), 1.0)
  np.testing.assert_array_equal(out.lower, np.full(3, -np.inf))


def test_xla_form_of_a_large_problem_never_holds_the_distances():
  (case, *_) = module.compile_cases()
  compiled = jax.jit(case.function).trace(*case.arguments).lower().compile()
  assert compiled.memory_analysis().temp_size_in_bytes <= case.limits["temp_bytes"]


def test_sharded_over_queries_equals_one_device():
  args = TestEnvelope().typical()
  mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  split, whole = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
  specs = (split, whole, whole, whole, whole)
  gradient = jax.grad(lambda *a: jax.lax.psum(envelope(*a).upper.sum(), "x"), (0, 1))
  sharded = jax.shard_map(envelope, mesh=mesh, in_specs=specs, out_specs=split)
  np.testing.assert_array_equal(sharded(*args).upper, envelope(*args).upper)
  got = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=(split, whole))(*args)
  want = jax.grad(lambda *a: envelope(*a).upper.sum(), (0, 1))(*args)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), got, want)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"queries": jnp.ones(3)}, "queries has shape"),
    ({"queries": jnp.ones((3, 0)), "arms": jnp.ones((4, 0))}, "queries has shape"),
    ({"arms": jnp.ones((4, 3))}, "arms has shape"),
    ({"upper_offsets": jnp.ones(5)}, "upper_offsets has shape"),
    ({"lower_offsets": jnp.ones((4, 1))}, "lower_offsets has shape"),
    ({"lipschitz": jnp.ones(4)}, "use vmap"),
    ({"arms": jnp.ones((4, 2), jnp.int32)}, "arms has dtype int32"),
    ({"queries": jnp.ones((3, 200)), "arms": jnp.ones((4, 200))}, "d <= 128"),
  ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
  good = {
    "queries": jnp.ones((3, 2)),
    "arms": jnp.ones((4, 2)),
    "upper_offsets": jnp.ones(4),
    "lipschitz": 1.0,
  }
  # Without the shape checks of the test run, as its users have it.
  with pytest.raises(ValueError, match=message):
    inspect.unwrap(envelope)(**good | change, implementation="pallas")
