"""Gaussian process regression with a Matern-5/2 kernel, on fixed-capacity masked data.

The surrogate of CGP-Hybrid and of the GP-UCB baseline. Data live in arrays of a fixed capacity `n`
with a mask, so that everything runs under `jit`, `vmap` and `scan`; masked rows, and rows with a
value that is not finite, change nothing. Outputs are standardised inside `fit` (`GPParams.offset`
and `.scale`), so that hyper-parameters do not depend on the unit of y; every argument and result
is in the unit of y.

Two forms of the posterior agree exactly: `condition` + `predict` at any query in O(n^3), and
`candidates_posterior` + `observe` over a fixed set of m candidates, where one more observation
costs O(n^2 + n m).

Sources: Rasmussen & Williams 2006, Gaussian Processes for Machine Learning, eq. 2.30 and alg. 2.1;
the confidence schedule of GP-UCB as used in arXiv 2601.20231; priors and optimiser are our choice.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

LEARNING_RATE = 0.1
# Normal priors on logarithms: (mean, standard deviation). The median lengthscale grows as sqrt(d),
# as distances in the unit cube do.
LENGTHSCALE_PRIOR = (-0.7, 1.0)
AMPLITUDE_PRIOR = (0.0, 1.0)
NUGGET_PRIOR = (-4.0, 2.0)


class GPParams(NamedTuple):
  """Hyper-parameters of the standardised output (y - offset) / scale."""

  log_lengthscale: Float[Array, "*batch d"]
  log_amplitude: Float[Array, "*batch"]  # of the standard deviation of the process
  log_nugget: Float[Array, "*batch"]  # of an extra noise variance; -inf where none is fitted
  offset: Float[Array, "*batch"]  # prior mean, in the unit of y
  scale: Float[Array, "*batch"]  # one standard deviation, in the unit of y
  ok: Bool[Array, "*batch"]  # False: no start had a factorisable covariance; prior mode returned


class Posterior(NamedTuple):
  """A GP conditioned on data; where `ok` is False it is the prior."""

  params: GPParams
  x: Float[Array, "*batch n d"]
  mask: Bool[Array, "*batch n"]
  factor: Float[Array, "*batch n n"]  # lower Cholesky factor, identity on masked rows
  weights: Float[Array, "*batch n"]  # K^-1 (y - offset) / scale
  ok: Bool[Array, "*batch"]


class CandidatePosterior(NamedTuple):
  """Mean and variance over a fixed candidate set, with what one more observation needs."""

  params: GPParams
  candidates: Float[Array, "*batch m d"]
  x: Float[Array, "*batch n d"]
  factor: Float[Array, "*batch n n"]  # lower Cholesky factor, identity on unused rows
  rows: Float[Array, "*batch n m"]  # factor^-1 K(x, candidates), zero on unused rows
  whitened: Float[Array, "*batch n"]  # factor^-1 (y - offset) / scale
  standard_mean: Float[Array, "*batch m"]
  standard_variance: Float[Array, "*batch m"]
  count: Int[Array, "*batch"]
  ok: Bool[Array, "*batch"]  # False once a factorisation failed or an observation found no room

  @property
  def mean(self) -> Float[Array, "*batch m"]:
    """Posterior mean at the candidates, in the unit of y."""
    return self.params.offset[..., None] + self.params.scale[..., None] * self.standard_mean

  @property
  def variance(self) -> Float[Array, "*batch m"]:
    """Posterior variance of the noise-free value at the candidates, in the unit of y squared."""
    return self.params.scale[..., None] ** 2 * jnp.maximum(self.standard_variance, 0.0)


def matern52(squared_distance: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """Matern-5/2 correlation (1 + s + s^2/3) exp(-s), s = sqrt(5) r, from r^2.

  Source: Rasmussen & Williams 2006, eq. 4.17.

  Args:
    squared_distance: r^2 in lengthscales squared.
  Returns:
    Correlation in (0, 1]; its gradient is finite everywhere, r = 0 included.
  """
  positive = squared_distance > 0
  s = jnp.sqrt(5.0 * jnp.where(positive, squared_distance, 1.0))
  return jnp.where(positive, (1.0 + s + s**2 / 3.0) * jnp.exp(-s), 1.0)


def _covariance(
  params: GPParams, a: Float[Array, "n d"], b: Float[Array, "m d"]
) -> Float[Array, "n m"]:
  # Direct differences: the matrix-product form loses close pairs to cancellation in float32.
  inverse = jnp.exp(-params.log_lengthscale)
  difference = (a[:, None, :] - b[None, :, :]) * inverse
  return jnp.exp(2.0 * params.log_amplitude) * matern52(jnp.sum(difference**2, -1))


def _noise(params: GPParams, noise_variance: Float[Array, "*n"]) -> Float[Array, "*n"]:
  # Rounding of a Cholesky factorisation is a multiple of eps times the largest eigenvalue.
  jitter = 100.0 * jnp.finfo(noise_variance.dtype).eps * jnp.exp(2.0 * params.log_amplitude)
  return noise_variance / params.scale**2 + jnp.exp(params.log_nugget) + jitter


def _usable(x, y, noise_variance, mask):
  mask = mask & jnp.isfinite(y) & jnp.isfinite(noise_variance) & (noise_variance >= 0)
  mask = mask & jnp.all(jnp.isfinite(x), -1)
  return jnp.where(mask[:, None], x, 0.0), jnp.where(mask, y, 0.0), noise_variance, mask


def _masked(covariance, noise, mask):
  inside = mask[:, None] & mask[None, :]
  return jnp.where(inside, covariance, 0.0) + jnp.diag(jnp.where(mask, noise, 1.0))


def _factorise(covariance):
  """Lower Cholesky factor and whether it exists; the identity where it does not."""
  factor = jnp.linalg.cholesky(covariance)
  ok = jnp.all(jnp.isfinite(factor))
  return jnp.where(ok, factor, jnp.eye(factor.shape[-1], dtype=factor.dtype)), ok


def _solve_lower(factor, b, transpose=False):
  return jax.scipy.linalg.solve_triangular(factor, b, lower=True, trans=int(transpose))


@jax.custom_vjp
def _log_density(covariance, residual, count):
  """log N(residual; 0, covariance) over `count` real rows; -inf where it cannot be factorised."""
  return _log_density_forward(covariance, residual, count)[0]


def _log_density_forward(covariance, residual, count):
  factor, ok = _factorise(covariance)
  whitened = _solve_lower(factor, residual)
  value = -0.5 * (whitened @ whitened) - jnp.sum(jnp.log(jnp.diagonal(factor)))
  value = jnp.where(ok, value - 0.5 * count * jnp.log(2.0 * jnp.pi), -jnp.inf)
  return value, (factor, whitened, ok, count)


def _log_density_backward(residuals, cotangent):
  # Closed form (eq. 5.9): half the work of differentiating through the factorisation, and zero,
  # not NaN, where that failed.
  factor, whitened, ok, count = residuals
  inverse_factor = _solve_lower(factor, jnp.eye(factor.shape[-1], dtype=factor.dtype))
  weights = inverse_factor.T @ whitened
  gradient = 0.5 * (jnp.outer(weights, weights) - inverse_factor.T @ inverse_factor)
  cotangent = jnp.where(ok, cotangent, 0.0)
  return cotangent * gradient, -cotangent * weights, jnp.zeros_like(count)


_log_density.defvjp(_log_density_forward, _log_density_backward)


def standardisation(
  y: Float[Array, "n"], mask: Bool[Array, "n"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Mean and standard deviation of the masked outputs; (mean, 1) where they do not vary.

  Returns:
    Offset and scale in the unit of y.
  """
  count = jnp.maximum(jnp.sum(mask), 1)
  offset = jnp.sum(jnp.where(mask, y, 0.0)) / count
  deviation = jnp.where(mask, y - offset, 0.0)
  scale = jnp.sqrt(jnp.maximum(jnp.sum(deviation**2) / count, jnp.finfo(y.dtype).tiny))
  varies = jnp.max(jnp.abs(deviation)) > 1e-6 * jnp.max(jnp.where(mask, jnp.abs(y), 0.0))
  return offset, jnp.where(varies, scale, 1.0)


