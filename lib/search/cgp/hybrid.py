"""CGP-Hybrid: a Gaussian process proposes inside the active set where f is locally flat.

rho = L_local / L compares the slope near the incumbent with the global constant. Below 0.5 the
envelopes waste calls there, and a Gaussian process takes over proposing, restricted to A_t (the
paper's Alg. 4 and threshold). Certificates are untouched: every call still tightens the same
envelopes. L_local, the surrogate, its candidates and the hysteresis are our choice.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from foliax.search import gaussian_process as gp
from foliax.search.cgp import search
from foliax.search.cgp import state as arms
from foliax.search.cgp.state import CGPState, Config
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key

EVERY = 10
"""Calls between new candidate sets, and between evaluations of rho."""

FIT_ROWS = 64
"""Hyper-parameters are fitted to at most so many arms, whenever their number has doubled."""

SURROGATE_POINTS = 256
NEIGHBOURS = 16
"""Arms nearest to the incumbent among which L_local is measured."""


class Surrogate(NamedTuple):
  """A Gaussian process over the arms, kept at a fixed set of candidates between refreshes."""

  params: gp.GPParams
  posterior: gp.CandidatePosterior
  fitted: Int[Array, ""]  # arms at the last fit of the hyper-parameters; 0 before the first


def gp_fit(state: CGPState, key: Key[Array, ""], init: gp.GPParams | None = None) -> gp.GPParams:
  """Hyper-parameters from the first `FIT_ROWS` arms: 60 Adam steps from 4 starts, or from `init`.

  Args:
    state: the search; arm i is an observation of mean s_i / n_i with noise variance sigma^2 / n_i.
    key: draws the starts.
    init: an earlier fit to start from, instead of several starts.
  """
  rows = slice(0, FIT_ROWS)
  x, mean, variance, mask = (a[rows] for a in _data(state))
  return gp.fit(x, mean, variance, mask, key=key, init=init, restarts=4 if init is None else 1)


def _data(state):
  variance = state.sigma**2 / jnp.maximum(state.n, 1)
  # Exact observations still need a factorisable covariance.
  variance = jnp.maximum(variance, 1e-6 * jnp.var(arms.means(state), where=state.n > 0))
  return state.x, arms.means(state), variance, state.n > 0


def surrogate_init(state: CGPState, config: Config) -> Surrogate:
  """A surrogate that has seen nothing and is refreshed at its first use."""
  candidates = jnp.zeros((SURROGATE_POINTS, config.dim), state.x.dtype)
  params = jax.eval_shape(gp_fit, state, state.key)
  like = params, jax.eval_shape(_condition, state, params, candidates)
  params, posterior = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
  return Surrogate(params, posterior, jnp.zeros((), jnp.int32))


def _condition(state, params, candidates):
  """The posterior given the arms, with room for the calls until the next refresh."""
  room = [(0, EVERY)]
  x, mean, variance, mask = _data(state)
  return gp.candidates_posterior(
    params,
    candidates,
    jnp.pad(x, [*room, (0, 0)]),
    jnp.pad(mean, room),
    jnp.pad(variance, room),
    jnp.pad(mask, room),
  )


def surrogate_refresh(state: CGPState, surrogate: Surrogate, key: Key[Array, ""]) -> Surrogate:
  """Fits the hyper-parameters if the arms have doubled, and moves the candidates.

  Half of the candidates are Sobol points, half Gaussian perturbations of the incumbent at three
  scales.
  """
  seen = jnp.minimum((state.n > 0).sum(), FIT_ROWS)

  def first(_):
    return gp_fit(state, key)

  def again(params):
    return gp_fit(state, key, params)

  stage = jnp.where(surrogate.fitted == 0, 0, jnp.where(seen >= 2 * surrogate.fitted, 1, 2))
  params = jax.lax.switch(stage, [first, again, lambda params: params], surrogate.params)
  half, d = SURROGATE_POINTS // 2, state.x.shape[1]
  key_sobol, key_near = jax.random.fold_in(key, 1), jax.random.fold_in(key, 2)
  scale = jnp.asarray([0.2, 0.05, 0.0125], state.x.dtype)[jnp.arange(half) % 3]
  step = scale[:, None] * jax.random.normal(key_near, (half, d), state.x.dtype)
  near = jnp.clip(arms.incumbent(state) + step, 0, 1)
  candidates = jnp.concatenate([search.sobol(key_sobol, half, d).astype(near.dtype), near])
  fitted = jnp.where(stage == 2, surrogate.fitted, seen).astype(jnp.int32)
  return Surrogate(params, _condition(state, params, candidates), fitted)


def surrogate_observe(
  state: CGPState, surrogate: Surrogate, x: Float[Array, " d"], y: ArrayLike
) -> Surrogate:
  """One more call, in O(N^2 + N M)."""
  variance = jnp.maximum(state.sigma**2, 1e-6 * surrogate.params.scale**2)
  return surrogate._replace(
    posterior=gp.observe(surrogate.posterior, x, jnp.asarray(y, x.dtype), variance)
  )


def gp_ucb(state: CGPState, surrogate: Surrogate) -> Float[Array, " m"]:
  """mean + sqrt(beta_t variance) at the candidates, beta_t = 2 log(t^2 pi^2 / (6 delta))."""
  beta = gp.ucb_beta(jnp.maximum(state.t, 1), state.delta)
  posterior = surrogate.posterior
  return gp.upper_confidence_bound(posterior.mean, posterior.variance, beta)


class HybridState(NamedTuple):
  """Memory of CGP-Hybrid; the thresholds are traced, so that they can be swept."""

  surrogate: Surrogate
  active: Bool[Array, ""]
  rho: Float[Array, ""]
  enter: Float[Array, ""]
  leave: Float[Array, ""]


def local_slope_ratio(state: CGPState) -> Float[Array, ""]:
  """rho: the largest slope proven between the arms nearest to the incumbent, over L."""
  distance = ((state.x - arms.incumbent(state)) ** 2).sum(-1)
  distance = jnp.where(state.n > 0, distance, jnp.inf)
  _, near = jax.lax.top_k(-distance, min(NEIGHBOURS, distance.shape[0]))
  proven, length = arms.pair_slopes(state.x[near], state.upper[near], state.lower[near])
  slope = jnp.where(length > 0, proven / jnp.where(length > 0, length, 1.0), 0.0)
  return jnp.max(slope, initial=0.0) / state.L


def hybrid_init(
  state: CGPState, config: Config, *, enter: float = 0.5, leave: float = 0.7
) -> HybridState:
  """Memory of a search that starts on envelopes.

  Args:
    state, config: the search.
    enter: rho below which the Gaussian process takes over (paper: 0.5).
    leave: rho above which the envelopes take over again (our choice).
  """
  number = functools.partial(jnp.asarray, dtype=state.x.dtype)
  return HybridState(
    surrogate_init(state, config), jnp.asarray(False), number(1.0), number(enter), number(leave)
  )


def hybrid_ask(
  state: CGPState, memory: HybridState, config: Config
) -> tuple[CGPState, HybridState, Float[Array, " d"], Int[Array, ""]]:
  """Asks the envelopes, or the Gaussian process while rho is small."""
  state, x, repeat_idx = search.ask(state, config)
  key = jax.random.fold_in(jax.random.fold_in(state.key, state.t), 3)
  ready = (state.n > 0).sum() >= 5 * config.dim
  # Once ready, the first evaluation is due at once.
  due = ready & ((state.t % EVERY == 0) | (memory.surrogate.fitted == 0))

  def evaluate(memory):
    rho = local_slope_ratio(state)
    active = jnp.where(memory.active, rho <= memory.leave, rho < memory.enter)
    surrogate = surrogate_refresh(state, memory.surrogate, key)
    return memory._replace(rho=rho, active=active, surrogate=surrogate)

  memory = jax.lax.cond(due, evaluate, lambda memory: memory, memory)
  x, repeat_idx = jax.lax.cond(
    memory.active & memory.surrogate.posterior.ok,
    lambda: _ask_surrogate(state, memory.surrogate),
    lambda: (x, repeat_idx),
  )
  return state, memory, x, repeat_idx


def _ask_surrogate(state, surrogate):
  candidates = surrogate.posterior.candidates
  active = arms.upper_env(candidates, state)[0] >= arms.lower_bound(state)
  score = jnp.where(active, gp_ucb(state, surrogate), -jnp.inf)
  # With no candidate left in A_t, the incumbent is: pulling it again is the safe call.
  best = candidates[jnp.argmax(search.avoid_failures(state, candidates, score))]
  x = jnp.where(active.any(), best, arms.incumbent(state))
  return search.bind(state, x)


def hybrid_learn(
  state: CGPState,
  memory: HybridState,
  config: Config,
  x: Float[Array, " d"],
  repeat_idx: Int[Array, ""],
  y: ArrayLike,
) -> HybridState:
  """Takes the call into the Gaussian process."""
  return memory._replace(surrogate=surrogate_observe(state, memory.surrogate, x, y))


HYBRID = search.Strategy(hybrid_init, hybrid_ask, hybrid_learn)
"""CGP-Hybrid, for `run` or a loop of one's own."""
