"""Weights come out of files as they went in, and a file that is not right says what is wrong."""

import dataclasses
import json
import shutil

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from foliax.language import gguf_file, lora, model, weights
from written_models import CONFIG, FAMILIES, gguf_tensors, random_params, write_gguf

KINDS = gguf.GGMLQuantizationType


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
  monkeypatch.setenv("FOLIAX_CACHE", str(tmp_path / "cache"))
  return tmp_path / "cache" / "converted"


@pytest.fixture
def tiny(tmp_path):
  """A safetensors directory of the smallest model."""
  weights.save(tmp_path / "tiny", random_params(CONFIG), CONFIG)
  return tmp_path / "tiny"


def written(path, family="llama", **changes):
  config = FAMILIES[family]
  write_gguf(path, config, gguf_tensors(random_params(config), config), **changes)
  return path


def assert_same(params, expected):
  assert jax.tree.structure(params) == jax.tree.structure(expected)
  for path, leaf in jax.tree.leaves_with_path(params):
    other = expected
    for entry in path:
      other = other[entry.key]
    np.testing.assert_array_equal(leaf, other, err_msg=str(path))


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_gives_the_parameters_and_configuration_that_were_written(family, tmp_path):
  params, config = weights.load(written(tmp_path / "m.gguf", family))
  assert_same(params, random_params(FAMILIES[family]))
  assert config == FAMILIES[family]


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_types_are_decoded_as_the_package_decodes_them_row_by_row(name, tmp_path):
  kind = KINDS[name]
  block, size = gguf.GGML_QUANT_SIZES[kind]
  rng = np.random.default_rng(0)
  values = rng.normal(size=(700, 512)).astype(np.float32)
  if name in ("Q4_K", "Q6_K"):  # the package decodes these and does not encode them
    raw = rng.integers(256, size=(700, 512 // block, size), dtype=np.uint8)
    scale = np.float16(rng.normal(size=(700, 512 // block, 2))).view(np.uint8)
    where = slice(0, 4) if name == "Q4_K" else slice(208, 210)
    raw[..., where] = scale[..., : where.stop - where.start]
    raw = raw.reshape(700, -1)
  else:
    raw = gguf.quants.quantize(values, kind)
  writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
  writer.add_tensor("odd", np.ones(3, np.float32))
  writer.add_tensor("t", raw, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  read = gguf_file.GGUFFile(tmp_path / "m.gguf").read("t")
  assert read.shape == (700, 512)
  assert read.dtype == np.float32
  np.testing.assert_array_equal(read, gguf.quants.dequantize(raw, kind))
  if name not in ("Q4_K", "Q6_K"):
    error = np.abs(read - values).max()
    assert error < {"F32": 1e-9, "F16": 2e-3, "BF16": 2e-2, "Q8_0": 0.03}.get(name, 0.6)


def test_block_sizes_are_those_of_the_package():
  for number, (name, block, size) in gguf_file.TYPES.items():
    assert KINDS(number).name == name
    assert gguf.GGML_QUANT_SIZES[KINDS(number)] == (block, size)


def test_metadata_of_every_type_comes_back(tmp_path):
  writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
  kinds = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
  for kind in kinds:
    limits = np.iinfo(kind)
    getattr(writer, f"add_{kind}")(f"low.{kind}", int(limits.min))
    getattr(writer, f"add_{kind}")(f"high.{kind}", int(limits.max))
  writer.add_float32("float32", 0.5)
  writer.add_float64("float64", 0.1)
  writer.add_bool("bool", True)
  writer.add_string("string", "naïve\n東京 🙂")
  writer.add_array("strings", ["a", "", "Ġb"])
  writer.add_array("numbers", [1, -2, 3])
  writer.add_array("floats", [0.5, -1.5])
  writer.add_array("bools", [True, False])
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.close()
  metadata = weights.gguf_metadata(tmp_path / "m.gguf")
  assert metadata.pop("general.architecture") == "llama"
  for kind in kinds:
    assert metadata.pop(f"low.{kind}") == np.iinfo(kind).min
    assert metadata.pop(f"high.{kind}") == np.iinfo(kind).max
  assert metadata == {
    "float32": 0.5,
    "float64": 0.1,
    "bool": True,
    "string": "naïve\n東京 🙂",
    "strings": ["a", "", "Ġb"],
    "numbers": [1, -2, 3],
    "floats": [0.5, -1.5],
    "bools": [True, False],
  }


def test_a_conversion_is_made_once_and_read_from_then_on(tmp_path, cache, monkeypatch):
  path = written(tmp_path / "m.gguf", "llama 3")
  first = weights.load(path)
  (kept,) = cache.iterdir()
  monkeypatch.setattr(gguf_file.GGUFFile, "read", lambda *_: pytest.fail("converted again"))
  again = weights.load(shutil.copy(path, tmp_path / "copy.gguf"))
  assert_same(again[0], first[0])
  assert again[1] == first[1]
  assert list(cache.iterdir()) == [kept]
  half = weights.load(path, jnp.bfloat16)[0]
  assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("where", ["header", "values", "end"])
def test_a_damaged_conversion_is_made_again(where, tmp_path, cache):
  path = written(tmp_path / "m.gguf")
  expected = weights.load(path)[0]
  (kept,) = cache.iterdir()
  whole = kept.read_bytes()
  damaged = bytearray(whole)
  if where == "end":
    del damaged[-5:]
  else:
    damaged[20 if where == "header" else -3] ^= 1
  kept.write_bytes(damaged)
  assert_same(weights.load(path)[0], expected)
  assert kept.read_bytes() == whole


def test_a_cache_that_cannot_be_written_costs_a_warning(tmp_path, cache):
  cache.parent.mkdir()
  cache.write_text("not a folder")
  with pytest.warns(UserWarning, match="not kept"):
    params, _ = weights.load(written(tmp_path / "m.gguf"))
  assert_same(params, random_params(CONFIG))


def test_without_the_cache_nothing_is_kept(tmp_path, cache):
  params, _ = weights.load(written(tmp_path / "m.gguf"), cache=False)
  assert_same(params, random_params(CONFIG))
  assert not cache.exists()


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3 window", "mistral"])
@pytest.mark.parametrize("shard_bytes", [10**9, 9000])
def test_saved_weights_load_as_they_were(family, shard_bytes, tmp_path):
  config = FAMILIES.get(family)
  if config is None:
    base = FAMILIES["qwen3"] if family.startswith("qwen3") else CONFIG
    config = dataclasses.replace(base, sliding_window=7)
  params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), random_params(config))
  # What another save left behind must not be read.
  weights.save(tmp_path, random_params(CONFIG), CONFIG, shard_bytes=10**9 + 9000 - shard_bytes)
  weights.save(tmp_path, params, config, shard_bytes=shard_bytes)
  assert (tmp_path / "model.safetensors.index.json").exists() == (shard_bytes == 9000)
  loaded, loaded_config = weights.load(tmp_path, jnp.bfloat16)
  assert loaded_config == config
  assert_same(loaded, params)


def test_saved_files_are_read_by_the_safetensors_package(tiny):
  tensors = safetensors.numpy.load_file(tiny / "model.safetensors")
  params = random_params(CONFIG)
  np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], params["embedding"])
  name = "model.layers.1.self_attn.k_proj.weight"
  np.testing.assert_array_equal(tensors[name], params["layers"]["key"][1].T)
  tensors = {name: value.astype(np.float16) for name, value in tensors.items()}
  safetensors.numpy.save_file(tensors, tiny / "model.safetensors")
  loaded, _ = weights.load(tiny)
  assert_same(loaded, jax.tree.map(lambda x: x.astype(np.float16).astype(np.float32), params))


def test_old_files_with_both_heads_and_old_keys_load(tiny):
  tensors = safetensors.numpy.load_file(tiny / "model.safetensors")
  tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
  safetensors.numpy.save_file(tensors, tiny / "model.safetensors")
  assert_same(weights.load(tiny)[0], random_params(CONFIG))
  table = json.loads((tiny / "config.json").read_text())
  for name in ("head_dim", "tie_word_embeddings", "rope_theta", "rope_scaling", "attention_bias"):
    del table[name]
  (tiny / "config.json").write_text(json.dumps(table))
  params, config = weights.load(tiny)
  assert config == dataclasses.replace(CONFIG, tied=False)
  np.testing.assert_array_equal(params["head"], params["embedding"])


def rewrite(directory, change):
  tensors = safetensors.numpy.load_file(directory / "model.safetensors")
  change(tensors)
  safetensors.numpy.save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (
      lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
      "model.layers.1.mlp.up_proj.weight is m",
    ),
    (lambda t: t.update({"model.extra": np.ones(2)}), "'model.extra' is unexpected"),
    (
      lambda t: t.update({"model.norm.weight": np.ones(31)}),
      r"model.norm.weight has shape \[31\]; the configuration asks for \[32\]",
    ),
    (
      lambda t: t.update({"model.norm.weight": np.ones(32, np.int32)}),
      "model.norm.weight has type I32; allowed: F64, F32, F16, BF16",
    ),
    (
      lambda t: t.update({"model.norm.weight": np.full(32, np.nan)}),
      "model.norm.weight has values that are not finite",
    ),
  ],
)
def test_a_wrong_tensor_of_a_directory_is_named(change, message, tiny):
  rewrite(tiny, change)
  with pytest.raises(ValueError, match=message) as caught:
    weights.load(tiny)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"model_type": "gpt2"}, "model_type is 'gpt2'; allowed: llama, mistral, qwen2, qwen3"),
    ({"num_hidden_layers": 10**9}, "has 1000000000 layers, and there are only 20 tensors"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; it must be a whole"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": True}, "hidden_size is True"),
    ({"vocab_size": 34}, r"embed_tokens.weight has shape \[33, 32\].* asks for \[34, 32\]"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed: silu"),
    ({"attention_bias": True}, "attention_bias is true"),
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is .* allowed: none"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn'; allowed: default, llama3"),
    ({"rope_scaling": [1]}, "must be a table"),
    ({"rope_scaling": {"rope_type": "llama3"}}, "low_freq_factor is missing"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
    ({"num_key_value_heads": 3}, "kv_heads 3 does not divide"),
    (
      {"model_type": "qwen3", "sliding_window": 4, "use_sliding_window": True},
      "some layers have a sliding window and some have none",
    ),
    (
      {
        "model_type": "qwen2",
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
      },
      "some layers have a sliding window and some have none",
    ),
  ],
)
def test_a_wrong_configuration_is_named(change, message, tiny):
  table = json.loads((tiny / "config.json").read_text()) | {"max_window_layers": 1} | change
  (tiny / "config.json").write_text(json.dumps(table))
  with pytest.raises(ValueError, match=message) as caught:
    weights.load(tiny)
  assert "\n" not in str(caught.value)


