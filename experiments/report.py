"""The page of one run: verdicts with their intervals drawn, figures, configuration, provenance.

Everything is inside the one file; it asks nothing of the network.
"""

import html
import importlib.resources
import json
import math
import string
from typing import Any

from foliax.experiments import storage, verdicts
from foliax.experiments.claims import VERDICTS, Claim
from foliax.training.progress import duration

_MEANING = (
  "Intervals are 95 % confidence intervals. A claim holds when its whole interval lies on the "
  "wanted side of the threshold (shaded), fails when the whole interval lies on the other side, "
  "and is undecided when the interval reaches across."
)
_WIDTH, _HEIGHT, _MARGIN = 272, 58, 12


def page(document: dict[str, Any], drawn: list[tuple[str, str, str]]) -> str:
  """The report of a finished run.

  Args:
    document: the content of `results.json`.
    drawn: name, caption and `<svg>` element of each figure, in order.
  Returns:
    A complete HTML page.
  """
  claims = verdicts.claims_of(document)
  origin = document["provenance"]
  body = [
    f"<h1>{text(document['title'])}</h1>",
    facts(document),
    f'<p class="lead">{text(_sentence(claims))}</p>',
    bar(claims),
    '<section aria-labelledby="claims"><h2 id="claims">Claims</h2>',
    f'<p class="note">{_MEANING}</p>' if claims else "",
    f'<ul class="claims">{"".join(_claim(c) for c in claims)}</ul></section>',
  ]
  if drawn:
    body.append('<section aria-labelledby="figures"><h2 id="figures">Figures</h2>')
    body += [_figure(i, *figure) for i, figure in enumerate(drawn, 1)]
    body.append("</section>")
  body += [
    '<section aria-labelledby="configuration"><h2 id="configuration">Configuration</h2>',
    f'<p class="note">Repeat with <code>foliax run {text(document["method"])}:'
    f"{text(document['scale'])}</code>; the measured numbers are in <code>results.json</code> "
    "beside this page.</p>",
    _table(storage.flatten(document["config"])),
    '</section><section aria-labelledby="provenance"><h2 id="provenance">Provenance</h2>',
    _table(origin),
    "</section>",
  ]
  return shell(f"{document['title']} · foliax", "\n".join(body))


def shell(title: str, body: str) -> str:
  """A complete page around `body`, with style and script inside it."""
  parts = importlib.resources.files("foliax.experiments")
  return string.Template(parts.joinpath("page.html").read_text(encoding="utf-8")).substitute(
    title=text(title),
    style=parts.joinpath("page.css").read_text(encoding="utf-8"),
    script=parts.joinpath("page.js").read_text(encoding="utf-8"),
    body=body,
    footer="foliax: research methods as pure functions, and the experiments that could refute them",
  )


def facts(document: dict[str, Any]) -> str:
  """One line: which method, at which scale, from which paper, when, how long."""
  origin = document["provenance"]
  parts = [f"<code>{text(document['method'])}:{text(document['scale'])}</code>"]
  if paper := document["paper"]:
    parts.append(f'<a href="https://arxiv.org/abs/{text(paper)}">arXiv {text(paper)}</a>')
  parts.append(f'<time datetime="{text(origin["date"])}">{text(origin["date"][:10])}</time>')
  parts.append(text(duration(origin["wall_seconds"])))
  return f'<p class="facts">{"".join(f"<span>{part}</span>" for part in parts)}</p>'


def bar(claims: list[Claim]) -> str:
  """One block per claim, grouped by verdict; failing ones stand taller."""
  blocks = [f'<i class="{css_class(v)}"></i>' for v in VERDICTS for c in claims if c.verdict == v]
  return (
    f'<div class="bar" role="img" aria-label="{verdicts.tally(claims)}">{"".join(blocks)}</div>'
  )


def badge(verdict: str) -> str:
  """The verdict as a word with its mark."""
  return f'<span class="badge {css_class(verdict)}">{verdicts.MARKS[verdict]} {verdict}</span>'


def css_class(verdict: str) -> str:
  """Name of the CSS class that carries the colours of a verdict."""
  return verdict.replace(" ", "-")


