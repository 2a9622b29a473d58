"""Certificate-Guided Pruning for stochastic Lipschitz optimisation (CGP).

I. F. Shihab, S. Akter, A. Sharma, "Certificate-Guided Pruning for Stochastic Lipschitz
Optimization", arXiv 2601.20231.

Maximises f on the unit box through calls y = f(x) + noise that are expensive, where
|f(x) - f(z)| <= L ||x - z|| and the noise is sigma-sub-Gaussian. From the arms x_i, with means
mean_i and radii r_i, it keeps

  U_t(x) = min_i {mean_i + r_i + L ||x - x_i||}       upper envelope,
  l_t    = max_i {mean_i - r_i}                       a value that is certainly reached,
  A_t    = {x : U_t(x) >= l_t}                        active set: contains every maximiser,
  gap    = max_x U_t(x) - l_t                         f* - f(x_hat) <= gap: when to stop,

all valid at once with probability 1 - delta. `ask` says where to call next, `tell` takes the
answer, `certificate` says what is known; `run` scans over a JAX objective. CGP-Adaptive is
`lip_status="learned"`; `HYBRID` and `TRUST_REGION` are other strategies over the same envelopes.

From the paper (as far as public sources quote it): envelopes, active set, replication of arms with
wide intervals, doubling, trust regions with certified restart, the switch to a Gaussian process.
Not readable, and chosen here: the radius, the score and the rule when to replicate, the boxes that
make the reported certificate rigorous, the candidates, what replaces the trust regions' fixed
centres. Each place says so.
"""

from foliax.search.cgp.baselines import GP_UCB, LIPO, RANDOM, UNIFORM_ACTIVE
from foliax.search.cgp.hybrid import (
  HYBRID,
  HybridState,
  gp_fit,
  gp_ucb,
  hybrid_init,
  local_slope_ratio,
)
from foliax.search.cgp.search import (
  CGP,
  Certificate,
  History,
  Strategy,
  ask,
  bind,
  candidates,
  certificate,
  check,
  propose,
  refine,
  run,
  sobol,
)
from foliax.search.cgp.state import (
  ASSUMED,
  KNOWN,
  LEARNED,
  CGPState,
  Config,
  box_upper,
  double_L,
  incumbent,
  init,
  lower_bound,
  lower_env,
  means,
  pair_slopes,
  radius,
  slack,
  tell,
  upper_env,
)
from foliax.search.cgp.trust_region import (
  TRUST_REGION,
  TRState,
  local_certificate,
  tr_ask,
  tr_init,
  tr_step,
)

__all__ = [
  "ASSUMED",
  "CGP",
  "GP_UCB",
  "HYBRID",
  "KNOWN",
  "LEARNED",
  "LIPO",
  "RANDOM",
  "TRUST_REGION",
  "UNIFORM_ACTIVE",
  "CGPState",
  "Certificate",
  "Config",
  "History",
  "HybridState",
  "Strategy",
  "TRState",
  "ask",
  "bind",
  "box_upper",
  "candidates",
  "certificate",
  "check",
  "double_L",
  "gp_fit",
  "gp_ucb",
  "hybrid_init",
  "incumbent",
  "init",
  "local_certificate",
  "local_slope_ratio",
  "lower_bound",
  "lower_env",
  "means",
  "pair_slopes",
  "propose",
  "radius",
  "refine",
  "run",
  "slack",
  "sobol",
  "tell",
  "tr_ask",
  "tr_init",
  "tr_step",
  "upper_env",
]
