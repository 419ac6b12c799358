"""Tensors of a checkpoint are written once, by whom has least to write, and read back as they were."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pairs import ends, start_pair
from safetensors import safe_open

from uniml_rl.engines.stored_tensors import StoredTensors, _own_share, shard_prefix, store

TENSORS = {f"{size}-{copy}": torch.arange(float(size)) + copy for size in (7, 40, 100) for copy in range(3)}
LARGEST = max(value.nbytes for value in TENSORS.values())


def work(folder: Path) -> None:
    """What each of two ranks does, which give the same tensors in other orders."""
    dist.init_process_group("gloo")
    order = list(TENSORS.items())[:: 1 - 2 * dist.get_rank()]
    copied = sum(value.nbytes for value in _own_share(dict(order)).values())
    assert copied <= (sum(value.nbytes for value in TENSORS.values()) + LARGEST) / 2, "more than its share is copied"
    for name, beside in (("now", False), ("beside", True)):
        store(dict(order), folder / name, beside)()
    store({"alone": torch.ones(3)}, folder / "one")()
    dist.destroy_process_group()


def test_ranks_that_hold_the_same_write_half_each_and_every_tensor_once(tmp_path: Path) -> None:
    ended = ends(start_pair([__file__, str(tmp_path)]))
    assert [code for code, _, _ in ended] == [0, 0], ended[0][2][-3000:]
    for name in ("now", "beside"):
        read = StoredTensors.of(tmp_path / name)
        assert read.keys() == TENSORS.keys()
        assert all(torch.equal(read[key], value) for key, value in TENSORS.items())
        written = [names_in(tmp_path / name, rank) for rank in (0, 1)]
        assert not written[0] & written[1]
        sizes = [sum(TENSORS[key].nbytes for key in each) for each in written]
        assert abs(sizes[0] - sizes[1]) <= LARGEST
    assert torch.equal(StoredTensors.of(tmp_path / "one")["alone"], torch.ones(3)), (
        "and a rank may have nothing to write"
    )


def names_in(folder: Path, rank: int) -> set[str]:
    found = set[str]()
    for path in folder.glob(f"{shard_prefix(rank)}*.safetensors"):
        found |= set(safe_open(path, framework="pt").keys())
    return found


@pytest.mark.parametrize("beside", [False, True])
def test_one_process_writes_without_a_warning(beside: bool, tmp_path: Path) -> None:
    """A thread may give it when whoever began to write has long gone on."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store(TENSORS, tmp_path, beside)()
    assert [str(each.message) for each in caught] == []
    assert StoredTensors.of(tmp_path).keys() == TENSORS.keys()


if __name__ == "__main__":
    torch.set_num_threads(1)
    work(Path(sys.argv[1]))
