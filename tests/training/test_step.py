"""Gradient steps work with any optimiser and any params, and skip what is not finite."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from foliax.training import step

PARAMS = {"layers": [{"w": jnp.ones(3)}, {"w": jnp.full(2, 0.5)}], "scale": jnp.float32(1.5)}


def quadratic(params, batch, key):
  value = sum(jnp.sum((x - batch) ** 2) for x in jax.tree.leaves(params))
  return value, {"noise": jax.random.normal(key)}


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(
  "optimizer",
  [
    optax.adamw(0.1),
    optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.5)),
    optax.polyak_sgd(),
    optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8)),
  ],
  ids=["adamw", "clipped momentum", "polyak", "line search"],
)
def test_any_optimiser_lowers_the_loss_without_fit(optimizer):
  update = jax.jit(step.gradient_step(quadratic, optimizer))
  state = step.init(PARAMS, optimizer, jax.random.key(0))
  losses = []
  for _ in range(6):
    state, metrics = update(state, jnp.float32(0.25))
    losses.append(float(metrics["loss"]))
  assert losses[-1] < 0.5 * losses[0]
  assert int(state.step) == 6
  assert int(state.skipped) == 0


def test_a_step_is_what_optax_does():
  optimizer = optax.adam(0.1)
  state = step.init(PARAMS, optimizer, jax.random.key(0))

  @jax.jit
  def expected(state):
    key = jax.random.fold_in(state.key, 0)
    gradient = jax.grad(lambda p: quadratic(p, 0.0, key)[0])(PARAMS)
    change, opt_state = optimizer.update(gradient, state.opt_state, PARAMS)
    after = optax.apply_updates(PARAMS, change), opt_state
    return after, (optax.tree.norm(gradient), jax.random.normal(key))

  after, metrics = jax.jit(step.gradient_step(quadratic, optimizer))(state, 0.0)
  found = (after.params, after.opt_state), (metrics["gradient_norm"], metrics["noise"])
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6)
  jax.tree.map(close, found, expected(state))


BAD = {
  "loss": lambda p: jnp.sum(p["layers"][0]["w"]) * 0 + jnp.inf,
  "gradient/layers/1/w": lambda p: jnp.sum(jnp.sqrt(p["layers"][1]["w"] - 0.5)),
  "update/scale": lambda p: jnp.sum(jnp.square(p["scale"])) * 1e20,
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_finite_is_named_and_changes_nothing_but_the_count(name):
  # Normalising by the square of a large gradient overflows though the gradient itself is finite.
  overflowing = optax.stateless(lambda g, _: jax.tree.map(lambda x: x**3, g))
  update = jax.jit(step.gradient_step(lambda p, b, k: (BAD[name](p), {}), overflowing))
  state = step.init(PARAMS, overflowing, jax.random.key(0))
  after, metrics = update(state, None)
  found = metrics["non_finite"]
  assert found.names[int(found.index)] == name
  assert_equal((after.params, after.opt_state), (state.params, state.opt_state))
  assert (int(after.step), int(after.skipped)) == (1, 1)


def test_the_first_tensor_in_order_is_named_and_integers_and_keys_are_passed_over():
  tree = collections.OrderedDict(
    z=jnp.ones(2), key=jax.random.key(0), n=jnp.int32(3), b=jnp.array([1, jnp.nan]), a=jnp.inf
  )
  found = step.non_finite(tree)
  assert found.names == ("z", "b", "a")
  assert int(found.index) == 1
  assert int(step.non_finite({"n": jnp.int32(1)}).index) == -1
