"""GGUF files, with every count, size and offset checked against the file before it is trusted.

The layout is that of versions 2 and 3, little-endian: github.com/ggml-org/ggml, `docs/gguf.md`.
The file is mapped into memory, and parsing allocates at most a small multiple of its size, whatever
it claims about itself. Quantised blocks are decoded by the `gguf` package.
"""

import math
import os
import pathlib
import struct
from typing import Any, NamedTuple

import numpy as np
from foliax import extras

# Type number -> name, elements of a block, bytes of a block.
TYPES = {
  0: ("F32", 1, 4),
  1: ("F16", 1, 2),
  2: ("Q4_0", 32, 18),
  3: ("Q4_1", 32, 20),
  6: ("Q5_0", 32, 22),
  7: ("Q5_1", 32, 24),
  8: ("Q8_0", 32, 34),
  10: ("Q2_K", 256, 84),
  11: ("Q3_K", 256, 110),
  12: ("Q4_K", 256, 144),
  13: ("Q5_K", 256, 176),
  14: ("Q6_K", 256, 210),
  30: ("BF16", 1, 2),
}
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST_NAME = 65535
_MOST_DIMENSIONS = 4
# The package decodes a few rows at a time, which costs more than the arithmetic when rows are
# short. Blocks know nothing of rows: this many elements at a time stay in a core's cache.
_ELEMENTS_AT_ONCE = 2**17


class Tensor(NamedTuple):
  """Where a tensor lies.

  Attributes:
    shape: outermost axis first, as in numpy (the file has them the other way round).
    kind: number of its type, a key of `TYPES`.
    start, stop: its bytes in the file.
  """

  shape: tuple[int, ...]
  kind: int
  start: int
  stop: int


