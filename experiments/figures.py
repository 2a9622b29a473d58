"""How figures look: one palette, one style, and SVG that follows the theme of the page around it.

The colours have a contrast of at least 3 to 1 against both page backgrounds and stay apart for
people with protanopia, deuteranopia or tritanopia; lines differ in dash as well. Text, axes and
ticks take the colour of the surrounding text.
"""

import contextlib
import html
import io
import re
from collections.abc import Iterator
from typing import Any

from foliax import extras

PALETTE = {
  "blue": "#1f6bd0",
  "orange": "#de7a12",
  "green": "#0e8a63",
  "magenta": "#c42a98",
  "violet": "#9b82f2",
  "brown": "#9a6b1f",
  "grey": "#808790",
}
# Stand-ins that matplotlib can draw with; `svg` turns them into the colours of the page.
FOREGROUND = "#1f2429"
SURFACE = "#fdfcfe"
LIGHT = {"surface": "#ffffff", "text": "#1d2126"}
DARK = {"surface": "#171a20", "text": "#e4e7eb"}
_DASHES = ["-", "--", "-.", (0, (1, 1.2)), (0, (5, 1, 1, 1, 1, 1)), (0, (7, 2)), "-"]
_FONT = "var(--figure-font, system-ui, 'Helvetica Neue', Arial, sans-serif)"


@contextlib.contextmanager
def style() -> Iterator[None]:
  """The matplotlib style of every figure; the runner draws an experiment's figures inside it."""
  matplotlib = extras.require("matplotlib", "experiments")
  cycler = extras.require("cycler", "experiments")
  lines = cycler.cycler(color=list(PALETTE.values())) + cycler.cycler(linestyle=_DASHES)
  with matplotlib.rc_context(
    {
      "axes.axisbelow": True,
      "axes.edgecolor": FOREGROUND,
      "axes.facecolor": "none",
      "axes.grid": True,
      "axes.labelcolor": FOREGROUND,
      "axes.prop_cycle": lines,
      "axes.spines.right": False,
      "axes.spines.top": False,
      "axes.titlelocation": "left",
      "axes.titlesize": 11,
      "axes.titleweight": "bold",
      "figure.constrained_layout.use": True,
      "figure.dpi": 100,
      "figure.facecolor": "none",
      "figure.figsize": (7.6, 3.8),
      "font.size": 10,
      "grid.alpha": 0.13,
      "grid.color": FOREGROUND,
      "grid.linewidth": 0.8,
      "image.cmap": "viridis",
      "legend.frameon": False,
      "lines.linewidth": 1.8,
      "patch.edgecolor": SURFACE,
      "savefig.facecolor": "none",
      "text.color": FOREGROUND,
      "xtick.color": FOREGROUND,
      "ytick.color": FOREGROUND,
    }
  ):
    yield


def svg(figure: Any, name: str, caption: str) -> str:
  """Draws a figure as an `<svg>` element to stand inside a page, many to a page.

  The same figure gives the same text, byte for byte.

  Args:
    figure: a `matplotlib.figure.Figure`.
    name: identifier of the figure, unique in the page: letters, digits and `_-`.
    caption: what the figure shows, read out by screen readers.
  Returns:
    The element. It takes its colours from `currentColor` and the CSS variable `--surface`.
  Raises:
    ValueError: the name cannot be an identifier.
  """
  if not re.fullmatch(r"[A-Za-z][\w-]*", name):
    raise ValueError(f"figure name {name!r} must be letters, digits and _-, starting with a letter")
  matplotlib = extras.require("matplotlib", "experiments")
  stream = io.StringIO()
  with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
  text = stream.getvalue()
  text = text[text.index("<svg") :]
  # matplotlib's style sheet would apply to the whole page; its two rules fit into an attribute.
  text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)
  text = re.sub(r"<metadata>.*?</metadata>", "", text, count=1, flags=re.DOTALL)
  text = re.sub(r'\bid="', f'id="{name}-', text)
  text = re.sub(r'href="#', f'href="#{name}-', text)
  text = re.sub(r"url\(#", f"url(#{name}-", text)
  text = text.replace(FOREGROUND, "currentColor").replace(SURFACE, "var(--surface, Canvas)")
  text = text.replace("font: bold ", "font: 600 ")
  text = re.sub(r"(font: [^;\"]*?px )[^;\"]+", rf"\g<1>{_FONT}", text)
  text = re.sub(r"font-family: [^;\"]+", f"font-family: {_FONT}", text)
  head = (
    f'<svg role="img" aria-label="{html.escape(caption)}" '
    'style="stroke-linejoin: round; stroke-linecap: butt" '
  )
  return text.replace("<svg ", head, 1).strip() + "\n"


def standalone(element: str) -> str:
  """An `svg` element as a file of its own, dark where the reader's system is dark."""
  light, dark = (
    f"svg {{ color: {theme['text']}; --surface: {theme['surface']}; background: var(--surface) }}"
    for theme in (LIGHT, DARK)
  )
  sheet = f"<style>{light} @media (prefers-color-scheme: dark) {{ {dark} }}</style>"
  end = element.index(">") + 1
  return f'<?xml version="1.0" encoding="utf-8"?>\n{element[:end]}\n{sheet}{element[end:]}'
