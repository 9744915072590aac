"""Check turns that come from outside: nothing is trained on that a policy with this tokenizer cannot have drawn."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from oarjax.rollout.source import Turn


class Rules(NamedTuple):
    """The rules of a run's turns."""

    vocab: int
    stop_ids: tuple[int, ...]
    stops_at_text: bool = False  # a row may also end with any id, at a stop string


def check_turn(turn: Turn, max_new: int, rules: Rules) -> None:
    """Check ids, log-probs and the end of a turn against each other.

    Raises:
        ValueError: they do not fit; says what.
    """
    ids, count = turn.tokens, len(turn.tokens)
    if not 1 <= count <= max_new:
        raise ValueError(f"expected 1 to {max_new} tokens, got {count}")
    if ids.min() < 0 or ids.max() >= rules.vocab:
        raise ValueError(f"ids reach from {ids.min()} to {ids.max()}, the vocabulary from 0 to {rules.vocab - 1}")
    arrays = {"log-probs": turn.logps, "whole_logps": turn.whole_logps, "teacher_logps": turn.teacher_logps}
    for name, logps in arrays.items():
        if logps is not None and (len(logps) != count or np.ndim(logps) != 1):
            raise ValueError(f"{len(logps)} {name} of {count} tokens")
        if logps is not None and (not np.isfinite(logps).all() or logps.max() > 1e-3):
            raise ValueError(f"{name} are not finite, or above 0: {logps.max():.3g}")
    stops = np.isin(ids, rules.stop_ids)
    if stops[:-1].any():
        raise ValueError(f"tokens follow the stop id {ids[int(stops.argmax())]}")
    at_stop = bool(stops[-1])
    if turn.finish == "stop" and not (at_stop or rules.stops_at_text):
        raise ValueError(f"finish is stop, but the last id {ids[-1]} is none of the stop ids {rules.stop_ids}")
    if turn.finish == "length" and (at_stop or count != max_new):
        raise ValueError(f"finish is length, after {count} of {max_new} tokens, the last of them {ids[-1]}")
    if turn.finish not in ("stop", "length"):
        raise ValueError(f"expected finish stop or length, got {turn.finish!r:.50}")
