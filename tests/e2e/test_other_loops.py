"""Loops, loaders and models other than the usual: each resumes exactly as far as it claims, or is refused with the line to change."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import unbroken
from tests.rigs.ranks import run_ranks
from tests.rigs.tiny_run import Tiny, loss_of, open_run, samples, train
from tests.rigs.torture_runs import ROOT
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # in torchdata's own constructor
RANKS = 3
STEPS = 6
CUT = 3
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
FOREIGN = ("distributed", "stateful", "torchdata0", "torchdata2")
KILL = [{"at": "step.reduce", "step": 4, "rank": 1, "generation": 0, "action": "kill"}]


def script(folder: Path, name: str) -> str:
    """A script that runs a function of this module on the folder it is given."""
    path = folder / f"{name}.py"
    path.write_text(f"import sys\nfrom pathlib import Path\nfrom tests.e2e.test_other_loops import {name}\n{name}(Path(sys.argv[1]))\n")
    return str(path)


def root_of(directory: Path) -> tuple[int, str]:
    """Step and state root of the newest checkpoint."""
    newest = unbroken.open(directory).steps()[-1]
    return newest.step, newest.root


def options_of(directory: Path) -> dict[str, Any]:
    return Repository.open(DiskTier(str(directory))).facts.options


# -- a plain loop under DDP ------------------------------------------------------------------------------------------------------


class Deep(Tiny):
    """Layers enough for several of DDP's buckets, and one that only odd steps use."""

    def __init__(self) -> None:
        super().__init__(width=4)
        self.odd = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.used = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.used += 1
        if self.used % 2:
            x = x + self.odd(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return super().forward(x)


def ring_run(directory: Path, steps: int) -> None:
    """A loop that knows nothing of units: forward, loss.backward(), step."""
    torch.manual_seed(3)
    model = Deep()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=0.0001)
    run = ring(directory, wrapped, total_steps=steps)
    model.used = run.completed
    for batch in run:
        for micro in batch:
            loss_of(wrapped, micro).backward()  # type: ignore[no-untyped-call]
        run.step(clip_grad_norm=1.0)


def ring(directory: Path, model: nn.Module, **options: Any) -> unbroken.Run:
    """A Run over one unit of four samples per rank, that leaves the gradients to DDP."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = unbroken.Batches(samples(), global_batch=4 * RANKS, seed=1)
    given: dict[str, Any] = {"optimizer": optimizer, "data": data, "reduce": "ring", "units": RANKS} | options
    return open_run(directory, model=model, **given)


def refusal(begin: Callable[[], Any]) -> str:
    try:
        begin()
    except ValueError as error:
        return str(error)
    return "accepted"


def ring_job(folder: Path) -> None:
    """One rank: what must be refused, an uninterrupted run, one whose rank 1 is killed, and DDP under the default reduction."""
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    refusals = {
        "loose": refusal(lambda: ring(folder / "loose", DistributedDataParallel(Deep()))),
        "plain": refusal(lambda: ring(folder / "plain", Deep())),
        "uneven": refusal(lambda: ring(folder / "uneven", DistributedDataParallel(Deep(), find_unused_parameters=True), units=4)),
    }
    (folder / f"refusals{dist.get_rank()}.json").write_text(json.dumps(refusals))
    ring_run(folder / "whole", STEPS)
    torch.manual_seed(3)
    train(folder / "ordered", CUT, model=DistributedDataParallel(Tiny()), units=4)
    os.environ["UNBROKEN_FAULTS"] = json.dumps(KILL)
    ring_run(folder / "hit", STEPS)


@pytest.fixture(scope="module")
def ring_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ring")
    command = [sys.executable, "-m", "unbroken", "run", "--json", "--nproc-per-node", str(RANKS), script(folder, "ring_job"), str(folder)]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["restarts"] == 1, "rank 1 was to be killed once"
    return folder


def test_I13_a_plain_loop_under_ddp_ends_in_the_same_bits_at_equal_world_size(ring_folder: Path) -> None:
    assert root_of(ring_folder / "hit") == root_of(ring_folder / "whole")
    certificate = unbroken.open(ring_folder / "hit").certify(ring_folder / "whole")
    assert (certificate.grade, certificate.generations) == ("exact", 2), certificate.problems
    assert any("reduce='ring'" in text for text in certificate.differences), "the smaller claim is stated"


def test_a_plain_loop_under_ddp_is_refused_at_another_world_size(ring_folder: Path) -> None:
    with pytest.raises(unbroken.LayoutMismatch, match=r"world size: 3 at the checkpoint, now 1 \(reduce='ring' keeps it\)") as caught:
        ring(ring_folder / "hit", Deep())
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("rank", range(RANKS))
def test_ddp_whose_buckets_move_is_refused_with_the_line_to_write(ring_folder: Path, rank: int) -> None:
    refusals = json.loads((ring_folder / f"refusals{rank}.json").read_text())
    assert "DDP rebuilds its buckets; wrap it as DDP(model, find_unused_parameters=True)" in refusals["loose"]
    assert "not wrapped in DistributedDataParallel" in refusals["plain"]
    assert "units=4 cannot be shared out equally to 3 ranks" in refusals["uneven"] and "use units=6" in refusals["uneven"]


def test_I14_ddp_under_the_default_reduction_is_only_a_wrapper(ring_folder: Path, tmp_path: Path) -> None:
    """Three ranks with DDP, then one without: names and bits are those of a plain model."""
    train(tmp_path / "whole", STEPS, units=4)
    train(ring_folder / "ordered", STEPS, units=4)
    certificate = unbroken.open(ring_folder / "ordered").certify(tmp_path / "whole")
    assert (certificate.grade, certificate.world_sizes) == ("exact", [RANKS, RANKS, 1]), certificate.problems
    assert root_of(ring_folder / "ordered") == root_of(tmp_path / "whole")


# -- loaders with an order of their own ------------------------------------------------------------------------------------------


class Noisy:
    """Features with noise from all three libraries' streams."""

    def __init__(self) -> None:
        self.clean = samples()

    def __len__(self) -> int:
        return len(self.clean)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.clean[index]
        return x + torch.rand(4) + random.random() + float(np.random.rand()), y


