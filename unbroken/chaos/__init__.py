"""The live fault injector: strikes a trainer at named failpoints, and logs each strike as ground truth before it acts."""

from unbroken.chaos.inject import arm_from_environment

__all__ = ["arm_from_environment"]
