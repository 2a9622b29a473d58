"""The `foliax` command. Each subcommand imports what it needs when it runs."""

import argparse
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from foliax.experiments import registry
from foliax.experiments.registry import UserError

_EPILOG = """examples:
  foliax run cgp:laptop --config.horizon=500 --workdir=runs/a
  foliax reproduce cgp --scale=smoke
The same command again resumes a run that was stopped, and repeats nothing that is finished."""


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command.

  Args:
    argv: arguments after the program's name; those of the process when None.
  Returns:
    Exit code: 0 done, 1 something failed, 2 the command must be put right, 130 stopped.
  """
  argv = list(sys.argv[1:] if argv is None else argv)
  # The small factorisations of these experiments are up to hundreds of times slower when OpenBLAS
  # spreads them over cores that are busy. It reads this when numpy and scipy load it.
  os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
  config_flags, rest = _split_config_flags(argv)
  arguments = _parser().parse_args(rest)
  if config_flags and arguments.command not in ("run", "train"):
    return _refuse(
      f"{config_flags[0]} belongs to foliax run and train; {arguments.command} takes none"
    )
  arguments.config_flags = config_flags
  # A scheduler that takes the machine away sends SIGTERM: stop as for Ctrl-C, to resume later.
  before = signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    return _COMMANDS[arguments.command](arguments)
  except UserError as error:
    return _refuse(str(error))
  except ModuleNotFoundError as error:
    if "pip install 'foliax[" not in str(error):
      raise
    return _refuse(str(error))
  except KeyboardInterrupt:
    print("\nfoliax: stopped; the same command continues from here", file=sys.stderr)
    return 130
  finally:
    signal.signal(signal.SIGTERM, before)


def _refuse(message: str) -> int:
  print(f"foliax: {' '.join(message.split())}", file=sys.stderr)
  return 2


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="foliax",
    description="Experiments that could refute what papers claim.",
    epilog=_EPILOG,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

  def command(name: str, summary: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)

  command("list", "Lists the experiments and training jobs.")
  run = command("run", "Runs one experiment; --config.FIELD=VALUE overrides its configuration.")
  run.add_argument("target", metavar="METHOD:SCALE", help="e.g. cgp:laptop")
  run.add_argument("--workdir", type=pathlib.Path, help="default: runs/METHOD-SCALE")
  train = command("train", "Trains a model, on the devices of one process or of many.")
  train.add_argument("target", metavar="JOB:SCALE", help="e.g. decoder:laptop")
  train.add_argument("--workdir", type=pathlib.Path, help="default: runs/JOB-SCALE")
  train.add_argument(
    "--distributed", action="store_true", help="join the processes of Slurm, GKE or a TPU slice"
  )
  several = command("reproduce", "Runs several experiments and shows all their verdicts.")
  several.add_argument("methods", nargs="+", metavar="METHOD")
  several.add_argument("--scale", default="laptop", help="smoke, laptop (default) or pod")
  several.add_argument("--workdir", type=pathlib.Path, default="runs", help="default: runs")
  board = command("scoreboard", "Writes the table of results/ into README.md.")
  board.add_argument("--check", action="store_true", help="fail if the table is out of date")
  board.add_argument("--add", type=pathlib.Path, metavar="RUNDIR", help="first copy its results")
  board.add_argument("--html", type=pathlib.Path, metavar="PATH", help="write the page as well")
  board.add_argument("--root", type=pathlib.Path, default=".", help="folder of README and results")
  compiling = command("preflight", "Compiles kernels and what runs on pods for TPU and GPU.")
  compiling.add_argument("names", nargs="*", metavar="NAME", help="default: everything")
  compiling.add_argument("--json", type=pathlib.Path, metavar="PATH", help="write the reports")
  chatting = command("chat", "Talks with a language model in the terminal.")
  chatting.add_argument("model", help="smollm2, a .gguf file, or a directory with safetensors")
  chatting.add_argument("--system", metavar="TEXT", help="instructions to the model")
  chatting.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
  chatting.add_argument("--seed", type=int, default=0, help="default: 0")
  chatting.add_argument("--max-tokens", type=int, default=512, help="of an answer; default: 512")
  chatting.add_argument("--once", metavar="QUESTION", help="answer this question and end")
  fetching = command("fetch", "Brings models and data, checks them, says where they come from.")
  fetching.add_argument(
    "names", nargs="*", metavar="NAME", help="default: all data sets; models only when named"
  )
  return parser


def _split_config_flags(argv: list[str]) -> tuple[list[str], list[str]]:
  """Separates `--config.FIELD=VALUE`, `--config.FIELD VALUE` and `--config.FLAG` from the rest."""
  config: list[str] = []
  rest: list[str] = []
  waiting = False
  for argument in argv:
    if argument.startswith(("--config.", "--noconfig.")):
      config.append(argument)
      waiting = argument.startswith("--config.") and "=" not in argument
    elif waiting and not argument.startswith("--"):
      config[-1] += f"={argument}"
      waiting = False
    else:
      rest.append(argument)
      waiting = False
  return config, rest


def overridden(config: Any, config_flags: list[str]) -> Any:
  """A configuration with `--config.FIELD=VALUE` flags applied, locked.

  Args:
    config: the `ml_collections.ConfigDict` of the experiment.
    config_flags: flags as typed.
  Returns:
    The configuration.
  Raises:
    UserError: an unknown field, a value of the wrong type, or a flag without a value.
  """
  import ml_collections
  from absl import flags
  from foliax.experiments import storage
  from ml_collections import config_flags as parser

  fields = storage.flatten(config.to_dict())
  for flag in config_flags:
    name = flag.split("=", 1)[0].split(".", 1)[1]
    if name not in fields:
      raise UserError(f"unknown config field {name!r}; {registry.nearest(name, fields)}")
    if "=" not in flag and not isinstance(fields[name], bool):
      raise UserError(f"{flag} has no value; write {flag}=VALUE")
  values = flags.FlagValues()
  argv = ["foliax", *config_flags]
  try:
    parser.DEFINE_config_dict(
      "config", ml_collections.ConfigDict(config), flag_values=values, sys_argv=argv
    )
    values(argv)
  except (flags.Error, TypeError, ValueError) as error:
    raise UserError(str(error).removeprefix("flag ")) from None
  return values.config


def _list(arguments: argparse.Namespace) -> int:
  for name in registry.EXPERIMENTS:
    experiment = registry.load(name)
    print(f"{name:<16}{experiment.TITLE}  (arXiv {experiment.PAPER})")
  print(f"\nscales: {', '.join(registry.SCALES)}; run one with: foliax run METHOD:SCALE\n")
  for name in registry.JOBS:
    print(f"{name:<16}{registry.load_job(name).TITLE}")
  print("\ntraining jobs; run one with: foliax train JOB:SCALE")
  return 0


def _configured(
  method: str, scale: str, config_flags: list[str], load: Callable[[str], Any] = registry.load
) -> Any:
  module = load(method)
  try:
    config = module.get_config(scale)
  except ValueError as error:
    raise UserError(f"{method} has no scale {scale}: {error}") from None
  return overridden(config, config_flags)


def _run_one(
  method: str, scale: str, config_flags: list[str], workdir: pathlib.Path
) -> dict[str, Any] | int:
  """The results of a run, or the exit code when the experiment itself stopped with an error."""
  config = _configured(method, scale, config_flags)
  from foliax.experiments import run

  try:
    document, before = run.run(method, scale, config, workdir)
  except (UserError, KeyboardInterrupt):
    raise
  except Exception as error:
    kind = type(error).__name__
    print(
      f"foliax: {method}:{scale} stopped: {kind}: {' '.join(str(error).split())} "
      f"(traceback in {workdir / 'error.txt'})",
      file=sys.stderr,
    )
    return 2 if isinstance(error, ValueError) else 1
  if before:
    print(f"{workdir} is finished already; delete it, or choose another --workdir, to run again")
  return document


def _workdir(root: pathlib.Path, method: str, scale: str) -> pathlib.Path:
  return root / f"{method.rpartition('.')[2]}-{scale}"


def _run(arguments: argparse.Namespace) -> int:
  from foliax.experiments import verdicts

  method, scale = registry.split(arguments.target)
  workdir = arguments.workdir or _workdir(pathlib.Path("runs"), method, scale)
  outcome = _run_one(method, scale, arguments.config_flags, workdir)
  if isinstance(outcome, int):
    return outcome
  verdicts.show([outcome])
  print(f"report: {workdir / 'report.html'}")
  return 0


def _train(arguments: argparse.Namespace) -> int:
  job, scale = registry.split(arguments.target)
  config = _configured(job, scale, arguments.config_flags, registry.load_job)
  workdir = arguments.workdir or _workdir(pathlib.Path("runs"), job, scale)
  from foliax.experiments import jobs
  from foliax.training import sharding

  try:
    if arguments.distributed:
      sharding.initialise_distributed()
    document = jobs.train(job, scale, config, workdir)
  except UserError:
    raise
  except Exception as error:
    kind = type(error).__name__
    print(f"foliax: {job}:{scale} stopped: {kind}: {' '.join(str(error).split())}", file=sys.stderr)
    return 2 if isinstance(error, ValueError) else 1
  for name, value in document["results"].items():
    print(f"{name:<24}{value}")
  return 0


def _reproduce(arguments: argparse.Namespace) -> int:
  from foliax.experiments import verdicts

  targets = [registry.split(f"{method}:{arguments.scale}") for method in arguments.methods]
  for method, scale in targets:
    _configured(method, scale, [])  # a misspelt last method must not show up after an hour
  documents, reports, codes = [], [], []
  for method, scale in targets:
    workdir = _workdir(arguments.workdir, method, scale)
    outcome = _run_one(method, scale, [], workdir)
    if isinstance(outcome, int):
      codes.append(outcome)
    else:
      documents.append(outcome)
      reports.append(workdir / "report.html")
  verdicts.show(documents)
  for report in reports:
    print(f"report: {report}")
  return max(codes, default=0)


def _scoreboard(arguments: argparse.Namespace) -> int:
  from foliax.experiments import scoreboard, storage

  folder, readme = arguments.root / "results", arguments.root / "README.md"
  if arguments.add:
    print(f"wrote {scoreboard.add(arguments.add, folder)}")
  documents = scoreboard.load(folder)
  try:
    before = readme.read_text(encoding="utf-8")
  except FileNotFoundError:
    raise UserError(f"there is no {readme}; run this where README.md is, or give --root") from None
  after = scoreboard.insert(before, documents)
  if arguments.html:
    storage.write_atomically(arguments.html, scoreboard.page(documents))
    print(f"wrote {arguments.html}")
  if arguments.check:
    if before != after:
      print(f"{readme} is out of step with {folder}; run: foliax scoreboard", file=sys.stderr)
      return 1
    print(f"{readme} is in step with {folder}")
  elif before != after:
    storage.write_atomically(readme, after)
    print(f"wrote {readme}")
  return 0


def _preflight(arguments: argparse.Namespace) -> int:
  from foliax.experiments import preflight, storage

  found = list(preflight.cases(arguments.names))
  if not found:
    raise UserError("nothing to compile: what you named has no compile cases")
  left_out = [] if arguments.names else [owner for owner, case in found if case.takes_minutes]
  reports = preflight.check([pair for pair in found if not left_out or not pair[1].takes_minutes])
  preflight.show(reports)
  for owner in dict.fromkeys(left_out):
    print(
      f"left out: {left_out.count(owner)} cases of {owner}, which take minutes; compile them with: "
      f"foliax preflight {owner.partition(':')[0]}"
    )
  if arguments.json:
    storage.write_atomically(arguments.json, storage.to_json(reports) + "\n")
    print(f"wrote {arguments.json}")
  return 0 if all(report["ok"] for report in reports) else 1


def _fetch(arguments: argparse.Namespace) -> int:
  from foliax.experiments import inputs

  print("\n".join(inputs.fetch(arguments.names)))
  return 0


def _chat(arguments: argparse.Namespace) -> int:
  from foliax.experiments import chat

  return chat.run(
    arguments.model,
    arguments.once,
    system=arguments.system,
    temperature=arguments.temperature,
    seed=arguments.seed,
    max_tokens=arguments.max_tokens,
  )


_COMMANDS = {
  "list": _list,
  "run": _run,
  "train": _train,
  "reproduce": _reproduce,
  "scoreboard": _scoreboard,
  "preflight": _preflight,
  "fetch": _fetch,
  "chat": _chat,
}

if __name__ == "__main__":
  sys.exit(main())
