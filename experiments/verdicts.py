"""Verdicts in words and tables, the same on the terminal, in the report and on the scoreboard."""

import math
import sys
from collections import Counter
from typing import Any

from foliax.experiments.claims import VERDICTS, Claim, Interval

MARKS = {"holds": "✓", "fails": "✗", "undecided": "?", "not measured": "–"}
_COLOURS = {"holds": "green", "fails": "bold red", "undecided": "yellow", "not measured": "dim"}
_RELATIONS = {"<=": "≤", ">=": "≥", "<": "<", ">": ">"}


def number(x: float | int) -> str:
  """Three significant digits, without an exponent where none is needed."""
  if x == 0 or not math.isfinite(x):
    return {math.inf: "∞", -math.inf: "−∞"}.get(x, "0" if x == 0 else "nan")
  text = f"{x:.3g}" if 1e-3 <= abs(x) < 1000 else f"{x:.0f}" if 1e3 <= abs(x) < 1e5 else f"{x:.2e}"
  return text.replace("-", "−")


def measured(interval: Interval | None) -> str:
  """`0.12 [0.1, 0.15]`, or a dash."""
  if interval is None:
    return "–"
  return f"{number(interval.value)} [{number(interval.low)}, {number(interval.high)}]"


def wanted(claim: Claim) -> str:
  """`≤ 0.5`, kept on one line."""
  return f"{_RELATIONS[claim.relation]}\N{NO-BREAK SPACE}{number(claim.threshold)}"


def comparison(claim: Claim) -> str:
  """`0.12 [0.1, 0.15], wanted ≤ 0.5`; what was measured is left out when nothing was."""
  value = "" if claim.statistic is None else f"{measured(claim.statistic)}, "
  return f"{value}wanted {wanted(claim)}"


def claims_of(document: dict[str, Any]) -> list[Claim]:
  """The claims of a results document."""
  return [Claim.from_dict(fields) for fields in document["claims"]]


def tally(claims: list[Claim]) -> str:
  """`5 hold, 1 fails, 2 undecided`; what does not occur is left out."""
  counts = Counter(c.verdict for c in claims)
  words = {"holds": ("holds", "hold"), "fails": ("fails", "fail")}
  parts = [f"{counts[v]} {words.get(v, (v, v))[counts[v] != 1]}" for v in VERDICTS if counts[v]]
  return ", ".join(parts) or "no claims"


def show(documents: list[dict[str, Any]]) -> None:
  """Prints the verdicts of finished runs: a table on a terminal, plain lines elsewhere."""
  if sys.stdout.isatty():
    _show_table(documents)
    return
  for document in documents:
    claims = claims_of(document)
    print(f"{document['method']}:{document['scale']}: {tally(claims)}")
    for c in claims:
      line = f"  {MARKS[c.verdict]} {c.verdict:<12}  {c.id:<4} {measured(c.statistic)} {wanted(c)}"
      print(f"{line}  {c.sentence}" + (f" ({c.note})" if c.note else ""))


def _show_table(documents: list[dict[str, Any]]) -> None:
  from rich.console import Console
  from rich.table import Table
  from rich.text import Text

  for document in documents:
    claims = claims_of(document)
    name = f"{document['method']}:{document['scale']}"
    table = Table(title=f"{name}: {tally(claims)}", title_justify="left", expand=True)
    for column in ("", "claim", "measured [95 %]", "wanted", "verdict"):
      table.add_column(column, ratio=1 if column == "claim" else None)
    for c in claims:
      verdict = Text(f"{MARKS[c.verdict]} {c.verdict}", _COLOURS[c.verdict])
      sentence = Text(c.sentence + (f" ({c.note})" if c.note else ""))
      table.add_row(c.id, sentence, measured(c.statistic), wanted(c), verdict)
    Console().print(table)
