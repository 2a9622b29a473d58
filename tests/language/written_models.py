"""Small models as files, for the tests of what reads them."""

import dataclasses

import gguf
import jax
import numpy as np
from foliax.language import model

CONFIG = model.Config(
  vocab_size=33, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_size=64, context=64
)
FAMILIES = {
  "llama": CONFIG,
  "llama 3": dataclasses.replace(
    CONFIG, tied=False, rope_theta=500000.0, rope_scaling=model.RopeScaling(8.0, 1.0, 4.0, 8192)
  ),
  "qwen2": dataclasses.replace(CONFIG, qkv_bias=True, rope_theta=1e6, rms_eps=1e-6),
  "qwen3": dataclasses.replace(CONFIG, qk_norm=True, tied=False, head_dim=16),
}
NAMES = {
  "embedding": "token_embd.weight",
  "final_norm": "output_norm.weight",
  "head": "output.weight",
  "attention_norm": "attn_norm.weight",
  "query": "attn_q.weight",
  "key": "attn_k.weight",
  "value": "attn_v.weight",
  "output": "attn_output.weight",
  "query_bias": "attn_q.bias",
  "key_bias": "attn_k.bias",
  "value_bias": "attn_v.bias",
  "query_norm": "attn_q_norm.weight",
  "key_norm": "attn_k_norm.weight",
  "ffn_norm": "ffn_norm.weight",
  "gate": "ffn_gate.weight",
  "up": "ffn_up.weight",
  "down": "ffn_down.weight",
}


def random_params(config, seed=0):
  rng = np.random.default_rng(seed)
  draw = lambda struct: rng.normal(size=struct.shape).astype(np.float32)
  return jax.tree.map(draw, model.shapes(config))


def gguf_tensors(params, config):
  """Name -> values, as llama.cpp's converter writes them."""
  interleaved = not (config.qk_norm or config.qkv_bias)
  tensors = {NAMES[name]: value for name, value in params.items() if name != "layers"}
  for name, stacked in params["layers"].items():
    for i, value in enumerate(stacked):
      rows = value.T
      if interleaved and name in ("query", "key"):
        heads = config.heads if name == "query" else config.kv_heads
        halves = rows.reshape(heads, 2, config.head_dim // 2, -1)
        rows = halves.swapaxes(1, 2).reshape(rows.shape)
      tensors[f"blk.{i}.{NAMES[name]}"] = np.ascontiguousarray(rows)
  if config.rope_scaling is not None:
    # torch code of convert_hf_to_gguf.py, wavelength by wavelength
    factor, low, high, original = config.rope_scaling
    divisors = []
    for exponent in np.arange(0, config.head_dim, 2) / config.head_dim:
      wavelength = 2 * np.pi * config.rope_theta**exponent
      if wavelength < original / high:
        divisors.append(1.0)
      elif wavelength > original / low:
        divisors.append(factor)
      else:
        smooth = (original / wavelength - low) / (high - low)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    tensors["rope_freqs.weight"] = np.array(divisors, np.float32)
  return tensors


def write_gguf(path, config, tensors, kind=gguf.GGMLQuantizationType.F32, metadata=()):
  """Writes tensors, those with two axes in type `kind`; `metadata` holds more 32-bit numbers."""
  family = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
  writer = gguf.GGUFWriter(path, family)
  writer.add_block_count(config.layers)
  writer.add_context_length(config.context)
  writer.add_embedding_length(config.hidden_size)
  writer.add_feed_forward_length(config.ffn_size)
  writer.add_head_count(config.heads)
  writer.add_head_count_kv(config.kv_heads)
  writer.add_key_length(config.head_dim)
  writer.add_value_length(config.head_dim)
  writer.add_rope_freq_base(config.rope_theta)
  writer.add_layer_norm_rms_eps(config.rms_eps)
  writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
  writer.add_token_types([1] * config.vocab_size)
  for name, value in dict(metadata).items():
    writer.add_uint32(name, value)
  for name, value in tensors.items():
    if value.ndim != 2:
      writer.add_tensor(name, value)
    else:
      writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
