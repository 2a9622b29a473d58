"""Other ways to spend the same calls, over the same state, so that certificates can be compared.

Each is a `Strategy`; none of them refines the cover while it runs: call `refine` before reading a
certificate.
"""

import jax
import jax.numpy as jnp
from foliax.kernels_pallas import envelope as envelope_kernel
from foliax.search.cgp import hybrid
from foliax.search.cgp import state as arms
from foliax.search.cgp.search import Strategy, avoid_failures, sobol, start_with_design

CANDIDATES = 512


def _without_memory(choose):
  """A strategy that opens `choose(state, key, config)` and remembers nothing."""

  def ask(state, memory, config):
    key = jax.random.fold_in(state.key, state.t)
    x = choose(state, key, config).astype(state.x.dtype)
    return state, memory, *start_with_design(state, config, x, jnp.asarray(-1, jnp.int32))

  return Strategy(lambda state, config: (), ask)


def _first(accepted, X, otherwise):
  return jnp.where(accepted.any(), X[jnp.argmax(accepted)], otherwise)


def _uniform(state, key, config):
  return jax.random.uniform(key, (config.dim,), state.x.dtype)


def _uniform_active(state, key, config):
  X = jax.random.uniform(key, (CANDIDATES, config.dim), state.x.dtype)
  upper, _ = arms.upper_env(X, state)
  return _first(upper >= arms.lower_bound(state), X, X[jnp.argmax(upper)])


def _lipo(state, key, config):
  X = jax.random.uniform(key, (CANDIDATES, config.dim), state.x.dtype)
  seen = state.n > 0
  mean = arms.means(state)
  upper = envelope_kernel.envelope(X, state.x, jnp.where(seen, mean, jnp.inf), state.L).upper
  best = jnp.where(seen, mean, -jnp.inf).max()
  return _first(upper >= best, X, X[jnp.argmax(upper)])


RANDOM = _without_memory(_uniform)
"""Uniform random search."""

UNIFORM_ACTIVE = _without_memory(_uniform_active)
"""Uniform on A_t, by rejection from 512 points: pruning without the choice of the query."""

LIPO = _without_memory(_lipo)
"""LIPO (Malherbe and Vayatis 2017, arXiv 1703.02628): uniform on {min_i y_i + L d >= max_i y_i}.

The rule takes the observations at face value, which is what running it on noise means.
"""


def _gp_ask(state, memory, config):
  key = jax.random.fold_in(state.key, state.t)
  start = sobol(state.key, 5 * config.dim, config.dim).astype(state.x.dtype)
  starting = state.t < start.shape[0]
  due = ~starting & ((state.t % hybrid.EVERY == 0) | (memory.fitted == 0))
  memory = jax.lax.cond(due, lambda m: hybrid.surrogate_refresh(state, m, key), lambda m: m, memory)
  candidates = memory.posterior.candidates
  score = avoid_failures(state, candidates, hybrid.gp_ucb(state, memory))
  x = candidates[jnp.argmax(score)]
  x = jnp.where(starting, start[jnp.minimum(state.t, start.shape[0] - 1)], x)
  return state, memory, x, jnp.asarray(-1, jnp.int32)


def _gp_learn(state, memory, config, x, repeat_idx, y):
  return hybrid.surrogate_observe(state, memory, x, y)


GP_UCB = Strategy(hybrid.surrogate_init, _gp_ask, _gp_learn)
"""GP-UCB with the paper's beta_t, a Matern-5/2 kernel, and 5 d Sobol points to start from."""
