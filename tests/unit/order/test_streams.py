"""Seeds are pure functions of where they are used, all different, frozen for ever."""

from __future__ import annotations

import pytest

from unbroken.order.streams import check_seed, rank_seed, sample_seed, stream_seed


def test_golden_seeds_never_change() -> None:
    assert stream_seed(7, 1, 0, "python") == 8998111786373084853
    assert stream_seed(7, 1, 0, "torch") == 18271223366278496918
    assert sample_seed(7, 0, 0) == 17515327737744022718
    assert rank_seed(7, 3, 1, "torch") == 4636079954993128601


def test_I7_every_place_has_its_own_seed() -> None:
    names = ("python", "numpy", "torch", "torch:cuda")
    seeds = [stream_seed(seed, step, unit, name) for seed in (0, 1) for step in (0, 1, 2**40) for unit in range(4) for name in names]
    seeds += [sample_seed(seed, epoch, position) for seed in (0, 1) for epoch in range(3) for position in (0, 1, 2**53 + 1)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_B24_new_ranks_get_streams_unlike_any_other() -> None:
    seeds = {rank_seed(7, generation, rank, name) for generation in range(5) for rank in range(8) for name in ("python", "numpy", "torch")}
    assert len(seeds) == 5 * 8 * 3
    assert not seeds & {stream_seed(7, step, unit, name) for step in range(5) for unit in range(8) for name in ("python", "numpy", "torch")}


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, "7", None, True])
def test_a_seed_that_is_none_is_refused(seed: object) -> None:
    with pytest.raises(ValueError, match="seed must be an integer"):
        check_seed(seed)  # type: ignore[arg-type]
