"""Test functions for black-box search: maximisation on the unit cube, with what is known of them.

The paper of certificate-guided pruning (arXiv 2601.20231) counts twelve benchmarks. `PAPER` names
the seven that are public formulas, `UNAVAILABLE` says why the others are not functions here.
Domains, scaling and, for Rosenbrock and Levy, the dimension are our choice: the paper's are not
public.

Every function takes points of shape `[*batch, d]` in [0,1]^d and returns values `[*batch]`. Those
that are minimised in the literature are negated and divided by the largest value they take on the
box (Ackley: by a bound on it), so that values lie in [-1, 0] and a noise level means the same
everywhere. `Benchmark.lipschitz` is a proven bound in the Euclidean norm, or None.
"""

import difflib
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

NEEDLE = (0.31, 0.67)
PAPER = ("needle", "branin", "rosenbrock-2", "levy-5", "hartmann-6", "ackley-10", "rover-60")
UNAVAILABLE = {
  "svm": "measured, not a formula: the real tuning tasks are in foliax.experiments.tuning",
  "nas-36": "needs a table of trained architectures; which one is not public",
  "ant-100": "needs a physics simulator; the policy class and the reward are not public",
  "eleventh": "counted by the paper, named in no public text",
  "twelfth": "counted by the paper, named in no public text",
}


class Benchmark(NamedTuple):
  """A function to maximise on [0,1]^dim and what is known of it."""

  name: str
  dim: int
  function: Callable[[Float[Array, "*batch d"]], Float[Array, "*batch"]]
  optimum: float | None  # largest value; None where it is not known
  optimiser: np.ndarray | None  # [k, dim], every point that attains it
  lipschitz: float | None  # proven upper bound; None for a function that jumps
  source: str


def _norm(difference):
  squared = jnp.sum(difference**2, -1)
  return jnp.where(squared > 0, jnp.sqrt(jnp.where(squared > 0, squared, 1.0)), 0.0)


def cone(dim: int) -> Benchmark:
  """1 - ||x - c|| with c alternating .31, .67; {f >= f* - e} is a ball of radius e."""
  centre = np.resize(NEEDLE, dim)
  return Benchmark(
    f"cone-{dim}", dim, lambda x: 1.0 - _norm(x - centre), 1.0, centre[None], 1.0, "our choice"
  )


def needle() -> Benchmark:
  """The cone in two dimensions, Needle-2D."""
  return cone(2)._replace(name="needle", source="named in arXiv 2601.20231; formula our choice")


def wavy() -> Benchmark:
  """0.5 exp(-8 ||x - (.7, .3)||^2) + 0.25 cos 9x cos 7y: several local maxima."""

  def function(x):
    bump = jnp.exp(-8.0 * ((x[..., 0] - 0.7) ** 2 + (x[..., 1] - 0.3) ** 2))
    return 0.5 * bump + 0.25 * jnp.cos(9.0 * x[..., 0]) * jnp.cos(7.0 * x[..., 1])

  optimiser = np.array([[0.69865163, 0.10301089]])
  return Benchmark("wavy", 2, function, 0.55432953, optimiser, 3.3, "our choice")


def branin() -> Benchmark:
  """Branin on [-5, 10] x [0, 15], negated, divided by 308.13; three maximisers."""

  def function(x):
    a, b = 15.0 * x[..., 0] - 5.0, 15.0 * x[..., 1]
    parabola = b - 5.1 / (4.0 * math.pi**2) * a**2 + 5.0 / math.pi * a - 6.0
    value = parabola**2 + 10.0 * (1.0 - 1.0 / (8.0 * math.pi)) * jnp.cos(a) + 10.0
    return -value / 308.13

  raw = np.array([[-math.pi, 12.275], [math.pi, 2.275], [3.0 * math.pi, 2.475]])
  optimiser = (raw + np.array([5.0, 0.0])) / 15.0
  source = "Dixon & Szego 1978, Towards Global Optimization 2"
  return Benchmark("branin", 2, function, -0.39788736 / 308.13, optimiser, 6.0, source)


def rosenbrock(dim: int) -> Benchmark:
  """Rosenbrock on [-2.048, 2.048]^d, negated, divided by its largest value; maximiser at 1."""
  side = 2.048
  corner = side + side**2
  largest = (100.0 * corner**2 + (1.0 + side) ** 2) * (dim - 1)

  def function(x):
    z = side * (2.0 * x - 1.0)
    head, tail = z[..., :-1], z[..., 1:]
    return -jnp.sum(100.0 * (tail - head**2) ** 2 + (1.0 - head) ** 2, -1) / largest

  # Largest modulus of a term's derivative by its first and its second coordinate, at a corner.
  first, second = 400.0 * side * corner + 2.0 * (1.0 + side), 200.0 * corner
  slope = math.sqrt(first**2 + (dim - 2) * (first + second) ** 2 + second**2)
  return Benchmark(
    f"rosenbrock-{dim}",
    dim,
    function,
    0.0,
    np.full((1, dim), 0.5 + 0.5 / side),
    2.0 * side * slope / largest,
    "Rosenbrock 1960, The Computer Journal 3; box as in De Jong 1975",
  )


