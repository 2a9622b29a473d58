"""A decoder language model of the Llama, Qwen2 and Qwen3 families, as pure functions over a pytree.

Architecture: pre-norm transformer with RMSNorm, rotary positions (half-split form), grouped-query
attention and SwiGLU. Qwen2 adds biases to queries, keys and values; Qwen3 normalises each head of
queries and keys instead. Sources: Touvron et al. 2023, arXiv 2302.13971 (Llama); Ainslie et al.
2023, arXiv 2305.13245 (grouped queries); Su et al. 2021, arXiv 2104.09864 (rotary positions); Qwen
2024, arXiv 2407.10671; Qwen 2025, arXiv 2505.09388.

Parameters are a dictionary (sizes: L layers, D hidden, H heads, K key-value heads, h head, F
feed-forward, V vocabulary). Weights of all layers are stacked, and one `scan` runs over them:

  embedding [V, D]   final_norm [D]   head [V, D], absent when tied
  layers:
    attention_norm [L, D]   query [L, D, H*h]   key, value [L, D, K*h]   output [L, H*h, D]
    query_bias, key_bias, value_bias (Qwen2)   query_norm, key_norm [L, h] (Qwen3)
    ffn_norm [L, D]   gate, up [L, D, F]   down [L, F, D]

A weight matrix may also be any pytree node with a method `project(x)`, such as
`foliax.language.lora.LowRank`. `Config` is static; everything else is traced.

`for_decoding` lays parameters out for generating on a CPU, where the slices that a scan takes of
its weights are copies and a step is as fast as weights can be read: `layers` becomes a tuple with
an entry a layer, run one after the other; matrices are `[o, i]`, and those that read the same
input are one (`qkv`, `gate_up`).

The cache of `forward_cached` is only read while the layers run, beside the keys and values of the
new tokens, which are written after; so no layer copies it. Batch and head come first in it, and
keys are `[h, s]`, because the products of decoding would otherwise transpose all of it each step.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from foliax.training.sharding import constrain
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Key

Params = dict[str, Any]

# Fully sharded over `data`, tensor parallel over `model`; see `foliax.training.sharding.shardings`.
SHARDING_RULES = (
  (r"(^|/)(embedding|head)$", P("model", "data")),
  (r"(^|/)(query|key|value|gate|up)$", P(None, "data", "model")),
  (r"(^|/)(output|down)$", P(None, "model", "data")),
  (r"(^|/)(query|key|value)_bias$", P(None, "model")),
  (r"norm$", P()),
)
# Matrices that read the same input, by the name they have when stored as one.
_PARTS = {"qkv": ("query", "key", "value"), "gate_up": ("gate", "up")}
# More queries than this at a time would make scores too large to keep: they go in blocks.
_QUERY_BLOCK = 512


class RopeScaling(NamedTuple):
  """How Llama 3.1 and later stretch rotary wavelengths beyond the context trained on first.

  Attributes:
    factor: by how much long wavelengths grow.
    low_frequency_factor, high_frequency_factor: wavelengths over `original_context / low` are
      stretched, those under `original_context / high` kept, and those between interpolated.
    original_context: tokens of the context trained on first.
  """

  factor: float = 8.0
  low_frequency_factor: float = 1.0
  high_frequency_factor: float = 4.0
  original_context: int = 8192


@dataclasses.dataclass(frozen=True)
class Config:
  """Static description of a model.

  Attributes:
    vocab_size, hidden_size, layers, heads, kv_heads, head_dim, ffn_size: sizes.
    rope_theta: base of the rotary frequencies.
    rms_eps: added to the mean square in RMSNorm.
    tied: the output head is the embedding.
    qkv_bias: queries, keys and values have biases (Qwen2).
    qk_norm: heads of queries and keys are normalised (Qwen3).
    sliding_window: each token sees itself and the `sliding_window - 1` before it; None sees all.
    rope_scaling: see `RopeScaling`.
    context: tokens that the model was trained to see.
    remat: what the backward pass recomputes: `"none"` nothing, `"dots"` all but matrix products,
      `"full"` whole layers.
  """

  vocab_size: int
  hidden_size: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  ffn_size: int
  rope_theta: float | int = 10000.0
  rms_eps: float = 1e-5
  tied: bool = True
  qkv_bias: bool = False
  qk_norm: bool = False
  sliding_window: int | None = None
  rope_scaling: RopeScaling | None = None
  context: int = 2048
  remat: str = "none"

  def __post_init__(self):
    for field in dataclasses.fields(self)[:7]:
      if getattr(self, field.name) < 1:
        raise ValueError(f"{field.name} is {getattr(self, field.name)}; it must be at least 1")
    if self.heads % self.kv_heads:
      raise ValueError(
        f"heads is {self.heads}, which kv_heads {self.kv_heads} does not divide; each key-value "
        "head serves a whole number of heads"
      )
    if self.head_dim % 2:
      raise ValueError(f"head_dim is {self.head_dim}; rotary positions need an even number")
    if self.sliding_window is not None and self.sliding_window < 1:
      raise ValueError(f"sliding_window is {self.sliding_window}; use None or at least 1")
    if self.remat not in _REMAT:
      raise ValueError(f"remat is {self.remat!r}; allowed: {', '.join(_REMAT)}")


_REMAT: dict[str, Callable[[Any], Any]] = {
  "none": lambda layer: layer,
  "dots": lambda layer: jax.checkpoint(
    layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  ),
  "full": jax.checkpoint,
}


class Cache(NamedTuple):
  """Keys and values of the tokens seen, for a batch of rows of different lengths.

  Attributes:
    keys, values: stacked over layers, or a tuple with an entry a layer, as the parameters that it
      is used with. Slot `s` of row `b` belongs to its token at position `s`; slots from `lengths`
      on are never read.
    lengths: number of tokens held of each row.
  """

  keys: Float[Array, "l b k h s"] | tuple[Float[Array, "b k h s"], ...]
  values: Float[Array, "l b k s h"] | tuple[Float[Array, "b k s h"], ...]
  lengths: Int[Array, " b"]

  @property
  def capacity(self) -> int:
    """How many tokens each row can hold."""
    return self.keys[0].shape[-1]


class Transposed(NamedTuple):
  """A matrix stored as `[o, i]`."""

  matrix: Float[Array, "o i"]

  def project(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
    """`x @ matrix.T`, as `(matrix @ x.T).T`: for few rows XLA:CPU is twice as fast at that."""
    out = jax.lax.optimization_barrier(self.matrix @ x.reshape(-1, x.shape[-1]).T)
    return out.T.reshape(*x.shape[:-1], self.matrix.shape[0])


def shapes(config: Config, dtype: Any = jnp.float32) -> Params:
  """The params pytree as `jax.ShapeDtypeStruct`s."""
  c = config
  queries, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
  layers = {
    "attention_norm": (c.hidden_size,),
    "query": (c.hidden_size, queries),
    "key": (c.hidden_size, kv),
    "value": (c.hidden_size, kv),
    "output": (queries, c.hidden_size),
    "ffn_norm": (c.hidden_size,),
    "gate": (c.hidden_size, c.ffn_size),
    "up": (c.hidden_size, c.ffn_size),
    "down": (c.ffn_size, c.hidden_size),
  }
  if c.qkv_bias:
    layers |= {"query_bias": (queries,), "key_bias": (kv,), "value_bias": (kv,)}
  if c.qk_norm:
    layers |= {"query_norm": (c.head_dim,), "key_norm": (c.head_dim,)}
  tree: dict[str, Any] = {
    "embedding": (c.vocab_size, c.hidden_size),
    "final_norm": (c.hidden_size,),
    "layers": {name: (c.layers, *shape) for name, shape in layers.items()},
  }
  if not c.tied:
    tree["head"] = (c.vocab_size, c.hidden_size)
  return jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, dtype), tree, is_leaf=lambda x: isinstance(x, tuple)
  )


def init(key: Key[Array, ""], config: Config, dtype: Any = jnp.float32) -> Params:
  """Random parameters: normal with deviation 0.02, and 0.02/sqrt(2 L) where residuals are written.

  Norms are one and biases zero. Source: Radford et al. 2019 (GPT-2), section 2.3.
  """
  leaves, treedef = jax.tree.flatten_with_path(shapes(config, dtype))

  def leaf(i: int, path: Any, struct: jax.ShapeDtypeStruct) -> Array:
    name = path[-1].key
    if name.endswith("norm"):
      return jnp.ones(struct.shape, dtype)
    if name.endswith("bias"):
      return jnp.zeros(struct.shape, dtype)
    deviation = 0.02 / math.sqrt(2 * config.layers) if name in ("output", "down") else 0.02
    draw = jax.random.normal(jax.random.fold_in(key, i), struct.shape)
    return (deviation * draw).astype(dtype)

  return treedef.unflatten(leaf(i, path, struct) for i, (path, struct) in enumerate(leaves))


def forward(
  params: Params,
  config: Config,
  tokens: Int[Array, "b t"],
  positions: Int[Array, "b t"] | None = None,
  segment_ids: Int[Array, "b t"] | None = None,
) -> tuple[Float[Array, "b t v"], Float[Array, "b t d"]]:
  """Logits of the next token at every position.

  Args:
    params: the pytree described above.
    config: static description of the model.
    tokens: token ids.
    positions: position of each token for the rotary embedding; counted from each segment's start
      when None.
    segment_ids: documents packed into one row have different positive ids, and none sees another;
      0 marks padding, whose outputs are finite and mean nothing. One segment a row when None.
  Returns:
    Logits in float32, and the hidden states after the last norm.
  """
  hidden = hidden_states(params, config, tokens, positions, segment_ids)
  return unembed(params, config, hidden), hidden


def hidden_states(
  params: Params,
  config: Config,
  tokens: Int[Array, "b t"],
  positions: Int[Array, "b t"] | None = None,
  segment_ids: Int[Array, "b t"] | None = None,
) -> Float[Array, "b t d"]:
  """Hidden states after the last norm; arguments as for `forward`."""
  order = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
  if segment_ids is None:
    segment_ids = jnp.ones_like(order)
  if positions is None:
    starts = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
    positions = order - jax.lax.cummax(jnp.where(starts, order, 0), axis=1)
  rotation = _rotation(config, positions)

  def attend(_, q, k, v):
    return _attend_block(config, q, k, v, order, segment_ids), None

  hidden, _ = _layers(params, config, tokens, rotation, attend, None)
  return hidden


def unembed(
  params: Params, config: Config, hidden: Float[Array, "*batch d"]
) -> Float[Array, "*batch v"]:
  """Logits in float32 of hidden states after the last norm."""
  head = params["embedding"] if config.tied else params["head"]
  if isinstance(params["layers"], tuple):
    return Transposed(head).project(hidden).astype(jnp.float32)
  return jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32)


def for_decoding(params: Params) -> Params:
  """Plain parameters laid out for `forward_cached` on a CPU; the functions here take both layouts.

  It copies all layers: do it once, outside of what is called often. Sharded parameters and
  training stay with the stacked layout, whose compile time does not grow with depth.
  """
  stacked = dict(params["layers"])
  depth = stacked["query"].shape[0]
  for fused, parts in _PARTS.items():
    stacked[fused] = jnp.concatenate([stacked.pop(name) for name in parts], -1)
    if f"{parts[0]}_bias" in stacked:
      stacked[f"{fused}_bias"] = jnp.concatenate([stacked.pop(f"{n}_bias") for n in parts], -1)

  def laid_out(w):
    return Transposed(jnp.swapaxes(w, 0, 1)) if w.ndim == 2 else w

  layers = tuple({name: laid_out(w[i]) for name, w in stacked.items()} for i in range(depth))
  return params | {"layers": layers}


def init_cache(params: Params, config: Config, batch: int, capacity: int) -> Cache:
  """An empty cache in the layout and dtype of the parameters.

  Args:
    params: the parameters that it will be used with.
    config: static description of the model.
    batch: number of rows.
    capacity: number of tokens that each row can hold.
  """
  dtype = params["embedding"].dtype
  row = (batch, config.kv_heads)
  keys, values = (*row, config.head_dim, capacity), (*row, capacity, config.head_dim)

  def empty(shape):
    if isinstance(params["layers"], tuple):
      return tuple(jnp.zeros(shape, dtype) for _ in range(config.layers))
    return jnp.zeros((config.layers, *shape), dtype)

  return Cache(empty(keys), empty(values), jnp.zeros(batch, jnp.int32))


def forward_cached(
  params: Params,
  config: Config,
  tokens: Int[Array, "b t"],
  cache: Cache,
  counts: Int[Array, " b"] | None = None,
) -> tuple[Float[Array, "b t v"], Float[Array, "b t d"], Cache]:
  """Logits at new tokens, which see themselves and the tokens in the cache.

  Args:
    params: the pytree described above.
    config: static description of the model.
    tokens: new tokens, appended to each row at its own length.
    cache: what came before. Tokens beyond its capacity are not kept, though the lengths count
      them: see that `lengths + counts <= capacity`.
    counts: how many of the new tokens of each row are real, the first ones; all when None.
      Outputs at the others are finite and mean nothing.
  Returns:
    Logits in float32, hidden states after the last norm, and the cache with the real tokens.
  """
  hidden, cache = hidden_cached(params, config, tokens, cache, counts)
  return unembed(params, config, hidden), hidden, cache


def hidden_cached(
  params: Params,
  config: Config,
  tokens: Int[Array, "b t"],
  cache: Cache,
  counts: Int[Array, " b"] | None = None,
) -> tuple[Float[Array, "b t d"], Cache]:
  """`forward_cached` without the logits, of which a prompt needs only the last."""
  t = tokens.shape[1]
  positions = cache.lengths[:, None] + jnp.arange(t, dtype=jnp.int32)
  rotation = _rotation(config, positions)

  def attend(layer_cache, q, k, v):
    return _attend_cached(config, q, k, v, *layer_cache, positions, cache.lengths), (k, v)

  hidden, (k, v) = _layers(params, config, tokens, rotation, attend, (cache.keys, cache.values))
  lengths = cache.lengths + (t if counts is None else counts)
  # Tokens that are not real go out of range, where a scatter drops them.
  slots = jnp.where(positions < lengths[:, None], positions, cache.capacity)
  rows = jnp.arange(tokens.shape[0])[:, None]
  # All reads come first: else XLA copies a cache that it could write in place.
  hidden, slots, old_keys, old_values = jax.lax.optimization_barrier(
    (hidden, slots, cache.keys, cache.values)
  )

  def write_key(old, new):  # [b, k, h, s] <- [b, t, k, h]
    return old.at[rows, :, :, slots].set(new.astype(old.dtype), mode="drop")

  def write_value(old, new):  # [b, k, s, h] <- [b, t, k, h]
    return old.at[rows, :, slots].set(new.astype(old.dtype), mode="drop")

  if isinstance(params["layers"], tuple):
    return hidden, Cache(
      tuple(map(write_key, old_keys, k)), tuple(map(write_value, old_values, v)), lengths
    )
  keys, values = jax.vmap(write_key)(old_keys, k), jax.vmap(write_value)(old_values, v)
  return hidden, Cache(keys, values, lengths)


def rollback(cache: Cache, lengths: Int[Array, " b"]) -> Cache:
  """The cache as it was when its rows had `lengths` tokens; a longer length changes nothing."""
  return cache._replace(lengths=jnp.minimum(cache.lengths, lengths))


def _layers(
  params: Params,
  config: Config,
  tokens: Int[Array, "b t"],
  rotation: tuple[Array, Array],
  attend: Callable[..., tuple[Array, Any]],
  layer_inputs: Any,
) -> tuple[Float[Array, "b t d"], Any]:
  """All layers and the last norm; `attend` maps a layer's inputs, q, k, v to output and record."""
  c = config

  def several(x, w, fused, widths):
    """Projections of the same input, stored together or apart."""
    names = (fused,) if fused in w else _PARTS[fused]
    out = [_project(x, w[n]) + w.get(f"{n}_bias", 0) for n in names]
    return out if len(out) > 1 else jnp.split(out[0], np.cumsum(widths)[:-1], -1)

  def layer(x, inputs):
    w, layer_input = inputs
    y = _rms_norm(x, w["attention_norm"], c.rms_eps)
    counts = (c.heads, c.kv_heads, c.kv_heads)
    qkv = several(y, w, "qkv", [n * c.head_dim for n in counts])
    q, k, v = (
      part.reshape(*y.shape[:2], n, c.head_dim) for part, n in zip(qkv, counts, strict=True)
    )
    if c.qk_norm:
      q = _rms_norm(q, w["query_norm"], c.rms_eps)
      k = _rms_norm(k, w["key_norm"], c.rms_eps)
    q, k = _rotate(q, rotation), _rotate(k, rotation)
    attended, record = attend(layer_input, q, k, v)
    x = x + _project(attended.reshape(*x.shape[:2], -1), w["output"])
    y = _rms_norm(x, w["ffn_norm"], c.rms_eps)
    gate, up = several(y, w, "gate_up", (c.ffn_size, c.ffn_size))
    x = x + _project(jax.nn.silu(gate) * up, w["down"])
    return constrain(x, "data", None, None), record

  # Gathered over `data` first: its gradient would otherwise need the gradients of all tokens.
  embedding = constrain(params["embedding"], "model", None)
  x = constrain(embedding[tokens], "data", None, None)
  if isinstance(params["layers"], tuple):
    kept = []
    for i, w in enumerate(params["layers"]):
      inputs = None if layer_inputs is None else tuple(part[i] for part in layer_inputs)
      x, record = layer(x, (w, inputs))
      kept.append(record)
    records: Any = None if layer_inputs is None else tuple(zip(*kept, strict=True))
  else:
    x, records = jax.lax.scan(_REMAT[c.remat](layer), x, (params["layers"], layer_inputs))
  return _rms_norm(x, params["final_norm"], c.rms_eps), records


