"""Fuzz of all that lies in a run folder: only our errors come out, nothing large is held, no name leads outside, no byte is wrong."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rigs.crash_life import BRANCH, Life, Op, expected
from tests.rigs.fuzzing import DEEP, MAX_BYTES, bounded, broken, changed, dumped, fuzz, outcome, values
from tests.rigs.store_run import WRITER, CountedNonces, StillClock, start
from unbroken.codec.digest import digest, text_digest
from unbroken.core.errors import Damaged, UnbrokenError
from unbroken.core.records import LogEntry, Manifest, RunFacts
from unbroken.store import paths
from unbroken.store.audit import verify
from unbroken.store.journal import durable_head, first_chain, next_chain, read_journal
from unbroken.store.lineages import lineage_names
from unbroken.store.loading import read_pieces
from unbroken.store.packs import audit_pack
from unbroken.store.repository import Repository
from unbroken.store.sealed import unseal
from unbroken.store.tiers.memory import MemoryTier, Snapshot

LAST = 5
"""The newest step whose checkpoint is whole."""

KINDS = {"run": RunFacts, "log": LogEntry, "manifest": Manifest}


class Watched(MemoryTier):
    """Takes down every name that it is asked for."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(snapshot)
        self.asked: set[str] = set()

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        self.asked.add(path)
        return super().read(path, offset, length)


@cache
def folder() -> Snapshot:
    """A run with differences, milestones, retention, two generations, a condemned checkpoint."""
    tier = MemoryTier()
    life = Life(tier, "incremental", 3, 0, lambda line: None)
    life.run([Op("save"), Op("save"), Op("milestone"), Op("save"), Op("restart"), Op("save"), Op("collect", 4)])
    repository = life.trainer("main").repository
    last = repository.visible()[-1]
    trainer = life.trainer("main")
    trainer.save(last.step + 1, logical=[])
    repository.condemn(last.step + 1, last.generation, [last.manifests[0].path + "x"], "for the test", writer=WRITER, clock=StillClock())
    return tier.snapshot()


def files(start_with: str = "") -> list[str]:
    return [path for path, _ in folder() if path.startswith(start_with)]


def kind_of(path: str) -> str:
    return "run" if path == paths.RUN else "manifest" if path.startswith(paths.MANIFESTS) else "log"


def sealed_again(kind: str, body: bytes, number: int = 2) -> bytes:
    """A sealed file with a right checksum, whatever its body is."""
    magic = f"unbroken/{kind}"
    checksum = text_digest(magic, str(number), str(number), body)
    return b'{"magic":"%s","format":%d,"min_reader":%d,"checksum":"%s","body":%s}' % (
        magic.encode(),
        number,
        number,
        checksum.encode(),
        body,
    )


def with_file(path: str, raw: bytes | None) -> Watched:
    objects = dict(folder())
    objects.pop(path)
    return Watched(tuple(sorted({**objects, **({path: raw} if raw is not None else {})}.items())))


def use(tier: Watched, *, must_be_right: bool) -> None:
    """Everything that a reader and a new writer do; where the forger did not forge digests, what is loaded is what was saved."""

    def read() -> None:
        repository = Repository.open(tier)
        for commit in repository.visible():
            outcome(lambda commit=commit: _load(repository, commit, must_be_right), UnbrokenError)  # type: ignore[misc]

    outcome(read, UnbrokenError)
    outcome(lambda: verify(tier, "main"), UnbrokenError)
    outcome(lambda: lineage_names(tier), UnbrokenError)

    def write() -> None:
        trainer = start(tier, nonces=CountedNonces("fuzz"))
        trainer.save(trainer.generation.base_step + 1)
        trainer.collect(1)

    outcome(write, UnbrokenError)
    assert all(paths.is_inside(path) for path in tier.asked)


def _load(repository: Repository, commit: Any, must_be_right: bool) -> None:
    found = {}
    for manifest in repository.manifests(commit):
        for stored, data in repository.read_pieces(manifest, manifest.pieces):
            found[stored.rank, stored.piece.pointer] = bytes(data)
    if must_be_right and commit.step <= LAST:
        assert found == expected(commit.step), f"step {commit.step} was loaded with wrong bytes"


