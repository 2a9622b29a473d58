"""The other side of a comparison of language models: transformers and llama.cpp, under torch.

Run by an interpreter that has the `peers` extra; it needs no foliax. Reads one JSON request a line
from standard input and writes one JSON answer a line to standard output.
"""

import json
import pathlib
import sys
import time


class Peer:
  """A model in transformers, and in llama.cpp when that is installed."""

  def load(self, path, threads):
    """Loads a GGUF file, dequantised to float32."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path = pathlib.Path(path)
    self.torch, self.path, self.threads, self.llama = torch, path, threads, None
    self.model = transformers.AutoModelForCausalLM.from_pretrained(
      path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    try:
      import llama_cpp
    except ModuleNotFoundError:
      return {"versions": versions}
    return {"versions": versions | {"llama-cpp-python": llama_cpp.__version__}}

  def logits(self, prompts, out):
    """Logits of each prompt at every position, written to files."""
    import numpy as np

    with self.torch.inference_mode():
      for i, prompt in enumerate(prompts):
        np.save(f"{out}-{i}.npy", self.model(self.torch.tensor([prompt])).logits[0].numpy())
    return {}

  def greedy(self, prompts, count):
    """The likeliest continuation of each prompt."""
    return {"tokens": [self._continue([prompt], count)[0].tolist() for prompt in prompts]}

  def decode(self, batch, prompt, count):
    """Seconds for each of `count` steps of a batch, without the prompt."""
    rows = [prompt] * batch
    self._continue(rows, 2)
    start = time.perf_counter()
    self._continue(rows, 1)
    first = time.perf_counter()
    self._continue(rows, count + 1)
    return {"seconds": (time.perf_counter() - first - (first - start)) / count}

  def prefill(self, prompt):
    """Seconds for one prompt, up to its first token."""
    self._continue([prompt], 1)
    start = time.perf_counter()
    self._continue([prompt], 1)
    return {"seconds": time.perf_counter() - start}

  def llama_decode(self, prompt, count):
    """Seconds for each step of llama.cpp at batch 1, on the quantised weights."""
    import llama_cpp
    import numpy as np

    if self.llama is None:
      self.llama = llama_cpp.Llama(
        str(self.path), n_ctx=1024, n_threads=self.threads, verbose=False, logits_all=False
      )
    self.llama.reset()
    self.llama.eval(prompt)
    start = time.perf_counter()
    for _ in range(count):
      token = int(np.argmax(self.llama.scores[self.llama.n_tokens - 1]))
      self.llama.eval([token])
    return {"seconds": (time.perf_counter() - start) / count}

  def _continue(self, rows, count):
    tokens = self.torch.tensor(rows)
    with self.torch.inference_mode():
      out = self.model.generate(
        tokens,
        attention_mask=self.torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        pad_token_id=0,
      )
    return out[:, tokens.shape[1] :]


def main():
  """Answers requests until standard input ends."""
  peer = Peer()
  answers, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed is no answer
  for line in sys.stdin:
    request = json.loads(line)
    try:
      answer = getattr(peer, request.pop("command"))(**request)
    except Exception as error:
      answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
  main()
