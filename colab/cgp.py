# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Tune something expensive, and know when to stop
#
# Certificate-Guided Pruning ([arXiv 2601.20231](https://arxiv.org/abs/2601.20231)) maximises a
# function that is expensive to call and noisy. It assumes that the function is Lipschitz,
#
# $$|f(x) - f(z)| \le L\,\|x - z\|,$$
#
# and keeps two numbers between which the maximum must lie. Their difference, the **gap**, says how
# much there is left to gain.
#
# 1. Tune a support vector machine on real data.
# 2. Watch the certificate on a function whose maximum we know.
# 3. Put in an objective of your own.
#
# The notebook takes about a minute on a CPU.

# %%
import os
import sys

REPOSITORY = ""  # where foliax lives, e.g. "https://github.com/OWNER/foliax"; used on Colab only

if "google.colab" in sys.modules:
  assert REPOSITORY, "set REPOSITORY to the address of foliax"
  get_ipython().run_line_magic("pip", f'install -q "foliax[experiments] @ git+{REPOSITORY}"')

SMOKE = os.environ.get("FOLIAX_SCALE") == "smoke"  # tests run the notebook with fewer calls

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from foliax.search import benchmarks, cgp
from sklearn import datasets, ensemble, model_selection, svm

# %% [markdown]
# ## 1. Tune a real model
#
# The objective: the accuracy of an RBF support vector machine on handwritten digits, by 3-fold
# cross-validation. The search lives in the unit box, so that `accuracy` maps `x` to $C$ and
# $\gamma$ on a log scale. Every call shuffles the folds anew, which makes it noisy.

# %%
digits, labels = datasets.load_digits(return_X_y=True)
digits, labels = digits[:500], labels[:500]


def parameters(x):
  return {"C": 10 ** float(5 * x[0] - 2), "gamma": 10 ** float(5 * x[1] - 5)}


def accuracy(x, call):
  folds = model_selection.StratifiedKFold(3, shuffle=True, random_state=call)
  model = svm.SVC(**parameters(x))
  return model_selection.cross_val_score(model, digits, labels, cv=folds).mean()


# %% [markdown]
# The loop is `ask`, call, `tell`. We know neither the slope of this function nor its noise, and say
# so: `sigma=None` estimates the noise from repeated calls, `lip_status="learned"` learns the
# constant $L$ from the data.
#
# `ask` returns a point and a number: the arm (a point opened earlier) to call again, or -1 for a
# new one.

# %%
calls = 12 if SMOKE else 40
config = cgp.Config(dim=2, capacity=calls, initial=5)
state = cgp.init(config, jax.random.key(0), sigma=None, lip_status="learned")

xs, scores = [], []
for call in range(calls):
  state, x, arm = cgp.ask(state, config)
  score = accuracy(x, call)
  state = cgp.tell(state, x, arm, score)
  xs.append(np.asarray(x))
  scores.append(score)

found = cgp.certificate(cgp.refine(state))
print("best setting:", parameters(found.x_hat))
print(f"its mean accuracy: {cgp.means(state)[jnp.argmax(state.lower)]:.3f}")
print(f"learned L: {state.L:.2f}, estimated noise: {state.sigma:.4f}")
print(f"gap: {found.gap:.2f}, valid: {found.valid}")

# %%
log_c, log_gamma = 5 * np.array(xs)[:, 0] - 2, 5 * np.array(xs)[:, 1] - 5
best, floor = max(scores), max(scores) - 0.3
figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.6), layout="constrained")
points = left.scatter(log_c, log_gamma, c=scores, vmin=floor, vmax=best, edgecolor="black")
recommended = np.log10(list(parameters(found.x_hat).values()))
left.plot(*recommended, "*", color="crimson", markersize=16)
left.set(xlabel="log10 C", ylabel="log10 gamma")
left.set_title("Where the calls went; star: recommended")
figure.colorbar(points, ax=left, label="accuracy of one call", extend="min")
right.plot(range(1, calls + 1), np.maximum(scores, floor), "o", color="silver", label="each call")
so_far = np.maximum.accumulate(np.maximum(scores, floor))
right.plot(range(1, calls + 1), so_far, label="best so far")
right.set(xlabel="calls", ylabel="accuracy", title="What they returned (clipped below)")
right.legend(loc="center right")
plt.show()

