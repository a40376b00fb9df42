"""`run.once` on three ranks: once per key on the surviving lineage, again where the commit did not survive, never anything in roots."""

from __future__ import annotations

import json
import os
from pathlib import Path

import unbroken
from tests.rigs.launched import launched
from tests.rigs.tiny_run import end_daemon

STEPS = 8

TRAIN = f"""
import torch, unbroken
from tests.rigs.tiny_run import Tiny, loss_of, samples
torch.manual_seed(3)
model = Tiny()
run = unbroken.Run(
    os.path.join(FOLDER, "run"), model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), units=4,
    data=unbroken.Batches(samples(), global_batch=8, seed=1), total_steps={STEPS}, lose_at_most="100 steps",
)
def once(key):
    if USE_ONCE and run.once(key):
        mark("once", key=key, step=run.completed)
USE_ONCE = os.environ.get("USE_ONCE", "1") == "1"
once("before the loop")
for batch in run:
    once("in the first body")
    for micro in batch:
        micro.backward(loss_of(run.model, micro))
    if not run.step():
        run.log(never=1)
        continue
    run.log(rank=RANK)
    if run.completed == 4:
        once("saved")
        run.save(wait=True)
    if run.completed == 6:
        once("lost with its step")
        if RANK == 0:
            once("asked for on rank 0 only")
        if ATTEMPT == 0 and USE_ONCE:
            mark("here")
            wait_for(lambda: len(marks("here")) == 3)
            if RANK == int(os.environ["VICTIM"]):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
"""


def environment(victim: int, **more: str) -> dict[str, str]:
    return {"PYTHONPATH": os.getcwd(), "VICTIM": str(victim), **more}


def test_I8_once_is_true_once_per_key_on_rank_0_and_again_only_where_the_commit_did_not_survive(tmp_path: Path) -> None:
    flags = ("--preload", "torch,torch._dynamo,unbroken.session")
    # a collective fails on one rank in step 3, and all repeat that step in place
    fault = json.dumps([{"at": "exchange.scatter", "step": 3, "rank": 1, "action": "raise"}])
    roots = set()
    for victim, used in ((0, "1"), (1, "1"), (2, "0")):  # the last one on one rank, undisturbed
        folder = tmp_path / f"{victim}{used}"
        folder.mkdir()
        with launched(
            folder,
            TRAIN,
            "--nproc-per-node",
            "3" if used == "1" else "1",
            *flags,
            env=environment(victim, UNBROKEN_FAULTS=fault, USE_ONCE=used),
        ) as one:
            assert one.wait(120) == 0, one.stderr
            told = [(m["rank"], m["attempt"], m["key"]) for m in one.marks("once")]
        end_daemon(folder / "run")
        again = [(0, 1, "lost with its step"), (0, 1, "asked for on rank 0 only")]
        expected = [(0, 0, "before the loop"), (0, 0, "in the first body"), (0, 0, "saved")]
        expected += [(0, 0, "lost with its step"), (0, 0, "asked for on rank 0 only"), *again]
        assert told == (expected if used == "1" else []), one.stderr
        certificate = unbroken.open(folder / "run").certify()
        assert certificate.certified, certificate.problems
        roots.add(certificate.final_root)
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [(row["step"], row["rank"], "never" in row) for row in rows] == [(k, 0, False) for k in range(1, STEPS + 1)]
    assert len(roots) == 1, "a run's state root does not know of it"
