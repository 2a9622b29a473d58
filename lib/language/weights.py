"""Weights of language models: GGUF files and safetensors directories in, safetensors out.

  params, config = load("SmolLM2-135M-Instruct.Q4_1.gguf")
  params, config = load("Qwen3-0.6B", dtype=jnp.bfloat16)  # a directory with config.json
  save("tuned", params, config)  # for transformers, or for `load`

Nothing is ever unpickled, and every file is checked before it is trusted: what is truncated,
damaged or lying ends in one `ValueError` that names the file and the tensor.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from foliax.language import config_files, encoder, model, pretrained
from foliax.language import safetensors_file as safetensors
from foliax.language.atomic import replacing
from foliax.language.encoder import SentenceEncoder
from foliax.language.gguf_file import GGUFFile
from foliax.language.model import Config, Params, RopeScaling

# Ours -> Hugging Face's, GGUF's.
_TOP = {
  "embedding": ("model.embed_tokens.weight", "token_embd.weight"),
  "final_norm": ("model.norm.weight", "output_norm.weight"),
  "head": ("lm_head.weight", "output.weight"),
}
_LAYER = {
  "attention_norm": ("input_layernorm.weight", "attn_norm.weight"),
  "query": ("self_attn.q_proj.weight", "attn_q.weight"),
  "key": ("self_attn.k_proj.weight", "attn_k.weight"),
  "value": ("self_attn.v_proj.weight", "attn_v.weight"),
  "output": ("self_attn.o_proj.weight", "attn_output.weight"),
  "query_bias": ("self_attn.q_proj.bias", "attn_q.bias"),
  "key_bias": ("self_attn.k_proj.bias", "attn_k.bias"),
  "value_bias": ("self_attn.v_proj.bias", "attn_v.bias"),
  "query_norm": ("self_attn.q_norm.weight", "attn_q_norm.weight"),
  "key_norm": ("self_attn.k_norm.weight", "attn_k_norm.weight"),
  "ffn_norm": ("post_attention_layernorm.weight", "ffn_norm.weight"),
  "gate": ("mlp.gate_proj.weight", "ffn_gate.weight"),
  "up": ("mlp.up_proj.weight", "ffn_up.weight"),
  "down": ("mlp.down_proj.weight", "ffn_down.weight"),
}
_PREFIX = ("model.layers.{}.", "blk.{}.")
_HF, _GGUF = 0, 1
# The same for encoders; NAME.weight and NAME.bias are two parameters.
_ENCODER_TOP = {
  "tokens": "embeddings.word_embeddings",
  "positions": "embeddings.position_embeddings",
  "types": "embeddings.token_type_embeddings",
  "norm": "embeddings.LayerNorm",
}
_ENCODER_LAYER = {
  "query": "attention.self.query",
  "key": "attention.self.key",
  "value": "attention.self.value",
  "output": "attention.output.dense",
  "attention_norm": "attention.output.LayerNorm",
  "up": "intermediate.dense",
  "down": "output.dense",
  "ffn_norm": "output.LayerNorm",
}
_SHARD_BYTES = 5 * 10**9
# Part of the name of cached conversions: to be raised when a file would be converted differently.
_CONVERTER = 1


class Leaf(NamedTuple):
  """A parameter and the tensors of a file that it is made of.

  Attributes:
    names: its tensors; one a layer for stacked parameters.
    shape: of one of them as a parameter.
    stacked: whether it has a leading axis of layers.
    transposed: whether files hold it with outputs first, as they do weight matrices.
  """

  names: list[str]
  shape: tuple[int, ...]
  stacked: bool
  transposed: bool


def load(
  path: str | os.PathLike, dtype: Any = jnp.float32, *, cache: bool = True
) -> tuple[Params, Config]:
  """Weights and configuration of a decoder model of the Llama, Qwen2 or Qwen3 family.

  Args:
    path: a `.gguf` file, or a directory with `config.json` and safetensors files.
    dtype: of the parameters.
    cache: keep what a GGUF file was converted to in `pretrained.cache_folder()`, in float32, and
      read that the next time.
  Returns:
    The params pytree that `foliax.language.model` describes, and its configuration.
  Raises:
    FileNotFoundError: there is no such file, or the directory lacks one.
    ValueError: a file is damaged, or a tensor is missing, unexpected or of another shape.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    return _from_directory(path, dtype)
  if path.suffix in safetensors.PICKLES:
    raise ValueError(f"{path} is a pickle, which can run code when read; convert it to safetensors")
  if path.suffix == ".safetensors":
    raise ValueError(f"{path} has no configuration; give its directory, with config.json in it")
  file = GGUFFile(path)
  if not cache:
    return _from_gguf(file, dtype)
  with open(path, "rb") as stream:
    digest = hashlib.file_digest(stream, "sha256").hexdigest()
  kept = pretrained.cache_folder() / "converted" / f"{digest}-v{_CONVERTER}.safetensors"
  if (found := _read_conversion(kept, dtype)) is not None:
    return found
  params, config = _from_gguf(file, jnp.float32)
  try:
    _write_conversion(kept, params, config)
  except OSError as error:
    warnings.warn(f"the converted weights were not kept: {error}", stacklevel=2)
  return jax.tree.map(lambda x: x.astype(dtype), params), config