@jax.jit
def log_marginal_likelihood(
  params: GPParams,
  x: Float[Array, "n d"],
  y: Float[Array, "n"],
  noise_variance: Float[Array, "n"],
  mask: Bool[Array, "n"],
) -> Float[Array, ""]:
  """Log density of the data under the GP, in the unit of y; arguments as in `fit`.

  Source: Rasmussen & Williams 2006, eq. 2.30.

  Returns:
    The log density; -inf, with zero gradient, where the covariance cannot be factorised.
  """
  x, y, noise_variance, mask = _usable(x, y, noise_variance, mask)
  noise = _noise(params, noise_variance)
  covariance = _masked(_covariance(params, x, x), noise, mask)
  residual = jnp.where(mask, (y - params.offset) / params.scale, 0.0)
  count = jnp.sum(mask).astype(y.dtype)
  return _log_density(covariance, residual, count) - count * jnp.log(params.scale)


def _prior_mode(x, y, mask, nugget):
  offset, scale = standardisation(y, mask)
  dimension = x.shape[-1]
  return GPParams(
    jnp.full(dimension, LENGTHSCALE_PRIOR[0] + 0.5 * jnp.log(dimension), x.dtype),
    jnp.asarray(AMPLITUDE_PRIOR[0], x.dtype),
    jnp.asarray(NUGGET_PRIOR[0] if nugget else -jnp.inf, x.dtype),
    offset,
    scale,
    jnp.asarray(True),
  )


