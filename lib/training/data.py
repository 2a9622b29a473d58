"""Batches whose position can be stored: from a dataset through grain, or made from a random key.

`fit` takes any iterator over batches with `get_state()`, which returns JSON-able data or bytes, and
`set_state(state)`, which goes back there. Grain's iterators are of this kind; so is `Generated`.
A batch is a pytree of arrays of the same shapes every time.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from foliax import extras
from foliax.training.checkpoint import form
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Key


@runtime_checkable
class Batches(Protocol):
  """An iterator over batches that knows where it is."""

  def __next__(self) -> Any:
    """The next batch; raises StopIteration at the end of the data."""

  def get_state(self) -> Any:
    """The position, JSON-able or bytes."""

  def set_state(self, state: Any) -> None:
    """Goes to a position that `get_state` returned, in this or an earlier process."""


class Generated:
  """Batches made by a pure function of a key: batch i is `function(fold_in(key, i))`.

  `fit` makes them inside its jitted loop, on the devices.
  """

  def __init__(self, function: Callable[[Key[Array, ""]], Any], key: Key[Array, ""]):
    """Batches from the first on.

    Args:
      function: maps a typed random key to a batch; can be traced by JAX.
      key: what all batches follow from.
    """
    self.function = function
    self.key = key
    self.next = 0
    self._jitted = jax.jit(lambda key, i: function(jax.random.fold_in(key, i)))

  def __iter__(self) -> Iterator[Any]:
    """Itself."""
    return self

  def __next__(self) -> Any:
    """The next batch, for loops other than `fit`."""
    batch = self._jitted(self.key, np.uint32(self.next))
    self.next += 1
    return batch

  def get_state(self) -> dict[str, Any]:
    """Number of the next batch, and the key."""
    return {"next": self.next, "key": _key_json(self.key)}

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes to a batch.

    Raises:
      ValueError: the state belongs to another key.
    """
    if state["key"] != _key_json(self.key):
      raise ValueError(
        f"the key of the batches is {_key_json(self.key)}, but that of the checkpoint is "
        f"{state['key']}; resume with the same key, or use another folder"
      )
    self.next = state["next"]


def batches(
  source: Sequence[Any] | Mapping[str, Any],
  batch_size: int,
  *,
  seed: int = 0,
  shuffle: bool = True,
  epochs: int | None = None,
  threads: int = 1,
) -> Iterator[Any]:
  """A grain iterator over batches of a dataset: the same order for the same seed, any restarts.

  Every epoch has another order; incomplete batches at the end of an epoch are filled from the next
  one. With several processes each reads its own share of the rows.

  Args:
    source: rows: anything with `len` and integer indexing, or a dict of arrays that share their
      leading axis.
    batch_size: rows per batch of this process.
    seed: of the order.
    shuffle: whether rows are shuffled.
    epochs: how often each row is seen; without end when None.
    threads: how many read ahead; for sources that wait for disk or network.
  Returns:
    An iterator over the stacked rows, with `get_state` and `set_state`. For other pipelines
    use grain itself: its iterators serve as well.
  Raises:
    ValueError: fewer rows than processes, batch_size < 1, or arrays of different lengths.
    ModuleNotFoundError: grain is not installed; names the extra.
  """
  grain = extras.require("grain", "experiments")
  rows = _Columns(source) if isinstance(source, Mapping) else source
  if batch_size < 1:
    raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
  if len(rows) < jax.process_count():
    raise ValueError(f"source has {len(rows)} rows for {jax.process_count()} processes; add rows")
  dataset = grain.MapDataset.source(rows).seed(seed)
  if shuffle:
    dataset = dataset.shuffle()
  even = len(rows) // jax.process_count() * jax.process_count()  # processes end together
  dataset = dataset[jax.process_index() : even : jax.process_count()].repeat(epochs)
  dataset = dataset.batch(batch_size, drop_remainder=True)
  reading = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=4 * threads)
  return iter(dataset.to_iter_dataset(reading))


class Feed:
  """Takes several batches at a time; what `fit` makes of the batches it is given.

  Attributes:
    function: makes batch i of `fold_in(key, i)`; None when batches come from the host.
    key: of generated batches.
  """

  def __init__(self, batches: Any, sharding: NamedSharding | None, stored: bool):
    """Checks what it is given.

    Args:
      batches: see `fit`.
      sharding: how a batch is laid over devices.
      stored: whether the position must be known.
    """
    self.function = self.key = None
    self.sharding = sharding
    self.source: Any = batches
    if isinstance(batches, Generated):
      self.function, self.key = batches.function, batches.key
      return
    self.source = batches if hasattr(batches, "__next__") else iter(batches)
    if stored and not isinstance(self.source, Batches):
      raise ValueError(
        f"batches is a {type(batches).__name__}, whose position cannot be stored; give an iterator "
        "with get_state and set_state, data.Generated, or no folder"
      )

  def take(self, step: int, count: int) -> tuple[int, Any]:
    """At most `count` batches, stacked, and how many they are; fewer at the end of the data."""
    if self.function is not None:
      start = self.source.next
      self.source.next += count
      return count, np.arange(start, start + count, dtype=np.uint32)
    taken: list[Any] = []
    while len(taken) < count:
      try:
        taken.append(next(self.source))
      except StopIteration:
        break
    if not taken:
      return 0, None
    forms = {json.dumps(form(batch)) for batch in taken}
    if len(forms) > 1:
      raise ValueError(
        f"batches after step {step} differ in form: {sorted(forms)}; pad them to one shape"
      )
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *taken)
    if self.sharding is None:
      return len(taken), stacked
    lay = lambda x: jax.make_array_from_process_local_data(_over_steps(self.sharding), x)
    return len(taken), jax.tree.map(lay, stacked)

  def positions(self) -> list[Any]:
    """The position of each process in its data."""
    state = self.source.get_state()
    position = {"bytes": state.hex()} if isinstance(state, bytes) else {"json": state}
    if jax.process_count() == 1:
      return [position]
    text = np.frombuffer(json.dumps(position).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(text.size))
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: text.size] = text
    texts = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(t[:n])) for t, n in zip(texts, lengths, strict=True)]

  def go_to(self, positions: list[Any]) -> None:
    """Goes to where this process was."""
    count = jax.process_count()
    if len(positions) != count and any(p != positions[0] for p in positions):
      raise ValueError(
        f"the checkpoint was written by {len(positions)} processes, each at a position of its own "
        f"in the data, but now there are {count}; resume with {len(positions)}"
      )
    position = positions[jax.process_index() if len(positions) == count else 0]
    self.source.set_state(
      bytes.fromhex(position["bytes"]) if "bytes" in position else position["json"]
    )


class _Columns:
  """The rows of a dict of arrays."""

  def __init__(self, columns: Mapping[str, Any]):
    self._columns = {name: np.asarray(column) for name, column in columns.items()}
    lengths = {name: len(column) for name, column in self._columns.items()}
    if len(set(lengths.values())) != 1:
      raise ValueError(f"source has arrays of lengths {lengths}; they must share a leading axis")
    self._length = next(iter(lengths.values()))

  def __len__(self) -> int:
    return self._length

  def __getitem__(self, i: int) -> dict[str, Any]:
    return {name: column[i] for name, column in self._columns.items()}


def _key_json(key: Key[Array, ""]) -> str:
  return f"{jax.random.key_impl(key)}:{jax.random.key_data(key).ravel().tolist()}"


def _over_steps(sharding: NamedSharding) -> NamedSharding:
  return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