def load_encoder(directory: str | os.PathLike, dtype: Any = jnp.float32) -> SentenceEncoder:
  """A sentence encoder with mean pooling, such as all-MiniLM-L6-v2.

  Args:
    directory: has `config.json`, `model.safetensors` and `tokenizer.json` of a BERT model.
    dtype: of the parameters.
  Raises:
    FileNotFoundError: a file is missing.
    ValueError: a file is damaged, a tensor is missing, unexpected or of another shape, or texts are
      not the mean of their tokens.
  """
  directory = pathlib.Path(directory)
  table = safetensors.read_json(directory / "config.json")
  config = config_files.encoder_from_json(table, directory / "config.json")
  max_tokens = config_files.sentence_settings(directory, config.context)
  source = safetensors.SafetensorsFiles(safetensors.find(directory))
  _enough(source, config.layers)
  leaves = {}
  for path, struct in _flat(encoder.shapes(config)).items():
    name = path.removeprefix("layers/")
    suffix = ".bias" if name.endswith("_bias") else ".weight"
    if name == path:
      names = [_ENCODER_TOP[name.removesuffix("_bias")] + suffix]
      leaves[path] = Leaf(names, struct.shape, False, False)
    else:
      tensor = _ENCODER_LAYER[name.removesuffix("_bias")] + suffix
      names = [f"encoder.layer.{i}.{tensor}" for i in range(config.layers)]
      leaves[path] = Leaf(names, struct.shape[1:], True, len(struct.shape) == 3)
  ignored = ["embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"]
  params = _assemble(source, leaves, dtype, lambda _, name: source.read(name), ignored)
  return SentenceEncoder(params, config, directory / "tokenizer.json", max_tokens=max_tokens)


def gguf_metadata(path: str | os.PathLike) -> dict[str, Any]:
  """Metadata of a GGUF file: numbers, booleans, strings, and lists of these.

  Raises:
    FileNotFoundError: no such file.
    ValueError: the file is damaged.
  """
  return GGUFFile(path).metadata