@functools.partial(jax.jit, static_argnames="nugget")
def log_posterior(
  params: GPParams,
  x: Float[Array, "n d"],
  y: Float[Array, "n"],
  noise_variance: Float[Array, "n"],
  mask: Bool[Array, "n"],
  *,
  nugget: bool = False,
) -> Float[Array, ""]:
  """What `fit` maximises: the log marginal likelihood plus the log prior, up to a constant."""
  mode = _prior_mode(x, y, mask, nugget)
  penalty = jnp.sum(((params.log_lengthscale - mode.log_lengthscale) / LENGTHSCALE_PRIOR[1]) ** 2)
  penalty += ((params.log_amplitude - mode.log_amplitude) / AMPLITUDE_PRIOR[1]) ** 2
  if nugget:
    penalty += ((params.log_nugget - mode.log_nugget) / NUGGET_PRIOR[1]) ** 2
  return log_marginal_likelihood(params, x, y, noise_variance, mask) - 0.5 * penalty


@functools.partial(jax.jit, static_argnames=("steps", "restarts", "nugget"))
def fit(
  x: Float[Array, "n d"],
  y: Float[Array, "n"],
  noise_variance: Float[Array, "n"],
  mask: Bool[Array, "n"],
  *,
  key: PRNGKeyArray,
  steps: int = 60,
  restarts: int = 4,
  init: GPParams | None = None,
  nugget: bool = False,
) -> GPParams:
  """Hyper-parameters of highest posterior density seen by Adam from several starts.

  Weak log-normal priors keep lengthscales sane on little data. The first start is `init` if given
  and the mode of the prior otherwise; the others are drawn from the prior. With `init` and
  `restarts=1` a refit on more data costs a quarter.

  Args:
    x: inputs, in the unit cube.
    y: outputs (for replicated inputs, their means), any unit.
    noise_variance: variance of the noise of each output, sigma^2 / n_i, unit of y squared.
    mask: which rows are data; without any the result is the mode of the prior.
    key: draws the starts.
    steps: Adam steps from each start.
    restarts: number of starts, at least 1.
    init: hyper-parameters of an earlier fit; their offset and scale are replaced.
    nugget: whether to fit an extra noise variance, for noise that is not fully known.
  Returns:
    Hyper-parameters, never of lower posterior density than any start; `ok` as in `GPParams`.
  Raises:
    ValueError: `steps` or `restarts` below 1.
  """
  if steps < 1 or restarts < 1:
    raise ValueError(f"steps and restarts must be at least 1; got {steps} and {restarts}")
  x, y, noise_variance, mask = _usable(x, y, noise_variance, mask)
  mode = _prior_mode(x, y, mask, nugget)

  def loss(free):
    params = mode._replace(**free)
    return -log_posterior(params, x, y, noise_variance, mask, nugget=nugget)

  names = ["log_lengthscale", "log_amplitude"] + ["log_nugget"] * nugget
  spread = {
    "log_lengthscale": LENGTHSCALE_PRIOR[1],
    "log_amplitude": AMPLITUDE_PRIOR[1],
    "log_nugget": NUGGET_PRIOR[1],
  }
  first = {name: getattr(init if init is not None else mode, name) for name in names}
  first = {
    name: jnp.where(jnp.isfinite(value), value, getattr(mode, name))
    for name, value in first.items()
  }
  starts = {}
  for name, name_key in zip(names, jax.random.split(key, len(names)), strict=True):
    centre = getattr(mode, name)
    noise = jax.random.normal(name_key, (restarts - 1, *centre.shape), x.dtype)
    starts[name] = jnp.concatenate([first[name][None], centre + spread[name] * noise])

  # One start after the other: jaxlib spreads a batch of factorisations over its pool of threads and
  # waits on a thread of that pool (seen in 0.10.1), so two programs at once can wait for ever.
  best, losses = jax.lax.map(lambda start: _minimise(loss, start, steps), starts)
  winner = jnp.argmin(losses)
  ok = jnp.isfinite(losses[winner])
  return mode._replace(
    **{name: jnp.where(ok, best[name][winner], getattr(mode, name)) for name in names}, ok=ok
  )