def levy(dim: int) -> Benchmark:
  """Levy on [-10, 10]^d, negated, divided by its largest value; maximiser at 1."""
  # A sum over coordinates, so that the bounds of the first, the middle and the last term add up.
  # Each is the term's largest value and largest derivative on the unit interval, rounded up.
  first, middle, last = (80.2579, 1214.22), (79.7579, 1224.02), (15.125, 257.59)
  if dim == 1:
    first, last = (15.625, 245.87), (0.0, 0.0)
  count = max(dim - 2, 0)
  largest = first[0] + count * middle[0] + last[0]

  def function(x):
    w = 1.0 + (20.0 * x - 11.0) / 4.0
    head, tail = w[..., :-1], w[..., -1]
    value = jnp.sin(jnp.pi * w[..., 0]) ** 2
    value += jnp.sum((head - 1.0) ** 2 * (1.0 + 10.0 * jnp.sin(jnp.pi * head + 1.0) ** 2), -1)
    value += (tail - 1.0) ** 2 * (1.0 + jnp.sin(2.0 * jnp.pi * tail) ** 2)
    return -value / largest

  slope = math.sqrt(first[1] ** 2 + count * middle[1] ** 2 + last[1] ** 2)
  return Benchmark(
    f"levy-{dim}",
    dim,
    function,
    0.0,
    np.full((1, dim), 0.55),
    slope / largest,
    "Levy & Montalvo 1985, SIAM J. Sci. Stat. Comput. 6; form of Laguna & Marti 2005",
  )


def ackley(dim: int) -> Benchmark:
  """Ackley on [-5, 10]^d, negated, divided by a bound on its values; maximiser at 0.

  The maximiser is not in the middle of the box, where many methods start.
  """
  largest = 20.0 * (1.0 - math.exp(-2.0)) + math.e - math.exp(-1.0)

  def function(x):
    z = 15.0 * x - 5.0
    spread = _norm(z) / math.sqrt(dim)
    ripple = jnp.exp(jnp.mean(jnp.cos(2.0 * jnp.pi * z), -1))
    return (20.0 * jnp.exp(-0.2 * spread) - 20.0 + ripple - math.e) / largest

  # The first term's slope is at most 4 / sqrt(d); the ripple's at most 2 pi e^c sqrt(1 - c^2)
  # / sqrt(d) over c, the mean cosine, largest where c^2 + c = 1.
  c = (math.sqrt(5.0) - 1.0) / 2.0
  slope = (4.0 + 2.0 * math.pi * math.exp(c) * math.sqrt(1.0 - c**2)) / math.sqrt(dim)
  return Benchmark(
    f"ackley-{dim}",
    dim,
    function,
    0.0,
    np.full((1, dim), 1.0 / 3.0),
    15.0 * slope / largest,
    "Ackley 1987, A Connectionist Machine for Genetic Hillclimbing; box as in TuRBO",
  )


def hartmann6() -> Benchmark:
  """Hartmann's six-dimensional function, negated, in its own unit (values in [0, 3.33]).

  The proven slope bound adds up the four bumps' own, and is several times what sampling finds.
  """
  height = np.array([1.0, 1.2, 3.0, 3.2])
  a = np.array(
    [
      [10.0, 3.0, 17.0, 3.5, 1.7, 8.0],
      [0.05, 10.0, 17.0, 0.1, 8.0, 14.0],
      [3.0, 3.5, 1.7, 10.0, 17.0, 8.0],
      [17.0, 8.0, 0.05, 10.0, 0.1, 14.0],
    ]
  )
  p = 1e-4 * np.array(
    [
      [1312, 1696, 5569, 124, 8283, 5886],
      [2329, 4135, 8307, 3736, 1004, 9991],
      [2348, 1451, 3522, 2883, 3047, 6650],
      [4047, 8828, 8732, 5743, 1091, 381],
    ]
  )

  def function(x):
    exponent = jnp.sum(a * (x[..., None, :] - p) ** 2, -1)
    return jnp.sum(height * jnp.exp(-exponent), -1)

  # |grad exp(-v^2)| with v^2 = sum a u^2 is at most 2 sqrt(max a) v exp(-v^2) <= sqrt(2 max a / e).
  slope = float(np.sum(height * np.sqrt(2.0 * a.max(-1) / math.e)))
  optimiser = np.array([[0.20168951, 0.15001069, 0.47687398, 0.27533243, 0.31165162, 0.65730053]])
  source = "Dixon & Szego 1978, Towards Global Optimization 2"
  return Benchmark("hartmann-6", 6, function, 3.32236801, optimiser, slope, source)