# %% [markdown]
# The setting is good. The certificate is not: `valid` is **False**, because the constant and the
# noise were guessed from the same few calls. The gap is what would follow if the guesses were
# right, and at forty calls on a function as steep as this one even that is wide: no accuracy
# exceeds 1, which is a better bound than the search has.
#
# So what does it take for a certificate to say something?

# %% [markdown]
# ## 2. Watch the certificate
#
# A function of two variables with several local maxima. Here we *know* that its slope is at most
# 3.3, and we choose the noise, so that the certificate is valid: with probability 95 % it is right
# at every step at once. The function is written in JAX, so that `run` does the whole search in one
# compiled loop; `observe` records the active set, where the maximum may still be, on a grid.

# %%
problem = benchmarks.get("wavy")
noise = 0.005
budget = 40 if SMOKE else 300
cells = 80
axis = (jnp.arange(cells) + 0.5) / cells
grid = jnp.stack(jnp.meshgrid(axis, axis), -1).reshape(-1, 2)


def noisy(x, key):
  return problem.function(x) + noise * jax.random.normal(key)


def active_set(state):
  upper, _ = cgp.upper_env(grid, state)
  return upper >= cgp.lower_bound(state)


state, history = cgp.run(
  jax.random.key(0),
  noisy,
  cgp.Config(dim=2, capacity=budget),
  budget,
  lipschitz=problem.lipschitz,
  sigma=noise,
  observe=active_set,
)
final = cgp.certificate(cgp.refine(state))
print(f"the maximum is between {final.lower:.3f} and {final.upper:.3f}, valid: {final.valid}")
print(f"it is {problem.optimum:.3f}")

# %% [markdown]
# Colour: what is left of the box. Grey: places that cannot hold the maximum, for what was seen
# elsewhere proves them too low. Dots: calls.

# %%
value = np.asarray(problem.function(grid)).reshape(cells, cells)
active = np.asarray(history.observed).reshape(-1, cells, cells)
figure, axes = plt.subplots(1, 4, figsize=(9.6, 2.8), layout="constrained", sharey=True)
for ax, share in zip(axes, (1 / 30, 1 / 10, 1 / 3, 1), strict=True):
  n = max(1, round(share * budget))
  shown = np.where(active[n - 1], value, np.nan)
  ax.set_facecolor("lightgrey")
  ax.imshow(shown, origin="lower", extent=(0, 1, 0, 1), vmin=value.min(), vmax=value.max())
  ax.plot(*history.x[:n].T, ".", color="tab:orange", markersize=2.5)
  ax.set(title=f"{n} calls: {active[n - 1].mean():.0%} left")
  ax.set_xlabel(f"gap {history.certificate.gap[n - 1]:.2g}")
plt.show()

# %% [markdown]
# The two bounds close in on the maximum. The gap bounds the regret, which is known here only
# because the function is.

# %%
n = np.arange(1, budget + 1)
bounds = history.certificate
figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.4), layout="constrained")
left.fill_between(n, bounds.lower, bounds.upper, alpha=0.25, label="where the maximum must be")
left.axhline(problem.optimum, color="tab:orange", linestyle=":", label="where it is")
left.set(xscale="log", ylim=(0, 2), xlabel="calls", ylabel="value")
regret = problem.optimum - problem.function(bounds.x_hat)
right.plot(n, bounds.gap, label="certified gap")
right.plot(n, np.maximum(regret, 1e-4), "--", label="regret")
right.set(xscale="log", yscale="log", xlabel="calls")
for ax in (left, right):
  ax.legend()
plt.show()

# %% [markdown]
# To stop once the gap is small enough, pass `target_gap` to `run`, or leave your own loop:
#
# ```python
# if cgp.certificate(state).gap <= 0.1:
#   break
# ```

# %%
reached = np.flatnonzero(bounds.gap <= 0.1)
if reached.size:
  print(f"a target gap of 0.1 would have stopped after {reached[0] + 1} of {budget} calls")
else:
  print(f"a gap of 0.1 takes more than {budget} calls")