@fuzz(60)
@given(st.data())
def test_I3_a_broken_file_of_a_run_is_an_error_and_never_other_bytes(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(files()))
    raw = dict(folder())[path]
    use(with_file(path, data.draw(st.none() | broken(raw))), must_be_right=True)


@fuzz(60)
@given(st.data())
def test_I3_a_forged_sealed_file_is_an_error_or_consistent(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from([path for path in files() if path.endswith(".json")]))
    body = json.loads(dict(folder())[path])["body"]
    raw = sealed_again(kind_of(path), dumped(data.draw(changed(body))))
    tier = with_file(path, raw)
    if kind_of(path) == "manifest":
        _name_anew(tier, path, raw)
    use(tier, must_be_right=False)


def _name_anew(tier: Watched, path: str, raw: bytes) -> None:
    """The log names the forged manifest by its digest."""
    for entry in tier.list(paths.log_folder("main")):
        body = json.loads(tier.read(entry))["body"]
        refs = body["entry"].get("manifests", [])
        for ref in refs:
            if ref["path"] == path:
                ref |= {"digest": digest(raw), "size_bytes": len(raw)}
        if any(ref["path"] == path for ref in refs):
            tier.delete(entry)
            tier.create(entry, [sealed_again("log", dumped(body))])


@fuzz(150)
@given(st.sampled_from(sorted(KINDS)), values | st.binary(max_size=200) | st.just(json.loads(DEEP[:1500] + "1" + "}" * 300)))
def test_I3_nothing_but_damaged_comes_out_of_a_made_up_sealed_file(kind: str, body: Any) -> None:
    raw = body if isinstance(body, bytes) else sealed_again(kind, dumped(body))
    outcome(lambda: unseal(kind, raw, KINDS[kind], "file"), UnbrokenError)


def test_I3_depth_without_end_is_damage_in_every_file() -> None:
    for kind, record in KINDS.items():
        for body in (DEEP, f'{{"options":{DEEP}}}', f'{{"x":{DEEP}}}', "[" * 100_000):
            error = outcome(
                lambda body=body, kind=kind, record=record: unseal(kind, sealed_again(kind, body.encode()), record, "f"), UnbrokenError
            )  # type: ignore[misc]
            assert isinstance(error, UnbrokenError)


@fuzz(60)
@given(st.data())
def test_I3_a_broken_pack_is_an_error(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(files(paths.PACKS)))
    raw = dict(folder())[path]
    at = data.draw(st.sampled_from((0, len(raw) - 2000, 4096)))
    cut = raw[at : at + 2000]
    changed_raw = raw[:at] + data.draw(broken(cut)) + raw[at + 2000 :]
    error = outcome(lambda: audit_pack(with_file(path, changed_raw), path), UnbrokenError)
    assert isinstance(error, UnbrokenError) or changed_raw == raw


@fuzz(80)
@given(st.data())
def test_I3_a_broken_journal_is_an_error_or_cut_short(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from([path for path in files() if path.endswith(".jsonl")]))
    generation = paths.number(path)
    assert generation is not None
    raw = dict(folder())[path]
    nonce = json.loads(raw.splitlines()[0])["nonce"]
    good = [line.record for line in read_journal(MemoryTier(folder()), "main", generation, nonce)]
    tier = with_file(path, data.draw(broken(raw)))
    found = outcome(lambda: [line.record for line in read_journal(tier, "main", generation, nonce)], UnbrokenError)
    assert isinstance(found, UnbrokenError) or found == good[: len(found)], "other records than were written"
    outcome(lambda: durable_head(tier, "main", generation, nonce), UnbrokenError)


@fuzz(80)
@given(values | st.sampled_from([json.loads(DEEP[:1500] + "1" + "}" * 300)]))
def test_I3_a_made_up_journal_record_is_an_error_or_a_record(record: Any) -> None:
    path = paths.journal("main", 0)
    head = dict(folder())[path].splitlines()[0]
    nonce = json.loads(head)["nonce"]
    raw = dumped(record)
    chain = next_chain(first_chain(0, nonce), raw)
    tier = with_file(path, head + b'\n{"chain":"%s","record":%s}\n' % (chain.encode(), raw))
    outcome(lambda: list(read_journal(tier, "main", 0, nonce)), UnbrokenError)
    outcome(lambda: durable_head(tier, "main", 0, nonce), UnbrokenError)


