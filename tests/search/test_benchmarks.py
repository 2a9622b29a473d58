"""The benchmark functions: known optima, slope bounds, and the rover's original trajectory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foliax.search import benchmarks

NAMES = [
  *benchmarks.PAPER, "wavy", "cone-5", "ackley-2", "levy-1", "levy-2", "rosenbrock-6", "ackley-30",
]  # fmt: skip
SMOOTH = [name for name in NAMES if name != "rover-60"]


@functools.cache
def values(name):
  """Values and gradients at 4096 random points, at a quarter of them near an optimum."""
  benchmark = benchmarks.get(name)
  x = np.random.default_rng(0).uniform(size=(4096, benchmark.dim))
  if benchmark.optimiser is not None:
    x[:1024] = benchmark.optimiser[0] + 0.02 * np.random.default_rng(1).normal(
      size=(1024, benchmark.dim)
    )
  x = jnp.asarray(np.clip(x, 0, 1), jnp.float32)
  gradient = jax.jit(jax.vmap(jax.grad(benchmark.function)))(x)
  return np.asarray(benchmark.function(x)), np.asarray(gradient)


@pytest.mark.parametrize("name", SMOOTH)
def test_every_known_maximiser_attains_the_optimum(name):
  benchmark = benchmarks.get(name)
  with jax.enable_x64(True):
    points = jnp.asarray(benchmark.optimiser, jnp.float64)
    assert bool(jnp.all((points >= 0) & (points <= 1)))
    np.testing.assert_allclose(benchmark.function(points), benchmark.optimum, atol=2e-8)


@pytest.mark.parametrize("name", SMOOTH)
def test_no_point_beats_the_optimum(name):
  assert values(name)[0].max() <= benchmarks.get(name).optimum + 1e-6


@pytest.mark.parametrize("name", ["branin", "rosenbrock-2", "rosenbrock-6", "levy-2", "levy-5"])
def test_scaled_values_reach_from_minus_one(name):
  assert values(name)[0].min() >= -1 - 1e-6
  corners = jnp.asarray([[0.0] * benchmarks.get(name).dim])
  assert benchmarks.get(name).function(corners)[0] < -0.9


@pytest.mark.parametrize("name", SMOOTH)
def test_no_sampled_gradient_exceeds_the_lipschitz_bound(name):
  slope = np.linalg.norm(values(name)[1], axis=-1).max()
  bound = benchmarks.get(name).lipschitz
  assert slope <= bound * (1 + 1e-5)
  # Not absurdly loose, apart from the functions of many coordinates.
  if benchmarks.get(name).dim <= 2:
    assert slope > 0.5 * bound


@pytest.mark.parametrize("name", ["wavy", "branin"])
def test_two_dimensional_bounds_hold_between_grid_points_too(name):
  """Largest gradient on a grid, plus a bound on the Hessian times half a cell's diagonal."""
  benchmark = benchmarks.get(name)
  axis = jnp.linspace(0.0, 1.0, 401)
  grid = jnp.stack(jnp.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
  slope = jnp.linalg.norm(jax.vmap(jax.grad(benchmark.function))(grid), axis=-1).max()
  # wavy: 0.5 * 16 + 0.25 * (81 + 49), as |exp''| <= 16 and each term of the cosines' Hessian.
  # Branin: the parabola p has |p| <= 19, |grad p|^2 <= 44^2 + 15^2 and |hess p| <= 59 in unit
  # coordinates, the cosine 9.61 * 15^2; all over 308.13.
  hessian = {
    "wavy": 0.5 * 16 + 0.25 * 130,
    "branin": (2 * (44**2 + 15**2) + 2 * 19 * 59 + 9.61 * 225) / 308.13,
  }[name]
  assert slope + hessian * np.sqrt(2) / 2 / 400 <= benchmark.lipschitz


def test_levy_bounds_are_those_of_its_terms():
  x = np.linspace(-10, 10, 400001)
  w = 1 + (x - 1) / 4
  middle = (w - 1) ** 2 * (1 + 10 * np.sin(np.pi * w + 1) ** 2)
  last = (w - 1) ** 2 * (1 + np.sin(2 * np.pi * w) ** 2)
  sine = np.sin(np.pi * w) ** 2
  slope = [np.abs(np.gradient(term, x)).max() * 20 for term in (middle + sine, middle, last)]
  largest = [term.max() for term in (middle + sine, middle, last)]
  np.testing.assert_allclose(
    benchmarks.get("levy-3").lipschitz, np.linalg.norm(slope) / np.sum(largest), rtol=1e-4
  )
  slope = np.abs(np.gradient(sine + last, x)).max() * 20 / (sine + last).max()
  np.testing.assert_allclose(benchmarks.get("levy-1").lipschitz, slope, rtol=1e-4)


def test_needle_super_level_sets_are_discs():
  x = jax.random.uniform(jax.random.key(0), (200_000, 2))
  share = jnp.mean(benchmarks.needle().function(x) >= 0.8)
  np.testing.assert_allclose(share, np.pi * 0.04, rtol=0.02)


def test_gradients_are_finite_at_kinks():
  for name in ("needle", "ackley-10"):
    benchmark = benchmarks.get(name)
    point = jnp.asarray(benchmark.optimiser[0], jnp.float32)
    assert np.isfinite(jax.grad(benchmark.function)(point)).all()


@pytest.mark.parametrize("name", NAMES)
def test_leading_axes_are_batch_axes(name):
  benchmark = benchmarks.get(name)
  x = jax.random.uniform(jax.random.key(0), (2, 3, benchmark.dim))
  y = benchmark.function(x)
  assert y.shape == (2, 3)
  np.testing.assert_allclose(y[1, 2], benchmark.function(x[1, 2]), rtol=1e-4, atol=1e-5)


def rover_by_scipy(x):
  """The original's definition, with scipy's smoothing spline."""
  from scipy.interpolate import splev, splprep

  spline, _ = splprep((1.2 * x.reshape(30, 2) - 0.1).T, k=3)
  path = np.stack(splev(np.linspace(0, 1, 1000), spline), -1)
  cost = np.full(1000, 0.05)
  for i, point in enumerate(path):
    inside = (point >= benchmarks.OBSTACLES - 0.025) & (point < benchmarks.OBSTACLES + 0.025)
    if inside.all(-1).any() or (point < 0).any() or (point >= 1).any():
      cost[i] += 20
  step = np.linalg.norm(np.diff(path, axis=0), axis=1)
  miss = np.abs(path[0] - 0.05).sum() + np.abs(path[-1] - 0.95).sum()
  return 5 - (step * (cost[1:] + cost[:-1]) / 2).sum() - 10 * miss


def test_rover_agrees_with_the_original_spline():
  rng = np.random.default_rng(0)
  straight = np.repeat(np.linspace(0.125, 0.875, 30), 2)
  x = np.concatenate(
    [rng.uniform(size=(5, 60)), np.clip(straight + 0.1 * rng.normal(size=(5, 60)), 0, 1)]
  )
  with jax.enable_x64(True):
    got = benchmarks.get("rover-60").function(jnp.asarray(x))
  np.testing.assert_allclose(got, [rover_by_scipy(row) for row in x], atol=1e-6)


def test_rover_never_reaches_its_bound_and_takes_a_point_path():
  function = benchmarks.get("rover-60").function
  x = jax.random.uniform(jax.random.key(0), (256, 60))
  assert function(x).max() < 4.936
  # All waypoints at (.5, .5): a path of no length, 0.9 in l1 from each end.
  np.testing.assert_allclose(function(jnp.full(60, 0.5)), 5 - 10 * 1.8, rtol=1e-5)
  assert len(benchmarks.OBSTACLES) == 113


@pytest.mark.parametrize(
  ("name", "reason"),
  [
    ("brannin", "branin"),
    ("nas-36", "table"),
    ("rosenbrock-1", "at least 2"),
    ("ackley-", "ackley-2"),
  ],
)
def test_unknown_names_say_what_to_use(name, reason):
  with pytest.raises(ValueError, match=reason):
    benchmarks.get(name)


def test_the_papers_twelve_are_accounted_for():
  assert len(benchmarks.PAPER) + len(benchmarks.UNAVAILABLE) == 12
  for name in benchmarks.PAPER:
    assert benchmarks.get(name).name == name
