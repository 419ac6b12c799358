"""The processes of a run find each other at its start; who waits says for whom, how long, and which key decides it."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from pairs import ends, free_port, start, start_pair
from toy_runs import stage, write_run

from uniml_rl.engines import meeting
from uniml_rl.engines.deepspeed_engine import DeepSpeedEngineConfig
from uniml_rl.engines.endings import MISTAKE, EndedByAnotherRankError, LostRankError
from uniml_rl.engines.ranks import as_lost_rank, exchanging
from uniml_rl.run import train_from_yaml


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_SILENCE", 0.2)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", free_port())


def meet(ranks: Sequence[int], of: int, patience: float, apart: float = 0.0) -> dict[int, BaseException | None]:
    """What came of the ranks, which are threads and start one after the other; None has met."""
    ended: dict[int, BaseException | None] = {}
    stores = []

    def come(rank: int) -> None:
        try:
            stores.append(meeting.meet(rank, of, patience))
            ended[rank] = None
        except Exception as error:
            ended[rank] = error

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
        time.sleep(apart)
    for thread in threads:
        thread.join()
    return ended


def test_who_is_awaited_is_said_and_all_go_on_when_it_has_come(capfd: pytest.CaptureFixture[str]) -> None:
    assert meet([2, 0, 1], 3, patience=60, apart=0.7) == {0: None, 1: None, 2: None}
    said = capfd.readouterr().err
    key = "for at most 60 seconds from its start (engine.start_timeout_seconds)"
    assert "rank 2 of 3 waits for rank 0, which does not answer yet at 127.0.0.1:" in said
    assert "rank 0 of 3 waits for rank 1; rank 0, 2 has come, " + key in said
    assert said.count("waits for rank 1") == 1, "one of those who wait speaks for all"


def test_ranks_that_do_not_come_end_the_others_with_one_message() -> None:
    ended = meet([0, 2], 4, patience=1)
    assert isinstance(ended[2], EndedByAnotherRankError) and ended[2].exit_code == MISTAKE
    assert str(ended[0]).startswith(
        "rank 1, 3 of 4 did not come within 1 seconds (engine.start_timeout_seconds); rank 0, 2 did. Start all 4"
    )


def test_a_first_rank_that_does_not_come_is_not_awaited_for_ever() -> None:
    ended = meet([1], 2, patience=1)
    assert str(ended[1]).startswith("rank 1 of 2 did not meet the others at 127.0.0.1:")
    assert "engine.start_timeout_seconds" in str(ended[1])


def test_a_run_that_is_refused_at_once_says_one_line_among_all_ranks() -> None:
    command = ["-m", "uniml_rl", "train", "missing.yaml"]
    ended = ends(start_pair(command))
    assert [code for code, _, _ in ended] == [MISTAKE, MISTAKE]
    said = [line for _, out, err in ended for line in (out + err).splitlines()]
    assert [line for line in said if "waits for rank" not in line] == ["Error: there is no file 'missing.yaml'"]
    launcher = ["-m", "uniml_rl.torchrun", "--standalone", "--nproc-per-node", "3"]  # whose store outlives the ranks
    ((code, out, err),) = ends([start([*launcher, *command], {})])
    assert code == MISTAKE and (out + err).count("Error: there is no file") == 1


def test_a_refusal_by_rank_0_alone_ends_the_others_that_wait_for_it_with_its_code(tmp_path: Path) -> None:
    """They wait for torch's process group, whose store goes with rank 0."""
    path = write_run(tmp_path, stage(tmp_path), engine={"type": "torch", "device": "cpu", "shard": "ddp"})
    train_from_yaml(path, [], tmp_path / "run")
    ended = ends(start_pair(["-m", "uniml_rl", "train", str(path), "seed=1", "--folder", str(tmp_path / "run")]))
    assert [code for code, _, _ in ended] == [MISTAKE, MISTAKE]
    assert "holds a run of another configuration" in ended[0][2]
    assert "Error" not in ended[1][2] and "Traceback" not in ended[1][2]


def test_what_fails_in_an_exchange_of_a_library_is_a_lost_rank_and_other_errors_are_not() -> None:
    """FSDP gathers weights, and tensor parallelism sums activations, inside of a model's passes."""
    engine = DeepSpeedEngineConfig(device="cpu").build()  # has a process group of its own
    try:
        with pytest.raises((RuntimeError, ValueError)) as caught:
            torch.distributed.all_gather_into_tensor(torch.zeros(3), torch.zeros(2))
        found = as_lost_rank(RuntimeError("reset by peer").with_traceback(caught.value.__traceback__))
        assert isinstance(found, LostRankError)
        assert "rank 0 of 1 lost another one while running a model" in str(found) and "reset by peer" in str(found)
        exhausted = torch.OutOfMemoryError("CUDA out of memory").with_traceback(caught.value.__traceback__)
        assert as_lost_rank(exhausted) is exhausted
        # As DeepSpeed raises them, which waits for what it has begun: of the exchange nothing is among the frames.
        gloo = RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:545] Read error: Connection reset by peer")
        for waited in (gloo, torch.distributed.DistBackendError("NCCL error: remote process exited")):
            assert isinstance(as_lost_rank(waited), LostRankError)
        with pytest.raises(RuntimeError, match="size") as other, exchanging("summing gradients"):
            torch.zeros(2) @ torch.zeros(3)
        assert as_lost_rank(other.value) is other.value
        with pytest.raises(LostRankError, match="while summing gradients"), exchanging("summing gradients"):
            raise gloo
    finally:
        engine.close()
