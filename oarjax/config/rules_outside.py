"""Rules for rollouts that another sampler, or an older policy, has drawn: what the config cannot ask of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from oarjax.config.inputs import DataConfig, PolicyConfig
from oarjax.config.learning import LossConfig, OffPolicyConfig, RolloutConfig, UpdateConfig
from oarjax.config.outputs import CheckpointConfig
from oarjax.system.http import names_host


def check_off_policy(loss: LossConfig, rollout: RolloutConfig) -> Iterator[str]:
    """Report corrections that do not match how rollouts are sampled."""
    off = loss.off_policy
    if off.support == "sampled" and (rollout.top_k, rollout.top_p, rollout.min_p) == (0, 1.0, 0.0):
        yield "loss.off_policy.support: sampled has no effect without rollout.top_k, top_p or min_p; set whole"
    if off.support == "sampled" and loss.kl_beta > 0:
        yield (
            "loss.off_policy.support: sampled cannot be combined with the KL term, which compares whole distributions; "
            "set loss.kl_beta=0"
        )
    if off.support == "sampled" and rollout.repetition_penalty != 1:
        yield "loss.off_policy.support: sampled ignores rollout.repetition_penalty, which must be 1; set it to 1"
    if off.weighting == "none" and (off.low, off.high) != (OffPolicyConfig().low, OffPolicyConfig().high):
        yield (
            "loss.off_policy.weighting: low and high have no effect with none; remove them, or set another weighting "
            "such as token_truncate"
        )


def check_outside(
    rollout: RolloutConfig, off: OffPolicyConfig, update: UpdateConfig, policy: PolicyConfig, iterations: int
) -> Iterator[str]:
    """Report what rollouts from outside the run cannot have."""
    name, engine = rollout.outside, rollout.engine
    if name is None:
        return
    if rollout.cache == "int8":
        yield f"rollout.cache: int8, and {name} draws the rollouts; set policy"
    if (rollout.top_k, rollout.top_p, rollout.min_p) != (0, 1.0, 0.0) and off.support != "sampled":
        yield (
            f"{name}: log-probs are those after rollout.top_k, top_p and min_p; set loss.off_policy.support=sampled, "
            "or turn these off"
        )
    if rollout.repetition_penalty != 1:
        yield f"{name}: the loss cannot follow rollout.repetition_penalty there; set the penalty to 1"
    if policy.router == "replay":
        yield f"{name}: brings no choices of experts; set policy.router=recompute"
    if rollout.recorded and update.refills:
        yield "rollout.from: no fresh prompts can be drawn; set update.refills=0"
    if engine is None:
        return
    if rollout.recorded:
        yield "rollout.from: rollouts come from files, and rollout.engine is set; set one of them"
    if not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", engine.url) or not names_host(engine.url):
        yield f"rollout.engine.url: expected an address such as http://127.0.0.1:8000, got {engine.url!r}"
    if rollout.stop:
        yield "rollout.stop: an engine cannot be told to end at the token that completes a string; leave it out"
    if iterations > 1 and engine.weights is None:
        yield (
            "rollout.engine: the engine keeps the weights that it was started with; set rollout.engine.weights to a "
            "folder, or iterations=1"
        )


def check_lag(
    update: UpdateConfig, rollout: RolloutConfig, data: DataConfig, checkpoint: CheckpointConfig
) -> Iterator[str]:
    """Report what rollouts that are drawn before their iteration cannot have, and devices that would draw nothing."""
    if rollout.devices is not None and rollout.outside is not None:
        yield f"rollout.devices: {rollout.devices}, and {rollout.outside} draws the rollouts; set one of them"
    if rollout.devices is not None and update.lag == 0:
        yield (
            f"rollout.devices: {rollout.devices}, and without a lag they would draw while the others wait; set "
            "update.lag=1, or rollout.devices=null"
        )
    if update.lag == 0:
        return
    where = f"update.lag: {update.lag}"
    if update.refills:
        yield f"{where}, and refills are drawn once an iteration's rewards are known; set update.refills=0"
    if data.difficulty is not None:
        yield f"{where}, and data.difficulty chooses prompts by the rewards until then; set data.difficulty=null"
    if rollout.environment is not None:
        yield f"{where}, and the records that a resumed run needs hold no episodes; set 0, or leave the environment out"
    if rollout.recorded:
        yield f"{where}, and rollouts come from files; set 0, or leave rollout.from out"
    if checkpoint.every == 0:
        yield f"{where}, and what is drawn ahead is kept in the records of runs with checkpoints; set checkpoint.every"
