"""Checkpoints that are noticed when they are damaged: Orbax writes them, checksums seal them.

A folder holds for each kept step what Orbax wrote (`120/`) and a seal (`120.json`): the SHA-256 of
its files, the form of the tree, and a JSON record of whatever else a run has to remember. The seal
is written last and atomically. So whatever kills the process, a checkpoint with a seal is whole;
and one that was truncated or altered since does not match its seal and is not used.
"""

import hashlib
import pathlib
import shutil
import sys
import threading
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from foliax.training import storage
from jax.experimental import multihost_utils


def say(message: str) -> None:
  """Tells the person at the terminal something, in one line."""
  print(message, file=sys.stderr, flush=True)


class Checkpoints:
  """The checkpoints of one run. With several processes each of them makes the same calls.

  Attributes:
    folder: where they are; all processes must share it.
    keep: how many are kept. The older ones serve when the newest is damaged.
  """

  def __init__(self, folder: pathlib.Path | str, keep: int = 2, say: Callable[[str], None] = say):
    """Opens a folder, which need not exist yet.

    Args:
      folder: where the checkpoints are.
      keep: how many of the newest are kept, at least 1.
      say: is told, in one line, of a checkpoint that is damaged.
    """
    if keep < 1:
      raise ValueError(f"keep is {keep}; keep at least 1 checkpoint, 2 to survive a damaged one")
    self.folder = pathlib.Path(folder).absolute()
    self.keep = keep
    self._say = say
    self._orbax: Any = None
    self._thread: threading.Thread | None = None
    self._error: OSError | None = None
    self._sound: dict[int, dict[str, Any]] = {}  # verified seals

  def steps(self) -> list[int]:
    """The steps that have a sealed checkpoint, newest first."""
    names = (p.stem for p in self.folder.glob("*.json"))
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)

  def save(self, step: int, tree: Any, record: Any = None, protect: Collection[int] = ()) -> None:
    """Writes a checkpoint in the background, after waiting for the one before.

    When this returns, `tree` has been copied to the host: its buffers may be donated.

    Args:
      step: number of the checkpoint. One that exists already only gets the new record.
      tree: pytree of arrays, typed random keys and numbers.
      record: JSON-able; that of process 0 is kept.
      protect: steps whose checkpoints are kept although they are old.
    Raises:
      OSError: this checkpoint or the one before could not be written, e.g. for want of space.
    """
    self.wait()
    seal = {"form": form(tree), "record": record}
    if step in self.steps():
      if jax.process_index() == 0:
        path = self._seal(step)
        storage.write_sealed(path, storage.read_sealed(path) | seal)
      return
    try:
      # On a CPU the host's copy can be the device's own buffer, which the next step will reuse.
      tree = jax.tree.map(_storable, tree)
      self.folder.mkdir(parents=True, exist_ok=True)
      self._open().save(self.folder / str(step), {"tree": tree})  # Orbax refuses a bare array
    except OSError as error:
      raise self._failure(step, error) from error
    self._thread = threading.Thread(
      target=self._finish, args=(step, seal, set(protect)), name=f"checkpoint {step}"
    )
    self._thread.start()

  def newest(self) -> int | None:
    """The newest step whose checkpoint is whole; damaged ones are named and removed.

    Returns:
      The step, the same in every process; None when there is none.
    """
    self.wait()
    found = self._newest_sound() if jax.process_index() == 0 else -1
    if jax.process_count() > 1:
      found = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
    return None if found < 0 else found

  def restore(self, tree: Any, step: int) -> tuple[Any, Any]:
    """Reads a checkpoint, normally that of `newest()`.

    Args:
      tree: a pytree like the one that was saved, of arrays or ShapeDtypeStructs. Arrays come back
        with its shardings, whatever shardings they were saved with.
      step: one of `steps()`.
    Returns:
      Tree and record.
    Raises:
      FileNotFoundError: there is no such checkpoint.
      ValueError: it is damaged, or holds a tree of another form; names the first difference.
    """
    self.wait()
    seal = self._sound.get(step) or self._verify(step)
    self._compare(step, seal["form"], form(tree))
    like = {"tree": jax.tree.map(lambda x: 0 if _empty(x) else abstract(x), tree)}
    stored = self._open().restore(self.folder / str(step), like)["tree"]
    return jax.tree.map(lambda x, y: _zeros(x) if _empty(x) else y, tree, stored), seal["record"]

  @property
  def busy(self) -> bool:
    """A checkpoint is being written."""
    return self._thread is not None and self._thread.is_alive()

  def check(self) -> None:
    """Raises the error of a checkpoint that could not be written, if there is one."""
    if not self.busy:
      self.wait()

  def wait(self) -> None:
    """Waits until everything is written.

    Raises:
      OSError: it could not be written.
    """
    if self._thread is not None:
      self._thread.join()
      self._thread = None
    if self._error is not None:
      error, self._error = self._error, None
      raise error

  def close(self) -> None:
    """Waits for what is being written, and ends Orbax's threads."""
    try:
      self.wait()
    finally:
      if self._orbax is not None:
        self._orbax.close()
        self._orbax = None

  def _open(self) -> Any:
    if self._orbax is None:
      import orbax.checkpoint as ocp  # takes a third of a second that most programs do not need

      self._orbax = ocp.StandardCheckpointer()
    return self._orbax

  def _seal(self, step: int) -> pathlib.Path:
    return self.folder / f"{step}.json"

  def _finish(self, step: int, seal: dict[str, Any], protect: set[int]) -> None:
    """Seals what Orbax has written. It returns on process 0 after all processes have written."""
    try:
      self._orbax.wait_until_finished()
      if jax.process_index() == 0:
        seal |= {"files": _digest(self.folder / str(step))}
        storage.write_sealed(self._seal(step), seal)
        for old in self.steps()[self.keep :]:
          if old not in protect:
            self._remove(old)
    except Exception as error:  # raised by the next call from outside this thread
      self._error = self._failure(step, error)
      self._error.__cause__ = error

  def _failure(self, step: int, error: Exception) -> OSError:
    if jax.process_index() == 0:  # what was written of it may be what fills the disk
      for path in self.folder.glob(f"{step}.*tmp*"):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
      if step not in self.steps():
        shutil.rmtree(self.folder / str(step), ignore_errors=True)
    kept = self.steps()
    intact = f"that of step {kept[0]} is intact" if kept else "there is no earlier one"
    return OSError(
      f"the checkpoint of step {step} could not be written to {self.folder} ({_cause(error)}); "
      f"{intact}; free space or choose another folder, then run again"
    )

  def _newest_sound(self) -> int:
    sealed = self.steps()
    for remainder in self.folder.glob("*/"):
      if remainder.name not in map(str, sealed):  # a save that was killed
        shutil.rmtree(remainder)
    for step in sealed:
      try:
        self._sound = {step: self._verify(step)}
        return step
      except ValueError as error:
        self._say(f"{error}; going back to an earlier checkpoint")
        self._remove(step)
    return -1

  def _verify(self, step: int) -> dict[str, Any]:
    seal = storage.read_sealed(self._seal(step))
    if seal["files"] != _digest(self.folder / str(step)):
      raise ValueError(f"{self.folder / str(step)} is damaged: its checksum does not match")
    return seal

  def _remove(self, step: int) -> None:
    self._seal(step).unlink(missing_ok=True)
    shutil.rmtree(self.folder / str(step), ignore_errors=True)

  def _compare(self, step: int, stored: dict[str, str], wanted: dict[str, str]) -> None:
    if stored == wanted:
      return
    name = next(n for n in [*wanted, *stored] if stored.get(n) != wanted.get(n))
    raise ValueError(
      f"the checkpoint of step {step} in {self.folder} has {stored.get(name, 'nothing')} for "
      f"{name or 'the state'}, but this run has {wanted.get(name, 'nothing')}; use another folder "
      "for another model, optimiser or state"
    )