# fmt: off
OBSTACLES = np.array([
  (0.43143755, 0.20876147), (0.38485367, 0.39183579), (0.02985961, 0.22328303),
  (0.7803707, 0.3447003), (0.93685657, 0.56297285), (0.04194252, 0.23598362),
  (0.28049582, 0.40984475), (0.6756053, 0.70939481), (0.01926493, 0.86972335),
  (0.5993437, 0.63347932), (0.57807619, 0.40180792), (0.56824287, 0.75486851),
  (0.35403502, 0.38591056), (0.72492026, 0.59969313), (0.27618746, 0.64322757),
  (0.54029566, 0.25492943), (0.30903526, 0.60166842), (0.2913432, 0.29636879),
  (0.78512072, 0.62340245), (0.29592116, 0.08400595), (0.87548394, 0.04877622),
  (0.21714791, 0.9607346), (0.92624074, 0.53441687), (0.53639253, 0.45127928),
  (0.99892031, 0.79537837), (0.84621631, 0.41891986), (0.39432819, 0.06768617),
  (0.92365693, 0.72217512), (0.95520914, 0.73956575), (0.820383, 0.53880139),
  (0.22378049, 0.9971974), (0.34023233, 0.91014706), (0.64960636, 0.35661133),
  (0.29976464, 0.33578931), (0.43202238, 0.11563227), (0.66764947, 0.52086962),
  (0.45431078, 0.94582745), (0.12819915, 0.33555344), (0.19287232, 0.8112075),
  (0.61214791, 0.71940626), (0.4522542, 0.47352186), (0.95623345, 0.74174186),
  (0.17340293, 0.89136853), (0.04600255, 0.53040724), (0.42493468, 0.41006649),
  (0.37631485, 0.88033853), (0.66951947, 0.29905739), (0.4151516, 0.77308712),
  (0.55762991, 0.26400156), (0.6280609, 0.53201974), (0.92727447, 0.61054975),
  (0.93206587, 0.42107549), (0.63885574, 0.37540613), (0.15303425, 0.57377797),
  (0.8208471, 0.16566631), (0.14889043, 0.35157346), (0.71724622, 0.57110725),
  (0.32866327, 0.8929578), (0.74435871, 0.47464421), (0.9252026, 0.21034329),
  (0.57039306, 0.54356078), (0.56611551, 0.02531317), (0.84830056, 0.01180542),
  (0.51282028, 0.73916524), (0.58795481, 0.46527371), (0.83259048, 0.98598188),
  (0.00242488, 0.83734691), (0.72505789, 0.04846931), (0.07312971, 0.30147979),
  (0.55250344, 0.23891255), (0.51161315, 0.46466442), (0.802125, 0.93440495),
  (0.9157825, 0.32441602), (0.44927665, 0.53380074), (0.67708372, 0.67527231),
  (0.81868924, 0.88356194), (0.48228814, 0.88668497), (0.39805433, 0.99341196),
  (0.86671752, 0.79016975), (0.01115417, 0.6924913), (0.34272199, 0.89543756),
  (0.40721675, 0.86164495), (0.26317679, 0.37334193), (0.74446787, 0.84782643),
  (0.55560143, 0.46405104), (0.73567977, 0.12776233), (0.28080322, 0.26036748),
  (0.17507419, 0.95540673), (0.54233783, 0.1196808), (0.76670967, 0.88396285),
  (0.61297539, 0.79057776), (0.9344029, 0.86252764), (0.48746839, 0.74942784),
  (0.18657635, 0.58127321), (0.10377802, 0.71463978), (0.7771771, 0.01463505),
  (0.7635042, 0.45498358), (0.83345861, 0.34749363), (0.38273809, 0.51890558),
  (0.33887574, 0.82842507), (0.02073685, 0.41776737), (0.68754547, 0.96430979),
  (0.4704215, 0.92717361), (0.72666234, 0.63241306), (0.48494401, 0.72003268),
  (0.52601215, 0.81641253), (0.71426732, 0.47077212), (0.00258906, 0.30377501),
  (0.35495269, 0.98585155), (0.65507544, 0.03458909), (0.10550588, 0.62032937),
  (0.60259145, 0.87110846), (0.04959159, 0.535785),
])  # centres of the squares of side 0.05 that the rover should go around
# fmt: on


