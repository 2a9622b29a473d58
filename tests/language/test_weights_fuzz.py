"""Whatever a file claims, reading it ends in one line or in a model, and allocates little."""

import json
import tracemalloc

import jax
import numpy as np
import pytest
from foliax.language import gguf_file, model, weights
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from written_models import gguf_tensors, random_params, write_gguf

CONFIG = model.Config(
  vocab_size=9, hidden_size=8, layers=1, heads=2, kv_heads=1, head_dim=4, ffn_size=8, context=64
)
ABSURD = (0, 1, 2, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
quick = settings(
  max_examples=60,
  deadline=None,
  suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def gguf_bytes(folder):
  write_gguf(folder / "whole.gguf", CONFIG, gguf_tensors(random_params(CONFIG), CONFIG))
  weights.load(folder / "whole.gguf", cache=False)  # what is imported then is not counted later
  return (folder / "whole.gguf").read_bytes()


@pytest.fixture(scope="module")
def directory_bytes(folder):
  weights.save(folder / "whole", random_params(CONFIG), CONFIG)
  weights.load(folder / "whole")
  parts = ("model.safetensors", "config.json")
  return tuple((folder / "whole" / part).read_bytes() for part in parts)


def attempt(read, path, size):
  """What `read` returns, or its one line; within memory of the order of the file."""
  error = None
  tracemalloc.start()
  try:
    result = read(path)
  except Exception as caught:
    error = caught
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert peak < 2**20 + 100 * size, (peak, size)
  if error is None:
    return result
  assert type(error) in (ValueError, FileNotFoundError), repr(error)
  assert "\n" not in str(error)
  assert 0 < len(str(error)) < 600
  return str(error)


def outcome(path, size):
  """The one line that loading a model ends in; None when it loads, and is then a model."""
  loaded = attempt(lambda path: weights.load(path, cache=False), path, size)
  if isinstance(loaded, str):
    return loaded
  params, config = loaded
  for leaf, struct in zip(
    jax.tree.leaves(params), jax.tree.leaves(model.shapes(config)), strict=True
  ):
    assert leaf.shape == struct.shape
    assert np.isfinite(leaf).all()
  return None


def damaged(whole, header, cut, edits):
  """Bytes with some overwritten, in the header mostly, and the end cut off."""
  data = bytearray(whole)
  for where, value, width in edits:
    at = int(where * (header - 1))
    data[at : at + width] = (value % 256**width).to_bytes(width, "little")
  return bytes(data[: int(cut * len(data))])


edits = st.lists(
  st.tuples(
    st.floats(0, 1),
    st.sampled_from(ABSURD) | st.integers(0, 2**64 - 1),
    st.sampled_from([1, 4, 8]),
  ),
  max_size=3,
)
cuts = st.just(1.0) | st.floats(0, 1)


def test_undamaged_files_load(folder, gguf_bytes, directory_bytes):
  assert outcome(folder / "whole.gguf", len(gguf_bytes)) is None
  assert outcome(folder / "whole", len(directory_bytes[0])) is None


@quick
@given(cuts, edits)
@example(0.0, [])
def test_damaged_gguf_files_end_in_one_line(folder, gguf_bytes, cut, edits):
  data = damaged(gguf_bytes, len(gguf_bytes) - 2000, cut, edits)
  (folder / "damaged.gguf").write_bytes(data)
  message = outcome(folder / "damaged.gguf", len(data))
  assert data == gguf_bytes or message or len(data) > len(gguf_bytes) - 2000


def test_an_absurd_number_anywhere_in_a_gguf_header_is_survived(folder, gguf_bytes):
  tensors = gguf_file.GGUFFile(folder / "whole.gguf").tensors
  header = min(tensor.start for tensor in tensors.values())
  path = folder / "absurd.gguf"
  for at in range(0, header - 8, 11):
    data = bytearray(gguf_bytes)
    data[at : at + 8] = (2**63 + 1 if at % 2 else 2**32 - 1).to_bytes(8, "little")
    path.write_bytes(data)
    attempt(gguf_file.GGUFFile, path, len(data))


@pytest.mark.parametrize(
  ("old", "new", "message"),
  [
    (b"GGUF", b"GGML", "it begins with b'GGML'"),
    (b"GGUF\3\0", b"GGUF\1\0", "GGUF version 1 is not read; allowed: 2, 3"),
    (b"GGUF\3\0\0\0", b"GGUF\0\0\0\3", "version 50331648 is not read"),
    (b"blk.0.ffn_up.weight", b"blk.0.attn_q.weight", "'blk.0.attn_q.weight' is there twice"),
    (b"llama.block_count", b"llama.head_count2", "block_count is missing"),
    (b"blk.0.ffn_up.weight", b"blk.0.ffn_up.weigh\n", r"weight is missing"),
    (b"general.architecture", b"general.architectur\xff", "metadata entry 0 is not UTF-8"),
  ],
)
def test_what_is_wrong_with_a_gguf_file_is_said(old, new, message, folder, gguf_bytes):
  assert gguf_bytes.count(old) == 1
  (folder / "wrong.gguf").write_bytes(gguf_bytes.replace(old, new))
  with pytest.raises(ValueError, match=message):
    weights.load(folder / "wrong.gguf", cache=False)


def tensor_entry(data, name):
  """Offset of the rank in the header's entry of a tensor; dimensions, type and offset follow."""
  return data.index(name) + len(name)


@pytest.mark.parametrize(
  ("skip", "value", "width", "message"),
  [
    (0, 0, 4, "has 0 dimensions; allowed: 1 to 4"),
    (0, 2**31, 4, "has 2147483648 dimensions"),
    (4, 2**40, 8, "ends at byte"),
    (4, 0, 8, "cannot have the shape"),
    (20, 9, 4, "has type number 9, which is not read; use F32"),
    (20, 2, 4, r"of type Q4_0 cannot have the shape \[8, 8\]"),
    (24, 2**63, 8, "ends at byte"),
    (24, 1, 8, "no multiple of 32"),
    (24, 0, 8, "lies over tensor"),
  ],
)
def test_lies_about_a_gguf_tensor_are_named(skip, value, width, message, folder, gguf_bytes):
  data = bytearray(gguf_bytes)
  at = tensor_entry(data, b"blk.0.ffn_up.weight") + skip
  data[at : at + width] = value.to_bytes(width, "little")
  (folder / "lie.gguf").write_bytes(data)
  with pytest.raises(ValueError, match=message) as caught:
    weights.load(folder / "lie.gguf", cache=False)
  assert "'blk.0.ffn_up.weight'" in str(caught.value)


@quick
@given(cuts, edits)
@example(0.0, [])
def test_damaged_safetensors_files_end_in_one_line(folder, directory_bytes, cut, edits):
  whole, config = directory_bytes
  header = 8 + int.from_bytes(whole[:8], "little")
  data = damaged(whole, header, cut, edits)
  target = folder / "damaged"
  target.mkdir(exist_ok=True)
  (target / "config.json").write_bytes(config)
  (target / "model.safetensors").write_bytes(data)
  outcome(target, len(data))


json_values = st.recursive(
  st.none()
  | st.booleans()
  | st.sampled_from([-1, 0, 1, 8, 2**31, 2**64, 10**400, 1e308, float("nan"), -0.5])
  | st.sampled_from(["F32", "I64", "BOOL", "llama3", "sliding_attention", "\n", "x" * 1000]),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["factor", "dtype", "rope_type"]), inner, max_size=3)
  ),
  max_leaves=4,
)


