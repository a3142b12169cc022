"""examples/cluster, as far as a machine without SLURM and Kubernetes can tell: stand-ins for commands, fields for the API."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from gpubound.cli.train_options import Train, from_file
from tests.messages import message

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"
SBATCH = CLUSTER / "train.sbatch"

# Stand-ins: each notes its arguments. A run waits for scancel, and ends with what its environment says.
COMMANDS = {
    "scontrol": 'if [ "$1" = show ]; then printf "node7\\nnode8\\n"; fi',
    "scancel": 'touch "$NOTES.cancelled"',
    "srun": 'while [ -n "${WAITS-}" ] && [ ! -e "$NOTES.cancelled" ]; do sleep 0.02; done; exit "${ENDS-0}"',
}


@pytest.fixture
def sbatch(tmp_path):
    """sbatch(*arguments, signalled=False, **environment) -> (exit code, stderr, the commands that were called)"""
    for name, does in COMMANDS.items():
        (tmp_path / name).write_text(f'#!/bin/bash\necho {name} "$@" >> "$NOTES"\n{does}\n')
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "41234", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}

    def run(*arguments, signalled=False, **environment):
        notes = tmp_path / "notes"
        names = {**os.environ, **slurm, **environment, "NOTES": str(notes), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        process = subprocess.Popen(["bash", str(SBATCH), *arguments], env=names, stderr=subprocess.PIPE, text=True)
        if signalled:
            while process.poll() is None and not (notes.exists() and "srun" in notes.read_text()):
                time.sleep(0.02)
            process.send_signal(signal.SIGUSR1)
        _, err = process.communicate(timeout=60)
        return process.returncode, err, notes.read_text().splitlines() if notes.exists() else []

    return run


START = (
    "srun --kill-on-bad-exit=1 torchrun --nnodes 2 --nproc-per-node 8 --max-restarts 3 --rdzv-backend c10d --rdzv-id 41234 "
    "--rdzv-endpoint node7:21234 -m gpubound train run.yaml --steps 9 --resume"
)


@pytest.mark.parametrize("code", [0, 3])
def test_a_job_ends_as_its_run_does(sbatch, code):
    ended, err, called = sbatch("run.yaml", "--steps", "9", ENDS=str(code))
    assert (ended, err, called) == (code, "", ["scontrol show hostnames node[7-8]", START])


@pytest.mark.parametrize(("code", "more"), [(1, ["scontrol requeue 41234"]), (0, [])], ids=["stopped", "finished meanwhile"])
def test_a_job_whose_time_is_over_saves_and_goes_back_into_the_queue(sbatch, code, more):
    ended, err, called = sbatch("run.yaml", "--steps", "9", signalled=True, WAITS="1", ENDS=str(code))
    assert (ended, err) == (0, "") and called[1:] == [START, "scancel --signal=TERM 41234", *more]


def test_a_job_without_a_config_says_so(sbatch):
    assert sbatch() == (2, message("parallel/cluster:a_job_without_a_config_s"), [])


def test_what_slurm_reads_stands_above_the_first_command():
    text = SBATCH.read_text()
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)
    head = text[: text.index("set -euo")]
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.+))?$", head, flags=re.MULTILINE))
    assert "#SBATCH" not in text[len(head) :] and len(options) == head.count("\n#SBATCH")
    assert options["signal"] == "B:USR1@600" and options["ntasks-per-node"] == "1" and {"requeue", "nodes"} <= options.keys()
    spare = int(options["signal"].split("@")[1]) - int(re.search(r"SHUTDOWN_TIMEOUT=(\d+)", text)[1])
    assert spare >= 30  # the checkpoint is saved before SLURM ends the job


# Fields of kubeflow.org/v1 PyTorchJob and of core v1, by their names in the API; each member of a list has those of the first.
NAMED = {"name": str}
CONTAINER = {
    "name": str, "image": str, "command": [str], "env": [{"name": str, "value": str}],
    "resources": {"limits": {"nvidia.com/gpu": int}}, "volumeMounts": [{"name": str, "mountPath": str}],
}  # fmt: skip
VOLUME = {"name": str, "persistentVolumeClaim": {"claimName": str}, "configMap": NAMED, "emptyDir": {"medium": str}}
POD = {"spec": {"terminationGracePeriodSeconds": int, "containers": [CONTAINER], "volumes": [VOLUME]}}
REPLICA = {"replicas": int, "restartPolicy": str, "template": POD}
JOB = {
    "apiVersion": str, "kind": str, "metadata": NAMED,
    "spec": {
        "nprocPerNode": str, "runPolicy": {"backoffLimit": int, "cleanPodPolicy": str},
        "pytorchReplicaSpecs": {"Master": REPLICA, "Worker": REPLICA},
    },
}  # fmt: skip


def fits(value, wanted, where="job"):
    """Hold a document to the fields that the API has."""
    if isinstance(wanted, dict):
        assert isinstance(value, dict) and value.keys() <= wanted.keys(), (
            f"{where}: {value} has other fields than {list(wanted)}"
        )
        for key, own in value.items():
            fits(own, wanted[key], f"{where}.{key}")
    elif isinstance(wanted, list):
        assert isinstance(value, list) and value, where
        for one in value:
            fits(one, wanted[0], where)
    else:
        assert type(value) is wanted, f"{where}: {value!r} is no {wanted.__name__}"


def test_the_pytorchjob_has_the_operators_fields_and_agrees_with_itself(tmp_path):
    config, job = yaml.safe_load_all((CLUSTER / "pytorchjob.yaml").read_text())
    fits(config, {"apiVersion": str, "kind": str, "metadata": NAMED, "data": {"run.yaml": str}}, "config")
    fits(job, JOB)
    assert (config["apiVersion"], config["kind"]) == ("v1", "ConfigMap")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = job["spec"]
    assert spec["runPolicy"]["cleanPodPolicy"] in ("None", "Running", "All")
    replicas = spec["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1  # the operator refuses another number
    for replica in replicas.values():
        assert replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # which the operator looks for
        assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == spec["nprocPerNode"]
        volumes = {volume.pop("name"): volume for volume in map(dict, replica["template"]["spec"]["volumes"])}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        assert all(len(source) == 1 for source in volumes.values())
        assert volumes["config"]["configMap"]["name"] == config["metadata"]["name"]
        _, gpubound, *typed = container["command"][container["command"].index("-m") :]
        assert (gpubound, typed) == ("gpubound", ["train", "/config/run.yaml", "--resume"])
    (tmp_path / "run.yaml").write_text(config["data"]["run.yaml"])
    recipe: Train = from_file(str(tmp_path / "run.yaml"))
    ranks = int(spec["nprocPerNode"]) * sum(replica["replicas"] for replica in replicas.values())
    assert recipe.accumulate % ranks == 0
