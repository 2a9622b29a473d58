"""Optimisers of other libraries as baselines, in this process or under another interpreter.

BoTorch brings torch, which foliax does not depend on: it runs in a separate environment (the extra
`peers`) through `peer_server`. `cma` and `optuna` come with the extra `experiments`.
"""

import contextlib
import json
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from foliax.experiments import peer_server
from foliax.extras import require

NAMES = tuple(peer_server.OPTIMISERS)
NEEDS_TORCH = ("botorch-qnei", "botorch-turbo")
_MODULES = {"cma": "cma", "optuna-tpe": "optuna"}


@runtime_checkable
class Peer(Protocol):
  """An optimiser that maximises on [0,1]^dim, one evaluation at a time."""

  def ask(self) -> Sequence[float]: ...
  def tell(self, x: Sequence[float], y: float | None) -> None: ...
  def preload(self, xs: Sequence[Sequence[float]], ys: Sequence[float | None]) -> None: ...


def _known(name: str) -> None:
  if name not in NAMES:
    raise ValueError(f"unknown optimiser {name!r}; use one of {', '.join(NAMES)}")


def in_process(name: str, dim: int, seed: int) -> Peer:
  """`cma` or `optuna-tpe` in this process.

  Raises:
    ValueError: unknown name, or one that needs torch.
    ModuleNotFoundError: the library is not installed.
  """
  _known(name)
  if name in NEEDS_TORCH:
    raise ValueError(f"{name!r} needs torch; use PeerProcess with the peers environment")
  require(_MODULES[name], "experiments")
  optimiser: Any = peer_server.OPTIMISERS[name]
  return optimiser(dim, seed)


def peers_python() -> pathlib.Path | None:
  """The interpreter that has the `peers` extra, or None.

  `FOLIAX_PEERS_PYTHON` if set, otherwise `.venv-peers/bin/python` of the checkout or of the
  working directory.

  Raises:
    ValueError: `FOLIAX_PEERS_PYTHON` names no file.
  """
  named = os.environ.get("FOLIAX_PEERS_PYTHON")
  if named:
    if not pathlib.Path(named).is_file():
      raise ValueError(f"FOLIAX_PEERS_PYTHON names no file: {named!r}; name a Python interpreter")
    return pathlib.Path(named)
  for root in (pathlib.Path(__file__).parents[1], pathlib.Path.cwd()):
    python = root / ".venv-peers" / "bin" / "python"
    if python.is_file():
      return python
  return None


class PeerProcess:
  """An optimiser in a process of its own, to be used as a context manager.

  `seconds` of the last `ask`, `tell` or `preload`, and `total_seconds` of all, are measured inside
  the process: they hold no time of starting it or of talking to it.
  """

  def __init__(
    self,
    python: str | os.PathLike,
    name: str,
    dim: int,
    seed: int,
    *,
    timeout_seconds: float = 300.0,
  ):
    """Starts the process.

    Args:
      python: interpreter that has the library; it need not have foliax.
      name: one of `NAMES`.
      dim: number of coordinates.
      seed: seeds the optimiser.
      timeout_seconds: limit for each answer.
    Raises:
      ValueError: unknown name.
      ModuleNotFoundError: that interpreter lacks the library.
      RuntimeError: the optimiser failed, with its own words.
      TimeoutError: no answer in time; the process is ended.
    """
    _known(name)
    self.name, self.python, self.timeout_seconds = name, os.fspath(python), timeout_seconds
    self.seconds = 0.0
    self.total_seconds = 0.0
    threads = str(peer_server.THREADS)
    environment = os.environ | {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by close)
    # -P: the script's own folder has modules whose names others may import.
    self._process = subprocess.Popen(
      [self.python, "-P", str(pathlib.Path(peer_server.__file__))],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._errors,
      text=True,
      bufsize=1,
      env=environment,
    )
    self._lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=self._read, daemon=True).start()
    try:
      self._request({"command": "start", "name": name, "dim": dim, "seed": seed})
    except BaseException:
      self.close()
      raise

  def _read(self) -> None:
    stream = self._process.stdout
    assert stream is not None
    for line in stream:
      self._lines.put(line)
    self._lines.put("")

  def _failed(self, reason: str) -> str:
    self._errors.seek(0)
    said = self._errors.read().strip().splitlines()
    return f"{self.name} under {self.python}: {reason}" + (f" ({said[-1]})" if said else "")

  def _request(self, message: dict[str, Any]) -> dict[str, Any]:
    stream = self._process.stdin
    if stream is None or stream.closed:
      raise RuntimeError(f"{self.name}: the process is closed; start another PeerProcess")
    try:
      stream.write(json.dumps(message) + "\n")
      line = self._lines.get(timeout=self.timeout_seconds)
    except queue.Empty:
      self.close()
      reason = f"{self.name} did not answer {message['command']} in {self.timeout_seconds} s"
      raise TimeoutError(f"{reason}; raise timeout_seconds") from None
    except BrokenPipeError:
      line = ""
    if not line:
      self._process.wait()
      raise RuntimeError(self._failed(f"ended with exit code {self._process.returncode}"))
    reply = json.loads(line)
    if "missing" in reply:
      extra = "peers" if self.name in NEEDS_TORCH else "experiments"
      raise ModuleNotFoundError(
        f"{self.name}: {reply['missing']} is not installed for {self.python}; it comes with: "
        f"pip install 'foliax[{extra}]'",
        name=reply["missing"],
      )
    if "error" in reply:
      raise RuntimeError(self._failed(reply["error"]))
    self.seconds = reply.get("seconds", 0.0)
    self.total_seconds += self.seconds
    return reply

  def ask(self) -> list[float]:
    """The next point to evaluate."""
    return self._request({"command": "ask"})["x"]

  def tell(self, x: Sequence[float], y: float | None) -> None:
    """The value at x; None or a value that is not finite is a failed evaluation."""
    y = None if y is None or not np.isfinite(y) else float(y)
    self._request({"command": "tell", "x": [float(value) for value in x], "y": y})

  def preload(self, xs: Sequence[Sequence[float]], ys: Sequence[float | None]) -> None:
    """Observations made elsewhere, all at once."""
    points = np.asarray(xs, np.float64).tolist()
    values = [None if y is None or not np.isfinite(y) else float(y) for y in ys]
    self._request({"command": "preload", "xs": points, "ys": values})

  def close(self) -> None:
    """Ends the process; a second call does nothing."""
    if self._process.poll() is None:
      self._process.kill()
      self._process.wait()
    for stream in (self._process.stdin, self._process.stdout):
      if stream is not None:
        with contextlib.suppress(BrokenPipeError):
          stream.close()
    self._errors.close()

  def __enter__(self) -> "PeerProcess":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