class Shards:
    """An endless loader that knows its own position: every rank reads its own stripe."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.data, self.rank, self.world_size, self.place = samples(), rank, world_size, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            first = (self.place * self.world_size + self.rank) * 2 % 64
            self.place += 1
            yield self.data[[first, first + 1]]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def loader(kind: str) -> Any:
    """A loader of two samples per unit, for this rank."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if kind == "distributed":
        return DataLoader(samples(), batch_size=2, sampler=DistributedSampler(samples(), world_size, rank, seed=7))
    if kind == "stateful":
        return Shards(rank, world_size)
    if kind.startswith("torchdata"):
        random.seed(rank)  # what a loader draws in this process is the rank's own, which a Run continues
        np.random.seed(rank)
        num_workers = int(kind.removeprefix("torchdata"))
        dataset: Any = samples() if num_workers else Noisy()
        order: Any = DistributedSampler(dataset, world_size, rank, seed=7)
        return StatefulDataLoader(dataset, batch_size=2, sampler=order, num_workers=num_workers, snapshot_every_n_steps=3)
    dataset = Noisy()
    order = unbroken.Sampler(dataset, global_batch=2 * RANKS, seed=7)
    return DataLoader(unbroken.keyed(dataset), batch_size=2, sampler=order)


def loaders_job(folder: Path) -> None:
    """One rank: each kind of loader in one go, and stopped after three steps; two kinds also go on."""
    for kind in (*FOREIGN, "keyed"):
        train(folder / kind / "whole", STEPS, data=loader(kind), units=RANKS)
        train(folder / kind / "parts", CUT, data=loader(kind), units=RANKS)
        if kind != "keyed":
            train(folder / kind / "parts", STEPS, data=loader(kind), units=RANKS)


@pytest.fixture(scope="module")
def loaders_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loaders")
    run_ranks([script(folder, "loaders_job"), str(folder)], RANKS, ENVIRONMENT)
    return folder


@pytest.mark.parametrize("kind", FOREIGN)
def test_B31_a_loader_with_its_own_order_goes_on_exactly_at_equal_world_size(loaders_folder: Path, kind: str) -> None:
    parts, whole = loaders_folder / kind / "parts", loaders_folder / kind / "whole"
    assert root_of(parts) == root_of(whole)
    certificate = unbroken.open(parts).certify(whole)
    assert (certificate.grade, certificate.generations) == ("exact", 2), certificate.problems
    assert certificate.samples_exactly_once is None, "nobody else can know its order"
    assert options_of(parts)["grade"] == "equal-world-size"


def killed_job(folder: Path) -> None:
    """One rank of a job with torchdata's loader and two workers; rank 1 is killed in step 4."""
    train(folder / "killed", STEPS, data=loader("torchdata2"), units=RANKS)


