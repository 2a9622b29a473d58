"""The launch files are well formed, and what they start trains on two processes of this machine."""

import json
import os
import pathlib
import shutil
import socket
import stat
import subprocess
import sys
import time

import jsonschema
import pytest
import yaml

LAUNCH = pathlib.Path(__file__).parents[2] / "launch"
BIN = pathlib.Path(sys.executable).parent
FLAGS = [
  "--config.model=tiny",
  "--config.compute_dtype=float32",
  "--config.sequence=16",
  "--config.rows=4",
  "--config.steps=2",
  "--config.steps_per_call=2",
  "--config.warmup=1",
  "--config.evaluate_every=2",
  "--config.evaluate_batches=1",
  "--config.held_out=0.05",
]

# The parts of the JobSet API, v1alpha2, and of batch/v1 and core/v1 in it that a training job may
# use. Source: the API reference at jobset.sigs.k8s.io, and that of Kubernetes 1.33.
COUNT = {"type": "integer", "minimum": 0}
TEXT = {"type": "string", "minLength": 1}
TEXTS = {"type": "array", "items": TEXT, "minItems": 1}
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
LABELS = {"type": "object", "additionalProperties": {"type": "string"}}


def fields(required=(), **properties):
  return {
    "type": "object",
    "properties": properties,
    "required": list(required),
    "additionalProperties": False,
  }


def items(schema):
  return {"type": "array", "items": schema, "minItems": 1}


AMOUNTS = {"type": "object", "additionalProperties": {"type": ["integer", "string"]}}
CONTAINER = fields(
  ("name", "image"),
  name=NAME,
  image=TEXT,
  command=TEXTS,
  args=TEXTS,
  env=items(fields(("name",), name=TEXT, value={"type": "string"})),
  ports=items(
    fields(
      ("containerPort",),
      containerPort={"type": "integer", "minimum": 1, "maximum": 65535},
      name=NAME,
    )
  ),
  resources=fields(requests=AMOUNTS, limits=AMOUNTS),
  volumeMounts=items(
    fields(("name", "mountPath"), name=NAME, mountPath=TEXT, readOnly={"type": "boolean"})
  ),
)
POD = fields(
  ("containers",),
  restartPolicy={"enum": ["Never", "OnFailure"]},
  terminationGracePeriodSeconds=COUNT,
  nodeSelector=LABELS,
  serviceAccountName=NAME,
  containers=items(CONTAINER),
  volumes=items(
    fields(
      ("name",),
      name=NAME,
      persistentVolumeClaim=fields(("claimName",), claimName=NAME, readOnly={"type": "boolean"}),
    )
  ),
)
POD_FAILURE_RULE = fields(
  ("action",),
  action={"enum": ["FailJob", "FailIndex", "Ignore", "Count"]},
  onPodConditions=items(
    fields(("type", "status"), type=TEXT, status={"enum": ["True", "False", "Unknown"]})
  ),
  onExitCodes=fields(
    ("operator", "values"),
    containerName=NAME,
    operator={"enum": ["In", "NotIn"]},
    values={"type": "array", "items": COUNT, "minItems": 1, "uniqueItems": True},
  ),
)
JOB = fields(
  ("template",),
  parallelism=COUNT,
  completions=COUNT,
  completionMode={"enum": ["Indexed", "NonIndexed"]},
  backoffLimit=COUNT,
  activeDeadlineSeconds=COUNT,
  podFailurePolicy=fields(("rules",), rules=items(POD_FAILURE_RULE)),
  template=fields(("spec",), metadata=fields(labels=LABELS, annotations=LABELS), spec=POD),
)
JOBSET = fields(
  ("apiVersion", "kind", "metadata", "spec"),
  apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
  kind={"const": "JobSet"},
  metadata=fields(("name",), name=NAME, namespace=NAME, labels=LABELS, annotations=LABELS),
  spec=fields(
    ("replicatedJobs",),
    replicatedJobs=items(
      fields(
        ("name", "template"),
        name=NAME,
        groupName=NAME,
        replicas=COUNT,
        template=fields(("spec",), metadata=fields(labels=LABELS, annotations=LABELS), spec=JOB),
      )
    ),
    network=fields(
      enableDNSHostnames={"type": "boolean"},
      subdomain=NAME,
      publishNotReadyAddresses={"type": "boolean"},
    ),
    successPolicy=fields(
      ("operator",), operator={"enum": ["All", "Any"]}, targetReplicatedJobs=TEXTS
    ),
    failurePolicy=fields(
      maxRestarts=COUNT,
      restartStrategy={"enum": ["Recreate", "BlockingRecreate"]},
      rules=items(
        fields(
          ("action",),
          name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:-]*[A-Za-z0-9_])?$"},
          action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
          onJobFailureReasons={
            "type": "array",
            "items": {
              "enum": [
                "BackoffLimitExceeded",
                "DeadlineExceeded",
                "FailedIndexes",
                "MaxFailedIndexesExceeded",
                "PodFailurePolicy",
              ]
            },
          },
          targetReplicatedJobs=TEXTS,
        )
      ),
    ),
    suspend={"type": "boolean"},
    ttlSecondsAfterFinished=COUNT,
  ),
)


