"""A start: one plan for all ranks, damage planned around, and proof that what lives is what was stored (I3, I5, I10)."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from tests.rigs.daemon_end import DaemonEnd, Said
from tests.rigs.stack_run import StackRun, items_of, plan_for
from tests.rigs.step_rank import CPU, raw, same_bits, stack_of, tensors_of
from tests.rigs.thread_exchange import all_ranks
from unbroken.capture.freeze import freeze, needed_bytes, plan_slot
from unbroken.capture.stack import Stack
from unbroken.capture.streams import Streams
from unbroken.core import os as host
from unbroken.core.errors import CheckFailed, LayoutMismatch, NoCheckpoint, Refused, UnbrokenError
from unbroken.core.messages import Bad, Begin, Error, Message, Opened, Plan
from unbroken.core.ports import SystemClock
from unbroken.core.records import CommitEntry
from unbroken.recover.start import MAX_DIFFERENCE_CHARS, MAX_DIFFERENCES, Start, _Found, fact_items
from unbroken.shm.channel import encode
from unbroken.step.exchange import Exchange
from unbroken.store.tiers.disk import DiskTier

FRESH = Plan(generation=0, step=0, source="fresh")


@pytest.fixture(autouse=True)
def own_streams() -> Iterator[None]:
    """Loading puts this process's random streams back; other tests keep theirs."""
    streams = Streams(0, CPU)
    kept = streams.read()
    yield
    streams.write(kept)


def accept(plan: Plan) -> None:
    """Birth facts that contradict nothing."""


def echo(message: Message) -> Iterable[Said]:
    return [message] if isinstance(message, Opened) else []


@pytest.fixture
def daemons() -> Iterator[Callable[..., DaemonEnd]]:
    made: list[DaemonEnd] = []

    def new(answer: Callable[[Message], Iterable[Said]] = echo) -> DaemonEnd:
        made.append(DaemonEnd(answer))
        return made[-1]

    yield new
    for daemon in made:
        daemon.close()


def starting(exchange: Exchange, stack: Stack, directory: Path | str = "nowhere", resume: str = "auto") -> Start:
    tier = DiskTier(str(directory))
    return Start(
        directory=str(directory), tier=tier, exchange=exchange, stack=stack, clock=SystemClock(), resume=resume, options={"units": 4}
    )


class Job(nn.Module):
    """One layer, statistics and a counter; always born with the same values, which `value` then overwrites."""

    def __init__(self, value: float = 0.5) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 20)
        self.register_buffer("seen", torch.zeros(3))
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.fill_(value)


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, list[CommitEntry]]:
    """Checkpoints of steps 2, 4 and 6, all of whose elements are 2.0, 4.0 and 6.0, on two ranks."""
    model = Job()
    run = StackRun(DiskTier(str(tmp_path / "run")), stack_of(model))
    run.begin(world_size=2)
    commits = []
    for step in (2, 4, 6):
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.fill_(float(step))
        run.train(2)
        commits.append(run.save())
    return tmp_path / "run", commits


# -- connecting and planning ---------------------------------------------------------------------------------------------------


def test_ranks_on_several_hosts_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    own = threading.local()
    monkeypatch.setattr(host, "boot_id", lambda: own.name)

    def rank(exchange: Exchange) -> None:
        own.name = f"host{exchange.rank // 2}"
        with pytest.raises(Refused, match=r"on 2 hosts.*--nnodes=1"):
            starting(exchange, stack_of(Job())).connect()

    all_ranks(3, rank)


def test_I5_rank_0_asks_and_all_ranks_learn_the_same_plan(daemons: Callable[..., DaemonEnd]) -> None:
    plan = Plan(generation=3, step=7, source="memory", options={"units": 4})
    daemon = daemons(lambda m: [plan] if isinstance(m, Begin) else [])
    silent = daemons()

    def rank(exchange: Exchange) -> Plan:
        link = daemon.link if exchange.rank == 0 else silent.link
        return starting(exchange, stack_of(Job()), resume="must").plan(link)

    assert all_ranks(3, rank) == [plan] * 3
    assert daemon.wait_for(Begin) == [Begin(world_size=3, resume="must", options={"units": 4})]
    assert silent.heard == []