@quick
@given(st.data())
def test_lying_safetensors_headers_end_in_one_line(folder, directory_bytes, data):
  whole, config = directory_bytes
  length = int.from_bytes(whole[:8], "little")
  header = json.loads(whole[8 : 8 + length])
  name = data.draw(st.sampled_from(sorted(header)))
  if data.draw(st.booleans()):
    header[name] = data.draw(json_values)
  else:
    header[name][data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))] = data.draw(
      json_values | st.lists(st.sampled_from(ABSURD), min_size=2, max_size=2)
    )
  text = json.dumps(header).encode()
  target = folder / "lying"
  target.mkdir(exist_ok=True)
  (target / "config.json").write_bytes(config)
  body = len(text).to_bytes(8, "little") + text + whole[8 + length :]
  (target / "model.safetensors").write_bytes(body)
  outcome(target, len(body))


@quick
@given(st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]), st.data())
def test_lying_configurations_end_in_one_line(folder, directory_bytes, kind, data):
  whole, config = directory_bytes
  table = json.loads(config) | {"model_type": kind, "max_window_layers": 0, "layer_types": None}
  for name in data.draw(st.lists(st.sampled_from(sorted(table)), min_size=1, max_size=3)):
    table[name] = data.draw(json_values)
  target = folder / "configured"
  target.mkdir(exist_ok=True)
  (target / "model.safetensors").write_bytes(whole)
  (target / "config.json").write_text(json.dumps(table))
  outcome(target, len(whole) + len(config))


@pytest.mark.parametrize(
  "text", ["", "[" * 100_000, '{"a":' * 100_000, "[]", "nul", '{"a":1,"a":1}', "\x00", "1" * 10_000]
)
def test_files_that_are_no_json_object_end_in_one_line(text, folder, directory_bytes):
  whole, config = directory_bytes
  target = folder / "json"
  target.mkdir(exist_ok=True)
  (target / "model.safetensors").write_bytes(whole)
  (target / "config.json").write_text(text)
  assert "config.json" in outcome(target, len(whole) + len(text))
  (target / "config.json").write_bytes(config)
  body = text.encode()
  (target / "model.safetensors").write_bytes(len(body).to_bytes(8, "little") + body)
  assert "model.safetensors" in outcome(target, len(body) + len(config))
