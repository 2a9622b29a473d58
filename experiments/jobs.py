"""Runs a training job: the work directory around it, in one process or in many.

A job makes a model where an experiment decides claims. Its module has `TITLE`, `get_config(scale)`,
`train(config, workdir)`, which returns numbers to report, and may have `preflight(config)`.
"""

import contextlib
import json
import pathlib
import traceback
from typing import Any

import jax
import ml_collections
from foliax.experiments import registry, run, storage


def train(
  job: str, scale: str, config: ml_collections.ConfigDict, workdir: pathlib.Path
) -> dict[str, Any]:
  """Runs a job to its end, from where an earlier run left it; a finished one is not run again.

  With several processes all of them call this, with a work directory that they share; process 0
  writes `config.json` and, when the job is finished, `results.json`.

  Args:
    job: name or dotted module of the job.
    scale: smoke, laptop or pod.
    config: its configuration with all overrides applied.
    workdir: where it keeps its files.
  Returns:
    The content of `results.json`.
  Raises:
    UserError: the directory is in use, or belongs to another configuration.
  """
  module = registry.load_job(job)
  first = jax.process_index() == 0
  asked = {"job": job, "scale": scale, "config": storage.round_trip(config.to_dict())}
  with run.lock(workdir) if first else contextlib.nullcontext():
    run.check_config(workdir, asked, write=first)
    path = workdir / "results.json"
    with contextlib.suppress(FileNotFoundError, ValueError):
      return json.loads(path.read_text(encoding="utf-8"))
    try:
      results = module.train(config, workdir)
    except Exception:
      error = workdir / ("error.txt" if first else f"error-{jax.process_index()}.txt")
      storage.write_atomically(error, traceback.format_exc())
      raise
    seconds = results.get("seconds", 0.0)
    document = {**asked, "title": module.TITLE, "results": results}
    document["provenance"] = run.provenance(asked["config"], seconds)
    if first:
      storage.write_atomically(path, storage.to_json(document) + "\n")
    return storage.round_trip(document)