def _project(x: Float[Array, "b t i"], weight: Any) -> Float[Array, "b t o"]:
  return weight.project(x) if hasattr(weight, "project") else x @ weight


def _rms_norm(x: Float[Array, "*b n"], weight: Float[Array, " n"], eps: float) -> Array:
  y = x.astype(jnp.float32)
  y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
  return y.astype(x.dtype) * weight


def _rotation(config: Config, positions: Int[Array, "b t"]) -> tuple[Array, Array]:
  """Cosines and sines `[b, t, 1, h/2]` of the rotary angles."""
  exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
  frequencies = 1.0 / config.rope_theta**exponents
  if config.rope_scaling is not None:
    factor, low, high, original = config.rope_scaling
    turns = original * frequencies / (2 * jnp.pi)  # within the context trained on first
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    frequencies = frequencies * (kept + (1 - kept) / factor)
  angles = positions[..., None, None].astype(jnp.float32) * frequencies
  return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: Float[Array, "b t n h"], rotation: tuple[Array, Array]) -> Float[Array, "b t n h"]:
  cos, sin = rotation
  a, b = jnp.split(x.astype(jnp.float32), 2, -1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def _attend_block(
  config: Config,
  q: Float[Array, "b t n h"],
  k: Float[Array, "b t k h"],
  v: Float[Array, "b t k h"],
  order: Int[Array, "b t"],
  segment_ids: Int[Array, "b t"],
) -> Float[Array, "b t n h"]:
  """Causal attention within segments; long rows go in blocks of queries to bound the scores."""

  def block(q, q_order, q_segments):
    visible = _visible(config, q_order, order) & (q_segments[:, :, None] == segment_ids[:, None])
    scores = _scores(q, k)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    # As `_attend_cached` rounds: weights are normalised after the product.
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    out = jnp.einsum(
      "bkgts,bskh->btkgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    out = out / jnp.moveaxis(weights.sum(-1), 3, 1)[..., None]
    return out.astype(q.dtype).reshape(q.shape)

  b, t = order.shape
  if t <= _QUERY_BLOCK or t % _QUERY_BLOCK:
    return block(q, order, segment_ids)
  blocks = t // _QUERY_BLOCK

  def split(x):
    return jnp.moveaxis(x.reshape(b, blocks, _QUERY_BLOCK, *x.shape[2:]), 1, 0)

  # Without a checkpoint the scores of all blocks would be kept for the backward pass.
  out = jax.lax.map(
    lambda x: jax.checkpoint(block)(*x), (split(q), split(order), split(segment_ids))
  )
  return jnp.moveaxis(out, 0, 1).reshape(q.shape)


def _attend_cached(
  config: Config,
  q: Float[Array, "b t n h"],
  k: Float[Array, "b t k h"],
  v: Float[Array, "b t k h"],
  old_k: Float[Array, "b k h s"],
  old_v: Float[Array, "b k s h"],
  positions: Int[Array, "b t"],
  lengths: Int[Array, " b"],
) -> Float[Array, "b t n h"]:
  """Attention of new tokens to the cache and to themselves, under one softmax."""
  b, t, n, h = q.shape
  groups = n // config.kv_heads
  # The g*t queries that share a key-value head become the rows of one matrix.
  grouped = jnp.moveaxis(q.reshape(b, t, config.kv_heads, groups, h), 1, 3)
  grouped = grouped.reshape(b, config.kv_heads, groups * t, h)
  k, v = jnp.moveaxis(k, 1, 3), jnp.moveaxis(v, 1, 2)
  slots = jnp.broadcast_to(jnp.arange(old_v.shape[2], dtype=jnp.int32), (b, old_v.shape[2]))
  held = slots[:, None] < lengths[:, None, None]
  old_visible = held & _visible(config, positions, slots)
  new_visible = _visible(config, positions, positions)
  scores = [
    jnp.where(jnp.tile(visible, (1, groups, 1))[:, None], _product(grouped, keys), -jnp.inf)
    for keys, visible in ((old_k.astype(k.dtype), old_visible), (k, new_visible))
  ]
  top = jnp.maximum(*(s.max(-1, keepdims=True) for s in scores))
  weights = [jnp.exp((s - top) / math.sqrt(h)) for s in scores]
  total = sum(w.sum(-1, keepdims=True) for w in weights)
  out = sum(
    _product(w.astype(v.dtype), values)
    for w, values in zip(weights, (old_v.astype(v.dtype), v), strict=True)
  )
  out = (out / total).astype(q.dtype).reshape(b, config.kv_heads, groups, t, h)
  return jnp.moveaxis(out, 3, 1).reshape(q.shape)


def _product(a: Float[Array, "b k m i"], c: Float[Array, "b k i n"]) -> Float[Array, "b k m n"]:
  """Products of matrices, accumulated in float32."""
  if 1 in c.shape[2:]:  # a library call for each row and head would cost more than the product
    wide_a, wide_c = a.astype(jnp.float32), c.astype(jnp.float32)
    if c.shape[2] == 1:
      return wide_a * wide_c
    return jnp.sum(wide_a * jnp.moveaxis(wide_c, 2, 3), -1, keepdims=True)
  return jnp.matmul(a, c, preferred_element_type=jnp.float32)


def _visible(
  config: Config, query_order: Int[Array, "b t"], key_order: Int[Array, "b s"]
) -> Bool[Array, "b t s"]:
  """Whether each query may see each key, by their order in the row."""
  distance = query_order[:, :, None] - key_order[:, None]
  visible = distance >= 0
  return visible if config.sliding_window is None else visible & (distance < config.sliding_window)


def _scores(q: Float[Array, "b t n h"], k: Float[Array, "b s k h"]) -> Float[Array, "b k g t s"]:
  """Scaled products in float32 of each query head with the keys of its group."""
  b, t, n, h = q.shape
  grouped = q.reshape(b, t, k.shape[2], n // k.shape[2], h)
  scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32)
  return scores * (1.0 / math.sqrt(h))
