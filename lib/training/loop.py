"""One training loop that cannot lose work: `fit`.

A pure `update(state, batch) -> (state, metrics)` is scanned over several steps inside one jitted
call that reuses the memory of the state. The host meanwhile fetches the next batches, writes the
metrics of the call before, and checkpoints. Killed at any moment, the same program ends with the
same bits: calls always begin and end at the same steps, and a checkpoint holds the state with its
random keys, the position in the data, and what evaluations found so far.
"""

import contextlib
import functools
import pathlib
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from foliax import extras
from foliax.training import checkpoint, data
from foliax.training import progress as progress_bar
from foliax.training.checkpoint import say
from foliax.training.step import NonFinite, hold, non_finite
from jax.sharding import NamedSharding, PartitionSpec

PREEMPTED = 143  # what a shell reports for a process that SIGTERM ended: 128 + 15


class Fitted(NamedTuple):
  """What `fit` returns.

  Attributes:
    state: the last state.
    step: number of steps done, over all the times the run was resumed.
    stopped: why it ended: `"steps"`, `"patience"` or `"data"`.
    skipped: number of steps that were skipped because something was not finite.
    best: best value of the monitored metric, None without evaluations.
    best_step: the step it was found at; its checkpoint is kept.
  """

  state: Any
  step: int
  stopped: str
  skipped: int
  best: float | None
  best_step: int | None


class NonFiniteError(ArithmeticError):
  """Too many steps in a row had a loss or gradient that is not finite."""


class Preempted(SystemExit):
  """SIGTERM came; the state is in a checkpoint. Uncaught, the process exits with code 143."""

  def __init__(self, step: int, folder: pathlib.Path):
    super().__init__(PREEMPTED)
    self.step, self.folder = step, folder


def watched(state: Any, metrics: dict[str, Any]) -> Any:
  """What must be finite after a step: the metric `loss` and the `params` of the state, if any."""
  found = OrderedDict()
  if "loss" in metrics:
    found["loss"] = metrics["loss"]
  params = state.get("params") if isinstance(state, dict) else getattr(state, "params", None)
  if params is not None:
    found["params"] = params
  return found


