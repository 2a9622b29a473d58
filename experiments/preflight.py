"""Compiles every kernel, and what runs at pod scale, for accelerators nobody has to own."""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from foliax.experiments import registry
from foliax.experiments.registry import UserError
from foliax.training import preflight as compiler
from foliax.training import progress

_SCALE = "pod"


def cases(names: Sequence[str]) -> Iterator[tuple[str, Any]]:
  """What to compile, as pairs of owner and `CompileCase`.

  Args:
    names: kernels, experiments and training jobs, by name; all of them when empty.
  Raises:
    UserError: a name is none of these.
  """
  import foliax.kernels_pallas

  modules = {m.name for m in pkgutil.iter_modules(foliax.kernels_pallas.__path__)}
  kernels: dict[str, Callable[[], list[Any]]] = {}
  for name in sorted(modules):
    module = importlib.import_module(f"foliax.kernels_pallas.{name}")
    if hasattr(module, "compile_cases"):
      kernels[name] = module.compile_cases
  known = [*kernels, *registry.EXPERIMENTS, *registry.JOBS]
  for name in names or known:
    if name in kernels:
      yield from ((name, case) for case in kernels[name]())
    elif name in known or "." in name:
      load = registry.load_job if name in registry.JOBS else registry.load
      module = load(name)
      if hasattr(module, "preflight"):
        config = module.get_config(_SCALE)
        yield from ((f"{name}:{_SCALE}", case) for case in module.preflight(config))
    else:
      raise UserError(
        f"unknown kernel, experiment or job {name!r}; {registry.nearest(name, known)}"
      )


def check(found: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
  """Compiles cases for each of their targets.

  Args:
    found: pairs of owner and `CompileCase`.
  Returns:
    One report per case and target: the fields of `foliax.training.preflight.Report`, and `owner`
    and `case`. A case whose compiler is not installed is reported as failing.
  """
  work = [(owner, case, target) for owner, case in found for target in case.targets]
  reports = []
  with progress.progress("preflight", len(work)) as bar:
    for owner, case, target in work:
      try:
        report = compiler.preflight(
          case.function, case.arguments, target, limits=case.limits or {}
        )._asdict()
      except (ModuleNotFoundError, ValueError) as error:
        report = {"target": target, "ok": False, "error": str(error)}
      reports.append({"owner": owner, "case": case.name} | report)
      bar.advance()
  return reports


def show(reports: list[dict[str, Any]]) -> None:
  """Prints reports: a table on a terminal, plain lines elsewhere."""
  rows = [
    (
      f"{r['owner']}: {r['case']}",
      r["target"],
      "✓ compiles" if r["ok"] else "✗ fails",
      _mebibytes(r, "temp_bytes"),
      _mebibytes(r, "device_bytes"),
      f"{r['seconds']:.0f} s" if "seconds" in r else "–",
      ", ".join(f"{n} {kind}" for kind, n in (r.get("collectives") or {}).items()) or "–",
    )
    for r in reports
  ]
  headings = ("case", "target", "", "temp MiB", "of MiB", "time", "collectives")
  if sys.stdout.isatty():
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headings)
    for row in rows:
      style = "green" if row[2].startswith("✓") else "bold red"
      table.add_row(*row[:2], Text(row[2], style), *row[3:])
    Console().print(table)
  else:
    for row in (headings, *rows):
      print("  ".join(cell for cell in row))
  for r in reports:
    if not r["ok"]:
      print(f"{r['owner']}: {r['case']} for {r['target']}: {r['error']}")


def _mebibytes(report: dict[str, Any], field: str) -> str:
  count = report.get(field)
  return "–" if count is None else f"{count / 2**20:.4g}"