def jobset():
  text = (LAUNCH / "gke-jobset.yaml").read_text()
  return yaml.safe_load(text.replace("${IMAGE}", "image:1").replace("${CLAIM}", "claim"))


def container():
  return jobset()["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
    "containers"
  ][0]


def write_program(path, text):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text)
  path.chmod(path.stat().st_mode | stat.S_IXUSR)


def free_port():
  with socket.socket() as taken:
    taken.bind(("localhost", 0))
    return taken.getsockname()[1]


def slurm_job():
  """A job number from which JAX derives a port that is free."""
  for job in range(os.getpid() % 4096, 4096):
    with socket.socket() as taken:
      try:
        taken.bind(("localhost", 61440 + job))
        return job
      except OSError:
        continue
  raise OSError("no free port for Slurm's coordinator")


@pytest.mark.parametrize("name", ["slurm.sbatch", "tpu-vm.sh"])
def test_scripts_pass_shellcheck(name):
  done = subprocess.run([BIN / "shellcheck", LAUNCH / name], capture_output=True, text=True)
  assert done.returncode == 0, done.stdout


def test_slurm_directives_are_options_of_sbatch_and_come_before_the_first_command():
  options = {}
  for line in (LAUNCH / "slurm.sbatch").read_text().splitlines():
    if line.startswith("#SBATCH"):
      name, _, value = line.split()[1].removeprefix("--").partition("=")
      options[name] = value
    elif line and not line.startswith("#"):
      break
  assert options["ntasks-per-node"] == options["gpus-per-node"]
  assert "gpus-per-task" not in options  # each task would see one GPU, of number 0 only
  assert options["signal"].startswith("TERM@")
  assert {"requeue", "nodes", "time"} <= options.keys()


def test_jobset_is_of_its_api():
  jsonschema.validate(jobset(), JOBSET)


@pytest.mark.parametrize(
  ("path", "value"),
  [
    (("spec", "failurePolicy", "maxRestart"), 3),
    (("spec", "replicatedJobs", 0, "template", "spec", "parallelism"), "64"),
    (("spec", "replicatedJobs", 0, "name"), "Slice_1"),
    (("apiVersion",), "jobset.x-k8s.io/v1alpha1"),
  ],
)
def test_schema_refuses_what_the_api_does(path, value):
  document = jobset()
  inner = document
  for key in path[:-1]:
    inner = inner[key]
  inner[path[-1]] = value
  with pytest.raises(jsonschema.ValidationError):
    jsonschema.validate(document, JOBSET)


def test_jobset_has_a_pod_for_each_host_of_its_slice():
  spec = jobset()["spec"]["replicatedJobs"][0]["template"]["spec"]
  pod = spec["template"]["spec"]
  rows, columns = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
  chips = container()["resources"]["limits"]["google.com/tpu"]
  assert spec["parallelism"] == spec["completions"] == int(rows) * int(columns) // chips
  workdir = next(x for x in container()["command"] if x.startswith("--workdir="))
  assert workdir.startswith(f"--workdir={container()['volumeMounts'][0]['mountPath']}/")


SRUN = """#!/bin/bash
# Starts the command of srun as two tasks of one node, and gives back the worst exit code.
shift
export SLURM_STEP_NODELIST=localhost SLURM_STEP_NUM_NODES=1 SLURM_NTASKS=2
for i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & tasks+=($!); done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""
GCLOUD = """#!/bin/bash
# Stands for a project with no slice; its hosts are two processes here.
echo "$4" >>"$HOME/verbs"
[ "$4" = describe ] && exit 1
for argument in "$@"; do
  case $argument in --command=*) command=${argument#--command=} ;; esac
done
case $command in "" | *"pip"*install*) exit 0 ;; esac
for i in 0 1; do JAX_PROCESS_ID=$i bash -c "$command" & tasks+=($!); done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""


