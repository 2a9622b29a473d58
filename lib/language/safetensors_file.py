"""safetensors files, with every size and offset checked against the file before it is trusted.

A file is an 8-byte little-endian length, a JSON header of that length with the type, shape and byte
range of each tensor, and the tensors, end to end: github.com/huggingface/safetensors, README.
"""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from foliax.language.atomic import replacing

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_LONGEST_HEADER = 100_000_000  # the reference implementation refuses longer ones too
_MOST_DIMENSIONS = 8
_FLOATS = {
  "F64": np.dtype("<f8"),
  "F32": np.dtype("<f4"),
  "F16": np.dtype("<f2"),
  "BF16": np.dtype(jnp.bfloat16),
}
_OTHERS = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "U32": 4}
_OTHERS |= {"I32": 4, "U64": 8, "I64": 8}
_SIZES = _OTHERS | {name: dtype.itemsize for name, dtype in _FLOATS.items()}


class _Tensor(NamedTuple):
  data: np.ndarray  # its bytes, mapped
  dtype: str
  shape: tuple[int, ...]


class SafetensorsFiles:
  """Open files: the `shapes` of their tensors, their `metadata`, and `read` for values."""

  def __init__(self, paths: Sequence[pathlib.Path]):
    """Reads and checks the headers.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a file is no safetensors file or is damaged, or two hold the same tensor.
    """
    self.path = paths[0] if len(paths) == 1 else paths[0].parent
    self.metadata: dict[str, str] = {}
    self._tensors: dict[str, _Tensor] = {}
    for path in paths:
      metadata, tensors = _parse(path)
      if twice := sorted(self._tensors.keys() & tensors.keys()):
        raise ValueError(f"{path}: tensor {twice[0][:80]!r} is in another file as well; keep one")
      self.metadata |= metadata
      self._tensors |= tensors
    self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

  def read(self, name: str, *, checked: bool = False) -> np.ndarray:
    """Values of a tensor as they are stored, in memory that is the file's own and read-only.

    Args:
      name: of the tensor.
      checked: the values are known to be finite.
    Raises:
      KeyError: no such tensor.
      ValueError: it holds no floating point numbers, or some are not finite.
    """
    data, dtype, shape = self._tensors[name]
    if dtype not in _FLOATS:
      raise ValueError(
        f"{self.path}: tensor {name} has type {dtype}; allowed: {', '.join(_FLOATS)}: convert it"
      )
    values = data.view(_FLOATS[dtype]).reshape(shape)
    if not checked and not np.isfinite(values).all():
      raise ValueError(f"{self.path}: tensor {name} has values that are not finite; get it again")
    return values

  def data(self) -> list[np.ndarray]:
    """Bytes of the tensors, in the order of their names."""
    return [self._tensors[name].data for name in sorted(self._tensors)]


def find(directory: pathlib.Path) -> list[pathlib.Path]:
  """The files that hold the weights of a directory: one, or the shards that its index names.

  Raises:
    FileNotFoundError: there are none.
    ValueError: the index is damaged, or names something that is not a file beside it.
  """
  if (directory / SINGLE).is_file():
    return [directory / SINGLE]
  index = directory / INDEX
  if not index.is_file():
    pickled = [p.name for p in sorted(directory.glob("*")) if p.suffix in PICKLES]
    if pickled:
      raise ValueError(
        f"{directory} has weights only in {pickled[0]}, and pickles can run code when they are "
        "read; convert them to safetensors"
      )
    raise FileNotFoundError(f"{directory} has neither {SINGLE} nor {INDEX}; download the weights")
  weight_map = read_json(index).get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise ValueError(f"{index} has no table weight_map from tensors to files; get it again")
  names = set(map(str, weight_map.values()))
  for name in names:
    if pathlib.PurePath(name).name != name or "\\" in name or not name.endswith(".safetensors"):
      raise ValueError(
        f"{index} names the file {name[:80]!r}; only .safetensors beside it are read"
      )
    if not (directory / name).is_file():
      raise FileNotFoundError(f"{directory} has no {name}, which its index names; get it again")
  return [directory / name for name in sorted(names)]


def read_json(path: pathlib.Path, longest: int = _LONGEST_HEADER) -> dict[str, Any]:
  """A JSON object from a file.

  Raises:
    FileNotFoundError: no such file.
    ValueError: it is too long, no JSON, or JSON of another kind.
  """
  if not path.is_file():
    raise FileNotFoundError(f"there is no {path}; download it with the weights")
  if path.stat().st_size > longest:
    raise ValueError(f"{path} has {path.stat().st_size} bytes, of at most {longest}; get it again")
  return _json_object(path.read_bytes(), str(path))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  table = dict(pairs)
  if len(table) < len(pairs):
    raise ValueError("a name is there twice")
  return table


