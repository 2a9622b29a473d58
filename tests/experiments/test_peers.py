"""Peer optimisers: they optimise, report time of their own, and fail with words."""

import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from foliax.experiments import peer_server, peers

HERE = ("cma", "optuna-tpe")


def cone(x):
  return 1.0 - float(np.linalg.norm(np.asarray(x) - 0.3))


@pytest.fixture
def fake_server(monkeypatch, tmp_path):
  """Replaces the server script by one with the given body."""

  def replace(body):
    script = tmp_path / "server.py"
    script.write_text(textwrap.dedent(body))
    monkeypatch.setattr(peer_server, "__file__", str(script))

  return replace


def torch_python():
  python = peers.peers_python()
  if python is None:
    pytest.skip("no peers environment: set FOLIAX_PEERS_PYTHON or make .venv-peers")
  return python


def search(peer, dim, calls, objective=cone):
  xs = []
  for _ in range(calls):
    xs.append(list(peer.ask()))
    peer.tell(xs[-1], objective(xs[-1]))
  assert np.shape(xs) == (calls, dim)
  assert np.min(xs) >= 0
  assert np.max(xs) <= 1
  return xs


@pytest.mark.parametrize("name", HERE)
def test_optimisers_find_the_maximum(name):
  xs = search(peers.in_process(name, 2, 0), 2, 100)
  assert max(map(cone, xs)) > 0.95
  assert np.mean([cone(x) for x in xs[60:]]) > np.mean([cone(x) for x in xs[:30]])


@pytest.mark.parametrize("name", HERE)
def test_a_process_gives_the_points_of_the_same_optimiser_in_process(name):
  with peers.PeerProcess(sys.executable, name, 3, 5) as process:
    apart = search(process, 3, 25)
    assert 0 < process.seconds < process.total_seconds < 60
  assert apart == search(peers.in_process(name, 3, 5), 3, 25)
  assert apart != search(peers.in_process(name, 3, 6), 3, 25)


@pytest.mark.parametrize("name", HERE)
def test_seed_zero_is_a_seed(name):
  assert search(peers.in_process(name, 2, 0), 2, 8) == search(peers.in_process(name, 2, 0), 2, 8)


@pytest.mark.parametrize("name", HERE)
def test_failed_evaluations_are_spent_calls(name):
  broken = lambda x: cone(x) if x[0] < 0.5 else float("nan")
  with peers.PeerProcess(sys.executable, name, 2, 0) as process:
    xs = search(process, 2, 60, broken)
  # CMA-ES ranks them last; TPE leaves them out and goes on.
  if name == "cma":
    assert np.mean([x[0] < 0.5 for x in xs[40:]]) > 0.5
  assert max(x[0] for x in xs) >= 0.5


@pytest.mark.parametrize("name", HERE)
def test_preloaded_observations_guide_the_search(name):
  rng = np.random.default_rng(0)
  xs = np.clip(0.3 + 0.1 * rng.normal(size=(200, 2)), 0, 1)
  peer = peers.in_process(name, 2, 0)
  peer.preload(xs.tolist(), [*map(cone, xs[:-1]), None])
  after = search(peer, 2, 12)
  fresh = search(peers.in_process(name, 2, 0), 2, 12)
  assert np.mean([cone(x) for x in after]) > np.mean([cone(x) for x in fresh])


def test_the_server_imports_nothing_of_foliax_and_nothing_heavy():
  source = pathlib.Path(peer_server.__file__).read_text()
  code = "import sys; import runpy; runpy.run_path(sys.argv[1]); print(*sys.modules)"
  loaded = subprocess.run(
    [sys.executable, "-P", "-c", code, peer_server.__file__],
    capture_output=True,
    text=True,
    check=True,
  ).stdout.split()
  assert "import foliax" not in source
  assert not {"foliax", "jax", "torch", "cma", "optuna", "numpy"} & set(loaded)


def test_unknown_names_are_refused():
  with pytest.raises(ValueError, match="botorch-qnei"):
    peers.in_process("annealing", 2, 0)
  with pytest.raises(ValueError, match="cma"):
    peers.PeerProcess(sys.executable, "annealing", 2, 0)
  with pytest.raises(ValueError, match="PeerProcess"):
    peers.in_process("botorch-qnei", 2, 0)


