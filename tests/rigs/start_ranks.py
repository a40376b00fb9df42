"""One rank of a run that is born from a source; its weights are drawn otherwise on each rank. python -m, arguments: folder, source."""

from __future__ import annotations

import os
import sys

from tests.rigs.tiny_run import loss_of, open_run


def main() -> None:
    directory, source = sys.argv[1:3]
    rank = os.environ.get("RANK", "0")
    run = open_run(directory, init_seed=int(rank), total_steps=2, start_from=source.replace("RANK", rank))  # type: ignore[arg-type]
    print("sum", *(float(parameter.detach().double().sum()) for parameter in run.model.parameters()))
    for batch in run:
        for micro in batch:
            micro.backward(loss_of(run.model, micro))
        run.step()


if __name__ == "__main__":
    main()
