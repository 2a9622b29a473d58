"""Ask, certify and run: where to spend the next call, and what is known once it is spent."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from foliax.kernels_pallas import envelope as envelope_kernel
from foliax.kernels_pallas.dispatch import vary_alike
from foliax.search.cgp import cover as covers
from foliax.search.cgp import state as arms
from foliax.search.cgp.state import CGPState, Config
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key

FAILURE_RADIUS = 0.05
"""Proposals keep this far (per square root of the dimension) from calls that failed; our choice."""

PROPOSAL_POINTS = 256
"""Boxes of the cover whose points are scored up to three dimensions; our choice."""


class Certificate(NamedTuple):
  """What is certain about the optimum f*, with probability 1 - delta if `valid`.

  f* lies in [lower, upper] and f(x_hat) >= lower, so f* - f(x_hat) <= gap.
  """

  upper: Float[Array, ""]
  lower: Float[Array, ""]
  gap: Float[Array, ""]
  x_hat: Float[Array, " d"]
  active_frac: Float[Array, ""]
  valid: Bool[Array, ""]


def certificate(state: CGPState, X: Float[Array, "m d"] | None = None) -> Certificate:
  """The certificate that the cover holds now; `ask` and `refine` sharpen it.

  Args:
    state: the search.
    X: M points, e.g. uniform ones, on which `active_frac` is estimated; None reports the volume of
      the cover instead, an upper bound of Vol(A_t) that is rigorous but loose in many dimensions.
  Returns:
    `Certificate`. `valid` is False when the constant is assumed or learned, the noise level is
    estimated, or the data contradict them: the numbers are then what would follow if they held.
  """
  lower = arms.lower_bound(state)
  upper = covers.maximum(state.cover)
  if X is None:
    active = covers.volume(state.cover, lower)
  else:
    active = (arms.upper_env(X, state)[0] >= lower).mean()
  valid = (state.lip_status == arms.KNOWN) & state.sigma_known & ~state.inconsistent
  gap = jnp.where(jnp.isfinite(lower), upper - lower, jnp.inf)
  return Certificate(upper, lower, gap, arms.incumbent(state), active, valid)


def check(state: CGPState) -> None:
  """Raises ValueError when the observations contradict what the search was told."""
  if bool(np.any(state.inconsistent)):
    raise ValueError(
      "noise_inconsistent: the observations contradict sigma or the Lipschitz constant; raise them,"
      " pass sigma=None to estimate the noise, or lip_status='learned' to learn the constant"
    )


@functools.partial(jax.jit, static_argnames=("splits", "rounds", "tolerance"))
def refine(
  state: CGPState, *, splits: int = 128, rounds: int = 200, tolerance: float = 1e-3
) -> CGPState:
  """Sharpens the cover without a call, until its excess is `tolerance` of the gap."""
  lower = arms.lower_bound(state)
  cover = covers.refine(
    state.cover, state.x, state.upper, state.L, lower,
    splits=splits, rounds=rounds, tolerance=tolerance,
  )  # fmt: skip
  return state._replace(cover=cover)


def propose(state: CGPState, X: Float[Array, "m d"]) -> tuple[Float[Array, " d"], Int[Array, ""]]:
  """The candidate with the largest score, or the arm to pull again instead (binding-arm rule).

  The score is U_t(x) - lam L min_i ||x - x_i||; the paper's exact score could not be read, and any
  lam > 0 made certificates worse in our measurements. Let j be the arm that attains U_t at the
  maximiser x. If r_j > L ||x - x_j||, more is gained by pulling j again than by opening x. This
  balances statistical and geometric slack (our choice).

  Args:
    state: the search.
    X: M candidates inside the unit box.
  Returns:
    (x, repeat_idx): repeat_idx is the arm to pull again, or -1 to open x. When no arm is left to
    open, it is the binding arm.
  """
  upper, _ = arms.upper_env(X, state)
  zero_if_open = jnp.where(state.n > 0, 0.0, jnp.inf).astype(X.dtype)
  distance = envelope_kernel.envelope(X, state.x, zero_if_open, 1.0).upper
  score = upper - jnp.where(state.lam > 0, state.lam * state.L * distance, 0.0)
  return bind(state, X[jnp.argmax(avoid_failures(state, X, score))])


def bind(state: CGPState, x: Float[Array, " d"]) -> tuple[Float[Array, " d"], Int[Array, ""]]:
  """(x, repeat_idx) by the binding-arm rule: open x, or pull its binding arm again."""
  _, j = arms.upper_env(x[None], state)
  j = jnp.maximum(j[0], 0)
  r = (state.upper[j] - state.lower[j]) / 2
  reach = state.L * jnp.sqrt(((x - state.x[j]) ** 2).sum())
  full = state.k >= state.n.shape[0]
  repeat = (state.n[j] > 0) & ((r > reach) | (reach == 0) | full)
  return jnp.where(repeat, state.x[j], x), jnp.where(repeat, j, -1)


def avoid_failures(
  state: CGPState, X: Float[Array, "m d"], score: Float[Array, " m"]
) -> Float[Array, " m"]:
  """The scores of candidates, minus infinity near points where every call failed.

  A failed call changes no bound, so without this the same point would be asked for ever. Where all
  candidates are near failures, the score is the distance to them.
  """
  failed = (jnp.arange(state.n.shape[0]) < state.k) & (state.n == 0)

  def away(score):
    marks = jnp.where(failed, 0.0, jnp.inf).astype(X.dtype)
    distance = envelope_kernel.envelope(X, state.x, marks, 1.0).upper
    close = distance < FAILURE_RADIUS * X.shape[1] ** 0.5
    return jnp.where(close.all(), distance, jnp.where(close, -jnp.inf, score))

  return jax.lax.cond(failed.any(), away, lambda score: score, score)


@functools.lru_cache(maxsize=32)
def _sobol(count: int, dim: int) -> np.ndarray:
  from scipy.stats import qmc  # slow to import, and needed only here

  exponent = max(count - 1, 1).bit_length()
  return qmc.Sobol(dim, scramble=False).random_base2(exponent)[:count]


def sobol(key: Key[Array, ""], count: int, dim: int) -> Float[Array, "{count} {dim}"]:
  """Sobol points of the unit box under a random shift (Cranley and Patterson 1976)."""
  shift = jax.random.uniform(key, (dim,))
  return (jnp.asarray(_sobol(count, dim), shift.dtype) + shift) % 1.0


def candidates(state: CGPState, key: Key[Array, ""], config: Config) -> Float[Array, "m d"]:
  """Proposal points where boxes are too coarse: four quarters, then subgradient ascent on the best.

  The points of the cover's boxes with the largest U_t, Sobol points, Gaussian perturbations of the
  arms with the largest upper bounds, and midpoints between arms (our choice). Proposals only: no
  reported number depends on them.
  """
  quarter = -(-config.candidates // 4)
  d = config.dim
  key_sobol, key_arm, key_step, key_pair = (jax.random.fold_in(key, i) for i in range(4))
  _, best = jax.lax.top_k(state.cover.value, min(quarter, config.boxes))
  boxes = covers.points(state.cover.lo[best], state.cover.hi[best])
  opened = jnp.maximum(state.k, 1)
  ranked = jnp.argsort(jnp.where(state.n > 0, -state.upper, jnp.inf))
  parent = ranked[jax.random.randint(key_arm, (quarter,), 0, jnp.minimum(opened, 2 * d))]
  spacing = 0.5 * opened.astype(state.x.dtype) ** (-1 / d)
  step = jax.random.normal(key_step, (quarter, d), state.x.dtype)
  near = jnp.clip(state.x[parent] + spacing * step / d**0.5, 0, 1)
  pair = jax.random.randint(key_pair, (2, quarter), 0, opened)
  middle = state.x[pair].mean(0)
  X = jnp.concatenate([boxes, sobol(key_sobol, quarter, d).astype(state.x.dtype), near, middle])
  _, start = jax.lax.top_k(arms.upper_env(X, state)[0], min(16, X.shape[0]))
  return jnp.concatenate([X, _ascend(state, X[start], spacing, config.ascent_steps)])


def _ascend(state, X, length, steps):
  """Projected subgradient steps: away from the binding arm, shrinking by a fifth each time."""

  def step(carry, i):
    x, best, best_value = carry
    value, j = arms.upper_env(x, state)
    better = value > best_value
    best = jnp.where(better[:, None], x, best)
    away = x - state.x[jnp.maximum(j, 0)]
    norm = jnp.sqrt(jnp.where((away == 0).all(-1), 1.0, (away**2).sum(-1)))
    x = jnp.clip(x + length * 0.8**i * away / norm[:, None], 0, 1)
    return (x, best, jnp.where(better, value, best_value)), None

  start = (X, X, jnp.full(X.shape[0], -jnp.inf, X.dtype))
  return jax.lax.scan(step, start, jnp.arange(steps, dtype=X.dtype))[0][1]


@functools.partial(jax.jit, static_argnames="config")
def ask(state: CGPState, config: Config) -> tuple[CGPState, Float[Array, " d"], Int[Array, ""]]:
  """Where to spend the next call.

  First the initial design; with an unknown noise level, then replicates of the first arm; with a
  learned constant, every tenth call a probe of the pair of arms that is nearest to contradicting
  it; else `propose`.

  Args:
    state: the search.
    config: the static sizes that `init` was given.
  Returns:
    (state, x, repeat_idx): evaluate the objective at x, then
    `state = tell(state, x, repeat_idx, y)`.
  """
  state = refine(state, splits=config.splits, rounds=config.most_rounds, tolerance=0.05)
  key = jax.random.fold_in(state.key, state.t)
  if config.low_dimensional:
    _, best = jax.lax.top_k(state.cover.value, min(PROPOSAL_POINTS, config.boxes))
    X = covers.points(state.cover.lo[best], state.cover.hi[best])
  else:
    X = candidates(state, key, config)
  x, repeat = propose(state, X)
  probing = (state.lip_status == arms.LEARNED) & (state.t % config.probe_every == 0)
  x, repeat = jax.lax.cond(
    probing & ((state.n > 0).sum() >= 2), _probe, lambda _, x, r: (x, r), state, x, repeat
  )
  return state, *start_with_design(state, config, x, repeat)


def start_with_design(
  state: CGPState,
  config: Config,
  x: Float[Array, " d"],
  repeat_idx: Int[Array, ""],
  *,
  design: bool = True,
) -> tuple[Float[Array, " d"], Int[Array, ""]]:
  """(x, repeat_idx), unless the initial `design` or the noise estimate still needs the call."""
  replicates = jnp.maximum(state.n - 1, 0).sum()
  noise = ~state.sigma_known & (replicates < arms.MIN_FREEDOM) & (state.n.max() > 0)
  first = jnp.argmax(state.n > 0).astype(repeat_idx.dtype)
  x = jnp.where(noise, state.x[first], x)
  repeat_idx = jnp.where(noise, first, repeat_idx)
  if not design:
    return x, repeat_idx
  if config.initial == 1:
    points = jnp.full((1, config.dim), 0.5, state.x.dtype)
  else:
    points = sobol(state.key, config.initial, config.dim).astype(state.x.dtype)
  starting = (state.k < config.initial) & ~noise
  slot = jnp.minimum(state.k, config.initial - 1)
  return jnp.where(starting, points[slot], x), jnp.where(starting, -1, repeat_idx)


def _probe(state, x, repeat_idx):
  """Pulls again the wider arm of the pair nearest to contradicting the constant in use.

  Nearest: the largest (|mean_i - mean_j| - L ||x_i - x_j||) / (r_i + r_j). Without such probes the
  confidence intervals can hide a wrong constant for the whole budget (our choice).
  """
  mean, seen = arms.means(state), state.n > 0
  r = jnp.where(seen, (state.upper - state.lower) / 2, 1.0)
  distance = jnp.sqrt(((state.x[:, None] - state.x[None]) ** 2).sum(-1))
  excess = abs(mean[:, None] - mean[None]) - state.L * distance
  width = r[:, None] + r[None]
  ratio = jnp.where(width > 0, excess / jnp.where(width > 0, width, 1.0), -jnp.inf)
  ratio = jnp.where(seen[:, None] & seen[None] & (distance > 0), ratio, -jnp.inf)
  i, j = jnp.unravel_index(jnp.argmax(ratio), ratio.shape)
  wider = jnp.where(r[i] >= r[j], i, j).astype(repeat_idx.dtype)
  useful = jnp.isfinite(ratio[i, j])
  return jnp.where(useful, state.x[wider], x), jnp.where(useful, wider, repeat_idx)


class Strategy(NamedTuple):
  """A way to spend calls over the same state, envelopes and certificates.

  Attributes:
    init: (state, config) -> memory, a pytree of the strategy's own.
    ask: (state, memory, config) -> (state, memory, x, repeat_idx).
    learn: (state, memory, config, x, repeat_idx, y) -> memory, with the state after `tell`.
  """

  init: Callable[[CGPState, Config], Any]
  ask: Callable[..., tuple[CGPState, Any, Float[Array, " d"], Int[Array, ""]]]
  learn: Callable[..., Any] = lambda state, memory, config, x, repeat_idx, y: memory


def _ask_without_memory(state, memory, config):
  state, x, repeat_idx = ask(state, config)
  return state, memory, x, repeat_idx


CGP = Strategy(lambda state, config: (), _ask_without_memory)
"""Certificate-guided pruning; CGP-Adaptive when the state's constant is learned."""