def test_a_missing_library_names_the_extra(fake_server):
  fake_server("""
    import json
    for line in iter(input, None):
      print(json.dumps({"error": "No module named 'botorch'", "missing": "botorch"}), flush=True)
  """)
  with pytest.raises(ModuleNotFoundError, match=r"botorch is not installed.*foliax\[peers\]"):
    peers.PeerProcess(sys.executable, "botorch-qnei", 2, 0)


def test_a_silent_process_is_ended_at_the_time_limit(fake_server):
  fake_server("import time; time.sleep(60)")
  with pytest.raises(TimeoutError, match=r"did not answer start in 0.3 s"):
    peers.PeerProcess(sys.executable, "cma", 2, 0, timeout_seconds=0.3)


def test_a_dead_process_gives_its_last_words(fake_server):
  fake_server("raise SystemExit('out of luck')")
  with pytest.raises(RuntimeError, match=r"exit code 1 \(out of luck\)"):
    peers.PeerProcess(sys.executable, "cma", 2, 0)


def test_an_error_in_the_optimiser_is_reported_and_closing_twice_is_fine():
  with peers.PeerProcess(sys.executable, "optuna-tpe", 2, 0) as process:
    with pytest.raises(RuntimeError, match="zip"):
      process.preload([[0.1, 0.2, 0.3]], [1.0])
    assert len(process.ask()) == 2
  process.close()
  with pytest.raises(RuntimeError, match="closed"):
    process.ask()


def test_the_peers_interpreter_is_found_by_the_environment_variable(monkeypatch, tmp_path):
  monkeypatch.setenv("FOLIAX_PEERS_PYTHON", sys.executable)
  assert peers.peers_python() == pathlib.Path(sys.executable)
  monkeypatch.setenv("FOLIAX_PEERS_PYTHON", str(tmp_path / "nothing"))
  with pytest.raises(ValueError, match="names no file"):
    peers.peers_python()
  monkeypatch.delenv("FOLIAX_PEERS_PYTHON")
  monkeypatch.setattr(peers, "__file__", str(tmp_path / "experiments" / "peers.py"))
  monkeypatch.chdir(tmp_path)
  assert peers.peers_python() is None
  (tmp_path / ".venv-peers" / "bin").mkdir(parents=True)
  (tmp_path / ".venv-peers" / "bin" / "python").touch()
  assert peers.peers_python() == tmp_path / ".venv-peers" / "bin" / "python"


def test_round_robin_alternates_and_leaves_out_the_warm_up():
  order = []

  def contestant(name):
    def call():
      order.append(name)
      return float(len(order))

    return call

  samples = peers.round_robin({"a": contestant("a"), "b": contestant("b")}, repeats=3, warm_up=1)
  assert "".join(order) == "ab" * 4
  assert samples == {"a": [3.0, 5.0, 7.0], "b": [4.0, 6.0, 8.0]}


def test_timing_returns_samples_of_every_peer_and_of_our_own():
  samples = peers.ask_tell_seconds(
    {"own": lambda: 0.125}, cone, names=HERE, dim=3, count=40, repeats=3
  )
  assert samples["own"] == [0.125] * 3
  for name in HERE:
    assert len(samples[name]) == 3
    assert min(samples[name]) > 0


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.parametrize("name", peers.NEEDS_TORCH)
def test_botorch_finds_the_maximum(name):
  smooth = lambda x: -float(np.sum((np.asarray(x) - 0.3) ** 2))
  with peers.PeerProcess(torch_python(), name, 2, 0) as process:
    xs = search(process, 2, 16, smooth)
    process.tell([0.5, 0.5], None)
  assert max(map(smooth, xs)) > -0.01


@pytest.mark.peers
@pytest.mark.slow
def test_turbo_restarts_after_its_region_has_shrunk_away():
  flat = lambda x: 0.0
  with peers.PeerProcess(torch_python(), "botorch-turbo", 1, 0) as process:
    # From side 0.8, seven halvings of four failures each end below 0.5^7.
    xs = search(process, 1, 2 + 7 * 4 + 2, flat)
  # The last two are Sobol points of a restart, and no longer crowd around one point.
  assert abs(xs[-1][0] - xs[-2][0]) > 0.05
