"""Credit that knows which tokens decide, on the built-in tasks: what perfect weights would do there.

oarjax train configs/forks.yaml credit.method=egca credit.marks=docs/examples/oracle.py:deciding
oarjax train configs/stories.yaml credit.method=custom credit.function=docs/examples/oracle.py:gated \
    credit.marks=docs/examples/oracle.py:deciding

EGCA puts the whole advantage on the marked tokens; ``gated`` sends the marks through OAR's gate.
"""

import re

import jax.numpy as jnp
from jaxtyping import Array, Float

from oarjax import Context, CreditInputs, CreditMethod, oar_weights
from oarjax.config.inputs import DatasetConfig, ForksConfig
from oarjax.data.tasks.truth import token_truth


def deciding(prompt: str, completion: str, reference: str) -> list[tuple[int, int, float]]:
    """Mark the characters of a completion that decide its outcome; the task is known by its prompt."""
    if re.fullmatch(r"[0-9]+=", prompt):
        kind = "chain" if re.search(r"[0-9]\+[0-9]=", completion) else "copy"
        task = DatasetConfig(source="builtin:forks", forks=ForksConfig(kind=kind))
    else:
        task = DatasetConfig(source="builtin:arithmetic" if prompt.endswith("=") else "builtin:stories")
    truth = token_truth(task, prompt, list(completion))
    assert truth is not None
    return [(n, n + 1, 1.0) for n, mark in enumerate(truth.pivotal) if mark]


def _gated(inputs: CreditInputs, context: Context) -> Float[Array, "B T"]:
    """Weigh the reasoning tokens by their marks, 0 or 1, through the configured gate."""
    marks = (jnp.asarray(inputs.signals.marks) > 0) & inputs.span.reasoning
    return oar_weights(marks.astype(jnp.float32), inputs.span.reasoning, **vars(context.credit.gate))


gated = CreditMethod(_gated, needs=("marks",))
