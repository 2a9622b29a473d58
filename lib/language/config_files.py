"""Configurations of decoders: `config.json` of Hugging Face, and the metadata of GGUF files."""

import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from foliax.language import encoder
from foliax.language.model import Config, RopeScaling
from foliax.language.safetensors_file import read_json

_LARGEST = 2**31 - 1
# Keys of config.json that change the computation -> values under which it stays the one we have.
_UNCHANGED = {
  "hidden_act": ("silu",),
  "mlp_bias": (False,),
  "pretraining_tp": (1,),
  "partial_rotary_factor": (1.0,),
  "quantization_config": (),
}
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_MEAN = "pooling_mode_mean_tokens"
ARCHITECTURES = ("llama", "qwen2", "qwen3")


class _Table:
  """Checked look-ups in a table that came from outside."""

  def __init__(self, table: Mapping[str, Any], source: str | os.PathLike):
    self.table, self.source = table, source

  def integer(self, name: str, default: int | None = None) -> int:
    value = self.table.get(name, default)
    value = default if value is None else value
    if type(value) is not int or not 1 <= value <= _LARGEST:
      raise ValueError(
        f"{self.source}: {name} is {_shown(value)}; it must be a whole number from 1 to {_LARGEST}"
      )
    return value

  def number(self, name: str, default: float | None = None) -> float:
    value = self.table.get(name, default)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
      raise ValueError(f"{self.source}: {name} is {_shown(value)}; it must be a positive number")
    return float(value)

  def flag(self, name: str, default: bool) -> bool:
    value = self.table.get(name, default)
    value = default if value is None else value
    if type(value) is not bool:
      raise ValueError(f"{self.source}: {name} is {_shown(value)}; it must be true or false")
    return value


def _shown(value: Any) -> str:
  return "missing" if value is None else repr(value)[:80]


