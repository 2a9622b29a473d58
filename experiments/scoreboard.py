"""The scoreboard over all committed results: a table in the README, and a page."""

import pathlib
import shutil
from typing import Any

from foliax.experiments import report, run, verdicts
from foliax.experiments.claims import VERDICTS
from foliax.experiments.registry import UserError

BEGIN = "<!-- scoreboard: written by `foliax scoreboard` from results/ -->"
END = "<!-- /scoreboard -->"


def load(folder: pathlib.Path) -> list[dict[str, Any]]:
  """All results documents of a folder, by method.

  Raises:
    UserError: a file is damaged.
  """
  documents = []
  for path in sorted(folder.glob("*.json")):
    document = run.finished(path.parent, path.name)
    if document is None:
      raise UserError(f"{path} is no results file; copy one with foliax scoreboard --add RUNDIR")
    documents.append(document)
  return documents


def table(documents: list[dict[str, Any]]) -> str:
  """The table in Markdown: one row per method, each claim's id under its verdict."""
  rows = [
    "| method | ✓ holds | ✗ fails | ? undecided | – not measured | measured |",
    "| --- | --- | --- | --- | --- | --- |",
  ]
  for document in documents:
    claims = verdicts.claims_of(document)
    cells = [" ".join(c.id for c in claims if c.verdict == v) for v in VERDICTS]
    cells[1] = f"**{cells[1]}**" if cells[1] else ""
    paper = document["paper"]
    link = f" ([paper](https://arxiv.org/abs/{paper}))" if paper else ""
    name = f"[{_cell(document['title'])}](results/{_stem(document)}){link}"
    origin = document["provenance"]
    when = f"{document['scale']}, {origin['date'][:10]}"
    rows.append(f"| {name} | {' | '.join(cells)} | {when} |")
  return "\n".join(rows)


def insert(readme: str, documents: list[dict[str, Any]]) -> str:
  """The README with its table replaced.

  Raises:
    UserError: the README lacks the pair of markers.
  """
  if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
    raise UserError(f"README.md must have one line {BEGIN} and, below it, one line {END}")
  before, rest = readme.split(BEGIN)
  return f"{before}{BEGIN}\n{table(documents)}\n{END}{rest.split(END)[1]}"


def add(rundir: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """Copies the results of a finished run to where the scoreboard reads them.

  Raises:
    UserError: the run is not finished.
  """
  document = run.finished(rundir)
  if document is None:
    raise UserError(f"{rundir} holds no finished run; give the --workdir of one")
  path = folder / _stem(document)
  folder.mkdir(parents=True, exist_ok=True)
  shutil.copyfile(rundir / "results.json", path)
  return path


def page(documents: list[dict[str, Any]]) -> str:
  """The scoreboard as a page: every method with every claim, failing ones first."""
  claims = [c for document in documents for c in verdicts.claims_of(document)]
  methods = f"{len(documents)} method{'s' if len(documents) != 1 else ''}"
  body = [
    "<h1>Scoreboard</h1>",
    f'<p class="lead">{methods}, {len(claims)} claims: {verdicts.tally(claims)}.</p>',
    report.bar(claims),
    '<section aria-labelledby="methods"><h2 id="methods">Methods</h2>',
    *(_method(document) for document in documents),
    "</section>",
  ]
  return report.shell("Scoreboard · foliax", "\n".join(body))


def _method(document: dict[str, Any]) -> str:
  claims = verdicts.claims_of(document)
  order = ("fails", "undecided", "not measured", "holds")
  items = "".join(
    f"<li><span>{report.badge(c.verdict)}</span><span>{report.text(c.sentence)}"
    f'<span class="numbers">{report.text(c.id)}: {report.text(verdicts.comparison(c))}'
    f"{report.text(f' ({c.note})' if c.note else '')}</span></span></li>"
    for c in sorted(claims, key=lambda c: order.index(c.verdict))
  )
  return (
    f'<article class="method"><h3>{report.text(document["title"])}</h3>{report.facts(document)}'
    f"{report.bar(claims)}<ul>{items}</ul></article>"
  )


def _stem(document: dict[str, Any]) -> str:
  return f"{document['method'].rpartition('.')[2]}.json"


def _cell(text: str) -> str:
  return text.replace("|", "\\|").replace("[", "\\[").replace("]", "\\]")
