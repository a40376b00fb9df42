"""Every bound of the system, each with its reason."""

from __future__ import annotations

LEAF_BYTES = 1 << 20
"""Merkle leaf over a piece's logical bytes: small enough to name a fault, large enough that hashes are 0.003 % of data."""

CHUNK_BYTES = 4 << 20
"""Unit of storage and of deduplication. A whole number of leaves; 100 B of metadata per chunk stays far below 0.1 %."""

PACK_BYTES = 256 << 20
"""A pack is closed at this size: one fsync per pack, bounded loss when a pack is condemned."""

SMALL_PIECE_BYTES = 64 << 10
"""Pieces up to this size share a chunk: hundreds of scalars must not become hundreds of chunks."""

MAX_JSON_BYTES = 256 << 20
"""A manifest, log entry or run.json larger than this is refused before it is read."""

MAX_PIECES = 1 << 20
"""Pieces in one manifest. A lying header must not make us allocate."""

MAX_POINTER_CHARS = 4096
"""Length of one JSON pointer, and of a path inside the run folder."""

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

SLOT_WAIT_S = 1.0
"""An automatic snapshot waits this long for a slot that the daemon is just letting go, then it is skipped and that is reported."""

CONNECT_TIMEOUT_S = 20.0
"""A trainer waits this long for its daemon to answer; a cold start of the daemon takes 0.3 s."""

REPLY_TIMEOUT_S = 120.0
"""Any single answer of the daemon, except waiting for a drain."""

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
