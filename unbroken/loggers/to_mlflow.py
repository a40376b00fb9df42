"""MLflow: one run, found again by a tag that holds the run's id. Numbers only: MLflow has no texts over steps.

What is held is asked of MLflow itself. A step's metrics are not one record there, so a kill may leave half of them: these are not
written twice. In a folder (not on a server) a metric `a` and a metric `a/b` cannot both be: there `/` becomes `.`.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

from unbroken.core.ports import Clock, SystemClock, environment
from unbroken.loggers.rows import Row
from unbroken.loggers.sink import RunInfo, wall_s

_TAG = "unbroken.run_id"
_LAST = "samples"
_MAX_BATCH = 1000


class MLflow:
    """A tracking server or folder by its URI; the experiment is MLFLOW_EXPERIMENT_NAME's, or "Default"."""

    def __init__(self, uri: str, clock: Clock | None = None) -> None:
        self._uri = uri
        self._clock = clock or SystemClock()
        self._is_folder = "://" not in uri or uri.startswith("file:")
        self._run_id = ""
        self._there: set[tuple[str, int]] = set()

    def open(self, run: RunInfo) -> int:
        self._client = MlflowClient(tracking_uri=self._uri)
        self._run_id = self._find(run)
        return self._look(self._run_id)

    def write(self, rows: Sequence[Row]) -> None:
        now_ms = int(wall_s(self._clock) * 1000)
        waiting: list[Metric] = []
        for row in rows:
            numbers = {self._key(name): float(value) for name, value in row.values.items() if not isinstance(value, str)}
            waiting += [Metric(k, v, now_ms, row.step) for k, v in numbers.items() if (k, row.step) not in self._there]
        for start in range(0, len(waiting), _MAX_BATCH):
            self._client.log_batch(self._run_id, metrics=waiting[start : start + _MAX_BATCH])

    def close(self) -> None:
        run_id, self._run_id = self._run_id, ""
        if run_id:
            self._client.set_terminated(run_id)

    def _key(self, name: str) -> str:
        return name.replace("/", ".") if self._is_folder else name

    def _find(self, run: RunInfo) -> str:
        """Id of the run's run at MLflow, made where there is none."""
        name = environment("MLFLOW_EXPERIMENT_NAME", "Default")
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        found = self._client.search_runs([experiment_id], filter_string=f"tags.`{_TAG}` = '{run.tracker_id}'", max_results=1)
        if not found:
            made = self._client.create_run(experiment_id, tags={_TAG: run.tracker_id}, run_name=run.title)
            return str(made.info.run_id)
        self._client.update_run(found[0].info.run_id, status="RUNNING")
        return str(found[0].info.run_id)

    def _look(self, run_id: str) -> int:
        """The newest step held as a whole; what is there of later ones is noted."""
        known = sorted(self._client.get_run(run_id).data.metrics)
        steps = {key: [metric.step for metric in self._client.get_metric_history(run_id, key)] for key in known}
        held = max(steps.get(_LAST, []), default=0)
        self._there = {(key, step) for key in known for step in steps[key] if step > held}
        return held
