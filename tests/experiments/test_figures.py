"""Figures are legible on light and dark, for every kind of colour vision, and in any company."""

import itertools
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from foliax.experiments import figures

# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
VISION = {
  "normal": np.eye(3),
  "protanopia": np.array([
    [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
    [-0.003882, -0.048116, 1.051998],
  ]),
  "deuteranopia": np.array([
    [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
    [-0.011820, 0.042940, 0.968881],
  ]),
  "tritanopia": np.array([
    [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
    [0.004733, 0.691367, 0.303900],
  ]),
}  # fmt: skip


def _linear(colour):
  c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
  return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def _contrast(a, b):
  low, high = sorted(float(_linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
  return (high + 0.05) / (low + 0.05)


def _lab(rgb):
  xyz = np.array([
    [0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
    [0.0193339, 0.1191920, 0.9503041],
  ]) @ rgb / [0.95047, 1.0, 1.08883]  # fmt: skip
  f = np.where(xyz > 0.008856, np.cbrt(np.maximum(xyz, 1e-9)), 7.787 * xyz + 16 / 116)
  return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("theme", [figures.LIGHT, figures.DARK])
def test_colours_stand_out_from_both_backgrounds(theme):
  for name, colour in figures.PALETTE.items():
    assert _contrast(colour, theme["surface"]) >= 3.0, name
  assert _contrast(theme["text"], theme["surface"]) >= 7.0


@pytest.mark.parametrize("kind", VISION)
def test_colours_stay_apart_for_every_kind_of_colour_vision(kind):
  seen = {n: _lab(np.clip(VISION[kind] @ _linear(c), 0, 1)) for n, c in figures.PALETTE.items()}
  for a, b in itertools.combinations(seen, 2):
    assert np.linalg.norm(seen[a] - seen[b]) > 12, (a, b)


def _figure():
  from matplotlib.figure import Figure

  with figures.style():
    figure = Figure()
    axes = figure.subplots()
    axes.plot([0, 1], [1, 0], "o-", label="line", mec=figures.SURFACE)
    axes.imshow([[0, 1]], extent=(0, 1, 0, 1))
    axes.set(title="title", xlabel="$x_1$")
    axes.legend()
    return figure, figures.svg(figure, "one", 'a "caption" <with> &')


def test_text_and_axes_take_the_colour_of_the_page():
  _, text = _figure()
  assert "currentColor" in text
  assert "var(--surface" in text
  assert figures.FOREGROUND not in text
  black = re.findall(r"(?:fill|stroke): (?:#000000|black)", text)
  assert not black


def test_same_figure_gives_the_same_bytes():
  assert _figure()[1] == _figure()[1]


def test_elements_of_two_figures_share_no_identifier_and_no_style():
  figure, first = _figure()
  second = figures.svg(figure, "two", "caption")
  ids = [set(re.findall(r'\bid="([^"]+)"', text)) for text in (first, second)]
  assert ids[0]
  assert not ids[0] & ids[1]
  for text, own in zip((first, second), ids, strict=True):
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    assert used
    assert used <= own
    assert "<style" not in text


def test_standalone_file_is_well_formed_and_says_what_it_shows():
  root = ET.fromstring(figures.standalone(_figure()[1]))
  assert root.get("aria-label") == 'a "caption" <with> &'
  assert root.get("role") == "img"
  assert "prefers-color-scheme: dark" in "".join(root.itertext())


@pytest.mark.parametrize("name", ["", "1a", "a b", 'a"b', "../a"])
def test_names_that_are_no_identifiers_are_refused(name):
  with pytest.raises(ValueError, match="figure name"):
    figures.svg(_figure()[0], name, "caption")
