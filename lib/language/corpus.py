"""Text as rows of tokens for training: read where it lies, shuffled, resumable, shared out.

A token is a byte of a text file, or an entry of a `.npy` file that holds what a tokenizer made of a
text. Files are mapped into memory, not read into it, so a corpus can be larger than the machine's.
"""

import bisect
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from foliax import extras
from jaxtyping import Int


class Corpus:
  """The tokens of one or more files, end to end."""

  def __init__(self, path: pathlib.Path | str | None = None):
    """Opens the files.

    Args:
      path: a file, or a folder whose `.txt` and `.npy` files count, in the order of their names.
        When None the manual of the Python language that comes with Python, some 700 kB.
    Raises:
      ValueError: no such path, nothing in it, or an `.npy` file that holds no list of integers.
    """
    if path is None:
      from pydoc_data.topics import topics

      text = "\n\n".join(topics[name] for name in sorted(topics))
      self._names, self._parts = ["pydoc_data.topics"], [np.frombuffer(text.encode(), np.uint8)]
    else:
      root = pathlib.Path(path)
      paths = [root] if root.is_file() else sorted([*root.glob("*.txt"), *root.glob("*.npy")])
      paths = [p for p in paths if p.stat().st_size]
      if not paths:
        raise ValueError(f"text is {str(path)!r}; it must be a file, or a folder of .txt and .npy")
      self._names, self._parts = [str(p) for p in paths], [_open(p) for p in paths]
    self._ends = np.cumsum([len(part) for part in self._parts]).tolist()

  def __len__(self) -> int:
    """Number of tokens."""
    return self._ends[-1]

  def read(self, start: int, count: int) -> Int[np.ndarray, " n"]:
    """Tokens from `start` on as int32; fewer than `count` at the end."""
    pieces = []
    i = bisect.bisect_right(self._ends, start)
    while count > 0 and i < len(self._parts):
      part = self._parts[i]
      begin = start - (self._ends[i] - len(part))
      piece = part[begin : begin + count]
      pieces.append(piece.astype(np.int32))
      start, count, i = start + len(piece), count - len(piece), i + 1
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)


class Windows:
  """Rows of `length + 1` tokens, each one's last token being the first of the next."""

  def __init__(
    self,
    corpus: Corpus,
    length: int,
    vocab_size: int,
    part: tuple[float | int, float | int] = (0, 1),
  ):
    """Cuts a corpus into rows.

    Args:
      corpus: the tokens.
      length: targets in a row.
      vocab_size: tokens are below it.
      part: where in the corpus the rows begin and end, as fractions of its length.
    Raises:
      ValueError: there is not one row.
    """
    self.corpus, self.length, self.vocab_size = corpus, length, vocab_size
    self.start, self.stop = (int(len(corpus) * fraction) for fraction in part)
    if len(self) < 1:
      raise ValueError(
        f"{self.stop - self.start} tokens of text are less than one row of {length + 1}; "
        "give more text, or a shorter sequence"
      )

  def __len__(self) -> int:
    """Number of rows."""
    return max(self.stop - self.start - 1, 0) // self.length

  def __getitem__(self, i: int) -> Int[np.ndarray, " n"]:
    """Row i.

    Raises:
      ValueError: a token of it is not in the vocabulary.
    """
    row = self.corpus.read(self.start + i * self.length, self.length + 1)
    if row.min() < 0 or row.max() >= self.vocab_size:
      raise ValueError(
        f"row {i} of the text has a token {row.max() if row.min() >= 0 else row.min()}, outside "
        f"the vocabulary of {self.vocab_size}; use the model's own tokenizer"
      )
    return row


class Batches:
  """Batches of shuffled rows without end, for `foliax.training.loop.fit`.

  Batch i has the same rows whatever number of processes shares it, and its position is i alone. So
  a run can go on with another number of processes.
  """

  def __init__(
    self, windows: Windows, rows: int, *, seed: int = 0, share: tuple[int, int] = (0, 1)
  ):
    """Batches from the first on.

    Args:
      windows: where rows come from.
      rows: rows of a batch, over all processes.
      seed: of the order, another one for every pass through the text.
      share: which part of a batch this process loads, and of how many; see
        `foliax.training.sharding.row_share`.
    Raises:
      ValueError: the parts do not divide the rows.
      ModuleNotFoundError: grain is not installed; names the extra.
    """
    index, parts = share
    if rows < 1 or rows % parts:
      raise ValueError(f"rows is {rows}; it must be a multiple of {parts}, which share each batch")
    grain = extras.require("grain", "experiments")
    self._rows = grain.MapDataset.source(windows).seed(seed).shuffle().repeat()
    self._offsets = range(index * rows // parts, (index + 1) * rows // parts)
    self._form = {"rows": rows, "seed": seed, "windows": len(windows), "length": windows.length}
    self.next = 0

  def __iter__(self) -> Iterator[Int[np.ndarray, "b t"]]:
    """Itself."""
    return self

  def __next__(self) -> Int[np.ndarray, "b t"]:
    """This process's rows of the next batch."""
    first = self.next * self._form["rows"]
    self.next += 1
    return np.stack([self._rows[first + offset] for offset in self._offsets])

  def get_state(self) -> dict[str, Any]:
    """Number of the next batch, and what it is a batch of."""
    return {"next": self.next} | self._form

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes to a batch.

    Raises:
      ValueError: the state belongs to other batches.
    """
    form = {name: state.get(name) for name in self._form}
    if form != self._form:
      raise ValueError(
        f"batches are {self._form}, but those of the checkpoint {form}; resume with the same text, "
        "sequence, rows and seed"
      )
    self.next = state["next"]


def _open(path: pathlib.Path) -> np.ndarray:
  if path.suffix != ".npy":
    return np.memmap(path, np.uint8, mode="r")
  try:
    tokens = np.load(path, mmap_mode="r", allow_pickle=False)
  except (ValueError, EOFError) as error:
    raise ValueError(f"{path} is no .npy file that can be read: {error}") from None
  if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
    raise ValueError(
      f"{path} holds {tokens.dtype}{list(tokens.shape)}; it must be one list of integers"
    )
  return tokens