def fit(
  update: Callable[[Any, Any], tuple[Any, dict[str, Any]]],
  state: Any,
  batches: Any,
  steps: int,
  *,
  folder: pathlib.Path | str | None = None,
  steps_per_call: int = 1,
  checkpoint_seconds: float | None = 600.0,
  checkpoint_every: int | None = None,
  keep: int = 2,
  evaluate: Callable[[Any], dict[str, Any]] | None = None,
  evaluate_every: int | None = None,
  monitor: str = "loss",
  maximise: bool = False,
  patience: int | None = None,
  watch: Callable[[Any, dict[str, Any]], Any] = watched,
  max_skipped: int = 10,
  log: Callable[[int, dict[str, float]], None] | None = None,
  log_every: int = 1,
  tensorboard: pathlib.Path | str | None = None,
  batch_sharding: NamedSharding | None = None,
  donate: bool = False,
  description: str = "training",
) -> Fitted:
  """Trains: applies `update` to `steps` batches, resuming from what is in `folder`.

  With several processes all of them call this with the same arguments, their own share of the
  data, and a folder on a file system that they share; process 0 writes metrics.

  Args:
    update: pure, traceable `(state, batch) -> (state, metrics)`; metrics is a dict, nested or not,
      of scalars. One named `non_finite` (a `NonFinite`) says that the update guarded itself.
    state: any pytree of arrays and typed random keys, laid over devices as it is to stay.
    batches: iterator with `get_state` and `set_state` (see `foliax.training.data`), something that
      makes such an iterator when iterated, or `data.Generated`. Without `folder` any iterable.
    steps: number of steps in all, resumed ones included.
    folder: where the checkpoints are; one folder per run. None keeps nothing.
    steps_per_call: steps scanned per jitted call.
    checkpoint_seconds: a checkpoint when this long has passed since the last; None for never.
    checkpoint_every: a checkpoint every so many steps. There is always one at the end.
    keep: number of checkpoints kept, besides that of the best evaluation.
    evaluate: maps the state to a dict of scalars, on the host; the same in every process.
    evaluate_every: steps between evaluations. There is always one at the end.
    monitor: the metric of the evaluation that decides what is best.
    maximise: whether more is better.
    patience: stop after so many evaluations in a row that were not the best so far.
    watch: what must be finite after each step, for an update that does not guard itself; a step
      after which it is not leaves the state as it was.
    max_skipped: stop with an error when so many steps in a row are skipped.
    log: called in process 0 with a step number and its metrics; a resumed run repeats some steps.
    log_every: steps between what is logged.
    tensorboard: folder for TensorBoard curves.
    batch_sharding: how a batch is laid over the devices of a mesh; its leaves share it. With
      several processes a batch is the share of its process.
    donate: let the first step reuse the memory of `state`, which cannot be used afterwards.
      Otherwise it is copied.
    description: name on the progress bar.
  Returns:
    The last state, and how it ended. A finished run returns at once.
  Raises:
    NonFiniteError: `max_skipped` steps in a row were skipped; names the step and the tensor.
    OSError: a checkpoint could not be written; the one before is intact.
    Preempted: SIGTERM came and the state is saved; exits with code 143. Run the same again.
    ValueError: an argument that does not fit, or a checkpoint of something else.
  """
  options = locals()
  del options["state"]  # else its memory could not be reused
  _check(options)
  run = _Run(options)
  with contextlib.ExitStack() as stack:
    stack.callback(run.close)
    run.begin(state)
    del state
    stack.enter_context(run.catch_sigterm())
    run.bar = stack.enter_context(run.progress())
    return run.loop()


def _check(o: dict[str, Any]) -> None:
  """Refuses arguments that do not fit together."""
  counts = ("steps_per_call", "keep", "max_skipped", "log_every", "steps")
  optional = ("checkpoint_every", "evaluate_every", "patience")
  for name in (*counts, *optional):
    if o[name] is not None and o[name] < 1:
      raise ValueError(f"{name} is {o[name]}; it must be at least 1")
  if (o["evaluate"] is None) != (o["evaluate_every"] is None):
    raise ValueError("evaluate and evaluate_every belong together; give both or none")
  if o["patience"] is not None and o["evaluate"] is None:
    raise ValueError("patience counts evaluations; give evaluate and evaluate_every with it")
  if o["checkpoint_every"] is not None and o["folder"] is None:
    raise ValueError("checkpoint_every needs a place for checkpoints; give folder")


class _Record(NamedTuple):
  """What a checkpoint remembers besides the state and the position in the data."""

  step: int = 0
  skipped: int = 0
  in_a_row: int = 0
  evaluated: int = 0
  best: float | None = None
  best_step: int | None = None
  since_best: int = 0