@fuzz(200)
@given(
    st.text(max_size=80)
    | st.sampled_from(["runs/main/log/" + "9" * n + ".json" for n in (8, 18, 19, 4000)])
    | st.from_regex(r"(manifests|packs|runs|hangs)/[0-9a-f./-]{0,80}(\.json|\.pack|\.jsonl|\.txt)?", fullmatch=True)
)
def test_names_are_ours_or_not_and_lead_nowhere_else(path: str) -> None:
    assert isinstance(paths.is_ours(path), bool)
    if paths.is_ours(path):
        assert paths.is_inside(path)
    paths.number(path), paths.manifest_name(path), paths.pack_origin(path), paths.is_stacks(path), paths.is_lineage(path)


@fuzz(40)
@given(
    st.lists(
        st.sampled_from(
            [f"runs/main/log/{n:08d}.json" for n in (3, 300, 10**9, 10**17, 10**18 - 1)]
            + [
                f"runs/{BRANCH}/log/00000000.json",
                "runs/main/journal/999999999999999999.jsonl",
                "manifests/999999999999999999-999999999999999999-" + "0" * 32 + "-0.json",
            ]
        ),
        min_size=1,
        max_size=4,
    ),
    values,
)
def test_strays_of_any_number_neither_hang_nor_stop_a_run(strays: list[str], body: Any) -> None:
    objects = dict(folder()) | dict.fromkeys(strays, sealed_again("log", dumped(body)))
    use(Watched(tuple(sorted(objects.items()))), must_be_right=False)


def test_the_folder_is_what_it_says() -> None:
    assert {kind_of(path) for path in files() if path.endswith(".json")} == set(KINDS)
    use(Watched(folder()), must_be_right=True)
    manifests = [msgspec.json.decode(dict(folder())[path])["body"] for path in files(paths.MANIFESTS)]
    assert any("base" in chunk for manifest in manifests for chunk in manifest["chunks"]), "no differences"


def forged_log(change: Any) -> Watched:
    """The commit of step LAST with its body changed and its checksum right."""
    path = next(path for path in files("runs/main/log") if json.loads(dict(folder())[path])["body"]["entry"].get("step") == LAST)
    body = json.loads(dict(folder())[path])["body"]
    change(body)
    return with_file(path, sealed_again("log", dumped(body)))


def test_I3_a_commit_without_manifests_is_damage() -> None:
    tier = forged_log(lambda body: body["entry"].update(manifests=[]))
    repository = Repository.open(tier)
    with pytest.raises(Damaged):
        repository.manifests(repository.visible()[-1])
    assert not verify(tier, "main").ok


@pytest.mark.parametrize("number", [10**17 + 1, 2**64 - 1])
def test_I6_a_generation_whose_number_no_name_can_hold_is_damage(number: int) -> None:
    tier = forged_log(lambda body: body["lineage"][-1].update(number=number))
    repository = Repository.open(tier)
    assert "out of bounds" in repository.log.damage[0]
    use(tier, must_be_right=True)


def test_I3_extents_that_overlap_cost_no_memory_before_their_digest_is_right() -> None:
    """A manifest of some kilobytes that names one chunk a thousand times, each time another part of it."""
    path = next(path for path in files(paths.MANIFESTS) if f"/{LAST:012d}-" in path)
    body = json.loads(dict(folder())[path])["body"]
    size = max(chunk["raw_bytes"] for chunk in body["chunks"])
    number = next(i for i, chunk in enumerate(body["chunks"]) if chunk["raw_bytes"] == size)
    piece = next(piece for piece in body["pieces"] if piece["piece"]["pointer"] == "/model/w")
    piece["extents"] = [[number, 0, size - i] for i in range(1500)]
    piece["size_bytes"] = sum(extent[2] for extent in piece["extents"])
    piece["piece"]["shape"] = [piece["size_bytes"]]
    assert piece["size_bytes"] > MAX_BYTES
    raw = sealed_again("manifest", dumped(body))
    manifest = unseal("manifest", raw, Manifest, path)
    stored = next(stored for stored in manifest.pieces if stored.piece.pointer == "/model/w")
    with bounded(), pytest.raises(Damaged, match="does not match its digest"):
        list(read_pieces(MemoryTier(folder()), manifest, [stored]))