def text(value: Any) -> str:
  """A value as text of a page, with the characters that HTML reserves escaped."""
  return html.escape(str(value))


def _sentence(claims: list[Claim]) -> str:
  if not claims:
    return "This experiment states no claims."
  held = sum(c.verdict == "holds" for c in claims)
  if held == len(claims):
    return f"All {held} claims hold." if held > 1 else "The one claim holds."
  return f"Of {len(claims)} claim{'s' if len(claims) > 1 else ''}: {verdicts.tally(claims)}."


def _claim(claim: Claim) -> str:
  # The drawing has the threshold written on it.
  numbers = verdicts.measured(claim.statistic) if claim.statistic else verdicts.comparison(claim)
  note = f'<p class="note">{text(claim.note)}</p>' if claim.note else ""
  return (
    f'<li class="claim {css_class(claim.verdict)}"><div>{badge(claim.verdict)}'
    f'<span class="id">{text(claim.id)}</span><p>{text(claim.sentence)}</p>{note}</div>'
    f'<div>{_interval(claim)}<span class="numbers">{text(numbers)}</span></div>'
    "</li>\n"
  )


def _interval(claim: Claim) -> str:
  if claim.statistic is None:
    return ""
  value, low, high = claim.statistic
  finite = [x for x in (value, low, high, claim.threshold) if math.isfinite(x)]
  span = (max(finite) - min(finite)) or max(abs(claim.threshold), 1.0)
  start, stop = min(finite) - 0.12 * span, max(finite) + 0.12 * span

  def x(v: float) -> float:
    return _MARGIN + (min(max(v, start), stop) - start) / (stop - start) * (_WIDTH - 2 * _MARGIN)

  at, y = x(claim.threshold), 22
  wanted_from, wanted_to = (0, at) if claim.relation in ("<=", "<") else (at, _WIDTH)
  ends = [
    f'<path class="open" d="M{edge:.1f} {y} l{-step} -6 v12 z"/>'
    for bound, edge, step in ((low, 2, -9), (high, _WIDTH - 2, 9))
    if not math.isfinite(bound)
  ]
  left, right = (x(low) if math.isfinite(low) else 9), (x(high) if math.isfinite(high) else 263)
  label_at = min(max(at, 34), _WIDTH - 34)
  return (
    f'<svg class="interval" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
    f'aria-label="Interval {text(verdicts.measured(claim.statistic))} against the threshold '
    f'{text(verdicts.number(claim.threshold))}">'
    f'<rect class="right" x="{wanted_from:.1f}" y="4" width="{wanted_to - wanted_from:.1f}" '
    'height="36" rx="3"/>'
    f'<line class="axis" x1="0" x2="{_WIDTH}" y1="{y}" y2="{y}"/>'
    f'<line class="range" x1="{left:.1f}" x2="{max(right, left + 0.1):.1f}" y1="{y}" y2="{y}"/>'
    f'{"".join(ends)}<line class="threshold" x1="{at:.1f}" x2="{at:.1f}" y1="2" y2="42"/>'
    f'<circle class="dot" cx="{x(value):.1f}" cy="{y}" r="4.5"/>'
    f'<text x="{label_at:.1f}" y="54" text-anchor="middle">{text(verdicts.wanted(claim))}</text>'
    "</svg>"
  )


def _figure(index: int, name: str, caption: str, element: str) -> str:
  return (
    f'<figure id="figure-{text(name)}"><div class="sheet" tabindex="0">{element}</div>'
    f"<figcaption><b>Figure {index}.</b> {text(caption)}</figcaption></figure>"
  )


def _table(values: dict[str, Any]) -> str:
  rows = "".join(f"<dt>{text(k)}</dt><dd>{text(_value(v))}</dd>" for k, v in values.items())
  return f'<dl class="table">{rows}</dl>'


def _value(value: Any) -> str:
  if isinstance(value, dict):
    return ", ".join(f"{k} {_value(v)}" for k, v in value.items())
  return value if isinstance(value, str) and value else json.dumps(value)