def _json_object(text: bytes, what: str) -> dict[str, Any]:
  try:
    value = json.loads(text, object_pairs_hook=_unique)
  except RecursionError:
    raise ValueError(f"{what} is nested too deeply; get it again") from None
  except ValueError as error:
    raise ValueError(f"{what} is not valid JSON: {' '.join(str(error)[:200].split())}") from None
  if not isinstance(value, dict):
    raise ValueError(f"{what} holds a JSON {type(value).__name__}, not an object; get it again")
  return value


def _parse(path: pathlib.Path) -> tuple[dict[str, str], dict[str, _Tensor]]:
  """Metadata and tensors of one file."""
  if not path.is_file():
    raise FileNotFoundError(f"there is no file {path}; download it")
  size = path.stat().st_size
  if size < 10:
    raise ValueError(f"{path} has {size} bytes; no safetensors file is as short: get it again")
  data = np.memmap(path, np.uint8, mode="r")
  length = int.from_bytes(data[:8].tobytes(), "little")
  if length > min(size - 8, _LONGEST_HEADER):
    raise ValueError(
      f"{path} claims a header of {length} bytes, of at most {min(size - 8, _LONGEST_HEADER)}; it "
      "is damaged, or no safetensors file: get it again"
    )
  header = _json_object(data[8 : 8 + length].tobytes(), f"the header of {path}")
  metadata = header.pop("__metadata__", {})
  if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
    raise ValueError(f"{path}: __metadata__ is not a table of strings; get it again")
  entries = {name: _entry(path, name, entry) for name, entry in header.items()}
  body = np.asarray(data[8 + length :])
  tensors, end = {}, 0
  for name, (dtype, shape, start, stop) in sorted(entries.items(), key=lambda e: e[1][2:]):
    if start != end or stop > body.size:
      raise ValueError(
        f"{path}: tensor {name[:80]!r} has the bytes {start} to {stop}; expected from {end} on, "
        f"and the file ends at {body.size}: get it again"
      )
    tensors[name], end = _Tensor(body[start:stop], dtype, shape), stop
  if end != body.size:
    raise ValueError(f"{path} has {body.size - end} bytes that belong to no tensor; get it again")
  return metadata, tensors


def _are_sizes(value: Any, most: int) -> bool:
  """Whether a JSON value is a list of up to `most` whole numbers that fit into 63 bits."""
  return (
    isinstance(value, list)
    and len(value) <= most
    and all(type(x) is int and 0 <= x < 2**63 for x in value)
  )


def _entry(path: pathlib.Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
  """Type, shape and byte range of a tensor as the header has it."""

  shown = f"{path}: tensor {name[:80]!r}"
  if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
    raise ValueError(f"{shown} is not described by dtype, shape and data_offsets; get it again")
  dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
  if not isinstance(dtype, str) or dtype not in _SIZES:
    raise ValueError(f"{shown} has type {str(dtype)[:80]!r}; allowed: {', '.join(_SIZES)}")
  if not _are_sizes(shape, _MOST_DIMENSIONS) or not _are_sizes(offsets, 2) or len(offsets) != 2:
    raise ValueError(
      f"{shown} has shape {str(shape)[:80]} and data_offsets {str(offsets)[:80]}; get it again"
    )
  start, stop = offsets
  if stop - start != math.prod(shape) * _SIZES[dtype]:
    raise ValueError(
      f"{shown} of type {dtype} and shape {shape} has {stop - start} bytes; get it again"
    )
  return dtype, tuple(shape), start, stop


def write(
  path: pathlib.Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
  """Writes a file, which appears under its name once it is complete.

  Args:
    path: where to, in a directory that is there.
    tensors: name -> values, in any memory layout.
    metadata: strings to keep in the header.
  Raises:
    ValueError: a type that is not floating point.
  """
  names = {dtype: name for name, dtype in _FLOATS.items()}
  header: dict[str, Any] = {"__metadata__": dict(metadata)}
  end = 0
  for name, values in tensors.items():
    if values.dtype not in names:
      raise ValueError(f"{name} has type {values.dtype}; allowed: {', '.join(map(str, names))}")
    start, end = end, end + values.nbytes
    header[name] = {
      "dtype": names[values.dtype],
      "shape": list(values.shape),
      "data_offsets": [start, end],
    }
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)
  with replacing(path) as stream:
    stream.write(len(text).to_bytes(8, "little") + text)
    for values in tensors.values():
      stream.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