def preloaded(
  peer: Peer,
  xs: Sequence[Sequence[float]],
  ys: Sequence[float],
  objective: Callable[[Sequence[float]], float],
) -> Callable[[], float]:
  """Tells the observations, and returns a function that times one ask + tell on top of them.

  The seconds are those inside the optimiser where it is a `PeerProcess`; the objective's own time
  is never counted.
  """
  peer.preload(xs, ys)

  def once() -> float:
    begin = time.perf_counter()
    x = peer.ask()
    asked = time.perf_counter() - begin
    asked = peer.seconds if isinstance(peer, PeerProcess) else asked
    y = objective(x)
    begin = time.perf_counter()
    peer.tell(x, y)
    told = time.perf_counter() - begin
    return asked + (peer.seconds if isinstance(peer, PeerProcess) else told)

  return once


def round_robin(
  contestants: Mapping[str, Callable[[], float]], repeats: int, warm_up: int = 2
) -> dict[str, list[float]]:
  """Calls the contestants in turn, so that a slow moment of the machine meets all of them.

  Args:
    contestants: name -> a call that returns its own seconds.
    repeats: rounds that count.
    warm_up: rounds before them that do not.
  Returns:
    name -> `repeats` seconds; sample r of every name is of the same round.
  """
  samples: dict[str, list[float]] = {name: [] for name in contestants}
  for turn in range(warm_up + repeats):
    for name, call in contestants.items():
      seconds = call()
      if turn >= warm_up:
        samples[name].append(float(seconds))
  return samples


def ask_tell_seconds(
  own: Mapping[str, Callable[[], float]],
  objective: Callable[[Sequence[float]], float],
  *,
  python: str | os.PathLike | None = None,
  names: Sequence[str] = NAMES,
  dim: int = 6,
  count: int = 500,
  repeats: int = 11,
  seed: int = 0,
  timeout_seconds: float = 300.0,
) -> dict[str, list[float]]:
  """Seconds of one ask + tell on top of `count` observations, for each peer and our own.

  Every peer runs in a process of its own and is told the same `count` uniform random points. After
  two rounds that do not count, `repeats` rounds alternate between all of them.

  Args:
    own: name -> a warm call of ours that returns the seconds of its ask + tell.
    objective: what is maximised; its time is not counted.
    python: interpreter for all peers; this one if None (which has no torch).
    names: the peers, of `NAMES`.
    dim: number of coordinates.
    count: observations before the first ask.
    repeats: samples each.
    seed: draws the observations and seeds the peers.
    timeout_seconds: limit for each answer of a peer.
  Returns:
    name -> `repeats` seconds, paired by round.
  """
  xs = np.random.default_rng(seed).uniform(size=(count, dim))
  ys = [float(objective(x)) for x in xs]
  peers: list[PeerProcess] = []
  try:
    contestants = dict(own)
    for name in names:
      interpreter = sys.executable if python is None else python
      peers.append(PeerProcess(interpreter, name, dim, seed, timeout_seconds=timeout_seconds))
      contestants[name] = preloaded(peers[-1], xs.tolist(), ys, objective)
    return round_robin(contestants, repeats)
  finally:
    for peer in peers:
      peer.close()