def save(
  directory: str | os.PathLike, params: Params, config: Config, *, shard_bytes: int = _SHARD_BYTES
) -> None:
  """Writes weights and configuration for Hugging Face's transformers, or for `load`.

  Each file appears under its name once it is complete.

  Args:
    directory: where to; made if it is not there.
    params: plain parameters in one floating point type (see `foliax.language.lora.merge`).
    config: their configuration.
    shard_bytes: weights beyond this size are split over files, with an index.
  Raises:
    ValueError: a parameter is missing, unexpected or of another shape, or no family of models in
      transformers has this configuration.
  """
  directory = pathlib.Path(directory)
  leaves = _leaves(config, _HF)
  host = _host_arrays(params, config)
  table = config_files.to_json(config, str(host["embedding"].dtype))
  tensors: dict[str, np.ndarray] = {}
  for path, leaf in leaves.items():
    for name, value in zip(leaf.names, host[path] if leaf.stacked else [host[path]], strict=True):
      tensors[name] = value.T if leaf.transposed else value
  shards: list[dict[str, np.ndarray]] = [{}]
  size = 0
  for name, value in tensors.items():
    if shards[-1] and size + value.nbytes > shard_bytes:
      shards.append({})
      size = 0
    shards[-1][name] = value
    size += value.nbytes
  files = [safetensors.SINGLE]
  if len(shards) > 1:
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
  directory.mkdir(parents=True, exist_ok=True)
  for file, shard in zip(files, shards, strict=True):
    safetensors.write(directory / file, shard, {"format": "pt"})
  if len(shards) > 1:
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    total = sum(value.nbytes for value in tensors.values())
    _write_json(
      directory / safetensors.INDEX,
      {"metadata": {"total_size": total}, "weight_map": weight_map},
    )
    (directory / safetensors.SINGLE).unlink(missing_ok=True)
  else:
    (directory / safetensors.INDEX).unlink(missing_ok=True)
  _write_json(directory / "config.json", table)


def _write_json(path: pathlib.Path, table: Mapping[str, Any]) -> None:
  with replacing(path) as stream:
    stream.write(json.dumps(table, indent=2).encode() + b"\n")


def _host_arrays(params: Params, config: Config) -> dict[str, np.ndarray]:
  """Parameters by path, once they are seen to be those of `config`."""
  expected = _flat(model.shapes(config))
  found = _flat(params)
  if different := sorted(expected.keys() ^ found.keys()):
    state = "missing from params" if different[0] in expected else "unexpected in params"
    raise ValueError(f"{different[0]} is {state}; config asks for {', '.join(expected)}")
  for path, leaf in found.items():
    if hasattr(leaf, "project"):
      raise ValueError(f"params {path} has an adapter; give foliax.language.lora.merge(...)")
    if leaf.shape != expected[path].shape:
      raise ValueError(
        f"params {path} has shape {list(leaf.shape)}; config asks for {list(expected[path].shape)}"
      )
  return {path: np.asarray(leaf) for path, leaf in found.items()}


def _flat(params: Params) -> dict[str, Any]:
  layers = {f"layers/{name}": leaf for name, leaf in params.get("layers", {}).items()}
  return {name: leaf for name, leaf in params.items() if name != "layers"} | layers


def _leaves(config: Config, form: int) -> dict[str, Leaf]:
  """Path of each parameter -> its tensors under the names of Hugging Face or of GGUF."""
  leaves = {}
  for path, struct in _flat(model.shapes(config)).items():
    name = path.removeprefix("layers/")
    if name == path:
      leaves[path] = Leaf([_TOP[name][form]], struct.shape, False, False)
    else:
      names = [_PREFIX[form].format(i) + _LAYER[name][form] for i in range(config.layers)]
      leaves[path] = Leaf(names, struct.shape[1:], True, len(struct.shape) == 3)
  return leaves


def _enough(source: GGUFFile | safetensors.SafetensorsFiles, layers: int) -> None:
  """A file may claim any number of layers: nothing counts up to it before this has looked."""
  if layers > len(source.shapes):
    raise ValueError(
      f"{source.path}: the configuration has {layers} layers, and there are only "
      f"{len(source.shapes)} tensors; the two do not belong together"
    )