def _minimise(loss, start, steps):
  """Best point seen on an Adam trajectory, and its loss."""
  optimiser = optax.adam(LEARNING_RATE)

  def step(carry, _):
    point, state, best, lowest = carry
    value, gradient = jax.value_and_grad(loss)(point)
    better = value < lowest
    best = jax.tree.map(lambda new, old: jnp.where(better, new, old), point, best)
    # An overflow in one start must not poison the moments of Adam.
    gradient = jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), g, 0.0), gradient)
    updates, state = optimiser.update(gradient, state)
    return (optax.apply_updates(point, updates), state, best, jnp.minimum(value, lowest)), None

  infinity = jnp.asarray(jnp.inf, start["log_amplitude"].dtype)
  init = (start, optimiser.init(start), start, infinity)
  (_, _, best, lowest), _ = jax.lax.scan(step, init, None, length=steps)
  return best, lowest


@jax.jit
def condition(
  params: GPParams,
  x: Float[Array, "n d"],
  y: Float[Array, "n"],
  noise_variance: Float[Array, "n"],
  mask: Bool[Array, "n"],
) -> Posterior:
  """The GP given data, in O(n^3).

  Source: Rasmussen & Williams 2006, alg. 2.1.

  Args: as in `fit`; masked rows, and rows that are not finite, change nothing.
  Returns:
    The posterior; the prior, with `ok` False, where the covariance cannot be factorised.
  """
  x, y, noise_variance, mask = _usable(x, y, noise_variance, mask)
  covariance = _masked(_covariance(params, x, x), _noise(params, noise_variance), mask)
  factor, ok = _factorise(covariance)
  mask = mask & ok
  residual = jnp.where(mask, (y - params.offset) / params.scale, 0.0)
  weights = _solve_lower(factor, _solve_lower(factor, residual), transpose=True)
  return Posterior(params, x, mask, factor, weights, ok)


@jax.jit
def predict(
  posterior: Posterior, queries: Float[Array, "m d"]
) -> tuple[Float[Array, "m"], Float[Array, "m"]]:
  """Mean and variance of the noise-free value at the queries.

  Args:
    posterior: from `condition`.
    queries: points in the unit cube.
  Returns:
    Mean in the unit of y and variance in its square, at least 0.
  """
  params = posterior.params
  cross = jnp.where(posterior.mask[:, None], _covariance(params, posterior.x, queries), 0.0)
  mean = params.offset + params.scale * (posterior.weights @ cross)
  explained = jnp.sum(_solve_lower(posterior.factor, cross) ** 2, 0)
  variance = jnp.exp(2.0 * params.log_amplitude) - explained
  return mean, params.scale**2 * jnp.maximum(variance, 0.0)


@jax.jit
def candidates_posterior(
  params: GPParams,
  candidates: Float[Array, "m d"],
  x: Float[Array, "n d"],
  y: Float[Array, "n"],
  noise_variance: Float[Array, "n"],
  mask: Bool[Array, "n"],
) -> CandidatePosterior:
  """The posterior over fixed candidates given data so far (possibly none), to go on by `observe`.

  Args:
    params: hyper-parameters, fixed until the next call.
    candidates: points at which mean and variance are kept.
    x, y, noise_variance, mask: data as in `fit`; the capacity n is also the room for later
      observations. Rows that are data are moved to the front.
  Returns:
    The state, with `count` rows in use.
  """
  x, y, noise_variance, mask = _usable(x, y, noise_variance, mask)
  front = jnp.argsort(~mask, stable=True)
  x, y, noise_variance, mask = x[front], y[front], noise_variance[front], mask[front]
  posterior = condition(params, x, y, noise_variance, mask)
  mask = posterior.mask
  cross = jnp.where(mask[:, None], _covariance(params, x, candidates), 0.0)
  rows = _solve_lower(posterior.factor, cross)
  residual = jnp.where(mask, (y - params.offset) / params.scale, 0.0)
  whitened = _solve_lower(posterior.factor, residual)
  variance = jnp.exp(2.0 * params.log_amplitude) - jnp.sum(rows**2, 0)
  count = jnp.sum(mask).astype(jnp.int32)
  return CandidatePosterior(
    params,
    candidates,
    x,
    posterior.factor,
    rows,
    whitened,
    whitened @ rows,
    variance,
    count,
    posterior.ok,
  )