@pytest.fixture
def environment(tmp_path):
  """A machine with `foliax` on its path, and a folder for programs that stand in for others."""
  write_program(tmp_path / "bin" / "foliax", f'#!/bin/sh\nexec "{BIN}/foliax" "$@"\n')
  kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TPU_"))}
  return kept | {
    "JAX_PLATFORMS": "cpu",
    "HOME": str(tmp_path),
    "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    "WORKDIR": str(tmp_path / "work"),
  }


def trained(workdir):
  document = json.loads((workdir / "results.json").read_text())
  assert document["scale"] == "pod"
  assert document["results"]["processes"] == 2
  assert document["results"]["steps"] == 2
  assert sorted(p.name for p in workdir.glob("*.json")) == ["config.json", "results.json"]
  return document["results"]["held_out_loss"]


def run(command, environment, seconds=300):
  done = subprocess.run(
    command, env=environment, capture_output=True, text=True, timeout=seconds, check=False
  )
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
  return done


@pytest.mark.slow
def test_every_launch_file_trains_the_same_on_two_processes(environment, tmp_path):
  losses = {}
  write_program(tmp_path / "bin" / "srun", SRUN)
  environment |= {"SLURM_JOB_ID": str(slurm_job()), "WORKDIR": str(tmp_path / "slurm")}
  run(["bash", LAUNCH / "slurm.sbatch", *FLAGS], environment)
  losses["slurm"] = trained(tmp_path / "slurm")
  del environment["SLURM_JOB_ID"]

  address = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2"}
  command = [*container()["command"], f"--workdir={tmp_path / 'gke'}", *FLAGS]
  pods = [
    subprocess.Popen(command, env=environment | address | {"JAX_PROCESS_ID": str(i)})
    for i in range(2)
  ]
  deadline = time.monotonic() + 300
  assert [pod.wait(deadline - time.monotonic()) for pod in pods] == [0, 0]
  losses["gke"] = trained(tmp_path / "gke")

  write_program(tmp_path / "bin" / "gcloud", GCLOUD)
  (tmp_path / "foliax-venv").mkdir()
  shutil.copytree(tmp_path / "bin", tmp_path / "foliax-venv" / "bin")
  environment |= address | {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}"}
  environment |= {"NAME": "slice", "ZONE": "here", "ACCELERATOR": "v5litepod-8", "RUNTIME": "r"}
  environment |= {"WORKDIR": str(tmp_path / "a folder"), "RESTARTS": "0"}
  run(["bash", LAUNCH / "tpu-vm.sh", *FLAGS], environment)
  losses["tpu-vm"] = trained(tmp_path / "a folder")
  assert (tmp_path / "verbs").read_text().split() == ["describe", "create", "scp", "ssh", "ssh"]
  assert len(set(losses.values())) == 1, losses


@pytest.mark.parametrize(
  ("code", "restarts", "queued"), [(143, 0, True), (1, 49, True), (1, 50, False), (2, 0, False)]
)
def test_slurm_queues_a_stopped_job_again_but_not_one_to_be_put_right(
  code, restarts, queued, environment, tmp_path
):
  write_program(tmp_path / "bin" / "srun", f"#!/bin/sh\nexit {code}\n")
  write_program(tmp_path / "bin" / "scontrol", '#!/bin/sh\necho "$@" >"$HOME/asked"\n')
  environment |= {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
  done = subprocess.run(["bash", LAUNCH / "slurm.sbatch"], env=environment, capture_output=True)
  assert done.returncode == code
  asked = tmp_path / "asked"
  assert asked.exists() == queued
  assert not queued or asked.read_text() == "requeue 7\n"


def test_tpu_run_starts_again_after_a_lost_host_and_stops_after_its_restarts(environment, tmp_path):
  write_program(
    tmp_path / "bin" / "gcloud",
    '#!/bin/bash\necho "$4" >>"$HOME/verbs"\n[[ $* != *"foliax train"* ]]\n',
  )
  environment |= {"NAME": "slice", "ZONE": "here", "RESTARTS": "2", "PAUSE_SECONDS": "0"}
  done = subprocess.run(["bash", LAUNCH / "tpu-vm.sh"], env=environment, capture_output=True)
  assert done.returncode == 1
  verbs = (tmp_path / "verbs").read_text().split()
  assert verbs == ["describe", "scp", "ssh", "ssh"] * 3