def plain(tree: Any) -> Any:
  """A tree as it comes back from a checkpoint, so that resuming changes no bit."""

  def leaf(x):
    if isinstance(x, np.generic):
      return np.asarray(x)
    return jnp.asarray(x, x.dtype) if getattr(x, "weak_type", False) else x

  return jax.tree.map(leaf, tree)


def form(tree: Any) -> dict[str, str]:
  """Dtype and shape of each leaf by its path, e.g. `{"params/w": "float32[3, 4]"}`."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): (
      f"{getattr(x, 'dtype', type(x).__name__)}{list(np.shape(x))}"
    )
    for path, x in leaves
  }


def _storable(leaf: Any) -> Any:
  return 0 if _empty(leaf) else leaf  # Orbax does not take arrays without elements


def _empty(leaf: Any) -> bool:
  return 0 in np.shape(leaf)


def _zeros(leaf: Any) -> Any:
  if isinstance(leaf, np.ndarray):
    return leaf
  return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)


def abstract(leaf: Any) -> Any:
  """Shape, dtype and sharding of an array; any other leaf as it is."""
  if not isinstance(leaf, jax.Array):
    return leaf
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _digest(folder: pathlib.Path) -> str:
  total = hashlib.sha256()
  for path in sorted(p for p in folder.rglob("*") if p.is_file()):
    with path.open("rb") as file:
      content = hashlib.file_digest(file, "sha256").hexdigest()
    total.update(f"{path.relative_to(folder)} {content}\n".encode())
  return total.hexdigest()


def _cause(error: BaseException) -> str:
  """What the operating system said, out of what the layers above made of it."""
  text = " ".join(str(error).split())
  for known in ("No space left on device", "File too large", "Disk quota exceeded"):
    if known in text:
      return known
  return text[:200] or type(error).__name__