def _trajectory(waypoints, samples):
  """Least-squares cubic through the waypoints over their chord length, at `samples` times.

  The original fits a smoothing spline that may miss the waypoints by 30 - sqrt(60) = 22.25 in total
  square. Any 30 points of [-0.1, 1.1]^2 are within 21.6 of their middle, hence of a cubic, so that
  the cubic is what it returns.
  """
  length = _norm(jnp.diff(waypoints, axis=0))
  total = jnp.sum(length)
  evenly = jnp.linspace(0.0, 1.0, waypoints.shape[0], dtype=waypoints.dtype)
  chord = jnp.concatenate([jnp.zeros(1, waypoints.dtype), jnp.cumsum(length)])
  time = jnp.where(total > 0, chord / jnp.where(total > 0, total, 1.0), evenly)

  def basis(t):  # Legendre polynomials keep the normal equations well-conditioned
    s = 2.0 * t - 1.0
    return jnp.stack([jnp.ones_like(s), s, 1.5 * s**2 - 0.5, 2.5 * s**3 - 1.5 * s], -1)

  coefficients = jnp.linalg.lstsq(basis(time), waypoints)[0]
  return basis(jnp.linspace(0.0, 1.0, samples, dtype=waypoints.dtype)) @ coefficients


def rover60() -> Benchmark:
  """Rover-60: 30 waypoints of a path from (.05, .05) to (.95, .95) among 113 obstacles.

  5 minus the cost of the path: 0.05 per length, 20 more inside an obstacle or off the unit square,
  and 10 times the l1 distance by which its ends miss start and goal. The original also jitters the
  waypoints by 1e-4; here noise is the caller's. The largest value is not known; it is below
  5 - 0.05 * 0.9 sqrt(2) = 4.936, the straight path without obstacles. Waypoints w = 1.2 x - 0.1.
  """
  low, high = OBSTACLES - 0.025, OBSTACLES + 0.025
  ends = np.array([[0.05, 0.05], [0.95, 0.95]])

  def one(x):
    path = _trajectory(1.2 * x.reshape(30, 2) - 0.1, 1000)
    at = path[:, None]
    hit = jnp.any(jnp.all((at >= low) & (at < high), -1), -1)
    hit = hit | ~jnp.all((path >= 0.0) & (path < 1.0), -1)
    cost = 0.05 + 20.0 * hit
    travelled = jnp.sum(_norm(jnp.diff(path, axis=0)) * 0.5 * (cost[:-1] + cost[1:]))
    return 5.0 - travelled - 10.0 * jnp.sum(jnp.abs(path[jnp.array([0, -1])] - ends))

  @jax.jit
  def function(x):
    return jax.vmap(one)(x.reshape(-1, 60)).reshape(x.shape[:-1])

  source = "Wang et al. 2018, arXiv 1706.01445, and its public implementation (MIT)"
  return Benchmark("rover-60", 60, function, None, None, None, source)


_FIXED = {
  "needle": needle,
  "wavy": wavy,
  "branin": branin,
  "hartmann-6": hartmann6,
  "rover-60": rover60,
}
_ANY_DIMENSION = {
  "cone": (cone, 1),
  "ackley": (ackley, 1),
  "levy": (levy, 1),
  "rosenbrock": (rosenbrock, 2),
}


def get(name: str) -> Benchmark:
  """The benchmark of that name, e.g. `"branin"` or `"ackley-10"`.

  Args:
    name: a fixed name, or a family and a dimension: cone-d, ackley-d, levy-d, rosenbrock-d.
  Returns:
    The benchmark.
  Raises:
    ValueError: no such benchmark (with the nearest names, or the reason it cannot be had).
  """
  if name in _FIXED:
    return _FIXED[name]()
  family, _, dimension = name.rpartition("-")
  if family in _ANY_DIMENSION and dimension.isdecimal():
    build, smallest = _ANY_DIMENSION[family]
    if int(dimension) >= smallest:
      return build(int(dimension))
    raise ValueError(f"benchmark {name!r}: {family} needs a dimension of at least {smallest}")
  if name in UNAVAILABLE:
    raise ValueError(f"benchmark {name!r} cannot be had: {UNAVAILABLE[name]}")
  known = [*_FIXED, *(f"{family}-{d}" for family in _ANY_DIMENSION for d in (2, 10))]
  near = difflib.get_close_matches(name, known, 3) or known
  raise ValueError(f"unknown benchmark {name!r}; use one of {', '.join(near)}")
