"""Every bound of the system, each with its reason."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

LEAF_BYTES = 1 << 20
"""Merkle leaf over a piece's logical bytes: small enough to name a fault, large enough that hashes are 0.003 % of data."""

CHUNK_BYTES = 4 << 20
"""Unit of storage and of deduplication. A whole number of leaves; 100 B of metadata per chunk stays far below 0.1 %."""

PACK_BYTES = 256 << 20
"""A pack is closed at this size: one fsync per pack, bounded loss when a pack is condemned."""

MAX_CHAIN = 64
"""Of differences of differences a chunk may be, in a file that we read; what we write stays far below."""

SMALL_PIECE_BYTES = 64 << 10
"""Pieces up to this size share a chunk: hundreds of scalars must not become hundreds of chunks."""

MAX_JSON_BYTES = 256 << 20
"""A manifest, log entry or run.json larger than this is refused before it is read."""

MAX_PIECES = 1 << 20
"""Pieces in one manifest. A lying header must not make us allocate."""

MAX_POINTER_CHARS = 4096
"""Length of one JSON pointer, and of a path inside the run folder."""

MAX_COUNT = 10**17
"""Of anything that is counted: one more must still fit the 18 digits of a name and the 64 bits of a header."""

MAX_DEPTH = 64
"""Nesting of containers in a state; beyond it the state is refused by name."""

MAX_MESSAGE_BYTES = 128 << 10
"""One message between trainer and daemon. Bulk data never travels there, only descriptors and numbers."""

MAX_JOURNAL_LINE_BYTES = 1 << 20
"""One journal line; 131,072 ranks' clock is run-length encoded well below it."""

LOG_SUMMARY_EVERY = 256
"""Every so many log entries one carries a summary: opening costs one LIST and at most that many reads."""

KEEP_NEWEST = 3
"""Checkpoints kept besides milestones."""

NUM_SLOTS = 2
"""Memory slots per rank: one being written while the other stays READY (I4)."""

MILESTONE_WAIT_S = 30.0
"""So long a rank keeps the memory slot of a milestone of which the daemon says nothing, although it has no other slot to write to."""

SLOT_WAIT_S = 1.0
"""An automatic snapshot waits this long for a slot that the daemon is just letting go, then it is skipped and that is reported."""

CONNECT_TIMEOUT_S = 20.0
"""A trainer waits this long for its daemon to answer; a cold start of the daemon takes 0.3 s."""

REPLY_TIMEOUT_S = 120.0
"""Any single answer of the daemon, except waiting for a drain."""

ERRAND_NEWS_S = 5.0
"""Who waits for a checkpoint that is brought back from a copy hears this often that it goes on."""

ERRAND_TIMEOUT_S = 6 * 3600.0
"""A start waits this long for its checkpoint to be brought back: some TB over a slow line."""

COPY_TIMEOUT_S = 1800.0
"""After the last trainer the daemon goes on this long to copy the newest checkpoint, if the other tier takes it."""

COPY_WAIT_S = 120.0
"""A run that has ended waits this long for its last checkpoint to be copied: whoever removes the host next expects it there."""

DRAIN_TIMEOUT_S = 1800.0
"""Closing a run waits this long for its last snapshot to become durable."""

LINGER_S = 2.0
"""The daemon ends this long after its last client has gone and its slots are durable."""

EXIT_TIMEOUT_S = 30.0
"""A rank that ends without close() waits this long for the others' last snapshots."""

COLLECTIVE_TIMEOUT_S = 600.0
"""A collective that makes no progress for this long has failed: rank 0 may evaluate while the others wait for it."""

MAX_ATTEMPTS = 3
"""A step is tried in place so often; then the processes are started again."""

MAX_UNITS = 2048
"""Units of a step: the step's journal record, some 45 bytes for each of them, must fit one message."""

MAX_THREADS = 1024
"""Intra-op threads of a rank; OpenMP ends the process where it cannot start as many as it is told."""

MAX_GLOBAL_BATCH = 1 << 24
"""Samples of a step: 128 MB of ids, far above any batch that still trains."""

MAX_SKIPPED = 1 << 24
"""Samples of one data set that a run may skip: 128 MB for the list and as much for its places; beyond, a subset is the better tool."""

MAX_DATASETS = 256
"""Data sets in one mixture: all of them stand in the birth facts, which travel as one message."""

MAX_SHARES = 1 << 30
"""Sum of a mixture's whole-numbered weights: products with the samples of a step stay inside int64."""

MAX_WEIGHT = 1 << 32
"""Weight of one unit, in tokens."""

MAX_EPOCHS_PER_STEP = 1024
"""How often one step may read the whole data set: each epoch costs a permutation, and stored facts must not make us spin."""

MAX_DESCRIPTION_CHARS = 4000
"""Of an error in words: it goes into messages and journal lines, which have a limit."""

VERDICT_TIMEOUT_S = 30.0
"""Members of a refused step that have not spoken by then are hanging or have applied it."""

HEARTBEAT_S = 1.0
"""The daemon looks at every rank this often, and four times within a shorter `hang_timeout`."""

HANG_FLOOR_S = 30.0
"""No step is called hanging before: a garbage collection, a cold file or a compilation of one more shape takes seconds."""

HANG_FACTOR = 5.0
"""Times the median of recent steps, plus as often their spread: what grows by this much has stopped, or is not worth waiting for."""

