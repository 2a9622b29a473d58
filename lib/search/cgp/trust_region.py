"""CGP-TR: several trust regions over one set of envelopes, for more than a few dimensions.

The paper's version has fixed centres, and restarts a region at a new point once u_j = max U_t over
the region is below l_t: the region is then proven free of the optimum. That restart is kept. In our
measurements fixed centres with the envelope's maximum lost to random search from ten dimensions on,
so that centres here follow the best point of their region, steps change few coordinates, and the
score is the midpoint of the envelopes (all our choice). It is a heuristic with local certificates.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from foliax.kernels_pallas import envelope as envelope_kernel
from foliax.search.cgp import search
from foliax.search.cgp import state as arms
from foliax.search.cgp.state import CGPState, Config
from jaxtyping import Array, ArrayLike, Bool, Float, Int

MASKED = 10
"""About so many coordinates of the centre change in one step; our choice, after TuRBO."""


class TRState(NamedTuple):
  """Memory of n_T regions; a region without an arm has `owner` of none and a fresh centre."""

  fresh: Float[Array, "r d"]  # Sobol centre, used until the region has an arm
  half: Float[Array, " r"]  # half side
  successes: Int[Array, " r"]
  failures: Int[Array, " r"]
  certified: Int[Array, " r"]  # restarts of regions proven free of the optimum
  restarts: Int[Array, " r"]  # all restarts, those of regions grown too small included
  owner: Int[Array, " n"]  # region of each arm; -1 for none, or a region that has since restarted
  turn: Int[Array, ""]  # region of the current call
  r_0: Float[Array, ""]
  r_min: Float[Array, ""]
  r_max: Float[Array, ""]


def tr_init(
  state: CGPState,
  config: Config,
  *,
  regions: int = 4,
  r_0: float = 0.2,
  r_min: float = 0.005,
  r_max: float = 0.8,
) -> TRState:
  """Regions around Sobol points.

  Args:
    state, config: the search.
    regions: n_T (static; our choice).
    r_0: first half side (paper: 0.2).
    r_min, r_max: a region below r_min restarts, none grows beyond r_max (our choice).
  """
  count = lambda: jnp.zeros(regions, jnp.int32)
  number = functools.partial(jnp.asarray, dtype=state.x.dtype)
  key = jax.random.fold_in(state.key, 7)
  return TRState(
    fresh=search.sobol(key, regions, config.dim).astype(state.x.dtype),
    half=jnp.full(regions, r_0, state.x.dtype),
    successes=count(),
    failures=count(),
    certified=count(),
    restarts=count(),
    owner=jnp.full(config.capacity, -1, jnp.int32),
    turn=jnp.zeros((), jnp.int32),
    r_0=number(r_0),
    r_min=number(r_min),
    r_max=number(r_max),
  )


def centres(state: CGPState, memory: TRState) -> tuple[Float[Array, "r d"], Bool[Array, " r"]]:
  """The best arm of each region by lower confidence bound, and whether it has one."""
  mine = memory.owner[None] == jnp.arange(memory.half.shape[0])[:, None]
  lower = jnp.where(mine & (state.n > 0), state.lower, -jnp.inf)
  started = (lower > -jnp.inf).any(-1)
  return jnp.where(started[:, None], state.x[jnp.argmax(lower, -1)], memory.fresh), started


def local_certificate(
  state: CGPState, memory: TRState
) -> tuple[Float[Array, " r"], Bool[Array, " r"]]:
  """A sound bound of max U_t over each region, and whether it is proven free of the optimum.

  The second is only as good as the constant and the noise level (see `certificate`).
  """
  centre, _ = centres(state, memory)
  half = memory.half[:, None]
  lo, hi = jnp.clip(centre - half, 0, 1), jnp.clip(centre + half, 0, 1)
  upper = arms.box_upper(lo, hi, state)
  return upper, upper < arms.lower_bound(state)


def _restart(state, memory):
  """Moves regions that are proven empty, have shrunk away or failed at their centre."""
  _, empty = local_certificate(state, memory)
  _, started = centres(state, memory)
  regions, d = memory.fresh.shape
  called = (memory.owner[None] == jnp.arange(regions)[:, None]).any(-1)
  gone = empty | (memory.half < memory.r_min) | (called & ~started)
  key = jax.random.fold_in(jax.random.fold_in(state.key, state.t), 8)
  lost = gone[jnp.clip(memory.owner, 0, regions - 1)] & (memory.owner >= 0)
  return memory._replace(
    fresh=jnp.where(gone[:, None], search.sobol(key, regions, d), memory.fresh),
    half=jnp.where(gone, memory.r_0, memory.half),
    successes=jnp.where(gone, 0, memory.successes),
    failures=jnp.where(gone, 0, memory.failures),
    certified=memory.certified + empty,
    restarts=memory.restarts + gone,
    owner=jnp.where(lost, -1, memory.owner),
  )


def tr_ask(
  state: CGPState, memory: TRState, config: Config
) -> tuple[CGPState, TRState, Float[Array, " d"], Int[Array, ""]]:
  """The candidate with the largest midpoint of the envelopes, over all regions."""
  memory = _restart(state, memory)
  centre, started = centres(state, memory)
  regions, d = centre.shape
  each = -(-config.candidates // regions)
  key = jax.random.fold_in(state.key, state.t)
  key_step, key_mask, key_one = (jax.random.fold_in(key, i) for i in range(3))
  half = memory.half[:, None, None]
  shape = (regions, each, d)
  step = half * jax.random.uniform(key_step, shape, state.x.dtype, minval=-1.0)
  mask = jax.random.uniform(key_mask, shape) < min(1.0, MASKED / d)
  mask |= jax.nn.one_hot(jax.random.randint(key_one, shape[:2], 0, d), d, dtype=bool)
  X = jnp.clip(centre[:, None] + jnp.where(mask, step, 0.0), 0, 1).reshape(-1, d)

  env = envelope_kernel.envelope(X, state.x, state.upper, state.L, state.lower)
  allowed = env.upper >= arms.lower_bound(state)
  middle = jnp.where(allowed, (env.upper + env.lower) / 2, -jnp.inf)
  score = jnp.where(allowed.any(), middle, env.upper)
  best = jnp.argmax(search.avoid_failures(state, X, score))
  # A region without an arm opens its centre first.
  waiting = ~started
  turn = jnp.where(waiting.any(), jnp.argmax(waiting), best // each).astype(jnp.int32)
  x, repeat_idx = search.bind(state, X[best])
  x = jnp.where(waiting.any(), memory.fresh[turn], x)
  repeat_idx = jnp.where(waiting.any(), -1, repeat_idx)
  x, repeat_idx = search.start_with_design(state, config, x, repeat_idx, design=False)
  return state, memory._replace(turn=turn), x, repeat_idx


def tr_step(
  state: CGPState,
  memory: TRState,
  config: Config,
  x: Float[Array, " d"],
  repeat_idx: Int[Array, ""],
  y: ArrayLike,
) -> TRState:
  """TuRBO's radius rule: doubled after 3 successes, halved after max(5, d / 2) failures in a row.

  A call is a success when its arm becomes the best of its region.
  """
  opened = repeat_idx < 0
  arm = jnp.where(opened, state.k - 1, repeat_idx)
  j = memory.turn
  owner = memory.owner.at[jnp.where(opened, arm, state.n.shape[0])].set(j, mode="drop")
  mine = (owner == j) & (state.n > 0)
  others = jnp.where(mine & (jnp.arange(owner.shape[0]) != arm), arms.means(state), -jnp.inf).max()
  success = (arms.means(state)[arm] > others) & jnp.isfinite(others) & jnp.isfinite(y)
  successes = jnp.where(success, memory.successes[j] + 1, 0)
  failures = jnp.where(success, 0, memory.failures[j] + 1)
  grow, shrink = successes >= 3, failures >= max(5, config.dim // 2)
  half = memory.half[j] * jnp.where(grow, 2.0, jnp.where(shrink, 0.5, 1.0))
  return memory._replace(
    half=memory.half.at[j].set(jnp.minimum(half, memory.r_max)),
    successes=memory.successes.at[j].set(jnp.where(grow, 0, successes)),
    failures=memory.failures.at[j].set(jnp.where(shrink, 0, failures)),
    owner=owner,
  )


TRUST_REGION = search.Strategy(tr_init, tr_ask, tr_step)
"""CGP-TR with the default sizes, for `run` or a loop of one's own."""