def test_B28_torchdatas_loader_and_its_workers_go_on_exactly_after_a_kill(loaders_folder: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "unbroken",
        "run",
        "--json",
        "--nproc-per-node",
        str(RANKS),
        script(tmp_path, "killed_job"),
        str(tmp_path),
    ]
    environment = os.environ | ENVIRONMENT | {"UNBROKEN_FAULTS": json.dumps(KILL)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["restarts"] == 1
    certificate = unbroken.open(tmp_path / "killed").certify(loaders_folder / "torchdata2" / "whole")
    assert (certificate.grade, certificate.generations) == ("exact", 2), certificate.problems


@pytest.mark.parametrize("kind", FOREIGN)
def test_B31_a_loader_with_its_own_order_is_refused_at_another_world_size(loaders_folder: Path, kind: str) -> None:
    words = r"world_size: the run was born with 3, now it is 1\n.*continues only at world size 3.*unbroken\.Batches"
    with pytest.raises(unbroken.LayoutMismatch, match=words) as caught:
        open_run(loaders_folder / kind / "parts", data=loader(kind), units=RANKS)
    assert caught.value.exit_code == 4


def test_I7_an_order_of_ours_with_keyed_augmentation_is_exact_at_any_world_size(loaders_folder: Path, tmp_path: Path) -> None:
    """Three ranks to step 3, then one; against three ranks in one go, and against one rank in one go."""
    train(tmp_path / "alone", STEPS, data=loader("keyed"), units=RANKS)
    parts = loaders_folder / "keyed" / "parts"
    train(parts, STEPS, data=loader("keyed"), units=RANKS)
    assert root_of(parts) == root_of(loaders_folder / "keyed" / "whole") == root_of(tmp_path / "alone")
    certificate = unbroken.open(parts).certify(tmp_path / "alone")
    assert (certificate.grade, certificate.world_sizes, certificate.samples_exactly_once) == ("exact", [RANKS, 1], True)
    assert options_of(parts)["grade"] == "exact"


def test_augmentation_that_is_not_keyed_is_graded_by_its_order_only(tmp_path: Path) -> None:
    dataset = Noisy()
    data: DataLoader[Any] = DataLoader(dataset, batch_size=4, sampler=unbroken.Sampler(dataset, global_batch=8, seed=7))  # type: ignore[arg-type]
    train(tmp_path / "run", 1, data=data)
    assert options_of(tmp_path / "run")["grade"] == "order-only"


@pytest.mark.parametrize("kind", FOREIGN)
def test_B31_the_same_in_one_process(tmp_path: Path, kind: str) -> None:
    whole = train(tmp_path / "whole", STEPS, data=loader(kind))
    assert train(tmp_path / "parts", 2, data=loader(kind)) + train(tmp_path / "parts", STEPS, data=loader(kind)) == whole
    assert root_of(tmp_path / "parts") == root_of(tmp_path / "whole")


def test_a_random_order_that_cannot_be_found_again_is_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\(shuffle=True\)") as caught:
        open_run(tmp_path / "run", data=DataLoader(samples(), batch_size=4, shuffle=True))
    assert "sampler=unbroken.Sampler(dataset, global_batch=64, seed=7)" in str(caught.value)
    assert "unbroken.Batches(dataset, global_batch=64, seed=7)" in str(caught.value)
    assert not (tmp_path / "run").exists()


# -- several models, optimizers, schedulers; a compiled model --------------------------------------------------------------------


def two_models(directory: Path, steps: int) -> list[float]:
    """A generator and a judge, each with an optimizer and a schedule of its own."""
    torch.manual_seed(3)
    models = {"maker": nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2)), "judge": Tiny()}
    optimizers = {
        "judge": torch.optim.AdamW(models["judge"].parameters(), lr=1e-2),
        "maker": torch.optim.SGD(models["maker"].parameters(), lr=1e-1, momentum=0.9),
    }
    rates = torch.optim.lr_scheduler
    schedulers = [rates.StepLR(optimizers["judge"], 2, 0.5), rates.CosineAnnealingLR(optimizers["maker"], STEPS)]
    run = open_run(directory, model=models, optimizer=optimizers, scheduler=schedulers, total_steps=steps)
    losses = []
    for batch in run:
        for micro in batch:
            made = models["maker"](micro.x)
            micro.backward(nn.functional.cross_entropy(models["judge"](made), micro.y) + made.square().mean())
        run.step()
        losses.append(run.loss)
    return losses


def test_B18_several_models_optimizers_and_schedulers_go_on_exactly(tmp_path: Path) -> None:
    whole = two_models(tmp_path / "whole", STEPS)
    assert two_models(tmp_path / "parts", CUT) + two_models(tmp_path / "parts", STEPS) == whole
    assert unbroken.open(tmp_path / "parts").certify(tmp_path / "whole").grade == "exact"
    names = {variable["name"] for variable in unbroken.open(tmp_path / "parts").variables()}
    assert {
        "/model/parameters/maker/0.weight",
        "/model/buffers/judge/body.1.running_mean",
        "/optimizer/state/maker/maker.0.weight/momentum_buffer",
        "/optimizer/state/judge/judge.body.0.weight/exp_avg",
        "/scheduler/0/gamma",
        "/scheduler/1/T_max",
    } <= names


def test_B18_a_compiled_model_has_the_names_and_bits_of_the_plain_one(tmp_path: Path) -> None:
    """Compiled for three steps, plain for the rest."""
    whole = train(tmp_path / "whole", STEPS)
    torch.manual_seed(3)
    compiled: Any = torch.compile(Tiny(), backend="eager")
    assert any("_orig_mod." in name for name in compiled.state_dict())
    first = train(tmp_path / "parts", CUT, model=compiled)
    assert first + train(tmp_path / "parts", STEPS) == whole
    assert root_of(tmp_path / "parts") == root_of(tmp_path / "whole")