HANG_PATIENCE = 4.0
"""After an alarm the same step gets this many times as long: a slow step taken for a hang is then passed, a real one stops the job."""

MIN_STEP_TIMES = 5
"""Steps timed before their median means anything."""

FIRST_STEPS = 2
"""Of every start: they compile, allocate and warm up caches."""

STEP_TIMEOUT_S = 3600.0
"""Of what nothing is known about: first steps of a start, the loop's body after `run.step()`, a save, all ranks in one collective."""

EVAL_TIMEOUT_S = 86400.0
"""Of one `with run.eval()`: nobody knows how much there is to evaluate, but a day without a step is no training."""

MIN_HANG_TIMEOUT_S = 1.0
"""The smallest `hang_timeout`: below it ordinary steps on a busy machine would be called hanging."""

LOOK_GAP = 2.0
"""A look that comes later than this many intervals after the last one counts as this many: daemon or host were not running."""

DUMP_WAIT_S = 0.3
"""Ranks get this long to write their stacks; a signal handler needs milliseconds."""

END_WAIT_S = 2.0
"""Ranks get this long to end with HANG_EXIT_CODE after an alarm, then they are killed."""

PULSE_BYTES = 256 << 10
"""One rank's page: 4 KiB of numbers, the rest for its stacks and those of its loader's processes, some 5 KiB each."""

MAX_HANG_FILES = 16
"""Files with stacks in a run folder; the oldest go first."""

LADDER: tuple[tuple[str, float], ...] = (
    ("heartbeat", HEARTBEAT_S),
    ("collective", COLLECTIVE_TIMEOUT_S),
    ("quorum", COLLECTIVE_TIMEOUT_S + VERDICT_TIMEOUT_S),
    ("step", STEP_TIMEOUT_S),
)
"""I12: seconds from the moment at which something stands still to the moment at which each level acts, where nothing is known better.

heartbeat: the daemon has looked. collective: it fails on those who wait in it. quorum: all have refused the step, or it is known who has
not. step: the watchdog ends the group. Each level must have had its turn before the next, coarser one acts. What the watchdog has learned
of a run's own steps makes it faster than that, for a rank of which it knows that it stands still: such a rank can refuse nothing, so
the levels between cannot help. The levels above (a limit for a restart, the scheduler's) do not exist yet.
"""

ORDERS: tuple[tuple[str, float, str, float], ...] = (
    ("SLOT_WAIT_S", SLOT_WAIT_S, "HANG_FLOOR_S", HANG_FLOOR_S),
    ("VERDICT_TIMEOUT_S", VERDICT_TIMEOUT_S, "REPLY_TIMEOUT_S", REPLY_TIMEOUT_S),
    ("CONNECT_TIMEOUT_S", CONNECT_TIMEOUT_S, "REPLY_TIMEOUT_S", REPLY_TIMEOUT_S),
    ("ERRAND_NEWS_S", ERRAND_NEWS_S, "REPLY_TIMEOUT_S", REPLY_TIMEOUT_S),
    ("REPLY_TIMEOUT_S", REPLY_TIMEOUT_S, "COLLECTIVE_TIMEOUT_S", COLLECTIVE_TIMEOUT_S),
    ("DUMP_WAIT_S", DUMP_WAIT_S, "MIN_HANG_TIMEOUT_S", MIN_HANG_TIMEOUT_S),
    ("EXIT_TIMEOUT_S", EXIT_TIMEOUT_S, "DRAIN_TIMEOUT_S", DRAIN_TIMEOUT_S),
)
"""Waits beside the ladder that contain each other: whoever waits for an answer must outwait those who find it."""


def ladder_faults(ladder: Sequence[tuple[str, float]] = LADDER, orders: Sequence[tuple[str, float, str, float]] = ORDERS) -> list[str]:
    """I12: what is out of order, in words; [] when every level outwaits the one below it."""
    pairs = [(*low, *high) for low, high in itertools.pairwise(ladder)]
    return [
        f"{low} waits {low_s:g} s and must be shorter than {high}, which waits {high_s:g} s"
        for low, low_s, high, high_s in (*pairs, *orders)
        if not 0 < low_s < high_s
    ]


MAX_METRIC_NAME_CHARS = 200
"""Of a metric's name: MLflow's limit is 250, and a prefix may come before it."""

MAX_METRIC_TEXT_CHARS = 1000
"""Of a text among the metrics: a word or a line, not a sample of the output."""

MAX_METRICS_BYTES = 64 << 10
"""Of all metrics of one step: their journal record must fit one message; about 1,000 numbers with names of 20 characters."""

MAX_ONCE_KEY_CHARS = 200
"""Of a key of `run.once`."""

MAX_ONCE_KEYS = 4096
"""Keys of `run.once`: they are a piece of every checkpoint, and a key per step would grow it without end."""

LOG_CLOSE_S = 15.0
"""Closing a run waits this long for its sinks: they must be done before a launcher's grace period (30 s) is over."""
MAX_SETTINGS_BYTES = 1 << 20
"""An unbroken.toml larger than this is not one."""

MAX_REASON_CHARS = 300
"""Of why a step was skipped: it stands in the journal line of the step."""

MAX_SKIPPED_WINDOWS = 16
"""Windows of steps passed over that a run's state remembers: those before the newest checkpoints matter to nobody."""