class _Run:
  """One call of `fit`."""

  def __init__(self, options: dict[str, Any]):
    self.o = o = options
    self.first = jax.process_index() == 0
    self.record = _Record()
    self.pending: tuple[int, dict[str, Any]] | None = None  # first step and metrics of a call
    self.asked: Any = None
    self.sigterm = False
    self.checkpoints: Any = None
    if o["folder"] is not None:
      self.checkpoints = checkpoint.Checkpoints(o["folder"], o["keep"], say)
    self.saved: _Record | None = None
    self.saved_at = time.monotonic()
    self.writer: Any = None
    self.bar: Any = None

  def begin(self, state: Any) -> None:
    """Takes the state from the newest checkpoint, else from the caller."""
    o = self.o
    self.mesh = _mesh(state, o["batch_sharding"])
    state = _laid_out(state, self.mesh)
    self.feed = data.Feed(o["batches"], o["batch_sharding"], o["folder"] is not None)
    key = self.feed.key
    self.key = _replicate(key, self.mesh) if key is not None and self.mesh is not None else key
    newest = None if self.checkpoints is None else self.checkpoints.newest()
    if newest is None:
      self.state = state if o["donate"] else jax.tree.map(jnp.copy, state)
    else:
      like = jax.tree.map(checkpoint.abstract, state)
      if o["donate"]:
        jax.tree.map(lambda x: x.delete(), state)  # room for what is restored
      self.state, stored = self.checkpoints.restore(like, newest)
      self.record = self.saved = _Record(**stored["progress"])
      self.feed.go_to(stored["positions"])
      if self.first:
        say(f"{o['description']}: goes on after step {newest}, from {self.checkpoints.folder}")
    leaves = jax.tree.leaves(self.state)
    layout = [x.sharding if isinstance(x.sharding, NamedSharding) else None for x in leaves]
    self.layout = (tuple(layout), self.mesh, o["batch_sharding"])
    if o["tensorboard"] is not None and self.first:
      board = extras.require("tensorboardX", "experiments")
      purged = None if newest is None else newest + 1
      self.writer = board.SummaryWriter(str(o["tensorboard"]), purge_step=purged)

  @contextlib.contextmanager
  def catch_sigterm(self) -> Iterator[None]:
    """Notes SIGTERM, which is then dealt with between two calls."""
    in_main = threading.current_thread() is threading.main_thread()
    if self.checkpoints is None or not in_main:  # nothing to save, or Python does not allow it
      yield
      return

    def note(number, frame):
      self.sigterm = True

    before = signal.signal(signal.SIGTERM, note)
    try:
      yield
    finally:
      signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
    if self.sigterm:  # the run ended before it could heed the signal
      signal.raise_signal(signal.SIGTERM)

  def progress(self) -> Any:
    """The progress bar; in process 0 only."""
    if not self.first:
      return contextlib.nullcontext()
    return progress_bar.progress(self.o["description"], self.o["steps"], self.record.step)

  def loop(self) -> Fitted:
    """Steps, evaluations and checkpoints until something says stop."""
    o = self.o
    exhausted = preempted = due = False
    while True:
      step = self.record.step
      if preempted:
        self.save()
        self.checkpoints.wait()
        raise Preempted(step, self.checkpoints.folder)
      improved = self.evaluate(exhausted)
      stopped = self.stopped(exhausted)
      if (
        stopped or improved or due or (o["checkpoint_every"] and step % o["checkpoint_every"] == 0)
      ):
        self.save()
      if stopped:
        if self.checkpoints is not None:
          self.checkpoints.wait()
        record = self.record
        return Fitted(self.state, step, stopped, record.skipped, record.best, record.best_step)
      count, chunk = self.feed.take(step, self.next_stop() - step)
      exhausted = count == 0
      if exhausted:
        preempted = due = False
        continue
      self.state, metrics = _call(
        o["update"], self.feed.function, o["watch"], self.layout, self.state, chunk, self.key
      )
      self.record = self.record._replace(step=step + count)
      self.settle()  # the call before; this one runs meanwhile
      self.pending = (step, metrics)
      preempted, due = self.agree()

  def next_stop(self) -> int:
    """Where the next call ends; the same steps whenever the run was resumed."""
    o, step = self.o, self.record.step
    strides = (o["steps_per_call"], o["checkpoint_every"], o["evaluate_every"])
    return min(o["steps"], *((step // n + 1) * n for n in strides if n))

  def stopped(self, exhausted: bool) -> str | None:
    """Why the run is at its end, if it is."""
    if self.o["patience"] and self.record.since_best >= self.o["patience"]:
      return "patience"
    if self.record.step >= self.o["steps"]:
      return "steps"
    return "data" if exhausted else None

  def agree(self) -> tuple[bool, bool]:
    """Whether SIGTERM came, and whether it is time for a checkpoint.

    Processes must stop at the same step, so with several of them this is what any of them said
    one call ago: that has been exchanged meanwhile, and no device waits for it.
    """
    if self.checkpoints is None:
      return False, False
    self.checkpoints.check()
    seconds = self.o["checkpoint_seconds"]
    due = seconds is not None and time.monotonic() - self.saved_at >= seconds
    flags = np.array([self.sigterm, due and self.first and not self.checkpoints.busy])
    if jax.process_count() > 1:
      asked, self.asked = self.asked, _any(flags)
      flags = np.asarray(asked) if asked is not None else np.zeros(2, bool)
    return bool(flags[0]), bool(flags[1])

  def save(self) -> None:
    """Checkpoints what is there now."""
    self.settle()
    if self.checkpoints is None or self.record == self.saved:
      return
    if self.writer is not None:
      self.writer.flush()  # curves are never behind the checkpoint
    record = self.record
    stored = {"progress": record._asdict(), "positions": self.feed.positions()}
    best = () if record.best_step is None else (record.best_step,)
    self.checkpoints.save(record.step, self.state, stored, protect=best)
    self.saved, self.saved_at, self.asked = record, time.monotonic(), None

  def evaluate(self, exhausted: bool) -> bool:
    """Evaluates when it is time; returns whether this was the best so far."""
    o, record = self.o, self.record
    if o["evaluate"] is None or record.evaluated == record.step:
      return False
    ended = exhausted or record.step >= o["steps"]
    if not ended and record.step % o["evaluate_every"]:
      return False
    self.settle()
    values = _flat(o["evaluate"](self.state))
    if o["monitor"] not in values:
      raise ValueError(f"monitor is {o['monitor']!r}, but evaluate returned {sorted(values)}")
    value, best = float(values[o["monitor"]]), self.record.best
    better = value == value and (best is None or (value > best if o["maximise"] else value < best))
    self.record = self.record._replace(evaluated=record.step)
    if better:
      self.record = self.record._replace(best=value, best_step=record.step, since_best=0)
    else:
      self.record = self.record._replace(since_best=record.since_best + 1)
    self.write(record.step, {f"evaluation/{name}": float(v) for name, v in values.items()})
    return better

  def settle(self) -> None:
    """Waits for the metrics of the last call that was not looked at; counts, writes, judges."""
    if self.pending is None:
      return
    (start, metrics), self.pending = self.pending, None
    metrics = jax.device_get(metrics)
    found = metrics.pop("non_finite")
    flat = _flat(metrics)
    for name, values in flat.items():
      if np.ndim(values) != 1:
        raise ValueError(f"metric {name!r} has shape {np.shape(values)[1:]}; metrics are scalars")
    for i, index in enumerate(found.index):
      step = start + i + 1
      self.count(step, int(index), found.names)
      if step % self.o["log_every"] == 0:
        row = {name: float(values[i]) for name, values in flat.items()}
        self.write(step, row | {"skipped": float(self.record.skipped)})
    if self.bar is not None:
      self.bar.advance(len(found.index))

  def count(self, step: int, index: int, names: tuple[str, ...]) -> None:
    """Counts a step that was skipped, and stops the run after too many in a row."""
    record = self.record
    if index < 0:
      self.record = record._replace(in_a_row=0)
      return
    self.record = record = record._replace(skipped=record.skipped + 1, in_a_row=record.in_a_row + 1)
    if record.in_a_row >= self.o["max_skipped"]:
      raise NonFiniteError(
        f"at step {step} {names[index]} is not finite, and {record.in_a_row} steps in a row were "
        "skipped for that; lower the learning rate, clip the gradient, look at the batches from "
        f"step {step - record.in_a_row + 1} on, or raise max_skipped"
      )
    if self.first and record.in_a_row == 1:
      say(f"{self.o['description']}: {names[index]} is not finite, step {step} is skipped")

  def write(self, step: int, values: dict[str, float]) -> None:
    """Gives metrics to the log and to TensorBoard; in process 0 only."""
    if not self.first:
      return
    if self.o["log"] is not None:
      self.o["log"](step, values)
    if self.writer is not None:
      for name, value in values.items():
        self.writer.add_scalar(name, value, step)

  def close(self) -> None:
    """Ends what was opened."""
    if self.writer is not None:
      self.writer.close()
    if self.checkpoints is not None:
      self.checkpoints.close()


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=4)
def _call(update, generate, watch, layout, state, chunk, key):
  """Several steps. Without a `generate` function the chunk holds stacked batches, else numbers."""
  shardings, mesh, batch_sharding = layout

  def step(state, batch):
    if generate is not None:
      batch = generate(jax.random.fold_in(key, batch))
      if batch_sharding is not None:
        lay = lambda x: jax.lax.with_sharding_constraint(x, batch_sharding)
        batch = jax.tree.map(lay, batch)
    new, metrics = update(state, batch)
    if not isinstance(metrics.get("non_finite"), NonFinite):
      found = non_finite(watch(new, metrics))
      new = hold(found.index < 0, new, state)
      metrics = {**metrics, "non_finite": found}
    return new, metrics

  state, metrics = jax.lax.scan(step, state, chunk)
  leaves, tree = jax.tree.flatten(state)
  pin = lambda x, s: x if s is None else jax.lax.with_sharding_constraint(x, s)
  state = tree.unflatten([pin(x, s) for x, s in zip(leaves, shardings, strict=True)])
  if mesh is not None:  # every process reads the metrics
    metrics = jax.lax.with_sharding_constraint(metrics, NamedSharding(mesh, PartitionSpec()))
  return state, metrics


def _mesh(state: Any, batch_sharding: NamedSharding | None) -> Any:
  """The mesh of the run; None for a run on one device."""
  shardings = [batch_sharding, *(getattr(x, "sharding", None) for x in jax.tree.leaves(state))]
  meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
  if not meshes and jax.process_count() > 1:
    raise ValueError(
      f"there are {jax.process_count()} processes, but neither batch_sharding nor the state names "
      "a mesh; give batch_sharding, a NamedSharding over all devices"
    )
  return meshes[0] if meshes else None


def _laid_out(state: Any, mesh: Any) -> Any:
  """The state as arrays; what is not on the mesh yet has a copy on each of its devices."""

  def lay(x):
    x = jnp.asarray(x) if not isinstance(x, jax.Array) else x
    return x if mesh is None or isinstance(x.sharding, NamedSharding) else _replicate(x, mesh)

  return checkpoint.plain(jax.tree.map(lay, state))


def _replicate(x: jax.Array, mesh: Any) -> jax.Array:
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    data = _replicate(jax.random.key_data(x), mesh)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
  host = np.asarray(x)
  everywhere = NamedSharding(mesh, PartitionSpec())
  return jax.make_array_from_callback(host.shape, everywhere, lambda index: host[index])


def _any(flags: np.ndarray) -> jax.Array:
  """Starts to find out which flags are set in any process."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("device",))
  local = np.repeat(flags[None], jax.local_device_count(), axis=0)
  sharding = NamedSharding(mesh, PartitionSpec("device"))
  everyone = jax.make_array_from_process_local_data(sharding, local)
  return _reduce(mesh)(everyone)


@functools.cache
def _reduce(mesh: jax.sharding.Mesh) -> Callable[[jax.Array], jax.Array]:
  everywhere = NamedSharding(mesh, PartitionSpec())
  return jax.jit(lambda flags: flags.any(axis=0), out_shardings=everywhere)


def _flat(metrics: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """Nested dictionaries as one, with names joined by a slash."""
  flat: dict[str, Any] = {}
  for name, value in metrics.items():
    nested = isinstance(value, dict)
    flat |= _flat(value, f"{prefix}{name}/") if nested else {f"{prefix}{name}": value}
  return flat
