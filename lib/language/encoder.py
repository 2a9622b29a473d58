"""Sentence embeddings from a BERT encoder, as pure functions over a params pytree.

The model is a post-norm transformer with learnt positions (Devlin et al. 2019, arXiv 1810.04805); a
sentence is the mean of its tokens' hidden states, scaled to unit length (Reimers and Gurevych 2019,
arXiv 1908.10084). all-MiniLM-L6-v2 is one: Wang et al. 2020, arXiv 2002.10957.

Parameters are a dictionary (L layers, D hidden, F feed-forward, V vocabulary, P positions, T
segment types); those of all layers are stacked, and one `scan` runs over them:

  tokens [V, D]   positions [P, D]   types [T, D]   norm, norm_bias [D]
  layers:
    query, key, value, output [L, D, D]   attention_norm [L, D]
    up [L, D, F]   down [L, F, D]   ffn_norm [L, D]
    and for each of these NAME_bias

  encode = weights.load_encoder(pretrained.fetch("minilm"))
  similarity = encode(["A cat sleeps.", "The stock fell."]) @ encode(["A kitten naps."]).T
"""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from foliax import extras
from jaxtyping import Array, Bool, Float, Int

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
  """Static description of an encoder.

  Attributes:
    vocab_size, hidden_size, layers, heads, ffn_size: sizes.
    context: most tokens of a text, and how many positions are learnt.
    types: number of segment types; a sentence is all of type 0.
    norm_eps: added to the variance in layer norm.
  """

  vocab_size: int
  hidden_size: int
  layers: int
  heads: int
  ffn_size: int
  context: int = 512
  types: int = 2
  norm_eps: float = 1e-12

  def __post_init__(self):
    for field in dataclasses.fields(self)[:7]:
      if getattr(self, field.name) < 1:
        raise ValueError(f"{field.name} is {getattr(self, field.name)}; it must be at least 1")
    if self.hidden_size % self.heads:
      raise ValueError(
        f"hidden_size is {self.hidden_size}, which heads {self.heads} does not divide; each head "
        "has a whole number of dimensions"
      )


def shapes(config: Config, dtype: Any = jnp.float32) -> Params:
  """The params pytree as `jax.ShapeDtypeStruct`s."""
  d, f = config.hidden_size, config.ffn_size
  outputs: dict[str, tuple[int, ...]] = {
    name: (d, d) for name in ("query", "key", "value", "output")
  }
  outputs |= {"attention_norm": (d,), "up": (d, f), "down": (f, d), "ffn_norm": (d,)}
  layers = outputs | {f"{name}_bias": shape[-1:] for name, shape in outputs.items()}
  tree = {
    "tokens": (config.vocab_size, d),
    "positions": (config.context, d),
    "types": (config.types, d),
    "norm": (d,),
    "norm_bias": (d,),
    "layers": {name: (config.layers, *shape) for name, shape in layers.items()},
  }
  return jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, dtype), tree, is_leaf=lambda x: isinstance(x, tuple)
  )


def hidden_states(
  params: Params, config: Config, tokens: Int[Array, "b t"], mask: Bool[Array, "b t"]
) -> Float[Array, "b t d"]:
  """Hidden states of the last layer.

  Args:
    params: the pytree described above.
    config: static description of the encoder.
    tokens: token ids, at most `config.context` a row.
    mask: True at tokens; what is elsewhere changes nothing, and its outputs mean nothing.
  Raises:
    ValueError: rows are longer than the context.
  """
  b, t = tokens.shape
  if t > config.context:
    raise ValueError(f"tokens has {t} a row; allowed: at most the context, {config.context}")
  h = config.hidden_size // config.heads

  def layer(x, w):
    def project(y, name):
      return y @ w[name] + w[f"{name}_bias"]

    def normalised(y, name):
      return _layer_norm(y, w[name], w[f"{name}_bias"], config.norm_eps)

    q, k, v = (project(x, n).reshape(b, t, config.heads, h) for n in ("query", "key", "value"))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores / math.sqrt(h), -jnp.inf)
    mixed = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, -1).astype(v.dtype), v)
    x = normalised(x + project(mixed.reshape(x.shape), "output"), "attention_norm")
    y = project(jax.nn.gelu(project(x, "up"), approximate=False), "down")
    return normalised(x + y, "ffn_norm"), None

  x = params["tokens"][tokens] + params["positions"][:t] + params["types"][0]
  x = _layer_norm(x, params["norm"], params["norm_bias"], config.norm_eps)
  return jax.lax.scan(layer, x, params["layers"])[0]


