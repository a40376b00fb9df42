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

Units that were computed before the block are reduced as it opens. A collective that fails in `reduce` is tried again with the gradients
at hand, if every rank is at the same one of the step; nothing is computed again and the loop does not notice. Otherwise the step cannot
be undone, since an optimizer may have run: StepLost, and all ranks go back to a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable

from unbroken.stepping import Stepping


class OwnUpdate:
    """What `with run.update()` hands out."""

    def __init__(self, stepping: Stepping, stop: Callable[[], bool]) -> None:
        self._stepping = stepping
        self._stop = stop
        stepping.open_update()
        if stepping.has_begun:
            self.reduce()

    def reduce(self) -> float:
        """Add up the units' gradients over all ranks, in unit order; every rank must call it. The mean loss of the pass, NaN without one.

        `.grad` holds the result until the next unit is computed: unscale, clip, add to it and step optimizers as you like, the same on
        every rank. Then the batch may be iterated again; its units start from the buffers as they are then, and from random numbers of
        their own. StepLost where a collective failed for good. Cost: two collectives of the gradient's size in all.
        """
        return self._stepping.reduce(self._stop())