@jax.jit
def observe(
  state: CandidatePosterior,
  x: Float[Array, "d"],
  y: Float[Array, ""],
  noise_variance: Float[Array, ""],
) -> CandidatePosterior:
  """One more observation, in O(n^2 + n m): a row appended to the Cholesky factor and to `rows`.

  Observing a point again is one more row: the posterior is the one of their mean.

  Args:
    state: from `candidates_posterior` or `observe`.
    x: the observed point; it need not be a candidate.
    y: the observed value.
    noise_variance: variance of its noise.
  Returns:
    The state given the observation. A value that is not finite changes nothing. An observation
    beyond the capacity, or one that the factor cannot absorb, is dropped and `ok` becomes False.
  """
  params, capacity = state.params, state.x.shape[0]
  given = jnp.isfinite(y) & jnp.all(jnp.isfinite(x)) & (noise_variance >= 0)
  used = jnp.arange(capacity) < state.count
  covariance = jnp.where(used, _covariance(params, state.x, x[None])[:, 0], 0.0)
  projection = _solve_lower(state.factor, covariance)
  own = jnp.exp(2.0 * params.log_amplitude) + _noise(params, jnp.asarray(noise_variance, y.dtype))
  pivot_squared = own - projection @ projection
  accepted = given & (pivot_squared > 0) & (state.count < capacity)
  pivot = jnp.sqrt(jnp.where(accepted, pivot_squared, 1.0))

  residual = (y - params.offset) / params.scale
  value = jnp.where(accepted, (residual - projection @ state.whitened) / pivot, 0.0)
  cross = _covariance(params, x[None], state.candidates)[0]
  row = jnp.where(accepted, (cross - projection @ state.rows) / pivot, 0.0)
  index = jnp.minimum(state.count, capacity - 1)
  write = lambda old, new: old.at[index].set(jnp.where(accepted, new, old[index]))
  here = jnp.arange(capacity) == index
  return state._replace(
    x=write(state.x, x),
    factor=write(state.factor, jnp.where(here, pivot, projection)),
    rows=write(state.rows, row),
    whitened=write(state.whitened, value),
    standard_mean=state.standard_mean + value * row,
    standard_variance=state.standard_variance - row**2,
    count=state.count + accepted,
    ok=state.ok & (accepted | ~given),
  )


def ucb_beta(
  t: Int[Array, "*batch"] | Float[Array, "*batch"] | int, delta: Float[Array, ""] | float
) -> Float[Array, "*batch"]:
  """GP-UCB's squared width at call t >= 1: 2 log(t^2 pi^2 / (6 delta)).

  Source: the schedule of the GP-UCB baseline of arXiv 2601.20231.

  Args:
    t: number of the call, from 1.
    delta: failure probability in (0, 1).
  """
  t = jnp.asarray(t, jnp.result_type(float))
  return 2.0 * jnp.log(t**2 * jnp.pi**2 / (6.0 * delta))


def upper_confidence_bound(
  mean: Float[Array, "*m"], variance: Float[Array, "*m"], beta: Float[Array, ""] | float
) -> Float[Array, "*m"]:
  """mean + sqrt(beta variance), in the unit of y."""
  return mean + jnp.sqrt(beta * variance)


def expected_improvement(
  mean: Float[Array, "*m"], variance: Float[Array, "*m"], best: Float[Array, ""] | float
) -> Float[Array, "*m"]:
  """E max(f - best, 0) for f normal; max(mean - best, 0) where the variance is 0.

  Source: Jones et al. 1998, eq. 15.

  Args:
    mean: posterior mean at the candidates, unit of y.
    variance: posterior variance, unit of y squared.
    best: value to improve on.
  Returns:
    Expected improvement in the unit of y, at least 0.
  """
  uncertain = variance > 0
  deviation = jnp.sqrt(jnp.where(uncertain, variance, 1.0))
  z = (mean - best) / deviation
  improvement = deviation * (z * jax.scipy.stats.norm.cdf(z) + jax.scipy.stats.norm.pdf(z))
  return jnp.maximum(jnp.where(uncertain, improvement, mean - best), 0.0)
