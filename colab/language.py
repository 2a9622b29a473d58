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
# # A language model as functions over a pytree
#
# A real chat model, SmolLM2 with 135 million parameters, as plain JAX: `forward` is a function of
# parameters and tokens, and everything that JAX does to functions can be done to it.
#
# 1. Load it, and chat.
# 2. See which words of a text surprise it.
# 3. Teach it a style with low-rank adapters.
#
# The notebook takes about three minutes on a CPU, after a download of 90 MB.

# %%
import os
import sys

REPOSITORY = ""  # where foliax lives, e.g. "https://github.com/OWNER/foliax"; used on Colab only

if "google.colab" in sys.modules:
  assert REPOSITORY, "set REPOSITORY to the address of foliax"
  packages = f'"foliax[experiments,language] @ git+{REPOSITORY}"'
  get_ipython().run_line_magic("pip", f"install -q {packages}")

SMOKE = os.environ.get("FOLIAX_SCALE") == "smoke"  # tests run the notebook with fewer steps

# %%
import html

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from foliax.language import lora, loss, pretrained, tokenizer, weights
from foliax.language.generate import Generator, score
from foliax.training import step
from IPython.display import HTML, display

# %% [markdown]
# ## 1. Load it, and chat
#
# `fetch` brings the file and checks it; the first `load` undoes its quantisation, which takes some
# seconds and is kept for the next time. `params` is a dictionary of arrays, those of all layers
# stacked; `config` says how to read it.

# %%
path = pretrained.fetch("smollm2")
params, config = weights.load(path)
words = tokenizer.from_gguf(path)
print(config)
print({name: array.shape for name, array in params["layers"].items()})

# %%
chat = Generator(params, config, words)
question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
(answer,) = chat.generate(
  [question],
  temperature=0.0,
  max_new_tokens=12 if SMOKE else 40,
  callback=lambda row, piece: print(piece, end="", flush=True),
)

# %% [markdown]
# Several answers at once: each row has a key of its own, so that it says the same in any company.
# Every completion carries the log-probability of each of its tokens.

# %%
completions = chat.generate(
  [[{"role": "user", "content": "Write the first line of a poem about the sea."}]],
  n=2 if SMOKE else 4,
  seed=1,
  temperature=0.8,
  max_new_tokens=8 if SMOKE else 24,
)
for completion in completions:
  print(f"{np.sum(completion.log_probs):8.1f}  {completion.text!r}")

# %% [markdown]
# ## 2. What surprises it
#
# `score` gives the log-probability of each token after those before it. No attention map is needed
# to see where a model stumbles: the redder, the less it expected the token.


# %%
def heat(text):
  tokens = words.encode(text)
  scores = score(params, config, jnp.array([tokens]), jnp.array([len(tokens)]))[0]
  spans = "".join(
    f'<span style="background: rgba(220, 60, 20, {min(-float(s) / 12, 1):.2f})" '
    f'title="{float(s):.2f}">{html.escape(words.decode([t]))}</span>'
    for t, s in zip(tokens, scores, strict=True)
  )
  display(HTML(f'<p style="font-size: 1.2em; white-space: pre-wrap">{spans}</p>'))


heat("The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Oslo.")
heat("To be, or not to be, that is the pancake.")

# %% [markdown]
# ## 3. Teach it a style
#
# Low-rank adaptation ([Hu et al. 2021](https://arxiv.org/abs/2106.09685)) leaves the weights alone
# and trains two thin matrices beside each. `apply` puts them there; the rest of the code does not
# notice. The text to learn: Python's own manual. Put yours in its place.

# %%
from pydoc_data.topics import topics

text = "\n\n".join(topics[name] for name in sorted(topics))
tokens = np.array(words.encode(text[: 40_000 if SMOKE else 400_000]))
cut = int(0.9 * len(tokens))
length, rows, steps = (16, 1, 3) if SMOKE else (64, 2, 40)


def batch(starts, part):
  return jnp.array([part[start : start + length + 1] for start in starts])


def mean_loss(adapters, batch, params):
  adapted = lora.apply(params, adapters)
  total, count = loss.next_token_loss(adapted, config, batch[:, :-1], batch[:, 1:])
  return total / count, {}


held_out = batch(np.linspace(0, len(tokens) - cut - length - 1, 8).astype(int), tokens[cut:])
optimizer = optax.adam(5e-4)


@jax.jit
def update(state, batch, params):  # an argument: JAX would compile captured weights in
  frozen = lambda adapters, batch, key: mean_loss(adapters, batch, params)
  return step.gradient_step(frozen, optimizer)(state, batch)


evaluate = jax.jit(lambda adapters, params: mean_loss(adapters, held_out, params)[0])
state = step.init(lora.init(jax.random.key(0), params, rank=8), optimizer, jax.random.key(1))
print(f"{sum(x.size for x in jax.tree.leaves(state.params)):,} numbers to train")

# %% [markdown]
# The loop is a loop: `update` is a pure function. (`foliax.training.loop.fit` does the same with
# checkpoints, metrics and restarts.)

# %%
random = np.random.default_rng(0)
before, curve = evaluate(state.params, params), []
for _ in range(steps):
  starts = random.integers(0, cut - length - 1, rows)
  state, metrics = update(state, batch(starts, tokens), params)
  curve.append(float(metrics["loss"]))
after = evaluate(state.params, params)
print(f"held-out loss: {before:.3f} before, {after:.3f} after, in nats a token")

plt.figure(figsize=(6.4, 3))
plt.plot(curve, color="silver", label="training loss, each batch")
plt.axhline(before, linestyle=":", label="held out, before")
plt.axhline(after, color="tab:orange", label="held out, after")
plt.xlabel("step")
plt.legend()
plt.show()

# %% [markdown]
# The adapted model continues a sentence as the manual would. `merge` makes plain parameters of it,
# which `weights.save` writes as a checkpoint that transformers reads.

# %%
adapted = Generator(lora.merge(params, state.params), config, words)
prompt = "The yield expression"
for name, generator in (("before", chat), ("after", adapted)):
  (continued,) = generator.generate([prompt], temperature=0.0, max_new_tokens=6 if SMOKE else 30)
  print(f"{name}: {prompt}{continued.text}\n")