def test_files_that_are_not_weights_are_named(tiny, tmp_path):
  for name in ("pytorch_model.bin", "consolidated.00.pth", "m.pt"):
    (tmp_path / name).write_bytes(b"\x80\x02")
    with pytest.raises(ValueError, match="is a pickle, which can run code"):
      weights.load(tmp_path / name)
  with pytest.raises(ValueError, match=r"give its directory, with config\.json"):
    weights.load(tiny / "model.safetensors")
  with pytest.raises(FileNotFoundError, match="there is no file"):
    weights.load(tmp_path / "nothing.gguf")
  (tiny / "model.safetensors").rename(tiny / "model.bin")
  with pytest.raises(ValueError, match=r"only in model\.bin, and pickles can run code"):
    weights.load(tiny)
  (tiny / "model.bin").unlink()
  with pytest.raises(FileNotFoundError, match="neither"):
    weights.load(tiny)
  (tiny / "config.json").unlink()
  with pytest.raises(FileNotFoundError, match=r"config\.json"):
    weights.load(tiny)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "a.bin", "C:\\a"])
def test_an_index_names_nothing_outside_its_directory(name, tiny):
  (tiny / "model.safetensors").rename(tiny / "other.safetensors")
  index = tiny / "model.safetensors.index.json"
  index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
  with pytest.raises(ValueError, match=r"only \.safetensors beside it are read"):
    weights.load(tiny)
  index.write_text(json.dumps({"weight_map": []}))
  with pytest.raises(ValueError, match="no table weight_map"):
    weights.load(tiny)
  shutil.copy(tiny / "other.safetensors", tiny / "twice.safetensors")
  index.write_text(json.dumps({"weight_map": {"a": "other.safetensors", "b": "twice.safetensors"}}))
  with pytest.raises(ValueError, match="is in another file as well"):
    weights.load(tiny)


