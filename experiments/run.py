"""Runs an experiment in a work directory: resumes what was begun, repeats nothing finished."""

import contextlib
import datetime
import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import traceback
import types
from collections.abc import Iterator
from typing import Any

import foliax
import jax
import ml_collections
from foliax.experiments import figures, registry, report, storage
from foliax.experiments.context import Context
from foliax.experiments.registry import UserError

_VERSIONS = ("jax", "jaxlib", "flax", "optax", "numpy", "scipy", "scikit-learn")


def run(
  method: str, scale: str, config: ml_collections.ConfigDict, workdir: pathlib.Path
) -> tuple[dict[str, Any], bool]:
  """Runs an experiment to its end, from where an earlier process left it.

  Writes `config.json`, `results.json`, `figures/*.svg` and `report.html` into the work directory;
  `results.json` comes last and marks the run as finished.

  Args:
    method: name or dotted module of the experiment.
    scale: smoke, laptop or pod.
    config: its configuration with all overrides applied.
    workdir: where the run keeps its files; made if need be.
  Returns:
    The content of `results.json`, and whether the run had been finished before.
  Raises:
    UserError: another process is at work there, or the directory belongs to another configuration.
  """
  experiment = registry.load(method)
  with lock(workdir):
    asked = {"method": method, "scale": scale, "config": storage.round_trip(config.to_dict())}
    check_config(workdir, asked)
    document = finished(workdir)
    if document is not None:
      return document, True
    context = Context(workdir)
    try:
      results = storage.round_trip(experiment.run(config, context))
      document = _finish(experiment, asked, results, context)
    except Exception:
      storage.write_atomically(workdir / "error.txt", traceback.format_exc())
      raise
    finally:
      context.close()
    (workdir / "error.txt").unlink(missing_ok=True)
    return document, False


def finished(workdir: pathlib.Path, name: str = "results.json") -> dict[str, Any] | None:
  """The results of a finished run; None when there are none, or the file is damaged."""
  try:
    document = json.loads((workdir / name).read_text(encoding="utf-8"))
  except (FileNotFoundError, ValueError):
    return None
  keys = {"method", "scale", "title", "paper", "config", "results", "claims", "provenance"}
  return document if isinstance(document, dict) and keys <= document.keys() else None


def _finish(
  experiment: types.ModuleType, asked: dict[str, Any], results: Any, context: Context
) -> dict[str, Any]:
  claims = experiment.claims(results)
  ids = [c.id for c in claims]
  if len(set(ids)) < len(ids):
    raise ValueError(f"claims have ids {ids}; give each claim its own")
  document = {
    "method": asked["method"],
    "scale": asked["scale"],
    "title": getattr(experiment, "TITLE", asked["method"]),
    "paper": getattr(experiment, "PAPER", ""),
    "config": asked["config"],
    "claims": [c.as_dict() for c in claims],
    "results": results,
    "provenance": provenance(asked["config"], context.elapsed()),
  }
  captions = getattr(experiment, "CAPTIONS", {})
  drawn = []
  with figures.style():
    for name, figure in experiment.figures(results).items():
      caption = captions.get(name, name)
      drawn.append((name, caption, figures.svg(figure, name, caption)))
  for name, _, element in drawn:
    path = context.workdir / "figures" / f"{name}.svg"
    storage.write_atomically(path, figures.standalone(element))
  storage.write_atomically(context.workdir / "report.html", report.page(document, drawn))
  storage.write_atomically(context.workdir / "results.json", storage.to_json(document) + "\n")
  return document


def provenance(config: dict[str, Any], seconds: float) -> dict[str, Any]:
  """Where numbers come from: everything that may differ between two runs of the same command."""
  versions = {"foliax": foliax.__version__, "python": platform.python_version()}
  for name in _VERSIONS:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[name] = importlib.metadata.version(name)
  kinds: dict[str, int] = {}
  for device in jax.devices():
    kinds[device.device_kind] = kinds.get(device.device_kind, 0) + 1
  return {
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "wall_seconds": round(seconds, 1),
    "commit": _commit(),
    "seeds": {k: v for k, v in config.items() if "seed" in k},
    "devices": [f"{count} x {kind}" for kind, count in kinds.items()],
    "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    "versions": versions,
  }


def _commit() -> str | None:
  """Commit of the checkout that foliax was imported from; None when it is no checkout."""
  here = pathlib.Path(__file__)

  def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
      ["git", "-C", str(here.parent), *arguments], capture_output=True, text=True, check=True
    )

  try:
    git("ls-files", "--error-unmatch", here.name)
    changed = git("status", "--porcelain", "--untracked-files=no").stdout.strip()
    return git("rev-parse", "HEAD").stdout.strip() + (" with changes" if changed else "")
  except (OSError, subprocess.CalledProcessError):
    return None


@contextlib.contextmanager
def lock(workdir: pathlib.Path) -> Iterator[None]:
  """Keeps a work directory, made if need be, for this process.

  Raises:
    UserError: another process has it, or it cannot be written to.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    file = (workdir / "lock").open("a+", encoding="utf-8")  # held open while the run lasts
  except OSError as error:
    raise UserError(f"cannot write to the work directory {workdir}: {error.strerror}") from None
  with file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.seek(0)
      raise UserError(
        f"{workdir} is in use by process {file.read().strip() or 'unknown'}; "
        "wait for it, or choose another --workdir"
      ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    yield


def check_config(workdir: pathlib.Path, asked: dict[str, Any], write: bool = True) -> None:
  """Sees that what was begun in a work directory was begun with this configuration.

  Args:
    workdir: the directory.
    asked: the configuration, JSON-able.
    write: note it there.
  Raises:
    UserError: it was begun with another one, or nobody knows with which.
  """
  path = workdir / "config.json"
  begun = any((workdir / name).exists() for name in ("stages", "checkpoints", "results.json"))
  if begun:
    try:
      stored = json.loads(path.read_text(encoding="utf-8"))
      differences = _differences(stored, asked)
    except (FileNotFoundError, ValueError, AttributeError):
      raise UserError(
        f"{path} is missing or damaged, so nobody knows what {workdir} holds; "
        "delete the directory or choose another --workdir"
      ) from None
    if differences:
      raise UserError(
        f"{workdir} holds a run with another configuration ({'; '.join(differences)}); "
        "choose another --workdir"
      )
  if write:
    storage.write_atomically(path, storage.to_json(asked) + "\n")


def _differences(stored: dict[str, Any], asked: dict[str, Any]) -> list[str]:
  there, here = storage.flatten(stored), storage.flatten(asked)
  absent = object()
  return [
    f"{name}: {_shown(there, name)} there, {_shown(here, name)} here"
    for name in sorted(there.keys() | here.keys())
    if there.get(name, absent) != here.get(name, absent)
  ]


def _shown(values: dict[str, Any], name: str) -> str:
  return json.dumps(values[name]) if name in values else "absent"
