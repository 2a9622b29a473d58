"""JSON on disk that survives being killed: atomic writes, and checksums that notice damage."""

import hashlib
import json
import os
import pathlib
import re
from typing import Any

import jax
import numpy as np


def to_json(value: Any) -> str:
  """Writes JSON; arrays become nested lists, floats keep every bit, keys keep their order.

  Raises:
    TypeError: something in `value` is neither JSON nor an array of numbers.
  """
  text = json.dumps(value, default=_plain, indent=1)
  # A list of numbers fits on a line. Inside strings JSON has no bare newline, so none is touched.
  return re.sub(
    r"\[\n[^\[\]{}]*\n *\]", lambda m: re.sub(r"\n *", "", m[0].replace(",\n", ", \n")), text
  )


def _plain(value: Any) -> Any:
  if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
    raise TypeError("a random key cannot be stored in JSON; store the seed it came from")
  if isinstance(value, (np.ndarray, np.generic, jax.Array)):
    array = np.asarray(value)
    # bfloat16 and its kind are not numpy's own; float32 holds each of them exactly.
    return (array.astype(np.float32) if array.dtype.kind == "V" else array).tolist()
  kind = type(value).__name__
  raise TypeError(f"{kind} cannot be stored in JSON; convert it to numbers or strings")


def round_trip(value: Any) -> Any:
  """The form `value` has after being written and read back."""
  return json.loads(to_json(value))


def write_atomically(path: pathlib.Path, text: str) -> None:
  """Replaces a file by `text` so that a reader sees the old or the new one, never a part."""
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
  with open(temporary, "w", encoding="utf-8") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)


def write_sealed(path: pathlib.Path, value: Any) -> None:
  """Writes JSON together with its checksum, atomically."""
  text = to_json(value)
  seal = hashlib.sha256(text.encode()).hexdigest()
  write_atomically(path, f'{{"sha256": "{seal}",\n"value": {text}}}\n')


def read_sealed(path: pathlib.Path) -> Any:
  """Reads what `write_sealed` wrote.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file is truncated or was altered.
  """
  text = path.read_text(encoding="utf-8", errors="replace")
  try:
    stored = json.loads(text)
    seal, value = stored["sha256"], stored["value"]
  except (ValueError, TypeError, KeyError):
    raise ValueError(f"{path} is damaged: not the JSON that was written") from None
  if hashlib.sha256(to_json(value).encode()).hexdigest() != seal:
    raise ValueError(f"{path} is damaged: its checksum does not match")
  return value