@pytest.mark.parametrize(
  ("metadata", "tensors", "message"),
  [
    ({"llama.expert_count": 8}, {}, "mixture of experts"),
    (
      {"llama.rope.dimension_count": 4},
      {},
      "rope.dimension_count is 4; allowed: the key length, 8",
    ),
    ({}, {"blk.1.ffn_up.weight": None}, "blk.1.ffn_up.weight is missing"),
    ({}, {"blk.2.ffn_up.weight": (64, 32)}, "'blk.2.ffn_up.weight' is unexpected"),
    ({}, {"blk.1.ffn_up.weight": (32, 64)}, r"ffn_up.weight has shape \[32, 64\].*\[64, 32\]"),
    ({}, {"rope_freqs.weight": (4,)}, "rope_freqs.weight is not what Llama 3 has"),
    ({}, {"rope_freqs.weight": (5,)}, r"rope_freqs.weight has shape \[5\]; expected \[4\]"),
    ({}, {"token_embd.weight": (7,)}, r"token_embd.weight has shape \[7\], not two axes"),
  ],
)
def test_a_wrong_gguf_file_is_named(metadata, tensors, message, tmp_path):
  values = gguf_tensors(random_params(CONFIG), CONFIG)
  for name, shape in tensors.items():
    values.pop(name, None)
    if shape is not None:
      values[name] = np.full(shape, 2.5, np.float32)
  write_gguf(tmp_path / "m.gguf", CONFIG, values, metadata=metadata)
  with pytest.raises(ValueError, match=message):
    weights.load(tmp_path / "m.gguf")


