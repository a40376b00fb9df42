"""Three ranks on real Gloo: a reduction, unequal shares, an abandoned collective and a new group. Each rank prints one JSON line."""

from __future__ import annotations

import json
import os
import threading
import time

import torch
import torch.distributed as dist

from tests.rigs.thread_exchange import bits_of
from unbroken.order.units import blocks
from unbroken.step.exchange import Exchange, ExchangeFailed, join_world
from unbroken.step.reduce import OrderedReduction, RankFacts, UnitFacts

NUM_UNITS = 8
"""On three ranks their blocks are covered by 2, 2 and 1 nodes: what the ranks send is not equally long."""
SIZES = (70, 3)


def values(unit: int) -> list[torch.Tensor]:
    """A unit's gradients: 25 decades, float32 and bfloat16."""
    g = torch.Generator().manual_seed(unit)
    wide = torch.randn(SIZES[0], generator=g) * 10.0 ** torch.randint(-20, 5, (SIZES[0],), generator=g)
    return [wide, torch.randn(SIZES[1], generator=g).bfloat16()]


def reduced(exchange: Exchange) -> list[str]:
    """The results' bytes, hex, whatever the number of ranks; unit u has weight u + 1."""
    like = [torch.empty(SIZES[0]), torch.empty(SIZES[1], dtype=torch.bfloat16)]
    reduction = OrderedReduction(like, NUM_UNITS, exchange)
    block = blocks(NUM_UNITS, exchange.world_size)[exchange.rank]
    for unit in block:
        reduction.add(unit, values(unit))
    units = tuple(UnitFacts(u, "", u + 1, "0" * 16, "") for u in block)
    result = reduction.reduce(RankFacts(units=units, present=reduction.present))
    return [raw.hex() for raw in bits_of([value for value in result.sums if value is not None])]


def failure_of(exchange: Exchange, scatter: bool) -> tuple[float, str]:
    """Seconds until a collective fails, and how."""
    began = time.monotonic()
    try:
        if scatter:
            exchange.scatter(torch.zeros(3 * 64, dtype=torch.uint8), [64] * 3, [64] * 3)
        else:
            exchange.gather(torch.zeros(8))
    except ExchangeFailed as error:
        return time.monotonic() - began, str(error)
    return -1.0, ""


def beside_a_gather(exchange: Exchange) -> tuple[list[int], bool]:
    """What `share` gives while a gather in another thread still waits for rank 2, which begins it later; and that gather's own result."""
    own, got = torch.full((1000,), float(exchange.rank)), []
    lane = threading.Thread(target=lambda: got.append(exchange.as_connected().gather(own)))
    if exchange.rank != 2:
        lane.start()
        time.sleep(0.2)  # it has sent what is its own: nothing can be seen of that
    shared = exchange.share(exchange.rank * 7, int)
    if exchange.rank == 2:
        lane.start()
    lane.join(30)
    wanted = torch.arange(3.0).repeat_interleave(1000)
    return shared, bool(got) and torch.equal(got[0], wanted)


def wait_for_others(rank: int, name: str) -> None:
    """Until the other two are in their collective, or about to be."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait([f"{name}/0", f"{name}/2"])
    else:
        store.set(f"{name}/{rank}", "1")


def main() -> None:
    """All rounds; what each gave."""
    device = torch.device("cpu")
    assert join_world(device)
    assert not join_world(device), "the world is there already"
    exchange = Exchange(device)
    out: dict[str, object] = {"unconnected": failure_of(exchange, True)[1]}
    exchange.connect("start")
    out["reduced"] = reduced(exchange)
    out["shared"] = exchange.share({"rank": exchange.rank, "text": "ü" * 10 ** (2 * exchange.rank)}, dict[str, int | str])
    out["beside"] = beside_a_gather(exchange)
    failed = []
    for round_number, scatter in enumerate((True, False)):
        wait_for_others(exchange.rank, f"round{round_number}")
        if exchange.rank == 1:
            exchange.abandon()
        failed.append(failure_of(exchange, scatter))
        exchange.abandon()
        exchange.connect("again")
        out[f"after{round_number}"] = exchange.share(exchange.rank * 11, int)
    out["failed"] = failed
    for _ in range(5):
        exchange.abandon()
        exchange.connect("again")
        out["after1"] = exchange.share(exchange.rank * 11, int)
    out["same"] = reduced(exchange) == out["reduced"]
    print(json.dumps(out))
    exchange.abandon()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