def test_I10_a_refusal_to_start_is_raised_on_all_ranks(daemons: Callable[..., DaemonEnd]) -> None:
    daemon = daemons(lambda m: [Error(kind="NoCheckpoint", text="nothing usable", code=3)])

    def rank(exchange: Exchange) -> None:
        with pytest.raises(NoCheckpoint, match="nothing usable"):
            starting(exchange, stack_of(Job())).plan(daemon.link)

    all_ranks(2, rank)


@pytest.mark.parametrize(("launch_file", "told"), [(None, 2), ("opened", 2), ("empty", 0), ("missing", 0)])
def test_I10_a_restart_implies_must_once_an_earlier_attempt_has_opened_the_run(
    daemons: Callable[..., DaemonEnd], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch_file: str | None, told: int
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    if launch_file is not None:
        monkeypatch.setenv("UNBROKEN_LAUNCH_FILE", str(tmp_path / "launch.jsonl"))
    if launch_file in ("opened", "empty"):
        (tmp_path / "launch.jsonl").write_text("{}\n" if launch_file == "opened" else "")
    daemon = daemons(lambda m: [FRESH] if isinstance(m, Begin) else [])
    starting(Exchange(CPU), stack_of(Job())).plan(daemon.link)
    assert [begin.restart_count for begin in daemon.wait_for(Begin)] == [told]


# -- loading -------------------------------------------------------------------------------------------------------------------


def test_I3_a_checkpoint_is_loaded_proved_and_opened(stored: tuple[Path, list[CommitEntry]], daemons: Callable[..., DaemonEnd]) -> None:
    directory, commits = stored
    daemon, model = daemons(), Job()
    stack = stack_of(model)
    start = starting(Exchange(CPU), stack, directory)
    plan = plan_for(commits[1], world_size=2)
    adopted: list[Plan] = []
    assert start.load(daemon.link, plan, adopted.append) == plan
    assert adopted == [plan]
    assert start.counters.as_dict() == {"step": 4, "samples": 32, "applied": 4, "skipped": 0}
    assert start.loader_state == {"at": [0, 4]}
    start.differences = ("threads: 1 -> 2",)
    root = start.open(daemon.link, plan, items_of(stack, 4))
    assert root == start.root == commits[1].state_root
    assert same_bits(tensors_of(model), tensors_of(Job(4.0)))
    assert daemon.wait_for(Opened) == [Opened(generation=1, step=4, loaded_root=root, differences=("threads: 1 -> 2",))]


def test_a_fresh_start_touches_nothing_and_asks_for_the_birth_facts(daemons: Callable[..., DaemonEnd]) -> None:
    model, adopted = Job(), list[Plan]()
    start = starting(Exchange(CPU), stack_of(model))
    assert start.load(daemons().link, FRESH, adopted.append) == FRESH
    assert adopted == [FRESH]
    assert same_bits(tensors_of(model), tensors_of(Job()))
    assert start.counters.step == 0


def test_birth_facts_that_contradict_are_refused_before_anything_is_loaded(
    stored: tuple[Path, list[CommitEntry]], daemons: Callable[..., DaemonEnd]
) -> None:
    directory, commits = stored
    model = Job()

    def refuse(plan: Plan) -> None:
        raise LayoutMismatch("born with other units")

    with pytest.raises(LayoutMismatch, match="born with other units"):
        starting(Exchange(CPU), stack_of(model), directory).load(daemons().link, plan_for(commits[0]), refuse)
    assert same_bits(tensors_of(model), tensors_of(Job()))


def damage(directory: Path, commits: list[CommitEntry], which: int) -> str:
    """Change a byte of the pack that this checkpoint brought; its path."""
    packs = sorted((directory / "packs").rglob("*.pack"), key=lambda path: path.stat().st_mtime_ns)
    assert len(packs) == len(commits)
    raw = bytearray(packs[which].read_bytes())
    raw[4096] ^= 1
    packs[which].chmod(0o600)
    packs[which].write_bytes(raw)
    return str(packs[which].relative_to(directory))


def test_I3_damage_is_told_by_name_and_an_older_checkpoint_taken(
    stored: tuple[Path, list[CommitEntry]], daemons: Callable[..., DaemonEnd]
) -> None:
    directory, commits = stored
    pack = damage(directory, commits, 2)
    older = plan_for(commits[1], world_size=2)
    daemon = daemons(lambda m: [older] if isinstance(m, Bad) else [])
    silent = daemons()
    models = [Job(), Job()]

    def rank(exchange: Exchange) -> Plan:
        start = starting(exchange, stack_of(models[exchange.rank]), directory)
        return start.load(daemon.link if exchange.rank == 0 else silent.link, plan_for(commits[2], world_size=2), accept)

    assert all_ranks(2, rank) == [older] * 2
    (bad,) = daemon.wait_for(Bad)
    assert (bad.step, bad.stored_generation, bad.objects) == (6, 0, (pack,))
    assert pack in bad.reason
    assert all(same_bits(tensors_of(model), tensors_of(Job(4.0))) for model in models)


def test_I3_damage_that_only_one_rank_meets_moves_all_ranks(
    stored: tuple[Path, list[CommitEntry]], daemons: Callable[..., DaemonEnd], tmp_path: Path
) -> None:
    """One rank's folder lacks the commit: all must take the older step."""
    directory, commits = stored
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    damage(copy, commits, 2)
    older = plan_for(commits[0], world_size=2)
    daemon = daemons(lambda m: [older] if isinstance(m, Bad) else [])
    models = [Job(), Job()]

    def rank(exchange: Exchange) -> int:
        start = starting(exchange, stack_of(models[exchange.rank]), copy if exchange.rank == 1 else directory)
        start.load(daemon.link, plan_for(commits[2], world_size=2), accept)
        return start.counters.step

    assert all_ranks(2, rank) == [2, 2]
    assert all(same_bits(tensors_of(model), tensors_of(Job(2.0))) for model in models)


def frozen(daemon: DaemonEnd, run: StackRun, ranks: int = 1) -> Plan:
    """The snapshot that `run` has saved last, in memory too; the plan that takes it from there."""
    for rank in range(ranks):
        items = items_of(run.stack, run.step, rank if ranks > 1 else 0)
        index = plan_slot(items, generation=0, step=run.step, rank=rank, world_size=ranks, milestone=False)
        freeze(daemon.table.need(rank, needed_bytes(index), 1)[0], index, items)
    (cut,) = daemon.table.cuts()
    return Plan(generation=1, step=run.step, source="memory", slots=cut.slots, stored_world_size=ranks)


def flip(daemon: DaemonEnd, plan: Plan, rank: int, pointer: str) -> None:
    """Change one bit of a piece in a rank's slot."""
    (slot,) = daemon.table.find(plan.slots[rank : rank + 1])
    (place,) = [placed.offset for placed in slot.index().pieces if placed.piece.pointer == pointer]
    offset = slot._facts()[5] + place
    (byte,) = os.pread(slot.fd, 1, offset)
    os.pwrite(slot.fd, bytes([byte ^ 16]), offset)


def saved_run(directory: Path) -> tuple[StackRun, CommitEntry]:
    """One rank's run whose newest checkpoint is step 3, of a Job(3.0)."""
    run = StackRun(DiskTier(str(directory)), stack_of(Job(3.0)))
    run.begin(world_size=1)
    run.train(3)
    return run, run.save()


WEIGHT = "/model/parameters/layer.weight"


def test_I3_a_bit_that_flips_in_memory_is_found_and_the_disk_taken(tmp_path: Path, daemons: Callable[..., DaemonEnd]) -> None:
    run, commit = saved_run(tmp_path)
    disk = plan_for(commit)
    daemon = daemons(lambda m: [disk] if isinstance(m, Bad) else [])
    memory = replace(frozen(daemon, run), state_root=commit.state_root)
    flip(daemon, memory, 0, WEIGHT)
    model = Job()
    assert starting(Exchange(CPU), stack_of(model), tmp_path).load(daemon.link, memory, accept) == disk
    (bad,) = daemon.wait_for(Bad)
    assert (bad.step, bad.stored_generation) == (3, 0)
    assert "memory slot of rank 0: the state of step 3 in it has root" in bad.reason
    assert f"stored was {commit.state_root[:16]}" in bad.reason
    assert same_bits(tensors_of(model), tensors_of(Job(3.0)))


def test_I3_a_bit_that_flips_in_what_is_the_ranks_own_is_found(tmp_path: Path, daemons: Callable[..., DaemonEnd]) -> None:
    run, commit = saved_run(tmp_path)
    disk = plan_for(commit)
    daemon = daemons(lambda m: [disk] if isinstance(m, Bad) else [])
    memory = replace(frozen(daemon, run), state_root=commit.state_root)
    flip(daemon, memory, 0, "/rng/torch/cpu")
    assert starting(Exchange(CPU), stack_of(Job()), tmp_path).load(daemon.link, memory, accept) == disk
    assert "what is the rank's own of step 3 in it has root" in daemon.wait_for(Bad)[0].reason


@pytest.mark.parametrize("state", ["whole", "manifest gone", "not on disk"])
def test_a_good_snapshot_in_memory_is_taken_whatever_the_disk_says(tmp_path: Path, daemons: Callable[..., DaemonEnd], state: str) -> None:
    run, commit = saved_run(tmp_path)
    daemon = daemons()
    memory = replace(frozen(daemon, run), state_root="" if state == "not on disk" else commit.state_root)
    model = Job()  # its birth draws from the random streams, which belong to the snapshot
    if state == "manifest gone":
        (tmp_path / commit.manifests[0].path).unlink()
    assert starting(Exchange(CPU), stack_of(model), tmp_path).load(daemon.link, memory, accept) == memory
    assert same_bits(tensors_of(model), tensors_of(Job(3.0)))


def test_I3_snapshots_in_memory_that_differ_between_ranks_are_planned_around(tmp_path: Path, daemons: Callable[..., DaemonEnd]) -> None:
    """Nothing of the step is on disk yet, so nobody knows which rank is right: the cut is bad, and the next one is taken."""
    run, commit = saved_run(tmp_path)
    older = plan_for(commit, world_size=1)
    run.train(1)
    daemon = daemons(lambda m: [older] if isinstance(m, Bad) else [])
    memory = frozen(daemon, run, ranks=2)
    flip(daemon, memory, 1, WEIGHT)
    models, lock = [Job(), Job()], threading.Lock()

    class OneAtATime:
        """The one line to the daemon, for two ranks."""

        def ask(self, *question: Any) -> Any:
            with lock:
                return daemon.link.ask(*question)

    def rank(exchange: Exchange) -> Plan:
        return starting(exchange, stack_of(models[exchange.rank]), tmp_path).load(OneAtATime(), memory, accept)  # type: ignore[arg-type]

    assert all_ranks(2, rank) == [older] * 2
    (bad,) = daemon.wait_for(Bad)
    assert f"1 pieces are not the same on all ranks, first ['{WEIGHT}']" in bad.reason
    assert all(same_bits(tensors_of(model), tensors_of(Job(3.0))) for model in models)


def test_I10_when_nothing_is_left_the_refusal_is_raised(stored: tuple[Path, list[CommitEntry]], daemons: Callable[..., DaemonEnd]) -> None:
    directory, commits = stored
    damage(directory, commits, 2)
    daemon = daemons(lambda m: [Error(kind="NoCheckpoint", text="all candidates are damaged", code=3)] if isinstance(m, Bad) else [])
    with pytest.raises(NoCheckpoint, match="all candidates"):
        starting(Exchange(CPU), stack_of(Job()), directory).load(daemon.link, plan_for(commits[2]), accept)


def test_B18_a_model_that_does_not_fit_is_refused_on_all_ranks(
    stored: tuple[Path, list[CommitEntry]], daemons: Callable[..., DaemonEnd]
) -> None:
    directory, commits = stored
    daemon = daemons()

    def rank(exchange: Exchange) -> None:
        model = Job()
        if exchange.rank == 1:
            model.seen = torch.zeros(4)
        with pytest.raises(LayoutMismatch, match=r"/model/buffers/seen: stored float32\[3\], live float32\[4\]"):
            starting(exchange, stack_of(model), directory).load(daemon.link, plan_for(commits[0], world_size=2), accept)

    all_ranks(2, rank)


@pytest.mark.parametrize(("ranks", "words"), [(1, "random streams of ranks 1..1 of the checkpoint are not continued"), (3, "beyond the 2")])
def test_another_number_of_ranks_is_noted(
    stored: tuple[Path, list[CommitEntry]], daemons: Callable[..., DaemonEnd], ranks: int, words: str
) -> None:
    directory, commits = stored
    daemon = daemons()

    def rank(exchange: Exchange) -> tuple[tuple[str, ...], dict[str, Any]]:
        start = starting(exchange, stack_of(Job()), directory)
        start.load(daemon.link, plan_for(commits[0], world_size=2), accept)
        return start.notes, start.loader_state

    found = all_ranks(ranks, rank)
    assert all(len(notes) == 1 and words in notes[0] for notes, _ in found)
    assert [state for _, state in found] == [{"at": [0, 2]}, {"at": [1, 2]}, {}][:ranks]


# -- proof ---------------------------------------------------------------------------------------------------------------------


class Counter:
    """An extra whose load_state_dict does not keep what it is given."""

    def __init__(self) -> None:
        self.calls = 3

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"] + 1


def test_I3_an_object_that_changes_its_state_while_being_loaded_is_found(tmp_path: Path, daemons: Callable[..., DaemonEnd]) -> None:
    stack = stack_of(Job(), counter=Counter())
    run = StackRun(DiskTier(str(tmp_path)), stack)
    run.begin(world_size=1)
    run.train(1)
    commit = run.save()
    daemon, plan = daemons(), plan_for(commit)
    start = starting(Exchange(CPU), stack, tmp_path)
    start.load(daemon.link, plan, accept)
    with pytest.raises(CheckFailed, match=r"1 pieces are not what was stored, first \['/extras/counter/calls'\]"):
        start.open(daemon.link, plan, items_of(stack, 1))
    assert not daemon.heard, "no generation may have been opened"


def test_I3_state_that_no_checkpoint_knows_is_found(stored: tuple[Path, list[CommitEntry]], daemons: Callable[..., DaemonEnd]) -> None:
    directory, commits = stored
    daemon, model = daemons(), Job()
    stack, plan = stack_of(model), plan_for(commits[0], world_size=2)
    start = starting(Exchange(CPU), stack, directory)
    start.load(daemon.link, plan, accept)
    items = [*items_of(stack, 2), *fact_items({"/late": (1, "restored", "logical", "framework")})]
    with pytest.raises(CheckFailed, match=r"\['/late'\]"):
        start.open(daemon.link, plan, items)


def test_I3_a_root_other_than_the_stored_one_ends_the_start(
    stored: tuple[Path, list[CommitEntry]], daemons: Callable[..., DaemonEnd]
) -> None:
    directory, commits = stored
    daemon = daemons()
    stack = stack_of(Job())
    start = starting(Exchange(CPU), stack, directory)
    plan = plan_for(commits[0], state_root="ab" * 32)
    start.load(daemon.link, plan, accept)
    with pytest.raises(CheckFailed, match=f"step 2 has root {commits[0].state_root[:16]}, stored was {'ab' * 8}"):
        start.open(daemon.link, plan, items_of(stack, 2))


def test_I5_ranks_that_are_born_different_are_refused_by_the_piece(daemons: Callable[..., DaemonEnd]) -> None:
    daemon = daemons()

    def rank(exchange: Exchange) -> None:
        stack = stack_of(Job(0.5 + (exchange.rank == 2)))
        start = starting(exchange, stack)
        with pytest.raises(ValueError, match=r"3 pieces differ, first \['/model/buffers/seen', .*torch\.manual_seed"):
            start.open(daemon.link, FRESH, [i for i in items_of(stack, 0) if i.piece.scope == "logical"])

    all_ranks(3, rank)
    assert not daemon.heard


def test_what_belongs_to_a_rank_may_differ_between_ranks(daemons: Callable[..., DaemonEnd]) -> None:
    daemon = daemons()

    def rank(exchange: Exchange) -> str:
        stack = stack_of(Job())
        return starting(exchange, stack).open(daemon.link, FRESH, items_of(stack, 0, exchange.rank))

    assert len(set(all_ranks(3, rank))) == 1
    assert len(daemon.wait_for(Opened)) == 1, "rank 0 alone opens"


def test_I6_a_generation_that_cannot_be_opened_ends_all_ranks(daemons: Callable[..., DaemonEnd]) -> None:
    daemon = daemons(lambda m: [Error(kind="Fenced", text="another writer", code=4)])

    def rank(exchange: Exchange) -> None:
        stack = stack_of(Job())
        with pytest.raises(UnbrokenError, match="another writer"):
            starting(exchange, stack).open(daemon.link, FRESH, items_of(stack, 0))

    all_ranks(2, rank)


def test_I9_going_on_with_another_daemon_loads_nothing(daemons: Callable[..., DaemonEnd]) -> None:
    daemon, model = daemons(), Job(7.0)
    start = starting(Exchange(CPU), stack_of(model))
    start.root = "cd" * 32
    for root in ("ef" * 32, ""):
        plan = Plan(generation=2, step=5, source="disk", state_root=root)
        assert start.continue_from(daemon.link, plan) == plan
    assert [opened.loaded_root for opened in daemon.wait_for(Opened, 2)] == ["ef" * 32, "cd" * 32]
    assert same_bits(tensors_of(model), tensors_of(Job(7.0)))


# -- comparing -----------------------------------------------------------------------------------------------------------------


def facts(**values: Any) -> Any:
    return fact_items({"/environment": (values, "compared", "rank", "hardware")})


def test_I13_every_rank_learns_of_every_difference() -> None:
    before = {i.piece.pointer: (i.piece, raw(i)) for i in facts(threads=1, old="x", list=[1, 2], host="a")}

    def rank(exchange: Exchange) -> tuple[str, ...]:
        start = starting(exchange, stack_of(Job()))
        start.compare(before, facts(threads=1 + exchange.rank, new=None, list=[1, 3, 4], host="a"))
        return start.differences

    expected = (
        "environment/list/1: 2 -> 3",
        "environment/list/2: None -> 4",
        "environment/old: x -> None",
        "environment/threads: 1 -> 2",
    )
    assert all_ranks(2, rank) == [expected] * 2


def test_a_thousand_differences_still_fit_into_a_message() -> None:
    """1,500 modules whose options differ, some with very long words: a difference is to be told, not to end the start."""
    before = {i.piece.pointer: (i.piece, raw(i)) for i in facts(**{f"n{i:04}": "a" * 1000 * (i % 2) for i in range(1500)})}
    start = starting(Exchange(CPU), stack_of(Job()))
    start.compare(before, facts(**{f"n{i:04}": "\0" * 1000 for i in range(1500)}))
    assert len(start.differences) == MAX_DIFFERENCES + 1
    assert start.differences[-1] == f"and {1500 - MAX_DIFFERENCES} more"
    assert all(len(text) <= MAX_DIFFERENCE_CHARS for text in start.differences)
    assert all(f"environment/n{i:04}: " in text for i, text in enumerate(start.differences[:-1]))
    assert "a" * 100 + "… -> " in "".join(start.differences), "something of both values is told"
    encode(Opened(generation=0, step=0, loaded_root="", differences=start.differences))


def test_damage_on_many_ranks_fits_into_a_message(daemons: Callable[..., DaemonEnd], monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Start, link: Any, plan: Plan) -> Any:
        return None, _Found(path=f"packs/{self.exchange.rank}", reason="x" * 200_000)

    daemon = daemons(lambda m: [FRESH] if isinstance(m, Bad) else [])
    monkeypatch.setattr(Start, "_read", read)
    all_ranks(2, lambda exchange: starting(exchange, stack_of(Job())).load(daemon.link, Plan(generation=1, step=1, source="disk"), accept))
    assert daemon.wait_for(Bad)[0].objects == ("packs/0", "packs/1")


def test_facts_that_are_only_recorded_are_not_compared() -> None:
    start = starting(Exchange(CPU), stack_of(Job()))
    start.compare({}, fact_items({"/topology": ({"rank": 1}, "recorded", "rank", "scheduling")}))
    assert start.differences == ()


def test_facts_carry_the_labels_they_are_given() -> None:
    items = fact_items({"/options": ({"units": 4}, "recorded", "logical", "scheduling")})
    assert [(i.piece.pointer, i.piece.role, i.piece.scope, i.piece.layer, i.piece.captured) for i in items] == [
        ("/options", "recorded", "logical", "scheduling", "start"),
        ("/options/units", "recorded", "logical", "scheduling", "start"),
    ]
    assert items[1].piece.kind == "options"
