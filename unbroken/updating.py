"""An update that the loop does itself: `with run.update() as update:`, several optimizers, several passes over one batch.

    for batch in run:
        with run.update() as update:
            for micro in batch:
                micro.backward(judge_loss(micro.x))
            update.reduce()                  # .grad is the gradient of the whole step now, the same bits on every rank
            judge_optimizer.step()
            for micro in batch:              # the same units once more, with other random numbers
                micro.backward(maker_loss(micro.x))
            update.reduce()
            maker_optimizer.step()

Units that were computed before the block are reduced as it opens. Such an update cannot be undone in place, since an optimizer may have
run, nor can the loop's body be begun again: where a collective fails, all ranks go back to a snapshot (StepLost). Nor can it be skipped
for its numbers: poison is seen at the boundary, all ranks go back, and the replay passes it over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from unbroken.core.errors import StepLost
from unbroken.core.ports import failpoint
from unbroken.shm.pulse import Phase
from unbroken.step.exchange import ExchangeFailed
from unbroken.step.update import Applied
from unbroken.stepping import Stepping


class Updating(Stepping):
    """Steps that `run.step` applies, or the loop itself."""

    @contextmanager
    def update(self, stop: Callable[[], bool]) -> Iterator[OwnUpdate]:
        """The block in which the loop reduces and applies; `close_update` follows it.

        RuntimeError outside a batch, twice for one, and where gradients were not reduced.
        """
        try:
            self._open()
            update = OwnUpdate(lambda: self._reduce_pass(stop()))
            if self._batch.begun:
                update.reduce()
            yield update
            self._streams.leave()
            if self._reduced is None or self._batch.begun:
                raise RuntimeError("run.update() ended without update.reduce() after the last pass over the batch: its gradients are lost")
        except BaseException:  # raised again: only ends what it has interrupted
            self.is_own = False
            raise

    def close_update(self, now_s: Callable[[], float]) -> Applied:
        """The loop has applied its update: commit it. `now_s` is asked when it is done."""
        assert self._reduced is not None
        applied = self._update.finish(self._reduced, self._update.optimizers.have_run)
        return self._done(applied, self._reduced, "apply", now_s)

    def _open(self) -> None:
        self._streams.leave()
        if not self.is_inside or self._outcome is not None or self.is_own:
            raise RuntimeError("run.update() belongs into the loop over the run, once per batch, in place of run.step()")
        self.is_own = True
        self._update.own("with a closure")

    def _reduce_pass(self, stop: bool) -> float:
        """Reduce one pass over the batch into `.grad`; the mean loss, NaN without one."""
        self._streams.leave()
        if not self.is_own:
            raise RuntimeError("update.reduce() belongs into its block: with run.update() as update")
        self._require_all_units("update.reduce()")
        failpoint("step.reduce")
        try:
            reduced = self._update.reduce(self._keeping.flags(stop), lambda: self._pulse.mark(Phase.COLLECTIVE))
        except ExchangeFailed as error:
            self._exchange.abandon()
            step = self._counters.step + 1
            raise StepLost(
                f"step {step}: a collective failed inside run.update(), which cannot be begun again in place: {error}"
            ) from error
        self._guard.reduced(reduced)
        self._pulse.mark(Phase.UPDATE)
        self.is_whole = False
        self._update.deliver(reduced)
        self._update.begin_pass()
        self._update.own("yes")
        self._reduced = reduced
        self._turn += 1
        self._batch.begun = False
        failpoint("step.optimizer")
        return float("nan") if reduced.loss is None else reduced.loss


class OwnUpdate:
    """What `with run.update()` hands out."""

    def __init__(self, reduce: Callable[[], float]) -> None:
        self._reduce = reduce

    def reduce(self) -> float:
        """Add up the units' gradients over all ranks, in unit order; every rank must call it. The mean loss of the pass, NaN without one.

        `.grad` holds the result until the next unit is computed: unscale, clip, add to it and step optimizers as you like, the same on
        every rank. Then the batch may be iterated again; its units start from the buffers as they are then, and from random numbers of
        their own. StepLost where a collective failed; GaveUp where `Anomalies(nan="stop")` says so. Cost: two collectives of the
        gradient's size in all.
        """
        return self._reduce()
