"""Prompts into the cache, and the loop that draws token after token, under `jit`.

A step feeds the last token of each row to the model and draws the next, so a prompt of `l` tokens
puts `l - 1` in the cache before the first step. All steps run in one `while_loop`, which ends when
every row has stopped; a callback makes it many short ones. A row that has stopped neither grows
its cache nor matters to others.

Shapes are rounded up (parts of prompts to powers of two, capacities and lengths to a few sizes an
octave), so that few programs are compiled; sampling options are traced.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from foliax.language import model
from foliax.language.sampling import Sampling, sample
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int, Key

# Tokens of a prompt that go through the model at once.
_PREFILL = 512

Callback = Callable[[list[np.ndarray]], Any]


class Generation(NamedTuple):
  """What was generated; row `i` continues prompt `i // g` where there are `g` keys a prompt.

  Attributes:
    tokens: the tokens drawn, with the stop token if there was one, then zeros.
    log_probs: log-probability of each token under the model at temperature 1, then zeros.
    sample_log_probs: that under the distribution drawn from, then zeros.
    lengths: number of tokens drawn.
    stopped: whether a stop token, or the callback, ended the row.
    ok: False where the model's logits were not finite; the row ends before them.
    cache: holds all but the last token of prompt and continuation of each row. To go on, give it
      back with prompts that begin with that token.
  """

  tokens: Int[Array, "b n"]
  log_probs: Float[Array, "b n"]
  sample_log_probs: Float[Array, "b n"]
  lengths: Int[Array, " b"]
  stopped: Bool[Array, " b"]
  ok: Bool[Array, " b"]
  cache: model.Cache


class _State(NamedTuple):
  cache: model.Cache
  last: Int[Array, " b"]
  tokens: Int[Array, "b n"]
  log_probs: Float[Array, "b n"]
  sample_log_probs: Float[Array, "b n"]
  lengths: Int[Array, " b"]
  stopped: Bool[Array, " b"]
  ok: Bool[Array, " b"]
  step: Int[Array, ""]


def run(
  params: model.Params,
  config: model.Config,
  prompts: Int[Array, "b t"] | Int[np.ndarray, "b t"],
  lengths: Int[Array, " b"] | Int[np.ndarray, " b"],
  keys: Key[Array, " r"],
  options: Sampling,
  max_new_tokens: int,
  stop_ids: Sequence[int],
  callback: Callback | None,
  chunk: int,
  cache: model.Cache | None = None,
  unused: Bool[np.ndarray, " r"] | None = None,
) -> Generation:
  """Prompts and new tokens; rows that are `unused` have stopped before they start."""
  rows, (b, width) = keys.shape[0], prompts.shape
  if cache is None:
    cache = model.init_cache(params, config, b, _rounded(width + max_new_tokens))
  cache, last = _prefill(params, config, prompts, lengths, cache, rows // b)
  # Buffers of their own: all of the state is donated.
  zeros = [jnp.zeros((rows, _rounded(max_new_tokens)), jnp.float32) for _ in range(2)]
  state = _State(
    cache=cache,
    last=last,
    tokens=jnp.zeros(zeros[0].shape, jnp.int32),
    log_probs=zeros[0],
    sample_log_probs=zeros[1],
    lengths=jnp.zeros(rows, jnp.int32),
    stopped=jnp.zeros(rows, bool) if unused is None else jnp.array(unused),
    ok=jnp.ones(rows, bool),
    step=jnp.int32(0),
  )
  stops = np.full(_rounded(len(stop_ids) + 1), -1, np.int32)
  stops[: len(stop_ids)] = stop_ids
  for start in range(0, max_new_tokens, max_new_tokens if callback is None else chunk):
    until = min(start + chunk, max_new_tokens) if callback is not None else max_new_tokens
    state, seen = _steps(params, config, state, keys, options, stops, np.int32(until))
    if callback is not None:
      tokens, ends, stopped, ok = map(np.asarray, seen)
      ended = callback([tokens[i, start : ends[i]] for i in range(rows)])
      stopped = stopped if ended is None else stopped | np.asarray(ended, bool)
      state = state._replace(stopped=jnp.array(stopped))
      if (stopped | ~ok).all():
        break
  n = max_new_tokens
  return Generation(
    state.tokens[:, :n],
    state.log_probs[:, :n],
    state.sample_log_probs[:, :n],
    state.lengths,
    state.stopped,
    state.ok,
    state.cache,
  )


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def _steps(
  params: model.Params,
  config: model.Config,
  state: _State,
  keys: Key[Array, " r"],
  options: Sampling,
  stop_ids: Int[Array, " s"] | Int[np.ndarray, " s"],
  until: Int[Array, ""] | Int[np.ndarray, ""],
) -> tuple[_State, tuple[Array, ...]]:
  """Steps until `until` or all rows have ended; with copies of what a callback needs to see."""

  def step(state: _State) -> _State:
    active = ~state.stopped & state.ok
    hidden, cache = model.hidden_cached(
      params, config, state.last[:, None], state.cache, active.astype(jnp.int32)
    )
    logits = model.unembed(params, config, hidden[:, 0])
    # Rows in memory: where the model makes columns, each use of them would transpose all.
    logits = with_layout_constraint(logits, Layout((0, 1)))
    folded = jax.vmap(jax.random.fold_in, (0, None))(keys, state.step)
    draw = sample(logits, folded, options)
    ok = state.ok & (draw.ok | ~active)
    active = active & ok

    def write(buffer, value):
      column = jnp.where(active, value, 0).astype(buffer.dtype)[:, None]
      return jax.lax.dynamic_update_slice(buffer, column, (0, state.step))

    return _State(
      cache=cache,
      last=jnp.where(active, draw.tokens, state.last),
      tokens=write(state.tokens, draw.tokens),
      log_probs=write(state.log_probs, draw.log_probs),
      sample_log_probs=write(state.sample_log_probs, draw.sample_log_probs),
      lengths=state.lengths + active,
      stopped=state.stopped | active & (draw.tokens[:, None] == stop_ids).any(-1),
      ok=ok,
      step=state.step + 1,
    )

  def going(state: _State) -> Bool[Array, ""]:
    return (state.step < until) & jnp.any(~state.stopped & state.ok)

  state = jax.lax.while_loop(going, step, state)
  return state, (state.tokens, state.lengths, state.stopped, state.ok)


def _prefill(
  params: model.Params,
  config: model.Config,
  prompts: Int[Array, "b t"] | Int[np.ndarray, "b t"],
  lengths: Int[Array, " b"] | Int[np.ndarray, " b"],
  cache: model.Cache,
  copies: int,
) -> tuple[model.Cache, Int[Array, " r"]]:
  """The cache with all but the last token of each prompt, and that token; each row repeated."""
  # On the host no width of a prompt is compiled for.
  xp = np if isinstance(prompts, np.ndarray) else jnp
  last = jnp.asarray(xp.take_along_axis(prompts, lengths[:, None] - 1, 1)[:, 0])
  parts = list(_parts(prompts.shape[1] - 1))
  width = sum(size for _, size in parts)
  prompts = xp.pad(prompts, ((0, 0), (0, max(0, width - prompts.shape[1]))))
  for start, size in parts:
    counts = xp.clip(lengths - 1 - start, 0, size)
    cache = _append(params, config, prompts[:, start : start + size], cache, counts)
  if copies > 1:
    axis = 0 if isinstance(cache.keys, tuple) else 1
    repeat = functools.partial(jnp.repeat, repeats=copies)
    keys, values = jax.tree.map(lambda x: repeat(x, axis=axis), (cache.keys, cache.values))
    cache, last = model.Cache(keys, values, repeat(cache.lengths)), repeat(last)
  return cache, last


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _append(
  params: model.Params,
  config: model.Config,
  tokens: Int[Array, "b t"] | Int[np.ndarray, "b t"],
  cache: model.Cache,
  counts: Int[Array, " b"] | Int[np.ndarray, " b"],
) -> model.Cache:
  return model.hidden_cached(params, config, tokens, cache, counts)[1]


def _parts(width: int) -> Iterator[tuple[int, int]]:
  """Starts and sizes of the parts that a prompt is fed in: full ones, then a power of two."""
  start = 0
  while start < width:
    rest = width - start
    size = _PREFILL if rest >= _PREFILL else max(16, 1 << (rest - 1).bit_length())
    yield start, size
    start += size


def _rounded(n: int) -> int:
  """`n` rounded up to one of four sizes an octave, at least 32."""
  step = max(32, 1 << max(0, n.bit_length() - 3))
  return -(-n // step) * step
