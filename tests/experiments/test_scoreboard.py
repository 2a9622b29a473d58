"""The README's table says what results/ says, failing claims included."""

import json

import pytest
from foliax.experiments import claims, cli, report, scoreboard, verdicts


def _document(method="cgp", verdict_of=(("R1", 2.0), ("R2", -2.0), ("R3", 0.0)), title="A | [b]"):
  stated = [
    claims.claim(id, f"{id} <b> is & above zero", claims.Interval(v, v - 1, v + 1), ">", 0)
    for id, v in verdict_of
  ] + [claims.claim("R4", "unknown", None, ">", 0, note="no peer <here>")]
  return {
    "method": method,
    "scale": "laptop",
    "title": title,
    "paper": "2601.20231",
    "config": {"seeds": 3, "nested": {"a": [1, 2]}, "empty": {}},
    "claims": [c.as_dict() for c in stated],
    "results": {},
    "provenance": {"date": "2026-02-03T04:05:06+00:00", "wall_seconds": 75.0, "commit": None},
  }


@pytest.fixture
def root(tmp_path):
  (tmp_path / "results").mkdir()
  (tmp_path / "results" / "cgp.json").write_text(json.dumps(_document()))
  readme = f"# Title\n\n{scoreboard.BEGIN}\nstale\n{scoreboard.END}\nrest\n"
  (tmp_path / "README.md").write_text(readme)
  return tmp_path


def test_table_shows_every_claim_under_its_verdict(root):
  assert cli.main(["scoreboard", f"--root={root}"]) == 0
  readme = (root / "README.md").read_text()
  assert readme.startswith("# Title\n\n")
  assert readme.endswith(f"{scoreboard.END}\nrest\n")
  assert "stale" not in readme
  row = next(line for line in readme.splitlines() if "results/cgp.json" in line)
  assert row.replace("\\|", "").split("|")[2:6] == [" R1 ", " **R2** ", " R3 ", " R4 "]
  assert "laptop, 2026-02-03" in row


def test_check_notices_results_that_the_readme_lacks(root, capsys):
  check = ["scoreboard", "--check", f"--root={root}"]
  before = (root / "README.md").read_text()
  assert cli.main(check) == 1
  assert "out of step" in capsys.readouterr().err
  assert (root / "README.md").read_text() == before
  assert cli.main(check[:1] + check[2:]) == 0
  assert cli.main(check) == 0
  (root / "results" / "other.json").write_text(json.dumps(_document("other")))
  assert cli.main(check) == 1


def test_add_copies_a_finished_run(root):
  rundir = root / "run"
  rundir.mkdir()
  (rundir / "results.json").write_text(json.dumps(_document("pkg.newer")))
  assert cli.main(["scoreboard", f"--add={rundir}", f"--root={root}"]) == 0
  assert json.loads((root / "results" / "newer.json").read_text())["method"] == "pkg.newer"
  assert "results/newer.json" in (root / "README.md").read_text()


@pytest.mark.parametrize(
  ("readme", "message"), [("# no markers", "must have one line"), (None, "there is no")]
)
def test_readme_without_markers_is_refused(root, capsys, readme, message):
  (root / "README.md").unlink()
  if readme is not None:
    (root / "README.md").write_text(readme)
  assert cli.main(["scoreboard", f"--root={root}"]) == 2
  assert message in capsys.readouterr().err


def test_damaged_results_are_refused_by_name(root, capsys):
  (root / "results" / "cgp.json").write_text("{")
  assert cli.main(["scoreboard", f"--root={root}"]) == 2
  assert "cgp.json is no results file" in capsys.readouterr().err


def test_pages_escape_what_experiments_write(root):
  text = scoreboard.page([_document(title="<script>alert(1)</script>")])
  assert "<script>alert" not in text
  assert "R2 &lt;b&gt; is &amp; above zero" in text
  assert "no peer &lt;here&gt;" in report.page(_document(), [])


def test_failing_claims_come_first_on_the_page():
  text = scoreboard.page([_document()])
  positions = [text.index(f"{i} &lt;b&gt;") for i in ("R2", "R3", "R1")]
  assert positions == sorted(positions)
  assert "1 holds, 1 fails, 1 undecided, 1 not measured" in text


def test_pages_ask_nothing_of_the_network():
  for text in (scoreboard.page([_document()]), report.page(_document(), [])):
    linked = text.replace("http://www.w3.org/", "").replace("https://arxiv.org/abs/", "")
    assert "http:" not in linked
    assert "https:" not in linked
    assert "@import" not in text


def test_page_of_no_results_and_of_no_claims_still_reads():
  assert "0 methods, 0 claims: no claims." in scoreboard.page([])
  assert "states no claims" in report.page(_document() | {"claims": []}, [])


@pytest.mark.parametrize(
  ("x", "text"),
  [
    (0, "0"), (0.12345, "0.123"), (-3.0, "−3"), (1234.5, "1234"), (2.5e-7, "2.50e−07"),
    (float("inf"), "∞"), (float("-inf"), "−∞"), (99999.0, "99999"), (1e7, "1.00e+07"),
  ],
)  # fmt: skip
def test_numbers_have_three_digits(x, text):
  assert verdicts.number(x) == text