def test_values_that_are_not_finite_are_named(tmp_path):
  values = gguf_tensors(random_params(CONFIG), CONFIG)
  values["blk.1.ffn_norm.weight"][3] = np.inf
  write_gguf(tmp_path / "m.gguf", CONFIG, values)
  with pytest.raises(ValueError, match=r"tensor blk\.1\.ffn_norm\.weight has values that are not"):
    weights.load(tmp_path / "m.gguf")


def test_parameters_that_are_not_those_of_the_configuration_are_not_saved(tmp_path):
  params = random_params(CONFIG)
  with pytest.raises(ValueError, match="head is missing from params"):
    weights.save(tmp_path, params, dataclasses.replace(CONFIG, tied=False))
  with pytest.raises(
    ValueError, match=r"embedding has shape \[33, 32\]; config asks for \[34, 32\]"
  ):
    weights.save(tmp_path, params, dataclasses.replace(CONFIG, vocab_size=34))
  both = dataclasses.replace(CONFIG, qk_norm=True, qkv_bias=True)
  with pytest.raises(ValueError, match="qk_norm and qkv_bias"):
    weights.save(tmp_path, random_params(both), both)
  adapter = {"down": np.ones((2, 32, 2), np.float32), "up": np.ones((2, 2, 32), np.float32)}
  adapted = lora.apply(params, {"query": jax.tree.map(jnp.asarray, adapter)})
  with pytest.raises(ValueError, match=r"layers/query has an adapter.*merge"):
    weights.save(tmp_path, adapted, CONFIG)
  assert not list(tmp_path.iterdir())


def test_loaded_weights_run(tmp_path):
  params, config = weights.load(written(tmp_path / "m.gguf"))
  logits, _ = jax.jit(model.forward, static_argnums=1)(params, config, jnp.zeros((1, 4), jnp.int32))
  assert logits.shape == (1, 4, 33)
