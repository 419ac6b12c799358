"""Weights that are drawn anew are a function of their seed, whatever else draws at the same time."""

import threading

import torch

from modalities.critic import ValueHead


def test_threads_that_initialise_at_the_same_time_draw_what_each_draws_alone() -> None:
    before = torch.get_rng_state()
    alone = {seed: ValueHead(64, 64, seed).state_dict() for seed in range(4)}
    together: dict[int, dict[str, torch.Tensor]] = {}
    start = threading.Barrier(len(alone))

    def build(seed: int) -> None:
        start.wait()
        for _ in range(50):
            together[seed] = ValueHead(64, 64, seed).state_dict()
            if any(not torch.equal(together[seed][key], alone[seed][key]) for key in alone[seed]):
                return

    threads = [threading.Thread(target=build, args=(seed,)) for seed in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, weights in alone.items():
        assert all(torch.equal(together[seed][key], value) for key, value in weights.items())
    assert not torch.equal(alone[0]["layers.1.weight"], alone[1]["layers.1.weight"])
    assert torch.equal(torch.get_rng_state(), before)
