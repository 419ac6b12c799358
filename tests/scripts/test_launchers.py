"""The launchers hand our command line what was typed, and treat its exit codes as they should."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from torch.distributed.run import parse_args

from uniml_rl import cli

LAUNCH = Path(__file__).resolve().parents[2] / "scripts" / "launch"
TYPED = ["run.yaml", "seed=7", "--folder", "a folder"]
STUB = """#!/bin/sh
printf '%s\\n' "$0" "$@" > "$RECORDS/$(basename "$0")"
echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" > "$RECORDS/patience"
exit ${CODE:-0}
"""
PROGRAMS = {"python": STUB, "deepspeed": STUB, "srun": '#!/bin/sh\nshift\nexec "$@"\n', "scontrol": "#!/bin/sh\n"}
PROGRAMS["scontrol"] += '[ "$1" = show ] && echo node-1 && exit\necho "$@" > "$RECORDS/requeued"\n'
SLURM = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}


def launch(folder: Path, script: str, **environment: str) -> tuple[int, list[str]]:
    """The exit code of a launcher among stand-ins for the programs that it starts, and the arguments of the last."""
    for name, text in PROGRAMS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    paths = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "RECORDS": str(folder)}
    done = subprocess.run(["bash", str(LAUNCH / script), *TYPED], env=os.environ | paths | environment, check=False)
    called = folder / ("deepspeed" if script == "deepspeed.sh" else "python")
    return done.returncode, called.read_text().splitlines()[1:]


def accepted(arguments: list[str]) -> dict[str, Any]:
    """What our command line reads from `uniml_rl ...`."""
    command, *rest = arguments
    train = typer.main.get_command(cli.app).commands[command]  # type: ignore[attr-defined]
    return dict(train.make_context(command, list(rest)).params)


def assert_trains_what_was_typed(module: str, arguments: list[str]) -> None:
    assert module == "uniml_rl"
    read = accepted(arguments)
    assert (read["config"], read["overrides"], read["folder"]) == ("run.yaml", ["seed=7"], "a folder")


@pytest.mark.parametrize(
    ("script", "environment", "nodes", "endpoint"),
    [
        ("torchrun.sh", {"PROCESSES": "2"}, "1:1", ""),
        ("torchrun.sh", {"NODES": "3", "FIRST_NODE": "10.0.0.1", "PROCESSES": "8"}, "3", "10.0.0.1:29500"),
        ("slurm.sbatch", SLURM, "2", "node-1:20042"),
    ],
)
def test_torchrun_starts_what_was_typed(
    tmp_path: Path, script: str, environment: dict[str, str], nodes: str, endpoint: str
) -> None:
    code, called = launch(tmp_path, script, **environment)
    assert code == 0 and called[:2] == ["-m", "uniml_rl.torchrun"]
    options = parse_args(called[2:])
    assert (options.nnodes, options.rdzv_endpoint) == (nodes, endpoint)
    assert options.module and options.nproc_per_node == environment.get("PROCESSES", "8")
    assert_trains_what_was_typed(options.training_script, options.training_script_args)
    assert int((tmp_path / "patience").read_text()) > 500


@pytest.mark.parametrize("hosts", [{}, {"HOSTFILE": "hosts", "PROCESSES": "4"}])
def test_deepspeed_starts_what_was_typed(tmp_path: Path, hosts: dict[str, str]) -> None:
    from deepspeed.launcher import runner

    code, called = launch(tmp_path, "deepspeed.sh", CODE="75", **hosts)
    options = runner.parse_args(called)
    assert code == 75 and options.module and options.no_local_rank
    assert (options.num_gpus, options.hostfile) == ((4, "hosts") if hosts else (-1, runner.DLTS_HOSTFILE))
    assert_trains_what_was_typed(options.user_script, options.user_args)


@pytest.mark.parametrize(("code", "again"), [(75, True), (2, False), (1, False)])
def test_slurm_requeues_what_asks_for_it(tmp_path: Path, code: int, again: bool) -> None:
    assert launch(tmp_path, "slurm.sbatch", **SLURM, CODE=str(code))[0] == code
    assert (tmp_path / "requeued").exists() == again
    assert not again or (tmp_path / "requeued").read_text() == "requeue 42\n"


def test_the_kubernetes_job_starts_a_command_that_we_accept_and_knows_its_exit_codes() -> None:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][:3] == ["python", "-m", "uniml_rl.torchrun"]
    options = parse_args(container["command"][3:])
    assert int(options.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(options.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    first_pod = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert options.rdzv_endpoint.split(":")[0] == first_pod and pod["subdomain"] == service["metadata"]["name"]
    assert accepted(options.training_script_args)["config"] == "/config/run.yaml"
    rules = job["spec"]["podFailurePolicy"]["rules"]
    actions = {tuple(rule["onExitCodes"]["values"]): rule["action"] for rule in rules if "onExitCodes" in rule}
    assert actions == {(2,): "FailJob", (75,): "Ignore"}
    assert all(rule["onExitCodes"]["containerName"] == container["name"] for rule in rules if "onExitCodes" in rule)
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    (patience,) = [int(each["value"]) for each in container["env"]]
    assert patience < pod["terminationGracePeriodSeconds"]
