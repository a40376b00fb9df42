"""Sinks of metrics: each holds every committed step of the surviving lineage once, in order, fed from the journals.

A sink of your own is an object with three methods, see `Sink`; pass it as `log_to=`.
"""

from unbroken.loggers.rows import Row
from unbroken.loggers.sink import RunInfo, Sink

__all__ = ["Row", "RunInfo", "Sink"]
