"""What a running experiment is given: a work directory in which no finished work is done twice."""

import concurrent.futures
import contextlib
import os
import pathlib
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from foliax import extras
from foliax.experiments import storage
from foliax.training import progress
from foliax.training.checkpoint import Checkpoints, plain

Carry = TypeVar("Carry")
_NAME = re.compile(r"[\w.=,+-]*\w[\w.=,+-]*(/[\w.=,+-]*\w[\w.=,+-]*)*")
_KEPT = 2  # checkpoints of a loop; the older one serves when the newer is damaged


class Context:
  """The work directory of one run, and the two units of work that survive being killed.

  `stage` is for work that returns numbers, `loop` for long iterations over a state. A run that is
  killed and started again gives the same numbers, provided that functions depend only on their
  arguments and on the configuration.

  Attributes:
    workdir: where the run keeps its files.
    save_seconds: how often a loop checkpoints its state; an experiment may set it.
  """

  def __init__(self, workdir: pathlib.Path | str, save_seconds: float | int = 2.0):
    """Opens a work directory, made if need be.

    Args:
      workdir: where the run keeps its files.
      save_seconds: a loop checkpoints its state when this long has passed since the last time; 0
        for every step.
    """
    self.workdir = pathlib.Path(workdir)
    self.workdir.mkdir(parents=True, exist_ok=True)
    self.save_seconds = save_seconds
    self._writers: dict[str, Any] = {}
    self._names: set[str] = set()
    self._loops: list[str] = []
    self._lock = (
      threading.RLock()
    )  # for `parallel`; Orbax does not like to be called at once either
    self._start = time.monotonic()
    try:
      self._earlier = float(storage.read_sealed(self.workdir / "elapsed.json"))
    except (FileNotFoundError, ValueError):
      self._earlier = 0.0

  def progress(self, description: str, total: int, done: int = 0):
    """A context manager with `.advance(n=1)`; see `foliax.training.progress.progress`."""
    return progress.progress(description, total, done)

  def say(self, message: str) -> None:
    """Tells the person at the terminal something, in one line."""
    print(message, file=sys.stderr, flush=True)

  def scalars(self, prefix: str, values: dict[str, Any], step: int) -> None:
    """Writes numbers for TensorBoard.

    Args:
      prefix: name of the curves, e.g. the arm; curves with the same tag share a chart.
      values: number per tag.
      step: position on the horizontal axis. The first step that a resumed run writes replaces what
        the run before it had written from there on.
    """
    if prefix not in self._writers:
      board = extras.require("tensorboardX", "experiments")
      self._check_name(prefix)
      folder = self.workdir / "tensorboard" / prefix
      purged = int(step) if folder.exists() else None
      self._writers[prefix] = board.SummaryWriter(str(folder), purge_step=purged)
    for tag, value in values.items():
      self._writers[prefix].add_scalar(tag, float(value), int(step))

  def stage(self, name: str, function: Callable[[], Any], **dependencies: Any) -> Any:
    """Runs a piece of work once in the life of the work directory.

    Args:
      name: unique in the experiment; letters, digits and `_.=,+-`, with `/` for folders.
      function: does the work; returns JSON-able numbers, lists and dictionaries (arrays are fine).
      **dependencies: what the result depends on besides the configuration; when it differs from
        what was stored, the work is done again.
    Returns:
      The stored result: dictionaries, lists, numbers and strings, the same whether it was just
      computed or read back.
    """
    self._claim_name(name)
    path = self.workdir / "stages" / f"{name}.json"
    dependencies = storage.round_trip(dependencies)
    try:
      stored = storage.read_sealed(path)
      if stored["dependencies"] == dependencies:
        return stored["result"]
      self.say(f"stage {name}: what it depends on has changed, doing it again")
    except FileNotFoundError:
      pass
    except ValueError as error:
      self.say(f"stage {name}: {error}; doing it again")
    result = storage.round_trip(function())
    storage.write_sealed(path, {"dependencies": dependencies, "result": result})
    self._note_time()
    return result

  def loop(
    self,
    name: str,
    init: Carry,
    step: Callable[[Carry, int], tuple[Carry, Any]],
    steps: int,
  ) -> tuple[Carry, list[Any]]:
    """Runs a Python loop that can be killed between any two instructions and resumed.

    The state is checkpointed by Orbax when `save_seconds` have passed since the last checkpoint
    (less often when saving is slow, to spend at most a tenth of the time on it) and at the end.

    Args:
      name: unique in the experiment; see `stage`.
      init: state before the first step: a pytree of arrays, typed random keys and numbers, whose
        structure, shapes and dtypes every step keeps.
      step: maps state and step number to the next state and a JSON-able record of the step.
      steps: number of steps.
    Returns:
      The last state, and the list of records.
    Raises:
      ValueError: a step changed the structure, a shape or a dtype of the state.
    """
    self._claim_name(name)
    for other in self._loops:
      if name.startswith(other + "/") or other.startswith(name + "/"):
        raise ValueError(f"loop {name!r} and loop {other!r} would share a folder; rename one")
    self._loops.append(name)
    folder = self.workdir / "checkpoints" / name
    carry = plain(init)
    form = _form(carry)
    with self._lock:
      carry, records = self._restore(folder, carry)
    saved_at, interval = time.monotonic(), self.save_seconds
    with self.progress(name, steps, done=len(records)) as bar:
      for i in range(len(records), steps):
        carry, record = step(carry, i)
        carry = plain(carry)
        if _form(carry) != form:
          raise ValueError(
            f"step {i} of loop {name!r} changed its state from {form} to {_form(carry)}; "
            "keep structure, shapes and dtypes"
          )
        records.append(storage.round_trip(record))
        bar.advance()
        if i + 1 == steps or time.monotonic() - saved_at >= interval:
          start = time.monotonic()
          self._save(folder, carry, records)
          saved_at = time.monotonic()
          if interval:
            interval = max(self.save_seconds, 9 * (saved_at - start))
    return carry, records

  def parallel(
    self, description: str, work: Mapping[str, Callable[[], Any]], workers: int | None = None
  ) -> dict[str, Any]:
    """Does independent pieces of work on a few threads, under one progress bar.

    Worth it for compiled JAX functions, other native code and subprocesses, which let another
    thread run meanwhile. After an error or Ctrl-C no further piece is begun.

    Args:
      description: what is being done, a few words.
      work: name -> piece of work, normally one `stage` or `loop`; begun in this order.
      workers: number of threads; one a core, at most four, when None.
    Returns:
      name -> what the piece returned, in the order of `work`.
    """
    workers = workers or min(os.cpu_count() or 1, 4)
    with self.progress(description, len(work)) as bar:
      pool = concurrent.futures.ThreadPoolExecutor(workers)
      try:
        futures = {name: pool.submit(piece) for name, piece in work.items()}
        for future in concurrent.futures.as_completed(futures.values()):
          future.result()
          bar.advance()
        return {name: future.result() for name, future in futures.items()}
      finally:
        pool.shutdown(cancel_futures=True)

  def elapsed(self) -> float:
    """Seconds spent on this work directory, over all the times it was resumed."""
    return self._earlier + time.monotonic() - self._start

  def close(self) -> None:
    """Flushes what is still to be written."""
    self._note_time()
    for writer in self._writers.values():
      writer.close()

  def _check_name(self, name: str) -> None:
    if not _NAME.fullmatch(name):
      raise ValueError(f"name {name!r} must be letters, digits and _.=,+-, with / for folders")

  def _claim_name(self, name: str) -> None:
    self._check_name(name)
    with self._lock:
      if name in self._names:
        raise ValueError(f"the name {name!r} was already used in this run; give each piece its own")
      self._names.add(name)

  def _note_time(self) -> None:
    with self._lock:
      storage.write_sealed(self.workdir / "elapsed.json", self.elapsed())

  def _save(self, folder: pathlib.Path, carry: Any, records: list[Any]) -> None:
    with self._lock:
      self._save_alone(folder, carry, records)

  def _save_alone(self, folder: pathlib.Path, carry: Any, records: list[Any]) -> None:
    with contextlib.closing(Checkpoints(folder, _KEPT)) as checkpoints:
      checkpoints.save(len(records), carry, records)
    self._note_time()

  def _restore(self, folder: pathlib.Path, carry: Any) -> tuple[Any, list[Any]]:
    say = lambda message: self.say(f"loop {folder.name}: {message}")
    with contextlib.closing(Checkpoints(folder, _KEPT, say)) as checkpoints:
      newest = checkpoints.newest()
      return (carry, []) if newest is None else checkpoints.restore(carry, newest)


def _form(carry: Any) -> tuple[Any, list[str]]:
  leaves, structure = jax.tree.flatten(carry)
  return structure, [f"{getattr(x, 'dtype', type(x).__name__)}{list(np.shape(x))}" for x in leaves]
