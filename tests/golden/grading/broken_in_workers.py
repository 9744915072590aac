"""A plugin that imports in the process named by an environment variable and nowhere else."""

import os

from oarjax.grading.rewards import reward

if os.environ.get("OARJAX_TEST_PARENT") != str(os.getpid()):
    raise RuntimeError("this machine has no licence for that")


@reward("licensed")
def licensed(sample) -> float:
    return 1.0