def _assemble(
  source: GGUFFile | safetensors.SafetensorsFiles,
  leaves: Mapping[str, Leaf],
  dtype: Any,
  read: Callable[[str, str], np.ndarray],
  ignored: Iterable[str] = (),
) -> Params:
  """The params pytree of a file, after all names and shapes have been checked.

  Args:
    source: the file, for the shapes of its tensors and for messages.
    leaves: what to read.
    dtype: of the parameters.
    read: reads a tensor, given the path of the parameter and the tensor's name.
    ignored: ends of the names of tensors that may be there and are not read.
  """
  for leaf in leaves.values():
    expected = leaf.shape[::-1] if leaf.transposed else leaf.shape
    for name in leaf.names:
      if name not in source.shapes:
        raise ValueError(f"{source.path}: tensor {name} is missing; get the file again")
      if source.shapes[name] != expected:
        raise ValueError(
          f"{source.path}: tensor {name} has shape {list(source.shapes[name])}; the configuration "
          f"asks for {list(expected)}"
        )
  known = {name for leaf in leaves.values() for name in leaf.names}
  for name in source.shapes:
    if name not in known and not name.endswith(tuple(ignored)):
      raise ValueError(
        f"{source.path}: tensor {name[:80]!r} is unexpected; a model without it is another model"
      )
  params: Params = {}
  for path, leaf in leaves.items():
    tensors = (read(path, name) for name in leaf.names)
    if leaf.stacked:
      values = np.empty((len(leaf.names), *leaf.shape), dtype)
      for i, tensor in enumerate(tensors):
        values[i] = tensor.T if leaf.transposed else tensor
    else:
      values = next(tensors)
    *parents, last = path.split("/")
    node = params
    for parent in parents:
      node = node.setdefault(parent, {})
    # A copy: what comes out of a file is its mapped pages, which are slower, and may be cut off.
    node[last] = jnp.array(values, dtype)
  return params


def _from_directory(directory: pathlib.Path, dtype: Any) -> tuple[Params, Config]:
  table = safetensors.read_json(directory / "config.json")
  source = safetensors.SafetensorsFiles(safetensors.find(directory))
  config = config_files.from_json(
    table, directory / "config.json", has_head="lm_head.weight" in source.shapes
  )
  _enough(source, config.layers)
  ignored = ["rotary_emb.inv_freq"] + ["lm_head.weight"] * config.tied
  read = lambda _, name: source.read(name)
  return _assemble(source, _leaves(config, _HF), dtype, read, ignored), config


def _from_gguf(file: GGUFFile, dtype: Any) -> tuple[Params, Config]:
  divisors = "rope_freqs.weight"
  config = config_files.from_gguf(
    file.metadata, file.path, file.shapes, file.read(divisors) if divisors in file.shapes else None
  )
  _enough(file, config.layers)
  heads = {"layers/query": config.heads, "layers/key": config.kv_heads}
  interleaved = file.metadata["general.architecture"] == "llama"

  def read(path: str, name: str) -> np.ndarray:
    values = file.read(name)
    if interleaved and path in heads:
      # Rows of a head are stored in pairs of one rotation; here its two halves are rotated.
      pairs = values.reshape(heads[path], config.head_dim // 2, 2, -1)
      values = pairs.swapaxes(1, 2).reshape(values.shape)
    return values

  return _assemble(file, _leaves(config, _GGUF), dtype, read, [divisors]), config


def _read_conversion(path: pathlib.Path, dtype: Any) -> tuple[Params, Config] | None:
  """A cached conversion, or None when there is none or it is damaged."""
  if not path.is_file():
    return None
  try:
    source = safetensors.SafetensorsFiles([path])
    fields = json.loads(source.metadata["config"])
    if _digest(fields, source.data()) != source.metadata["sha256"]:
      return None
    scaling = fields.pop("rope_scaling")
    config = Config(**fields, rope_scaling=scaling and RopeScaling(*scaling))
    leaves = {
      path: Leaf([path], struct.shape, False, False)
      for path, struct in _flat(model.shapes(config)).items()
    }
    read = lambda _, name: source.read(name, checked=True)
    return _assemble(source, leaves, dtype, read), config
  except (ValueError, KeyError, TypeError):
    return None


def _write_conversion(path: pathlib.Path, params: Params, config: Config) -> None:
  tensors = _host_arrays(params, config)
  fields = json.loads(json.dumps(dataclasses.asdict(config)))
  digest = _digest(fields, [tensors[name] for name in sorted(tensors)])
  path.parent.mkdir(parents=True, exist_ok=True)
  safetensors.write(path, tensors, {"config": json.dumps(fields), "sha256": digest})


def _digest(fields: Mapping[str, Any], tensors: Iterable[np.ndarray]) -> str:
  """SHA-256 of a configuration and of the values of all parameters."""
  digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
  for tensor in tensors:
    digest.update(tensor.reshape(-1).view(np.uint8))
  return digest.hexdigest()
