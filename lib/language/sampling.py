"""Drawing tokens from logits: temperature, top-k, top-p and min-p, each per row and traced.

With weights w_i = exp((logit_i - max logit) / temperature), each filter keeps the tokens whose
weight reaches a threshold, so tokens of equal weight stay or go together and the likeliest always
stays:

  top-k  the largest threshold that at least k tokens reach.
  top-p  of what top-k left, the largest threshold whose tokens hold at least the share p (the
         nucleus of Holtzman et al. 2020, arXiv 1904.09751).
  min-p  the weight p itself, that is p times the largest probability (Nguyen et al. 2024,
         arXiv 2407.01082).

No vocabulary is sorted: a threshold is found by bisection over the bits of a float, some ten masked
sums, and none where no row asks for one. A draw inverts the cumulative distribution in two steps,
first which column of the vocabulary and then which token in it. That needs two uniforms a row
where Gumbel noise would need one for every token, and is exact to the rounding of the sums.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

# Width of the rows in which the vocabulary is summed: sums down columns run on vector units.
_COLUMNS = 128
# Below it, weights other than the largest vanish in float32 all the same.
_COLDEST = 1e-6


class Sampling(NamedTuple):
  """How to draw in each row.

  Attributes:
    temperature: divides the logits; 0 takes the likeliest token, the first of equals.
    top_k: number of likeliest tokens kept; 0 keeps all.
    top_p: share of the mass kept, the likeliest first; 1 keeps all.
    min_p: tokens less likely than this times the likeliest are dropped; 0 keeps all.
  """

  temperature: Float[Array, " b"]
  top_k: Int[Array, " b"]
  top_p: Float[Array, " b"]
  min_p: Float[Array, " b"]


class Draw(NamedTuple):
  """A token of each row.

  Attributes:
    tokens: token ids.
    log_probs: log-probability of the token under the logits as they are.
    sample_log_probs: log-probability under the distribution drawn from, after temperature and
      filters; 0 at temperature 0.
    ok: whether all logits of the row were finite; what else is said of the row means nothing when
      they were not.
  """

  tokens: Int[Array, " b"]
  log_probs: Float[Array, " b"]
  sample_log_probs: Float[Array, " b"]
  ok: Bool[Array, " b"]


def sampling(
  batch: int,
  temperature: float | Float[Array, " b"] = 1.0,
  top_k: int | Int[Array, " b"] = 0,
  top_p: float | Float[Array, " b"] = 1.0,
  min_p: float | Float[Array, " b"] = 0.0,
) -> Sampling:
  """A `Sampling` of `batch` rows from numbers for all rows or arrays with one for each.

  Raises:
    ValueError: for a value out of range; traced values are not looked at.
  """
  ranges = {
    "temperature": (temperature, jnp.float32, lambda x: (x >= 0) & np.isfinite(x), "at least 0"),
    "top_k": (top_k, jnp.int32, lambda x: x >= 0, "at least 1, or 0 for all tokens"),
    "top_p": (top_p, jnp.float32, lambda x: (x > 0) & (x <= 1), "in (0, 1]; 1 keeps all tokens"),
    "min_p": (min_p, jnp.float32, lambda x: (x >= 0) & (x <= 1), "in [0, 1]; 0 keeps all tokens"),
  }
  rows = {}
  for name, (value, dtype, allowed, text) in ranges.items():
    if not isinstance(value, jax.core.Tracer):
      value = np.asarray(value)
      wrong = value[~allowed(value)]
      if wrong.size:
        raise ValueError(f"{name} is {wrong.flat[0]}; it must be {text}")
    if jnp.shape(value) not in ((), (batch,)):
      raise ValueError(
        f"{name} has shape {jnp.shape(value)} for {batch} rows; give one number or one a row"
      )
    rows[name] = jnp.broadcast_to(jnp.asarray(value, dtype), (batch,))
  return Sampling(**rows)


def sample(logits: Float[Array, "b v"], keys: Key[Array, " b"], sampling: Sampling) -> Draw:
  """Draws a token of each row, from its own key."""
  logits = logits.astype(jnp.float32)
  ok = jnp.isfinite(_total(logits))
  greedy = sampling.temperature == 0
  first, top = _likeliest(logits)
  columns = _columns(_weights(logits, top, sampling))
  mass = columns.sum(1)
  uniforms = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
  column = _invert(mass, uniforms[:, 0])
  inside = jnp.take_along_axis(columns, column[:, None, None], 2)[..., 0]
  row = _invert(inside, uniforms[:, 1])
  tokens = jnp.where(greedy, first, row * _COLUMNS + column)

  share = jnp.take_along_axis(inside, row[:, None], 1)[:, 0] / mass.sum(-1)
  chosen = jnp.take_along_axis(logits, tokens[:, None], 1)[:, 0]
  log_probs = chosen - top - jnp.log(_total(jnp.exp(logits - top[:, None])))
  return Draw(tokens, log_probs, jnp.where(greedy, 0.0, jnp.log(share)), ok)


def log_distribution(logits: Float[Array, "b v"], sampling: Sampling) -> Float[Array, "b v"]:
  """Log-probabilities of the distribution that `sample` draws from; -inf where dropped."""
  logits = logits.astype(jnp.float32)
  first, top = _likeliest(logits)
  weights = _weights(logits, top, sampling)
  one = (jnp.arange(logits.shape[1]) == first[:, None]).astype(jnp.float32)
  weights = jnp.where(sampling.temperature[:, None] == 0, one, weights)
  kept = weights > 0
  logs = jnp.log(jnp.where(kept, weights, 1.0)) - jnp.log(_total(weights))[:, None]
  return jnp.where(kept, logs, -jnp.inf)


def _likeliest(logits: Float[Array, "b v"]) -> tuple[Int[Array, " b"], Float[Array, " b"]]:
  """The first of the largest logits, and its value; `argmax` is ten times slower on CPU."""
  blocks = _columns(logits, -jnp.inf)
  tops = blocks.max(-1)
  top = tops.max(-1)
  block = jnp.argmax(tops == top[:, None], -1)
  inside = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
  first = block * _COLUMNS + jnp.argmax(inside == top[:, None], -1)
  return first.astype(jnp.int32), top


def _weights(
  logits: Float[Array, "b v"], top: Float[Array, " b"], sampling: Sampling
) -> Float[Array, "b v"]:
  """Unnormalised probabilities to draw from: 1 for the likeliest and 0 for what is dropped.

  Those of a row at temperature 0 are not its distribution.
  """
  greedy = sampling.temperature == 0
  temperature = jnp.where(greedy, 1.0, jnp.maximum(sampling.temperature, _COLDEST))
  weights = jnp.exp((logits - top[:, None]) / temperature[:, None])
  top_k = jnp.where(greedy | (sampling.top_k >= logits.shape[1]), 0, sampling.top_k)
  top_p = jnp.where(greedy, 1.0, sampling.top_p)
  thresholds = jax.lax.cond(
    jnp.any((top_k > 0) | (top_p < 1)),
    _thresholds,
    lambda weights, *_: jnp.zeros(weights.shape[0], jnp.float32),
    *(weights, top_k, top_p),
  )
  thresholds = jnp.maximum(thresholds, sampling.min_p)
  return jnp.where(weights >= thresholds[:, None], weights, 0.0)


def _thresholds(
  weights: Float[Array, "b v"], top_k: Int[Array, " b"], top_p: Float[Array, " b"]
) -> Float[Array, " b"]:
  rows = (weights, top_k, top_p)
  # On CPU a row at a time stays in the cache of a core and ends when it is found.
  return jax.lax.platform_dependent(
    *rows,
    cpu=lambda *rows: jax.lax.map(lambda row: _threshold(*row), rows),
    default=jax.vmap(_threshold),
  )


def _threshold(
  weights: Float[Array, " v"], top_k: Int[Array, ""], top_p: Float[Array, ""]
) -> Float[Array, ""]:
  """A threshold that the tokens kept by top-k and top-p reach, and no others."""

  def search(summand, target, low, at_low, wanted):
    """Halves [low, high] until one token is left between.

    Sums rounded in one order are monotone in what they sum, so the largest threshold whose sum
    reaches the target is well defined. Two tokens between would part the sums of both ends by two
    summands at least.
    """

    def searching(state):
      low, high, at_low, above_high = state
      return wanted & (low < high) & (at_low - above_high >= 1.5 * summand(_float(low)))

    def halve(state):
      low, high, at_low, above_high = state
      middle = low + (high - low + 1) // 2
      at_middle = total(summand, _float(middle))
      enough = at_middle >= target
      return (
        jnp.where(enough, middle, low),
        jnp.where(enough, high, middle - 1),
        jnp.where(enough, at_middle, at_low),
        jnp.where(enough, above_high, at_middle),
      )

    state = (_bits(low), _bits(jnp.float32(1.0)), at_low, jnp.float32(0.0))
    return _float(jax.lax.while_loop(searching, halve, state)[0])

  def total(summand, threshold):
    return _total(jnp.where(weights >= threshold, summand(weights), 0.0)[None])[0]

  size = weights.shape[0]
  low = search(jnp.ones_like, top_k, jnp.float32(0.0), jnp.float32(size), top_k > 0)
  mass = total(lambda x: x, low)
  # Lighter tokens hold less than the share to drop all together.
  light = jnp.maximum(low, 0.5 * (1 - top_p) * mass / size)
  return jnp.where(top_p < 1, search(lambda x: x, top_p * mass, light, mass, top_p < 1), low)


def _bits(x: Float[Array, ""]) -> Int[Array, ""]:
  """An integer in the order of floats that are not negative."""
  return jax.lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: Int[Array, ""]) -> Float[Array, ""]:
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _invert(weights: Float[Array, "b n"], uniforms: Float[Array, " b"]) -> Int[Array, " b"]:
  """Index whose interval of the cumulative weights holds `uniforms` times their sum."""
  ends = jnp.cumsum(weights, -1)
  # Rounding may leave the ends of an interval crossed, so that none of weight 0 may be chosen.
  beyond = (ends > uniforms[:, None] * ends[:, -1:]) & (weights > 0)
  index = jnp.where(beyond.any(-1), jnp.argmax(beyond, -1), jnp.argmax(weights, -1))
  return index.astype(jnp.int32)


def _columns(x: Float[Array, "b v"], fill: float = 0.0) -> Float[Array, "b r c"]:
  """The vocabulary in rows of `_COLUMNS`, the last one filled up."""
  missing = -x.shape[1] % _COLUMNS
  padded = jnp.pad(x, ((0, 0), (0, missing)), constant_values=fill)
  return padded.reshape(x.shape[0], -1, _COLUMNS)


def _total(x: Float[Array, "b v"]) -> Float[Array, " b"]:
  return _columns(x).sum(1).sum(-1)