# %% [markdown]
# ## 3. Your own objective
#
# Change the cell below: names and bounds of the parameters (`"log"` for those that span orders of
# magnitude), the function, and the number of calls. Larger must be better. If a call can fail,
# return `float("nan")`: it counts as spent, changes no bound, and the search keeps away from that
# place.
#
# As it stands it tunes a random forest on breast cancer data.

# %%
BOUNDS = {
  "max_features": (0.05, 1.0, "linear"),
  "max_samples": (0.05, 1.0, "linear"),
}
SLOPE = 0.5  # a guess of L: how much the score changes, at most, from end to end of a parameter
CALLS = 12 if SMOKE else 40

features, malignant = datasets.load_breast_cancer(return_X_y=True)
random = np.random.RandomState(0)


def objective(max_features, max_samples):
  model = ensemble.RandomForestClassifier(
    30, max_features=max_features, max_samples=max_samples, random_state=random
  )
  folds = model_selection.StratifiedKFold(3, shuffle=True, random_state=random)
  return model_selection.cross_val_score(model, features, malignant, cv=folds).mean()


# %%
def from_box(x):
  """The parameters that a point of the unit box stands for."""
  scaled = {}
  for (name, (low, high, scale)), u in zip(BOUNDS.items(), x.tolist(), strict=True):
    scaled[name] = low * (high / low) ** u if scale == "log" else low + (high - low) * u
  return scaled


config = cgp.Config(dim=len(BOUNDS), capacity=CALLS, initial=5)
state = cgp.init(config, jax.random.key(0), lipschitz=SLOPE, sigma=None, lip_status="assumed")
gaps = []
for _ in range(CALLS):
  state, x, arm = cgp.ask(state, config)
  state = cgp.tell(state, x, arm, objective(**from_box(x)))
  gaps.append(float(cgp.certificate(state).gap))

found = cgp.certificate(cgp.refine(state))
proven, distance = cgp.pair_slopes(state.x, state.upper, state.lower)
steepest = jnp.where(distance > 0, proven / jnp.where(distance > 0, distance, 1), 0).max()
print("best setting:", from_box(found.x_hat))
print(f"the maximum is between {found.lower:.3f} and {found.upper:.3f}, if L and the noise hold")
print(f"valid: {found.valid}; estimated noise: {state.sigma:.4f}")
print(f"assumed L: {SLOPE}; steepest slope that the data prove: {max(float(steepest), 0):.2f}")

# %% [markdown]
# The gap jumps up where the estimate of the noise is revised: all intervals widen with it.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.4), layout="constrained")
seen = np.asarray(state.n) > 0
points = np.asarray(state.x)[seen]
means = np.asarray(cgp.means(state))[seen]
radius = np.asarray(state.upper - state.lower)[seen] / 2
last = list(BOUNDS)[-1]
left.errorbar(points[:, -1], means, radius, fmt="o", capsize=2, markersize=4)
left.set(xlabel=f"{last}, scaled to [0, 1]", ylabel="score")
left.set_title("Every point opened: mean and interval")
right.plot(range(1, CALLS + 1), gaps)
right.set(xlabel="calls", ylabel="gap, if L and the noise hold", ylim=(0, None))
right.set_title("What is left to gain")
plt.show()

# %% [markdown]
# ## What is certified, and what is not
#
# - `valid` is True only if you *know* a bound on the slope and on the noise (`lip_status="known"`,
#   the default, and a number for `sigma`), and the data do not contradict them. Then, with
#   probability $1 - \delta$ (95 %), the maximum lies between `lower` and `upper`, and `x_hat` is
#   within `gap` of it, at every step.
# - An overestimate of $L$ is fine; it makes the gap larger and the search slower. An underestimate
#   makes it wrong. If the steepest proven slope exceeds the constant you assumed, raise it.
# - With an assumed or learned constant, or an estimated noise, the numbers are conditional. They
#   help to decide where to look and whether going on is worthwhile. They are not a guarantee.
# - What is bounded is the function you call. If that is a cross-validation score, nothing is said
#   about new data.
# - Gaps get expensive with dimension: expect useful ones up to three variables. Beyond that, use
#   `cgp.TRUST_REGION` or `cgp.HYBRID` as the `strategy` of `run`, and do not expect the gap to
#   close.