class GGUFFile:
  """An open file: its `metadata`, the `shapes` of its tensors, and `read` for their values."""

  def __init__(self, path: str | os.PathLike):
    """Reads and checks the header.

    Raises:
      FileNotFoundError: no such file.
      ValueError: it is no GGUF file, is damaged, or has tensors of a type that is not read.
    """
    self.path = pathlib.Path(path)
    if not self.path.is_file():
      raise FileNotFoundError(f"there is no file {self.path}; give the path of a .gguf file")
    if self.path.stat().st_size < 24:
      raise ValueError(
        f"{self.path} has {self.path.stat().st_size} bytes; no GGUF file is as short"
      )
    self._data = np.memmap(self.path, np.uint8, mode="r")
    header = _Header(self.path, self._data)
    self.metadata, self.tensors = header.parse()
    self.shapes = {name: tensor.shape for name, tensor in self.tensors.items()}

  def read(self, name: str) -> np.ndarray:
    """Values of a tensor in float32.

    Raises:
      KeyError: no such tensor.
      ValueError: some value is not finite.
    """
    gguf = extras.require("gguf", "language")
    tensor = self.tensors[name]
    _, block, size = TYPES[tensor.kind]
    kind = gguf.GGMLQuantizationType(tensor.kind)
    values = np.empty(math.prod(tensor.shape), np.float32)
    step = max(_ELEMENTS_AT_ONCE // block, 1)
    with np.errstate(all="ignore"):
      for i in range(0, values.size // block, step):
        part = self._data[
          tensor.start + i * size : min(tensor.start + (i + step) * size, tensor.stop)
        ]
        decoded = gguf.quants.dequantize(np.asarray(part)[None], kind)[0]
        if not np.isfinite(decoded).all():
          raise ValueError(
            f"{self.path}: tensor {name} has values that are not finite; get it again"
          )
        values[i * block : (i + step) * block] = decoded
    return values.reshape(tensor.shape)


class _Header:
  """A cursor over the header; every step says what it was reading when the file let it down."""

  def __init__(self, path: pathlib.Path, data: np.ndarray):
    self.path, self.position = path, 0
    self.data = memoryview(data)

  def error(self, problem: str) -> ValueError:
    return ValueError(f"{self.path}: {problem}; the file is damaged, or no GGUF file: get it again")

  def take(self, count: int, what: str) -> memoryview:
    left = len(self.data) - self.position
    if count > left:
      raise self.error(f"{what} takes {count} bytes, and {left} are left")
    self.position += count
    return self.data[self.position - count : self.position]

  def number(self, code: str, what: str) -> Any:
    return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

  def text(self, what: str, longest: int | None = None) -> str:
    length = self.number("Q", f"the length of {what}")
    if longest is not None and length > longest:
      raise self.error(f"{what} has {length} bytes, of at most {longest}")
    try:
      return str(self.take(length, what), "utf-8")
    except UnicodeDecodeError:
      raise self.error(f"{what} is not UTF-8") from None

  def value(self, what: str) -> Any:
    kind = self.number("I", f"the type of {what}")
    if kind == _STRING:
      return self.text(what)
    if kind == _ARRAY:
      return self.array(what)
    if kind not in _SCALARS:
      raise self.error(f"{what} has the unknown type {kind}")
    return self.number(_SCALARS[kind], what)

  def array(self, what: str) -> list[Any]:
    kind = self.number("I", f"the type of {what}")
    count = self.number("Q", f"the length of {what}")
    if kind == _STRING:
      return self.strings(count, what)
    if kind not in _SCALARS:
      raise self.error(f"{what} has items of type {kind}; numbers and strings are read")
    dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
    self.room(count, dtype.itemsize, what)
    return np.frombuffer(self.take(count * dtype.itemsize, what), dtype).tolist()

  def strings(self, count: int, what: str) -> list[str]:
    """Many strings, such as the tokens of a vocabulary, in one loop."""
    self.room(count, 8, what)
    data, at, end = self.data, self.position, len(self.data)
    length_at = struct.Struct("<Q").unpack_from
    found = []
    for i in range(count):
      stop = at + 8
      if stop <= end:
        stop += length_at(data, at)[0]
      if stop > end:
        raise self.error(f"item {i} of {what} ends at byte {stop}, and the file at {end}")
      try:
        found.append(str(data[at + 8 : stop], "utf-8"))
      except UnicodeDecodeError:
        raise self.error(f"item {i} of {what} is not UTF-8") from None
      at = stop
    self.position = at
    return found

  def room(self, count: int, size: int, what: str) -> None:
    """A count must fit into what is left of the file before anything loops over it."""
    left = len(self.data) - self.position
    if count * size > left:
      raise self.error(f"{what}: {count} take at least {count * size} bytes, and {left} are left")

  def parse(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if (magic := bytes(self.take(4, "the magic"))) != b"GGUF":
      raise self.error(f"it begins with {magic!r} in place of b'GGUF'")
    if (version := self.number("I", "the version")) not in (2, 3):
      raise ValueError(
        f"{self.path}: GGUF version {version} is not read; allowed: 2, 3 (little-endian)"
      )
    tensor_count = self.number("Q", "the number of tensors")
    entry_count = self.number("Q", "the number of metadata entries")
    self.room(tensor_count, 24, "tensors")
    self.room(entry_count, 12, "metadata entries")
    metadata: dict[str, Any] = {}
    for i in range(entry_count):
      name = self.text(f"the name of metadata entry {i}", _LONGEST_NAME)
      if name in metadata:
        raise self.error(f"metadata entry {name[:80]!r} is there twice")
      metadata[name] = self.value(f"metadata entry {name[:80]!r}")
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
      raise self.error(f"general.alignment is {str(alignment)[:80]!r}, not a power of two")
    listed = [self.tensor(i) for i in range(tensor_count)]
    return metadata, self.placed(listed, -(-self.position // alignment) * alignment, alignment)

  def tensor(self, i: int) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type and offset of the next tensor."""
    name = self.text(f"the name of tensor {i}", _LONGEST_NAME)
    shown = f"tensor {name[:80]!r}"
    rank = self.number("I", f"the rank of {shown}")
    if not 1 <= rank <= _MOST_DIMENSIONS:
      raise self.error(f"{shown} has {rank} dimensions; allowed: 1 to {_MOST_DIMENSIONS}")
    shape = tuple(self.number("Q", f"the shape of {shown}") for _ in range(rank))[::-1]
    kind = self.number("I", f"the type of {shown}")
    if kind not in TYPES:
      known = ", ".join(name for name, _, _ in TYPES.values())
      raise ValueError(
        f"{self.path}: {shown} has type number {kind}, which is not read; use {known}"
      )
    if min(shape) < 1 or shape[-1] % TYPES[kind][1]:
      raise self.error(f"{shown} of type {TYPES[kind][0]} cannot have the shape {list(shape)}")
    return name, shape, kind, self.number("Q", f"the offset of {shown}")

  def placed(
    self, listed: list[tuple[str, tuple[int, ...], int, int]], base: int, alignment: int
  ) -> dict[str, Tensor]:
    """Tensors by name, once none reaches beyond the file or into another."""
    tensors: dict[str, Tensor] = {}
    end, before = base, ""
    for name, shape, kind, offset in sorted(listed, key=lambda entry: entry[3]):
      _, block, size = TYPES[kind]
      start, stop = base + offset, base + offset + math.prod(shape) // block * size
      shown = f"tensor {name[:80]!r}"
      if name in tensors:
        raise self.error(f"{shown} is there twice")
      if stop > len(self.data):
        raise self.error(
          f"{shown} of shape {list(shape)} ends at byte {stop}, and the file at {len(self.data)}"
        )
      if offset % alignment:
        raise self.error(f"{shown} begins at {offset}, which is no multiple of {alignment}")
      if start < end:
        raise self.error(f"{shown} lies over tensor {before!r}")
      tensors[name] = Tensor(shape, kind, start, stop)
      end, before = stop, name[:80]
    return tensors
