"""Arms, confidence bounds and the Lipschitz constant: what a search has seen and may assume."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from foliax.kernels_pallas import envelope as envelope_kernel
from foliax.search.cgp import cover as covers
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Key

KNOWN, ASSUMED, LEARNED = 0, 1, 2
"""Where the Lipschitz constant comes from: a fact or an overestimate, a guess, or the data."""

MIN_FREEDOM = 4
"""Degrees of freedom (replicates) before an estimated noise level is trusted; our choice."""

LIP_STATUS = {"known": KNOWN, "assumed": ASSUMED, "learned": LEARNED}


@dataclasses.dataclass(frozen=True)
class Config:
  """Static sizes of a search; everything a sweep varies is traced and lives in the state.

  Attributes:
    dim: number of coordinates d of the unit box.
    capacity: most points that can be opened (N); also the N_max of the union bound.
    boxes: capacity of the branch-and-bound cover of the active set.
    splits: boxes split in one refinement round.
    rounds: most refinement rounds per `ask`; None is 2 up to three dimensions and 1 above.
    candidates: proposal points above three dimensions (our choice: 4096 at the paper's scale).
    ascent_steps: projected subgradient steps on the best candidates above three dimensions.
    initial: size of the initial design: 1 is the centre, more are Sobol points.
    probe_every: with a learned constant, each such call replicates the pair of points nearest to
      contradicting it (10 % of the budget, our choice).
  """

  dim: int
  capacity: int = 256
  boxes: int = 4096
  splits: int = 64
  rounds: int | None = None
  candidates: int = 1024
  ascent_steps: int = 20
  initial: int = 1
  probe_every: int = 10

  def __post_init__(self):
    for name in ("dim", "capacity", "boxes", "splits", "candidates", "initial", "probe_every"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
    if self.boxes < 2 * self.splits:
      raise ValueError(
        f"boxes is {self.boxes} with splits {self.splits}; give room for two rounds: "
        f"boxes >= {2 * self.splits}"
      )

  @property
  def low_dimensional(self) -> bool:
    """Whether the boxes of the cover are fine enough to be the proposal candidates."""
    return self.dim <= 3

  @property
  def most_rounds(self) -> int:
    return self.rounds or (2 if self.low_dimensional else 1)


class CGPState(NamedTuple):
  """Everything a search knows, in arrays of fixed size; N = capacity, d = dim.

  An arm is a point that has been opened. An arm whose every observation failed has n = 0 and
  bounds of plus and minus infinity. `upper` and `lower` are nested over time: the running minimum
  and maximum of mean plus and minus radius, which the union bound over counts allows.
  """

  x: Float[Array, "n d"]
  s: Float[Array, " n"]  # sum of the observations of an arm
  m2: Float[Array, " n"]  # sum of their squared deviations from the arm's mean
  n: Int[Array, " n"]
  upper: Float[Array, " n"]
  lower: Float[Array, " n"]
  k: Int[Array, ""]  # arms opened
  t: Int[Array, ""]  # calls spent, failed ones included
  dropped: Int[Array, ""]  # calls that taught nothing: not finite, outside the box, no room left
  L: Float[Array, ""]
  lip_status: Int[Array, ""]
  kappa: Float[Array, ""]  # safety multiplier on the largest slope the data prove
  doublings: Int[Array, ""]
  sigma: Float[Array, ""]  # noise level in use
  sigma_known: Bool[Array, ""]
  delta: Float[Array, ""]
  lam: Float[Array, ""]  # weight of the distance term of the score; 0 is best (our measurement)
  inconsistent: Bool[Array, ""]  # the data contradict a constant that is not learned, or sigma
  cover: covers.Cover
  key: Key[Array, ""]


def init(
  config: Config,
  key: Key[Array, ""],
  *,
  lipschitz: ArrayLike = 1.0,
  sigma: ArrayLike | None = None,
  lip_status: str | ArrayLike = "known",
  delta: ArrayLike = 0.05,
  kappa: ArrayLike = 2.0,
  lam: ArrayLike = 0.0,
) -> CGPState:
  """A search that has seen nothing.

  Args:
    config: static sizes.
    key: typed key; every random choice of the search derives from it.
    lipschitz: L of |f(x) - f(y)| <= L ||x - y|| on the unit box, in units of f per unit of x.
    sigma: sub-Gaussian noise level in units of f; 0 for exact observations; None when unknown: it
      is then estimated from replicates, and no certificate is called valid.
    lip_status: `"known"` (a fact, or an overestimate), `"assumed"` (a guess) or `"learned"` (the
      start of doubling, CGP-Adaptive).
    delta: probability that any of the confidence intervals ever fails.
    kappa: safety multiplier on the largest slope the data prove (learned constants only).
    lam: weight of the distance term of the score, in units of L.
  Raises:
    ValueError: a value outside its range (when it is concrete).
  """
  _check("lipschitz", lipschitz, lambda v: np.isfinite(v) & (v > 0), "a finite number above 0")
  _check("delta", delta, lambda v: (v > 0) & (v < 1), "strictly between 0 and 1")
  _check("kappa", kappa, lambda v: np.isfinite(v) & (v >= 1), "at least 1")
  if sigma is not None:
    _check("sigma", sigma, lambda v: np.isfinite(v) & (v >= 0), "finite and at least 0, or None")
  if isinstance(lip_status, str):
    if lip_status not in LIP_STATUS:
      raise ValueError(f"lip_status is {lip_status!r}; it must be one of {sorted(LIP_STATUS)}")
    lip_status = LIP_STATUS[lip_status]
  dtype = jnp.result_type(float)
  n, d = config.capacity, config.dim
  scalar = functools.partial(jnp.asarray, dtype=dtype)
  count = functools.partial(jnp.asarray, dtype=jnp.int32)
  return CGPState(
    x=jnp.full((n, d), 0.5, dtype),
    s=jnp.zeros(n, dtype),
    m2=jnp.zeros(n, dtype),
    n=jnp.zeros(n, jnp.int32),
    upper=jnp.full(n, jnp.inf, dtype),
    lower=jnp.full(n, -jnp.inf, dtype),
    k=count(0),
    t=count(0),
    dropped=count(0),
    L=scalar(lipschitz),
    lip_status=count(lip_status),
    kappa=scalar(kappa),
    doublings=count(0),
    sigma=scalar(0.0 if sigma is None else sigma),
    sigma_known=jnp.asarray(sigma is not None),
    delta=scalar(delta),
    lam=scalar(lam),
    inconsistent=jnp.asarray(False),
    cover=covers.root(config.boxes, d, dtype),
    key=key,
  )


def _check(name, value, allowed, sentence):
  """Raises on a concrete value outside its range; traced values pass."""
  if not isinstance(value, jax.core.Tracer) and not np.all(allowed(np.asarray(value))):
    raise ValueError(f"{name} is {value}; it must be {sentence}")


def radius(
  n: Int[Array, "*s"], sigma: ArrayLike, delta: ArrayLike, n_max: ArrayLike
) -> Float[Array, "*s"]:
  """Confidence radius of a mean of n observations; infinite for n = 0, zero when sigma is 0.

  r(n) = sigma sqrt(2 log((pi^2 / 3) n_max n^2 / delta) / n), a union bound over n_max arms and all
  counts: with probability 1 - delta every interval mean +- r(n) holds at every time. The paper's
  own radius could not be read; this is our choice.

  Args:
    n: observations per arm.
    sigma: sub-Gaussian noise level, in units of the observations.
    delta: total failure probability.
    n_max: most arms that can ever be opened.
  """
  dtype = jnp.result_type(float)
  count = jnp.maximum(n, 1).astype(dtype)
  log_term = jnp.log(jnp.pi**2 / 3 * n_max / delta) + 2 * jnp.log(count)
  return jnp.where(n > 0, sigma * jnp.sqrt(2 * log_term / count), jnp.inf).astype(dtype)


def means(state: CGPState) -> Float[Array, " n"]:
  """Mean observation of every arm; 0 for arms without one."""
  return state.s / jnp.maximum(state.n, 1)


def upper_env(
  X: Float[Array, "m d"], state: CGPState
) -> tuple[Float[Array, " m"], Int[Array, " m"]]:
  """U_t(x) = min_i {UCB_i + L ||x - x_i||} and the arm that attains it (the binding arm)."""
  result = envelope_kernel.envelope(X, state.x, state.upper, state.L)
  return result.upper, result.argmin


def lower_env(X: Float[Array, "m d"], state: CGPState) -> Float[Array, " m"]:
  """max_i {LCB_i - L ||x - x_i||}: below f on the good event; its supremum is `lower_bound`."""
  return envelope_kernel.envelope(X, state.x, state.upper, state.L, state.lower).lower


def slack(X: Float[Array, "m d"], state: CGPState) -> Float[Array, " m"]:
  """rho_t(x) = min_i {r_i + L ||x - x_i||}: on the good event f <= U_t <= f + 2 rho_t."""
  radii = jnp.where(state.n > 0, (state.upper - state.lower) / 2, jnp.inf)
  return envelope_kernel.envelope(X, state.x, radii, state.L).upper


def lower_bound(state: CGPState) -> Float[Array, ""]:
  """l_t = max_i LCB_i, the value that is certainly reached (at `incumbent`)."""
  return state.lower.max()


def incumbent(state: CGPState) -> Float[Array, " d"]:
  """The arm with the largest lower confidence bound."""
  return state.x[jnp.argmax(state.lower)]


def box_upper(
  lo: Float[Array, "b d"], hi: Float[Array, "b d"], state: CGPState
) -> Float[Array, " b"]:
  """A sound upper bound of max U_t over boxes [lo, hi]; see `cover.box_upper`."""
  return covers.box_upper(lo, hi, state.x, state.upper, state.L)


def pair_slopes(
  x: Float[Array, "n d"], upper: Float[Array, " n"], lower: Float[Array, " n"]
) -> tuple[Float[Array, "n n"], Float[Array, "n n"]]:
  """For every pair of arms the difference of values that the data prove, and the distance.

  (|mean_i - mean_j| - r_i - r_j, ||x_i - x_j||); minus infinity for arms without observations.
  """
  proven = lower[:, None] - upper[None, :]
  return jnp.maximum(proven, proven.T), jnp.sqrt(((x[:, None] - x[None]) ** 2).sum(-1))


def double_L(state: CGPState) -> CGPState:
  """Doubles L while the observed data contradict it (CGP-Adaptive), at most 60 times.

  A pair contradicts L when |mean_i - mean_j| - r_i - r_j > L ||x_i - x_j||. On the good event this
  cannot happen once L is at least the true constant, so the final L is at most twice that. Two
  arms at one point whose intervals do not meet contradict every L: they set `inconsistent`, and do
  not double. After a change nothing stays pruned: the cover restarts from the whole box.
  """
  slope, contradiction = _proven_slope(state, *pair_slopes(state.x, state.upper, state.lower))
  lipschitz, count = _doubled(state.L, slope)
  return state._replace(
    L=lipschitz,
    doublings=state.doublings + count,
    inconsistent=state.inconsistent | contradiction,
    cover=covers.restart(state.cover, count > 0),
  )


def _proven_slope(state, proven, distance):
  """The largest slope that pairs of arms prove, and whether two arms at one point disagree."""
  # Room for the rounding of a difference of bounds, so that equality is no contradiction.
  scale = jnp.where(state.n > 0, jnp.maximum(abs(state.upper), abs(state.lower)), 0).max()
  proven = proven - 8 * jnp.finfo(proven.dtype).eps * scale
  same = distance == 0
  slopes = jnp.where(same, 0.0, proven / jnp.where(same, 1.0, distance))
  return jnp.max(slopes, initial=0.0), jnp.any(same & (proven > 0))


def _doubled(lipschitz, slope):
  """L doubled until it is at least `slope`, at most 60 times, and how often that was."""
  return jax.lax.while_loop(
    lambda carry: (carry[0] < slope) & (carry[1] < 60),
    lambda carry: (carry[0] * 2, carry[1] + 1),
    (lipschitz, jnp.zeros((), jnp.int32)),
  )


def tell(
  state: CGPState, x: ArrayLike | Sequence[float], repeat_idx: ArrayLike, y: Any
) -> CGPState:
  """Takes in one observation y of point x. Every call counts as spent, whatever it returned.

  Args:
    x: the point, inside the unit box.
    repeat_idx: the arm that x is (as `ask` said), or -1 to open x as a new arm.
    y: the observation; NaN or infinite for a call that failed. A failed new point is remembered,
      so that proposals keep away from it; it never changes a bound.
  Returns:
    The next state. When x lies outside the box, `repeat_idx` is no arm, or there is no room for a
    new arm, the call is counted in `dropped` and nothing else changes.
  Raises:
    ValueError: outside a transformation, on a point outside the box or an unknown arm; the state
      that was passed in is still good.
  """
  if not any(isinstance(v, jax.core.Tracer) for v in (x, repeat_idx, y, state.x)):
    _check_observation(state, x, repeat_idx, y)
  dtype = state.x.dtype
  return _tell(
    state, jnp.asarray(x, dtype), jnp.asarray(repeat_idx, jnp.int32), jnp.asarray(y, dtype)
  )


def _check_observation(state, x, repeat_idx, y):
  point, k, n = np.asarray(x), int(state.k), state.n.shape[0]
  if point.shape != (state.x.shape[1],):
    raise ValueError(f"x has shape {point.shape}; it must be ({state.x.shape[1]},)")
  if not np.all((point >= 0) & (point <= 1)):
    raise ValueError(f"x is {point}, outside the unit box; scale your parameters to [0, 1]")
  if not -1 <= int(repeat_idx) < k:
    raise ValueError(
      f"repeat_idx is {int(repeat_idx)}; it must be -1 or one of the {k} arms opened"
    )
  if np.shape(y) != ():
    raise ValueError(f"y has shape {np.shape(y)}; tell one number per call")
  if int(repeat_idx) == -1 and k == n:
    raise ValueError(f"all {n} arms are open; repeat one of them, or raise Config.capacity")


@jax.jit
def _tell(state, x, repeat_idx, y):
  capacity = state.n.shape[0]
  new = repeat_idx < 0
  placed = ((x >= 0) & (x <= 1)).all() & (repeat_idx < state.k) & ~(new & (state.k == capacity))
  j = jnp.where(placed, jnp.where(new, state.k, repeat_idx), capacity)  # capacity: written nowhere
  good = placed & jnp.isfinite(y)
  value = jnp.where(good, y, 0.0)
  slot = jnp.minimum(j, capacity - 1)
  n_old, s_old = state.n[slot], state.s[slot]
  n_new, s_new = n_old + good, s_old + value
  # Welford: the deviation from the old mean times the deviation from the new one.
  step = (value - s_old / jnp.maximum(n_old, 1)) * (value - s_new / jnp.maximum(n_new, 1))
  state = state._replace(
    x=state.x.at[jnp.where(new, j, capacity)].set(x, mode="drop"),
    s=state.s.at[j].set(s_new, mode="drop"),
    m2=state.m2.at[j].add(jnp.where(good & (n_old > 0), step, 0.0), mode="drop"),
    n=state.n.at[j].set(n_new, mode="drop"),
    k=state.k + (new & placed),
    t=state.t + 1,
    dropped=state.dropped + ~good,
  )
  state = _update_noise_level(state)
  r = radius(state.n[slot], state.sigma, state.delta, capacity)
  mean = state.s[slot] / jnp.maximum(state.n[slot], 1)
  state = state._replace(
    upper=state.upper.at[jnp.where(good, j, capacity)].min(mean + r, mode="drop"),
    lower=state.lower.at[jnp.where(good, j, capacity)].max(mean - r, mode="drop"),
  )
  state = state._replace(
    cover=covers.add_arm(
      state.cover, state.x[slot], jnp.where(good, state.upper[slot], jnp.inf), state.L
    )
  )
  return jax.lax.cond(good, _check_consistency, lambda state, _: state, state, slot)


def _update_noise_level(state):
  """Re-estimates an unknown sigma from replicates when it has moved by a quarter.

  Radii then change everywhere, so the bounds start anew and the cover restarts.
  """
  freedom = jnp.maximum(state.n - 1, 0).sum()
  estimate = jnp.sqrt(state.m2.sum() / jnp.maximum(freedom, 1))
  moved = (estimate > 1.25 * state.sigma) | (estimate < 0.8 * state.sigma)
  moved &= ~state.sigma_known & (freedom > 0)
  sigma = jnp.where(moved, estimate, state.sigma)
  r = radius(state.n, sigma, state.delta, state.n.shape[0])
  mean = means(state)
  return state._replace(
    sigma=sigma,
    upper=jnp.where(moved, mean + r, state.upper),
    lower=jnp.where(moved, mean - r, state.lower),
    cover=covers.restart(state.cover, moved),
  )


def _check_consistency(state, j):
  """Compares the arm that changed with every other, in O(N d): doubling, and contradictions."""
  # Including j itself: an interval that has become empty contradicts the noise level.
  proven = jnp.maximum(state.lower[j] - state.upper, state.lower - state.upper[j])
  distance = jnp.sqrt(((state.x - state.x[j]) ** 2).sum(-1))
  slope, contradiction = _proven_slope(state, proven, distance)
  trusted = state.sigma_known | (jnp.maximum(state.n - 1, 0).sum() >= MIN_FREEDOM)
  lipschitz, count = _doubled(state.L, jnp.where(trusted, slope, 0.0))
  lipschitz = jnp.maximum(lipschitz, jnp.where(trusted, state.kappa * slope, 0.0))
  learned = state.lip_status == LEARNED
  inconsistent = (contradiction & state.sigma_known) | ((slope > state.L) & ~learned & trusted)
  return state._replace(
    L=jnp.where(learned, lipschitz, state.L),
    doublings=state.doublings + jnp.where(learned, count, 0),
    inconsistent=state.inconsistent | inconsistent,
    cover=covers.restart(state.cover, learned & (lipschitz > state.L)),
  )
