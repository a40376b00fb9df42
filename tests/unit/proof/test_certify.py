"""The certificate says yes to a whole story, and no, with the name of the object, to each way in which a story can be wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.store_run import as_of_an_older_writer
from tests.rigs.synthetic_run import WRITER, SyntheticRun, interrupted, uninterrupted
from unbroken.core.errors import ForeignFolder, NoCheckpoint
from unbroken.core.ports import Tier
from unbroken.core.records import EventRecord
from unbroken.proof.certify import Certificate, certify
from unbroken.store.tiers.disk import DiskTier
from unbroken.store.tiers.memory import MemoryTier


def assert_refused(certificate: Certificate, said: str) -> None:
    """Not certified, and one of the problems names what is wrong."""
    assert not certificate.certified
    assert any(re.search(said, problem) for problem in certificate.problems), certificate.problems


def begun(num_steps: int = 3, **options: object) -> SyntheticRun:
    """A run with its first steps saved."""
    run = SyntheticRun(MemoryTier(), **options)  # type: ignore[arg-type]
    run.begin()
    run.train(num_steps)
    run.save()
    return run


def test_an_uninterrupted_run_is_certified_as_a_sequence() -> None:
    certificate = certify(uninterrupted(MemoryTier()).repository.tier)
    assert certificate.problems == []
    assert (certificate.certified, certificate.grade) == (True, "sequence")
    assert (certificate.steps, certificate.final_step, certificate.generations) == (12, 12, 1)
    assert (certificate.losses_equal, certificate.state_root_equal, certificate.superseded_equal) == (None, None, None)
    assert (certificate.samples_exactly_once, certificate.fell_back, certificate.steps_lost_total) == (True, False, 0)


def test_I13_an_interrupted_run_equals_its_reference_exactly() -> None:
    run = interrupted(MemoryTier())
    certificate = certify(run.repository.tier, against=uninterrupted(MemoryTier()).repository.tier)
    assert certificate.problems == []
    assert (certificate.certified, certificate.grade) == (True, "exact")
    assert (certificate.losses_equal, certificate.state_root_equal, certificate.superseded_equal) == (True, True, True)
    assert certificate.steps_lost_total == 3
    assert certificate.world_sizes == [3, 3, 2]
    assert certificate.final_root == run.root(12)


def test_without_a_reference_superseded_attempts_are_still_compared() -> None:
    certificate = certify(interrupted(MemoryTier()).repository.tier)
    assert (certificate.grade, certificate.superseded_equal) == ("sequence", True)


STEP_4 = r"journal/00000000\.jsonl line 6"


@pytest.mark.parametrize(
    ("wrong", "said", "samples"),
    [
        ({"units": ("0" * 32,) * 4}, rf"{STEP_4}: step 4 did not compute the samples of its units \[0, 1, 2, 3\]", False),
        ({"units": ("0" * 32,)}, rf"{STEP_4}: step 4 did not compute the samples of its units \[0, 1, 2, 3\]", False),
        ({"skip": 1}, rf"{STEP_4}: step 5 where 4 must follow", True),
        ({"skip": -1}, rf"{STEP_4}: step 3 where 4 must follow", True),
        ({"loss": "not hex"}, rf"{STEP_4}: 'not hex'", True),
        ({"clock_step": 3}, rf"{STEP_4}: the ranks' clock", True),
    ],
)
def test_I8_a_step_that_is_not_what_it_should_be_is_named(wrong: dict[str, object], said: str, samples: bool) -> None:
    run = begun()
    run.train(1, **wrong)  # type: ignore[arg-type]
    run.step = 4
    run.save()
    certificate = certify(run.repository.tier)
    assert_refused(certificate, said)
    assert certificate.grade == "none"
    assert certificate.samples_exactly_once is samples


def test_I3_a_state_loaded_that_was_not_saved_is_named() -> None:
    run = begun()
    run.begin(3, loaded_root=run.root(2))
    run.train(3)
    run.save()
    assert_refused(certify(run.repository.tier), "generation 1, continued at step 3 from disk: the root loaded is not the root saved")


def test_a_base_whose_root_nobody_stored_is_named() -> None:
    run = begun()
    run.train(2)
    run.journal.sync()
    run.begin(5, source="memory")
    run.train(1)
    run.save()
    assert_refused(certify(run.repository.tier), "generation 1, continued at step 5 from memory: no root of that step is stored")


def test_a_generation_that_began_and_did_nothing_is_no_problem() -> None:
    run = begun()
    run.begin(3)
    run.journal.sync()
    run.begin(3)
    run.train(3)
    run.save()
    certificate = certify(run.repository.tier)
    assert certificate.problems == []
    assert certificate.generations == 3


def test_I6_a_second_fall_back_beyond_the_first_supersedes_both() -> None:
    run = uninterrupted(MemoryTier(), 6)
    run.train(2)
    run.journal.sync()
    run.begin(6)
    run.train(2)
    run.journal.sync()
    run.begin(3)
    run.train(9)
    run.save()
    certificate = certify(run.repository.tier, against=uninterrupted(MemoryTier()).repository.tier)
    assert certificate.problems == []
    assert certificate.steps_lost_total == 3 + 2 + 2
    assert certificate.grade == "exact"


def test_I9_steps_that_another_daemon_only_journalled_again_were_not_lost() -> None:
    """The daemon dies twice without a checkpoint in between, then a trainer."""
    run = uninterrupted(MemoryTier(), 6)
    run.train(2)
    run.journal.sync()
    for continued in (2, 3):
        run.begin(6)
        run.journal.add(EventRecord(name="continued", step=6, facts={"steps": continued}))
        run.train(continued + 1)
        run.journal.sync()
    assert run.step == 10
    run.begin(6)
    run.train(6)
    run.save()
    certificate = certify(run.repository.tier, against=uninterrupted(MemoryTier()).repository.tier)
    assert (certificate.problems, certificate.grade) == ([], "exact")
    assert certificate.steps_lost_total == 4, "7, 8, 9 and 10 were computed twice, although 7 and 8 stand in four journals"


@pytest.mark.parametrize("steps", ["2", None, -1, 1 << 62])
def test_B39_a_continuation_that_says_nonsense_harms_nothing(steps: object) -> None:
    run = uninterrupted(MemoryTier(), 6)
    run.train(2)
    run.journal.sync()
    run.begin(6)
    run.journal.add(EventRecord(name="continued", step=6, facts={"steps": steps}))
    run.train(6)
    run.save()
    assert certify(run.repository.tier).steps_lost_total in (0, 2)


def test_a_commit_that_names_another_head_is_named() -> None:
    run = begun()
    run.train(3)
    run.save(head="ab" * 32)
    assert_refused(certify(run.repository.tier), r"journal/00000000\.jsonl line 8: .*commit of step 6")


def test_a_journal_that_lacks_committed_lines_is_named(tmp_path: Path) -> None:
    uninterrupted(DiskTier(str(tmp_path)))
    path = tmp_path / "runs/main/journal/00000000.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-4]))
    assert_refused(certify(DiskTier(str(tmp_path))), r"journal/00000000\.jsonl: ends at step 9, but steps up to 12 survive")


def superseded(tier: Tier) -> SyntheticRun:
    """Generation 1 did steps 4 and 5 and saved neither; generation 2 did them again, with other losses."""
    run = SyntheticRun(tier)
    run.begin()
    run.train(3)
    run.save()
    run.begin(3)
    run.train(2, loss="11" * 8)
    run.journal.sync()
    run.begin(3)
    run.train(9)
    run.save()
    return run


def test_I3_the_journal_of_a_superseded_attempt_cannot_go(tmp_path: Path) -> None:
    tier = superseded(DiskTier(str(tmp_path))).repository.tier
    assert (certify(tier).certified, certify(tier).superseded_equal) == (True, False)
    path = tmp_path / "runs/main/journal/00000001.jsonl"
    raw = path.read_bytes()
    path.write_bytes(b"".join(raw.splitlines(keepends=True)[:-1]))
    assert_refused(certify(tier), r"journal/00000001\.jsonl: ends after 2 lines, without the last one that the next generation found")
    path.unlink()
    assert_refused(certify(tier), r"journal/00000001\.jsonl: missing, without")


def test_a_journal_that_was_never_written_is_no_problem() -> None:
    run = begun()
    run.begin(3)  # killed before its journal was durable
    run.begin(3)
    run.train(3)
    run.save()
    run.begin(6)  # the newest one
    certificate = certify(run.repository.tier)
    assert certificate.problems == []
    assert certificate.generations == 4


def test_I3_a_missing_journal_whose_end_nobody_recorded_is_named() -> None:
    tier = MemoryTier()
    superseded(tier)
    as_of_an_older_writer(tier)
    assert certify(tier).certified
    tier.delete("runs/main/journal/00000001.jsonl")
    assert_refused(certify(tier), r"journal/00000001\.jsonl: missing, though a later generation was opened after it")


def test_a_torn_last_line_is_not_tampering(tmp_path: Path) -> None:
    run = uninterrupted(DiskTier(str(tmp_path)))
    run.train(1)
    run.journal.sync()
    path = tmp_path / "runs/main/journal/00000000.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    certificate = certify(DiskTier(str(tmp_path)))
    assert certificate.problems == []
    assert certificate.certified


def test_a_condemned_checkpoint_is_listed_and_does_not_fail(tmp_path: Path) -> None:
    run = uninterrupted(DiskTier(str(tmp_path)), 6)
    last = run.repository.visible()[-1]
    (manifest,) = run.repository.manifests(last)
    pack = manifest.chunks[-1].pack
    flip(tmp_path / pack, manifest.chunks[-1].offset)
    assert_refused(certify(DiskTier(str(tmp_path))), re.escape(pack))
    run.repository.condemn(6, 0, (pack,), f"{pack}: digest", writer=WRITER, clock=run.clock)
    run.begin(3)
    run.train(9)
    run.save()
    certificate = certify(DiskTier(str(tmp_path)), against=uninterrupted(MemoryTier()).repository.tier)
    assert certificate.problems == []
    assert certificate.grade == "exact"
    assert certificate.fell_back
    assert [(c.step, c.generation, c.objects) for c in certificate.condemned] == [(6, 0, [pack])]


def flip(path: Path, position: int) -> None:
    """Change one bit of a stored byte."""
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("folder", ["packs", "manifests", "runs/main/log", "runs/main/journal"])
def test_I3_one_changed_byte_anywhere_is_named(folder: str, tmp_path: Path) -> None:
    uninterrupted(DiskTier(str(tmp_path)), 6)
    (path, *_) = sorted(p for p in (tmp_path / folder).rglob("*") if p.is_file())
    size = path.stat().st_size
    for position in [*range(0, size - 1, max(1, size // 200)), size - 2]:
        flip(path, position)
        assert_refused(certify(DiskTier(str(tmp_path))), re.escape(str(path.relative_to(tmp_path))))
        flip(path, position)
    assert certify(DiskTier(str(tmp_path))).certified


def other_losses(tier: Tier) -> SyntheticRun:
    run = SyntheticRun(tier)
    run.begin()
    run.train(11)
    run.train(1, loss="00" * 8)
    run.save()
    return run


def other_states(tier: Tier) -> SyntheticRun:
    run = SyntheticRun(tier, piece_bytes=64)
    run.begin()
    run.train(12)
    run.save()
    return run


def shorter(tier: Tier) -> SyntheticRun:
    return uninterrupted(tier, 9)


def longer(tier: Tier) -> SyntheticRun:
    run = SyntheticRun(tier)
    run.begin()
    run.train(15)
    run.save()
    return run


@pytest.mark.parametrize(
    ("reference", "losses", "roots", "said"),
    [
        (other_losses, False, True, "step 12: the loss's bits differ"),
        (other_states, True, False, "step 12: the state root differs .* at step 12 it is in /model/w$"),
        (shorter, False, False, "reference: holds 9 steps, this run 12"),
        (longer, True, False, "reference: has no state root at step 12"),
    ],
)
def test_a_reference_that_differs_is_not_equal(reference: Callable[[Tier], SyntheticRun], losses: bool, roots: bool, said: str) -> None:
    certificate = certify(interrupted(MemoryTier()).repository.tier, against=reference(MemoryTier()).repository.tier)
    assert_refused(certificate, said)
    assert certificate.grade == "sequence"
    assert (certificate.losses_equal, certificate.state_root_equal) == (losses, roots)


def test_a_superseded_attempt_with_other_bits_denies_the_exact_grade_only() -> None:
    run = begun()
    run.train(1, loss="11" * 8)
    run.journal.sync()
    run.begin(3)
    run.train(9)
    run.save()
    certificate = certify(run.repository.tier)
    assert (certificate.certified, certificate.grade, certificate.superseded_equal) == (True, "sequence", False)
    certificate = certify(run.repository.tier, against=uninterrupted(MemoryTier()).repository.tier)
    assert_refused(certificate, "superseded attempt")


def test_B38_skipped_steps_are_named_and_overflows_counted() -> None:
    run = begun()
    run.train(1, not_applied="the loss is nan")
    run.train(1, not_applied="")
    run.train(7)
    run.save()
    certificate = certify(run.repository.tier)
    assert (certificate.certified, certificate.samples_exactly_once) == (True, True)
    assert (certificate.num_skipped, certificate.num_rollbacks) == (2, 0)
    assert [(one.step, one.reason) for one in certificate.skipped] == [(4, "the loss is nan")]
    assert_refused(certify(run.repository.tier, against=uninterrupted(MemoryTier()).repository.tier), "step 4: skipped in one of both runs")


def test_B38_an_attempt_is_compared_up_to_the_step_that_its_replay_skipped() -> None:
    """It went on from poisoned weights: its losses cannot be those of the replay. Before that step they must be."""

    def run(first: str | None) -> SyntheticRun:
        made = begun()
        made.train(1, loss=first)
        made.train(1)
        made.train(2, loss="11" * 8)
        made.journal.add(EventRecord(name="rollback", step=7))
        made.journal.sync()
        made.begin(3)
        made.train(1)
        made.train(1, not_applied="the gradient of w holds NaN")
        made.train(7)
        made.save()
        return made

    good, bad = certify(run(None).repository.tier), certify(run("22" * 8).repository.tier)
    assert (good.superseded_equal, good.num_rollbacks, good.num_skipped) == (True, 1, 1)
    assert bad.superseded_equal is False


def test_an_order_of_the_users_own_limits_the_claim() -> None:
    certificate = certify(begun(kind="foreign").repository.tier)
    assert certificate.certified
    assert certificate.samples_exactly_once is None
    assert any("order of samples" in text for text in certificate.differences)


def test_recorded_differences_are_listed_with_their_generation() -> None:
    run = begun()
    run.begin(3, differences=("threads: 1 -> 2",))
    run.train(1)
    run.save()
    certificate = certify(run.repository.tier)
    assert certificate.certified
    assert certificate.differences == ["generation 1: threads: 1 -> 2"]


def test_I10_a_run_without_a_checkpoint_proves_nothing() -> None:
    run = SyntheticRun(MemoryTier())
    run.begin()
    run.train(2)
    run.journal.sync()
    assert_refused(certify(run.repository.tier), "no checkpoint is visible")


def test_I10_nothing_to_certify_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpoint):
        certify(DiskTier(str(tmp_path)))
    (tmp_path / "notes.txt").write_text("not ours")
    with pytest.raises(ForeignFolder):
        certify(DiskTier(str(tmp_path)))
