"""Several processes train as one does, share what they must, and end together: `rank_work.py` is what they run."""

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import LAUNCHER, LIMIT, TESTS, ends, free_port, start, start_pair
from rank_work import RESULTS, RUN, STEPS, TABLE, WAIT, WHOLE
from toy_runs import (
    COUNT_A,
    COUNT_B,
    RankEngine,
    held_out,
    load_run,
    on_ranks,
    prompts,
    rows_of,
    stage,
    weights_of,
    write_run,
)

from modalities.errors import UserError
from uniml_rl.alike import check_alike
from uniml_rl.check import check_shares
from uniml_rl.checkpoint import CheckpointStore, load_checkpoint
from uniml_rl.config import load_yaml
from uniml_rl.curriculum import Curriculum
from uniml_rl.engines.groups import Launch
from uniml_rl.engines.ranks import launched
from uniml_rl.engines.torch_engine import TorchEngineConfig
from uniml_rl.evaluation import Evaluation
from uniml_rl.monitor.progress import Progress
from uniml_rl.run import train_from_yaml
from uniml_rl.stopping import Stop

SCRIPTS = TESTS.parent / "scripts" / "launch"
MORTAL = {"surprise": {"type": "rank_work:MortalConfig"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run that keeps experience, reward statistics, an average, a critic and a steered KL."""
    folder = tmp_path_factory.mktemp("ranks")
    first = stage(
        folder,
        "first",
        prompts_per_iteration=3,
        rewards=MORTAL,
        algorithm={"name": "grpo", "minibatches": 2, "replay": {"iterations": 2}},
        ema={"decay": 0.5},
        evaluation=held_out(folder, every=2, rows_at_once=2),  # of three prompts rank 0 has the first, rank 1 two
        until={"iterations": 5},
    )
    second = stage(
        folder,
        "second",
        rewards=COUNT_B,
        algorithm={
            "name": "ppo",
            "minibatches": 2,
            "kl": {"coefficient": 0.1, "adaptive": {"target": 0.05, "horizon": 100}},
        },
        critic={},
        rehearsal=[{"stage": "first", "share": 0.3}],
        until={"iterations": 3},
    )
    engine = {"type": "torch", "device": "cpu", "shard": "ddp", "timeout_seconds": 240}
    write_run(folder, first, second, engine=engine, checkpoint={"every": 2})
    return folder


def train_command(folder: Path, *overrides: str, run: str = "killed") -> list[str]:
    return ["-m", "uniml_rl", "train", str(folder / RUN), "--folder", str(folder / run), *overrides]


def assert_same_run(folder: Path, other: Path) -> None:
    assert rows_of(folder) == rows_of(other)
    assert torch.equal(weights_of(folder), weights_of(other))
    newest = [CheckpointStore(run / "checkpoints", 1).latest() for run in (folder, other)]
    weights = [dict(load_checkpoint(path).weights["letters"]) for path in newest if path]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """What the two processes found."""
    ended = ends(start_pair([str(TESTS / "rank_work.py"), str(folder)]))
    assert [code for code, _, _ in ended] == [0, 0], "\n".join(errors[-3000:] for _, _, errors in ended)
    return json.loads((folder / RESULTS).read_text())  # type: ignore[no-any-return]


def test_collectives_gradients_and_clipping_are_those_of_the_sum(results: dict[str, Any]) -> None:
    assert len(results["engine"]) >= 12
    assert [what for what, holds in results["engine"].items() if not holds] == []


def test_zero_divides_what_it_promises_and_gathers_it_once_a_rollout(results: dict[str, Any]) -> None:
    assert len(results["zero"]) >= 38
    assert [what for what, holds in results["zero"].items() if not holds] == []


def test_every_group_waits_as_long_as_the_engine_says(results: dict[str, Any]) -> None:
    *waits, patient = results["waits"]
    assert len(waits) >= 6 and set(waits) == {WAIT}
    assert patient > 300 * 24 * 3600  # of waits for work that one rank does alone


@pytest.mark.parametrize("mode, case", TABLE)
def test_two_ranks_do_what_one_process_does(mode: str, case: str, results: dict[str, Any]) -> None:
    found = results[f"{mode}: {case}"]
    assert found["samples"] <= 1.01 / 255  # text alike, colours to one level
    assert found["different samples"] > 40 and found["steps"] >= STEPS
    assert found["gradient"] <= 1e-5
    assert found["update"] <= 1e-3
    assert found["alike"] and found["metrics"] == []


def test_only_rank_0_writes_and_each_rank_saves_what_it_alone_knows(results: dict[str, Any], folder: Path) -> None:
    whole = folder / WHOLE
    assert [(row["stage"], row["iteration"]) for row in rows_of(whole)] == [
        *(("first", iteration) for iteration in range(6)),
        *(("second", iteration) for iteration in range(1, 4)),
    ]
    assert (whole / "report.md").is_file()
    checkpoint = CheckpointStore(whole / "checkpoints", 1).latest()
    assert checkpoint is not None
    assert json.loads((checkpoint / "manifest.json").read_text())["environment"]["ranks"] == 2


def test_an_evaluation_is_that_of_one_process(results: dict[str, Any], folder: Path) -> None:
    """Before training; what this run learns afterwards depends on what its reward remembers, on each rank."""
    train_from_yaml(folder / RUN, ["stages.first.until.iterations=1"], folder / "alone")
    path = Path("evaluations", "first", "iteration-000000.pt")
    together, alone = (Evaluation.load(folder / run / path) for run in (WHOLE, "alone"))
    assert together.prompts == alone.prompts and together.samples == alone.samples and len(alone.samples) == 6
    assert together.scores.keys() == alone.scores.keys() == {"total", "surprise"}
    assert all(torch.equal(together.scores[key], alone.scores[key]) for key in alone.scores)
    assert len(set(alone.scores["surprise"].flatten().tolist())) > 1


def test_a_mistake_on_one_rank_and_a_kill_end_all_and_the_run_goes_on_bit_for_bit(
    results: dict[str, Any], folder: Path
) -> None:
    killed = folder / "killed"
    (code, _, said), (other_code, _, other_said) = ends(start_pair(train_command(folder), FAIL_AT="1 4"))
    assert (code, other_code) == (2, 2)
    assert "Error:" not in said and other_said.count("Error: this rank cannot go on.") == 1
    kept = CheckpointStore(killed / "checkpoints", 1).latest()
    assert kept is not None
    states = [torch.load(kept / name, weights_only=True) for name in ("state.pt", "state-00001.pt")]
    remembered = [state["rewards"]["sets"][0]["surprise"] for state in states]
    assert remembered[0] != remembered[1]  # else the order of ranks would not matter
    with pytest.raises(UserError, match=r"written by 2 processes(?s:.*)cannot be shared out to 1; start 2"):
        train_from_yaml(folder / RUN, [], killed)

    processes = start_pair(train_command(folder), DIE_AT="1 2")
    processes[1].wait(LIMIT)
    began = time.monotonic()
    (code, _, said), (other_code, _, _) = ends(processes)
    assert (code, other_code) == (1, -signal.SIGKILL)
    assert time.monotonic() - began < 60
    assert "rank 0 of 2 lost another one while" in said and "Traceback" not in said

    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    ((code, output, errors),) = ends([start([*launcher, *train_command(folder)], {"DIE_AT": "1 3"})])
    assert code == 0, output + errors
    assert [output.count(f"continuing after {count} iterations") for count in (2, 4)] == [1, 1]
    assert_same_run(killed, folder / WHOLE)


def test_a_signal_to_one_rank_or_to_the_launcher_saves_on_all_and_two_nodes_go_on_bit_for_bit(
    results: dict[str, Any], folder: Path
) -> None:
    stopped = folder / "stopped"
    (code, _, said), (other_code, _, other_said) = ends(start_pair(train_command(folder, run="stopped"), STOP_AT="1 1"))
    assert (code, other_code) == (75, 75)
    assert (said + other_said).count("Stopped by") == 1
    assert "the same command continues after the 1 iterations that are saved" in said + other_said

    launcher = ["-m", "uniml_rl.torchrun", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, *train_command(folder, run="stopped")]
    ((code, output, errors),) = ends([start(command, {"STOP_LAUNCHER_AT": "0 2"})])
    assert code == 75
    assert "continuing after 1 iterations" in output
    assert "Stopped by SIGTERM; the same command continues after the 2 iterations" in errors

    ((code, _, _),) = ends([start(command, {"STOP_AT": "1 1"})])
    assert code == 75
    ((code, _, errors),) = ends([start(command, {"FAIL_AT": "1 1"})])
    assert code == 2 and errors.count("Error: this rank cannot go on.") == 1
    nodes = [  # two machines with a process each; they meet at the first one's address, and continue the run
        {"NODES": "2", "FIRST_NODE": "127.0.0.1", "LOCAL_ADDRESS": address, "PORT": port, "PROCESSES": "1"}
        for port in [free_port()]
        for address in ("127.0.0.1", "127.0.0.2")
    ]
    script = [str(SCRIPTS / "torchrun.sh"), *train_command(folder, run="stopped")[3:]]
    ended = ends([start(script, node, program="bash") for node in nodes])
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert_same_run(stopped, folder / WHOLE)


def test_a_time_out_says_where_every_rank_is(folder: Path) -> None:
    command = train_command(folder, "engine.timeout_seconds=5", run="hanging")
    (code, _, said), (hanging_code, _, hanging) = ends(start_pair(command, HANG_AT="1 2"))
    assert (code, hanging_code) == (1, 1)
    assert "timed out" in said.lower()
    assert re.search(r"  rank 0: update \(stage first, iteration 2\) for \d+ s\n", said)
    assert re.search(r"  rank 1: reward \(stage first, iteration 2\) for \d+ s\n", said)
    assert "it was in reward (stage first, iteration 2), in " in hanging


def test_a_full_disk_or_a_kill_while_one_rank_saves_ends_all_and_leaves_the_checkpoint_before(folder: Path) -> None:
    (code, _, said), (other_code, _, other_said) = ends(start_pair(train_command(folder, run="full"), FULL_AT="1 3"))
    assert (code, other_code) == (2, 2)
    assert re.search(r"Error: checkpoint .*iteration-000004 could not be written .*last good one is kept", other_said)
    assert "Error" not in said
    assert [path.name for path in (folder / "full" / "checkpoints").iterdir()] == ["iteration-000002"]

    ended = ends(start_pair(train_command(folder, run="full"), DIE_SAVING_AT="1 1"))
    assert [code for code, _, _ in ended] == [1, -signal.SIGKILL]
    assert "  rank 1: checkpoint (stage first, iteration 4) for " in ended[0][2]
    kept = CheckpointStore(folder / "full" / "checkpoints", 1).complete()
    assert [path.name for path in kept] == ["iteration-000002"]


ENGINE = """
import os, signal, time, torch
from uniml_rl.engines.ranks import ending_together, launched
from uniml_rl.engines.torch_engine import TorchEngineConfig
with ending_together(launched()):
    engine = TorchEngineConfig(device="cpu", shard="ddp", timeout_seconds=2).build()
"""
SILENT = """
    if engine.rank == 1:
        time.sleep(600)
    engine.sum_over_ranks(torch.ones(()))
"""
KILLED = """
    if engine.rank == 0:
        time.sleep(4)  # twice the time-out: whoever waits for work of one rank has patience
        engine.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    engine.wait()
    engine.wait()
"""


RESTARTED = """
import os, time
from uniml_rl.engines import ranks
from uniml_rl.engines.torch_engine import TorchEngineConfig
ranks._POLL = ranks._GRACE = 0.2
with ranks.ending_together(ranks.launched()):
    engine = TorchEngineConfig(device="cpu", shard="ddp", timeout_seconds=60).build()
    engine.wait()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("the first attempt")
    time.sleep(2)
print("the second attempt")
"""


def test_how_one_attempt_ended_says_nothing_to_the_next(tmp_path: Path) -> None:
    (tmp_path / "restarted.py").write_text(RESTARTED)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    ((code, output, errors),) = ends([start([*launcher, str(tmp_path / "restarted.py")], {})])
    assert (code, output.count("the second attempt")) == (0, 2), errors


def test_the_others_end_when_rank_0_is_killed_while_they_wait_for_it() -> None:
    (killed_code, _, _), (code, _, said) = ends(start_pair(["-c", ENGINE + KILLED]))
    assert (killed_code, code) == (-signal.SIGKILL, 1)
    assert "rank 1 of 2 lost another one while waiting for all" in said


def test_a_silent_rank_ends_the_others_after_the_time_out_and_is_ended_itself() -> None:
    (code, _, said), (silent_code, _, silent) = ends(start_pair(["-c", ENGINE + SILENT]))
    assert (code, silent_code) == (1, 1)
    assert "rank 0 of 2 lost another one while summing numbers" in said and "timed out" in said.lower()
    assert "rank 1 ends, because rank 0 did" in silent


# -- what one process can say of it ----------------------------------------------------------------------------------


def test_the_environment_says_who_this_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    assert launched() == Launch(0, 0, 1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="the environment has no RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        launched()
    for name, value in zip(LAUNCHER, ("3", "one", "4", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="LOCAL_RANK=one, which is no number"):
        launched()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launched() == Launch(3, 1, 4, local_world_size=4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert launched() == Launch(3, 1, 4, local_world_size=2)
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(UserError, match="RANK=4 must be below WORLD_SIZE=4"):
        launched()
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(UserError, match=r"each of 4 would train by itself; take ddp"):
        TorchEngineConfig(device="cpu").build()


def test_in_one_process_ddp_is_none(tmp_path: Path) -> None:
    for shard in ("none", "ddp"):
        path = write_run(tmp_path, stage(tmp_path, rewards=COUNT_A), engine={"type": "torch", "shard": shard})
        train_from_yaml(path, [], tmp_path / shard)
    assert torch.equal(weights_of(tmp_path / "none"), weights_of(tmp_path / "ddp"))


def test_fewer_prompts_than_processes_are_refused_at_their_line(tmp_path: Path) -> None:
    path = write_run(tmp_path, stage(tmp_path, prompts_per_iteration=2))
    check_shares(load_run(path), load_yaml(path), 2)
    with pytest.raises(UserError, match=r"run\.yaml:\d+: .*prompts_per_iteration: 2 cannot be shared by 3 processes"):
        check_shares(load_run(path), load_yaml(path), 3)


def test_what_the_ranks_read_must_be_the_same() -> None:
    on_ranks(3, lambda engine: check_alike(engine, "the data", "same"))
    with pytest.raises(UserError, match="rank 1, 2 has read another version of the data than rank 0"):
        on_ranks(3, lambda engine: check_alike(engine, "the data", "same" if engine.rank == 0 else "other"))


@pytest.mark.parametrize("what", ["data", "evaluation's prompts"])
def test_a_stream_that_ends_early_on_one_rank_is_refused_before_training(tmp_path: Path, what: str) -> None:
    def open_stage(engine: RankEngine) -> None:
        folder = tmp_path / str(engine.rank)
        folder.mkdir()
        own = prompts(folder, "one two three" if engine.rank == 0 else "one two")
        keys = {"prompts": own} if what == "data" else {"evaluation": {"prompts": own}}
        path = write_run(folder, stage(tmp_path, **keys))
        Curriculum(load_run(path), folder, engine, "cpu", None, Progress(quiet=True), Stop())._open(0)

    prompts(tmp_path)
    with pytest.raises(UserError, match=f"rank 1 has read another version of the {what} of stage 'only' than rank 0"):
        on_ranks(2, open_stage)


def test_a_time_out_that_nothing_waits_for_is_refused() -> None:
    with pytest.raises(ValueError, match="timeout_seconds: one process waits for no other"):
        TorchEngineConfig(timeout_seconds=60)