def from_json(table: Mapping[str, Any], source: str | os.PathLike, has_head: bool) -> Config:
  """The configuration that a `config.json` describes.

  Args:
    table: its contents.
    source: its path, for messages.
    has_head: whether the weights have an output head; consulted where the file does not say.
  Raises:
    ValueError: a value is missing or absurd, or the model is of a kind that `model` does not have.
  """
  read = _Table(table, source)
  kind = table.get("model_type")
  if kind not in _MODEL_TYPES:
    raise ValueError(f"{source}: model_type is {_shown(kind)}; allowed: {', '.join(_MODEL_TYPES)}")
  for name, allowed in _UNCHANGED.items():
    if (value := table.get(name)) is not None and value not in allowed:
      raise ValueError(
        f"{source}: {name} is {_shown(value)}; allowed: {', '.join(map(str, allowed)) or 'none'}"
      )
  if kind != "qwen2" and read.flag("attention_bias", False):
    raise ValueError(f"{source}: attention_bias is true; allowed: false, or model_type qwen2")
  hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
  theta, scaling = _rope(read)
  return Config(
    vocab_size=read.integer("vocab_size"),
    hidden_size=hidden,
    layers=read.integer("num_hidden_layers"),
    heads=heads,
    kv_heads=read.integer("num_key_value_heads", heads),
    head_dim=read.integer("head_dim", 128 if kind == "qwen3" else hidden // heads),
    ffn_size=read.integer("intermediate_size"),
    rope_theta=theta,
    rms_eps=read.number("rms_norm_eps", 1e-6),
    tied=read.flag("tie_word_embeddings", not has_head),
    qkv_bias=kind == "qwen2",
    qk_norm=kind == "qwen3",
    sliding_window=_window(read, kind),
    rope_scaling=scaling,
    context=read.integer("max_position_embeddings", 2048),
  )


def _rope(read: _Table) -> tuple[float, RopeScaling | None]:
  """Base and scaling of the rotary frequencies, under the keys of old and new releases."""
  table = read.table.get("rope_parameters") or read.table.get("rope_scaling") or {}
  if not isinstance(table, dict):
    raise ValueError(f"{read.source}: rope_parameters is {_shown(table)}; it must be a table")
  rope = _Table(table, read.source)
  theta = rope.number("rope_theta", read.number("rope_theta", 10000.0))
  kind = table.get("rope_type", table.get("type", "default"))
  if kind == "default":
    return theta, None
  if kind != "llama3":
    raise ValueError(f"{read.source}: rope_type is {_shown(kind)}; allowed: default, llama3")
  low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
  if low >= high:
    raise ValueError(
      f"{read.source}: low_freq_factor is {low}; it must be under high_freq_factor, {high}"
    )
  return theta, RopeScaling(
    rope.number("factor"), low, high, rope.integer("original_max_position_embeddings")
  )


def _window(read: _Table, kind: str) -> int | None:
  """The sliding window, which either all layers have or none."""
  kinds = read.table.get("layer_types")
  if kind == "llama" or read.table.get("sliding_window") is None:
    return None
  window = read.integer("sliding_window")
  if kind == "mistral":
    return window
  if isinstance(kinds, list) and kinds:
    sliding = [name == "sliding_attention" for name in kinds]
  elif read.flag("use_sliding_window", False):
    first = read.table.get("max_window_layers", 28)
    if first != 0:
      first = read.integer("max_window_layers", 28)
    sliding = [i >= first for i in (0, read.integer("num_hidden_layers") - 1)]
  else:
    return None
  if any(sliding) and not all(sliding):
    raise ValueError(
      f"{read.source}: some layers have a sliding window and some have none; allowed: all or none"
    )
  return window if all(sliding) else None


def to_json(config: Config, dtype: str) -> dict[str, Any]:
  """The `config.json` with which Hugging Face's transformers builds the same model.

  Args:
    config: the configuration.
    dtype: of the weights, e.g. `"float32"`.
  Raises:
    ValueError: no family has this combination of biases, norms and sliding window.
  """
  c = config
  if c.qk_norm and c.qkv_bias:
    raise ValueError("config has qk_norm and qkv_bias; no model_type has both: use one of them")
  if c.qk_norm:
    kind, name = "qwen3", "Qwen3"
  elif c.qkv_bias:
    kind, name = "qwen2", "Qwen2"
  elif c.sliding_window is not None:
    kind, name = "mistral", "Mistral"
  else:
    kind, name = "llama", "Llama"
  table: dict[str, Any] = {
    "architectures": [f"{name}ForCausalLM"],
    "model_type": kind,
    "dtype": dtype,
    "vocab_size": c.vocab_size,
    "hidden_size": c.hidden_size,
    "num_hidden_layers": c.layers,
    "num_attention_heads": c.heads,
    "num_key_value_heads": c.kv_heads,
    "head_dim": c.head_dim,
    "intermediate_size": c.ffn_size,
    "hidden_act": "silu",
    "rms_norm_eps": c.rms_eps,
    "max_position_embeddings": c.context,
    "tie_word_embeddings": c.tied,
    "attention_bias": False,
    "rope_theta": c.rope_theta,
    "rope_scaling": None,
    "sliding_window": c.sliding_window,
  }
  if kind in ("qwen2", "qwen3"):
    kind_of_layer = "full_attention" if c.sliding_window is None else "sliding_attention"
    table |= {
      "use_sliding_window": c.sliding_window is not None,
      "max_window_layers": c.layers if c.sliding_window is None else 0,
      "layer_types": [kind_of_layer] * c.layers,
    }
  if c.rope_scaling is not None:
    factor, low, high, original = c.rope_scaling
    table["rope_scaling"] = {
      "rope_type": "llama3",
      "factor": factor,
      "low_freq_factor": low,
      "high_freq_factor": high,
      "original_max_position_embeddings": original,
    }
  return table


def encoder_from_json(table: Mapping[str, Any], source: str | os.PathLike) -> encoder.Config:
  """The configuration of a BERT encoder that a `config.json` describes.

  Args:
    table: its contents.
    source: its path, for messages.
  Raises:
    ValueError: a value is missing or absurd, or the model is of another kind.
  """
  read = _Table(table, source)
  for name, allowed in (
    ("model_type", "bert"),
    ("hidden_act", "gelu"),
    ("position_embedding_type", "absolute"),
  ):
    if (value := table.get(name, allowed)) != allowed:
      raise ValueError(f"{source}: {name} is {_shown(value)}; allowed: {allowed}")
  return encoder.Config(
    vocab_size=read.integer("vocab_size"),
    hidden_size=read.integer("hidden_size"),
    layers=read.integer("num_hidden_layers"),
    heads=read.integer("num_attention_heads"),
    ffn_size=read.integer("intermediate_size"),
    context=read.integer("max_position_embeddings", 512),
    types=read.integer("type_vocab_size", 2),
    norm_eps=read.number("layer_norm_eps", 1e-12),
  )


def sentence_settings(directory: pathlib.Path, context: int) -> int:
  """How many tokens of a text a sentence encoder reads, once its pooling is known to be the mean.

  Args:
    directory: of the model; what it says nothing about has its usual value.
    context: of the encoder, which is the most.
  Raises:
    ValueError: the pooling is another, or a value is absurd.
  """
  pooling = directory / "1_Pooling" / "config.json"
  if pooling.is_file():
    wrong = sorted(k for k, v in read_json(pooling).items() if v is True and k != _MEAN)
    if wrong:
      raise ValueError(f"{pooling}: {wrong[0][:80]} is true; allowed: {_MEAN} alone")
  settings = directory / "sentence_bert_config.json"
  if not settings.is_file():
    return context
  return min(_Table(read_json(settings), settings).integer("max_seq_length", context), context)


def from_gguf(
  metadata: Mapping[str, Any],
  source: str | os.PathLike,
  shapes: Mapping[str, tuple[int, ...]],
  rope_divisors: np.ndarray | None,
) -> Config:
  """The configuration that the metadata of a GGUF file describes.

  Args:
    metadata: its metadata.
    source: its path, for messages.
    shapes: shapes of its tensors; whether the head is tied and the vocabulary are read from them.
    rope_divisors: its tensor `rope_freqs.weight`, by which Llama 3 divides rotary frequencies.
  Raises:
    ValueError: a value is missing or absurd, or the model is of a kind that `model` does not have.
  """
  kind = metadata.get("general.architecture")
  if kind not in ARCHITECTURES:
    raise ValueError(
      f"{source}: general.architecture is {_shown(kind)}; allowed: {', '.join(ARCHITECTURES)}"
    )
  prefix = f"{kind}."
  read = _Table(
    {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)},
    f"{source}: {kind}",
  )
  hidden, heads = read.integer("embedding_length"), read.integer("attention.head_count")
  head_dim = read.integer("attention.key_length", hidden // heads)
  for name in ("attention.value_length", "rope.dimension_count"):
    if (size := read.integer(name, head_dim)) != head_dim:
      raise ValueError(f"{source}: {name} is {size}; allowed: the key length, {head_dim}")
  if read.table.get("expert_count", 0) != 0:
    raise ValueError(f"{source} is a mixture of experts; allowed: dense models")
  if (scaling := read.table.get("rope.scaling.type", "none")) != "none":
    raise ValueError(f"{source}: rope.scaling.type is {_shown(scaling)}; allowed: none")
  theta = _decimal(read.number("rope.freq_base", 10000.0))
  embedding = shapes.get("token_embd.weight", ())
  if len(embedding) != 2:
    raise ValueError(f"{source}: token_embd.weight has shape {list(embedding)}, not two axes")
  return Config(
    vocab_size=embedding[0],
    hidden_size=hidden,
    layers=read.integer("block_count"),
    heads=heads,
    kv_heads=read.integer("attention.head_count_kv", heads),
    head_dim=head_dim,
    ffn_size=read.integer("feed_forward_length"),
    rope_theta=theta,
    rms_eps=_decimal(read.number("attention.layer_norm_rms_epsilon")),
    tied="output.weight" not in shapes,
    qkv_bias=kind == "qwen2",
    qk_norm=kind == "qwen3",
    rope_scaling=_scaling_of(rope_divisors, theta, head_dim, source),
    context=read.integer("context_length", 2048),
  )


def _decimal(value: float) -> float:
  """The number that was meant by one of 32 bits: 1e-5 for 9.999999747378752e-06."""
  return float(str(np.float32(value)))


def _scaling_of(
  divisors: np.ndarray | None, theta: float, head_dim: int, source: str | os.PathLike
) -> RopeScaling | None:
  """The scaling under which Llama 3 divides frequencies by `divisors`."""
  if divisors is None or (divisors == 1).all():
    return None
  if divisors.shape != (head_dim // 2,):
    raise ValueError(
      f"{source}: rope_freqs.weight has shape {list(divisors.shape)}; expected [{head_dim // 2}]"
    )
  scaling = RopeScaling(factor=max(float(divisors.max()), 1.0))
  frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
  turns = scaling.original_context * frequencies / (2 * math.pi)
  low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
  kept = np.clip((turns - low) / (high - low), 0, 1)
  expected = 1 / (kept + (1 - kept) / scaling.factor)
  if not np.allclose(divisors, expected, rtol=1e-3):
    raise ValueError(
      f"{source}: rope_freqs.weight is not what Llama 3 has for a factor of {scaling.factor:.4g}; "
      "other scalings are not read"
    )
  return scaling
