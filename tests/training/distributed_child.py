"""One process of a training run: `distributed_child.py FOLDER STEPS PAUSE_SECONDS [--alone]`.

Process 0 prints a JSON line for each step. Address, number and count come from the environment.
"""

import json
import pathlib
import sys
import time

from foliax.experiments import decoder
from foliax.training import sharding


def main(folder, steps, pause):
  config = decoder.get_config("smoke")
  config.update({"rows": 4, "sequence": 16, "steps": int(steps), "steps_per_call": 2})
  config.update({"evaluate_every": int(steps), "evaluate_batches": 1, "checkpoint_seconds": 0.1})

  def log(step, metrics):
    print(json.dumps({"step": step, "loss": metrics.get("loss")}), flush=True)
    time.sleep(float(pause))

  results = decoder.train(config, pathlib.Path(folder), log)
  print(json.dumps(results), flush=True)


if __name__ == "__main__":
  if sys.argv[-1] != "--alone":
    sharding.initialise_distributed()
  main(*sys.argv[1:4])