class History(NamedTuple):
  """What a run did and knew after each of its T calls; after a stop, `x` and `y` are NaN."""

  x: Float[Array, "t d"]
  repeat_idx: Int[Array, " t"]
  y: Float[Array, " t"]
  spent: Bool[Array, " t"]
  certificate: Certificate
  L: Float[Array, " t"]
  observed: Any


def run(
  key: Key[Array, ""],
  objective: Callable[[Float[Array, " d"], Key[Array, ""]], Float[Array, ""]],
  config: Config,
  calls: int,
  *,
  strategy: Strategy = CGP,
  memory: Any = None,
  target_gap: ArrayLike = 0.0,
  observe: Callable[[CGPState], Any] = lambda state: (),
  **hyperparameters: ArrayLike | None,
) -> tuple[CGPState, History]:
  """Spends up to `calls` calls of a JAX objective inside one `lax.scan`.

  Args:
    key: typed key.
    objective: f(x, key) -> y, maximised; wrap a Python function in `jax.experimental.io_callback`.
    config: static sizes.
    calls: T.
    strategy: how to spend them.
    memory: what the strategy starts from, instead of its own `init` (e.g. other thresholds).
    target_gap: stops, spending nothing more, once the gap is at most this, valid or not.
    observe: further quantities to record after each call, as a function of the state.
    **hyperparameters: of `init`: lipschitz, sigma, lip_status, delta, kappa, lam.
  Returns:
    The last state, and the history with leading axis T.
  """
  state = arms.init(config, jax.random.fold_in(key, 0), **hyperparameters)
  memory = strategy.init(state, config) if memory is None else memory
  # Inside shard_map, what differs between devices makes the whole carry of the scan differ.
  key, state, memory, target_gap = vary_alike((key, state, memory, jnp.asarray(target_gap)))
  return _run(key, state, memory, target_gap, objective, config, calls, strategy, observe)


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7, 8))
def _run(key, state, memory, target_gap, objective, config, calls, strategy, observe):
  def call(carry):
    state, memory = carry
    state, memory, x, repeat_idx = strategy.ask(state, memory, config)
    y = objective(x, jax.random.fold_in(jax.random.fold_in(key, 1), state.t))
    state = arms.tell(state, x, repeat_idx, y)
    memory = strategy.learn(state, memory, config, x, repeat_idx, y)
    return (state, memory), (x, repeat_idx, jnp.asarray(y, state.x.dtype))

  def stay(carry):
    nothing = jnp.full_like(carry[0].x[0], jnp.nan)
    return vary_alike((carry, (nothing, jnp.asarray(-1, jnp.int32), nothing[0])))

  def step(carry, _):
    stopped = certificate(carry[0]).gap <= target_gap
    carry, (x, repeat_idx, y) = jax.lax.cond(stopped, stay, call, carry)
    state = carry[0]
    record = History(x, repeat_idx, y, ~stopped, certificate(state), state.L, observe(state))
    return carry, record

  (state, _), history = jax.lax.scan(step, (state, memory), length=calls)
  return state, history