def embed(
  params: Params, config: Config, tokens: Int[Array, "b t"], mask: Bool[Array, "b t"]
) -> Float[Array, "b d"]:
  """Unit vectors of texts; arguments as for `hidden_states`, and a token or more in each row."""
  hidden = hidden_states(params, config, tokens, mask).astype(jnp.float32)
  total = jnp.where(mask[..., None], hidden, 0).sum(1)
  mean = total / jnp.maximum(mask.sum(1, keepdims=True), 1)
  return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)


def _layer_norm(
  x: Float[Array, "*b n"], scale: Float[Array, " n"], bias: Float[Array, " n"], eps: float
) -> Float[Array, "*b n"]:
  y = x.astype(jnp.float32)
  y = y - y.mean(-1, keepdims=True)
  y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + eps)
  return y.astype(x.dtype) * scale + bias


_embed = jax.jit(embed, static_argnums=1)


class SentenceEncoder:
  """Texts to unit vectors: an encoder with its tokenizer."""

  def __init__(
    self,
    params: Params,
    config: Config,
    tokenizer: str | os.PathLike,
    *,
    max_tokens: int | None = None,
    batch_size: int = 32,
  ):
    """Reads the tokenizer.

    Args:
      params: the pytree described above.
      config: static description of the encoder.
      tokenizer: path of a `tokenizer.json`.
      max_tokens: longer texts are cut; the context when None.
      batch_size: how many texts are embedded at once.
    Raises:
      ValueError: the tokenizer cannot be read or has more tokens than the model, or a size is
        under 1 or beyond the context.
    """
    self.params, self.config, self.batch_size = params, config, batch_size
    self.max_tokens = config.context if max_tokens is None else max_tokens
    if not 2 <= self.max_tokens <= config.context:
      raise ValueError(
        f"max_tokens is {self.max_tokens}; allowed: 2 to the context, {config.context}"
      )
    if batch_size < 1:
      raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    tokenizers = extras.require("tokenizers", "language")
    try:
      self.tokenizer = tokenizers.Tokenizer.from_file(os.fspath(tokenizer))
    except Exception as error:  # the library raises nothing narrower
      problem = " ".join(str(error)[:200].split())
      raise ValueError(f"tokenizer {tokenizer} cannot be read: {problem}; get it again") from None
    if (size := self.tokenizer.get_vocab_size()) > config.vocab_size:
      raise ValueError(
        f"tokenizer {tokenizer} has {size} tokens, and the model {config.vocab_size}; the two do "
        "not belong together"
      )
    self.tokenizer.no_padding()
    self.tokenizer.enable_truncation(self.max_tokens)

  def __call__(self, texts: Sequence[str]) -> Float[np.ndarray, "n d"]:
    """Unit vectors of texts, whose products are cosine similarities.

    A vector does not depend on the other texts beyond rounding.
    """
    if isinstance(texts, str):
      raise ValueError("texts is one string; give a list of strings")
    ids = [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]
    vectors = np.empty((len(ids), self.config.hidden_size), np.float32)
    # Texts of about one length go together, in few different shapes: each shape is compiled.
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    for start in range(0, len(order), self.batch_size):
      rows = order[start : start + self.batch_size]
      width = min(max(_power_of_two(len(ids[rows[-1]])), 16), self.config.context)
      tokens = np.zeros((min(_power_of_two(len(rows)), self.batch_size), width), np.int32)
      mask = np.zeros(tokens.shape, bool)
      mask[len(rows) :, 0] = True  # rows that only fill the batch
      for row, i in enumerate(rows):
        tokens[row, : len(ids[i])] = ids[i]
        mask[row, : len(ids[i])] = True
      vectors[rows] = _embed(self.params, self.config, tokens, mask)[: len(rows)]
    return vectors


def _power_of_two(n: int) -> int:
  """The least power of two from `n` on."""
  return 1 << max(n - 1, 0).bit_length()
