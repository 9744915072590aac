"""Compile stop strings to a table for the sampler, which finds the token that completes one, at any of its bytes.

A string may begin in one token and end in another, in the middle of either. So a row carries a state: the longest
prefix of a stop string that its bytes end with (Aho and Corasick, 1975). The table leads from state and token to the
next state; its last state is "a string was completed" and is never left. ``draw_next`` of ``sampler.py`` ends the row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

MOST_STATES = 512
"""Maximum number of states, about as many as the bytes of all stop strings; a table for Qwen's ids then has 300 MB."""


def stop_table(strings: Sequence[str], token_bytes: Sequence[bytes]) -> Int32[np.ndarray, "states V"] | None:
    """Build the table of next states, [states, V]; None without strings. Rows begin in state 0.

    Args:
        strings: stop strings; a completion ends with the first token whose bytes complete one of them.
        token_bytes: the bytes of every token id; special tokens have none and leave the state as it is.

    Raises:
        ValueError: an empty string, or too many bytes in all.
    """
    if not strings:
        return None
    if not all(strings):
        raise ValueError("stop: an empty string would end every completion; leave it out")
    step = _automaton([string.encode() for string in strings])
    final = len(step) - 1
    if len(step) > MOST_STATES:
        raise ValueError(
            f"stop: the strings have {final} different prefixes, at most {MOST_STATES - 1} fit; shorten them"
        )
    state = np.repeat(np.arange(len(step), dtype=np.int32)[:, None], len(token_bytes), axis=1)
    lengths = np.asarray([len(piece) for piece in token_bytes])
    for at in range(int(lengths.max(initial=0))):
        longer = np.flatnonzero(lengths > at)
        byte = np.asarray([token_bytes[token][at] for token in longer.tolist()])
        state[:, longer] = step[state[:, longer], byte]
    return state


def cut_text(text: str, strings: Sequence[str]) -> str:
    """Return the text before the first stop string that occurs in it."""
    ends = [at for string in strings if (at := text.find(string)) >= 0]
    return text[: min(ends)] if ends else text


def _automaton(strings: Sequence[bytes]) -> Int32[np.ndarray, "states 256"]:
    """Build the transitions of bytes; the last state is final and is never left."""
    children: list[dict[int, int]] = [{}]
    ends: set[int] = set()
    for string in strings:
        state = 0
        for byte in string:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
            state = children[state][byte]
        ends.add(state)
    count = len(children)
    step, fallback = np.zeros((count, 256), np.int32), np.zeros(count, np.int32)
    queue = deque([0])
    while queue:  # breadth first: the fallback of a state is complete before it
        state = queue.popleft()
        if int(fallback[state]) in ends:
            ends.add(state)
        step[state] = step[fallback[state]] if state else 0
        for byte, child in children[state].items():
            fallback[child] = step[fallback[state]][byte] if state else 0
            queue.append(child)
        for byte, child in children[state].items():
            step[state, byte] = child
    # All states that end a string become one, the last.
    nonfinal = [state for state in range(count) if state not in ends]
    new_states = np.full(count, len(nonfinal), np.int32)
    new_states[nonfinal] = np.arange(len(nonfinal))
    return np.concatenate([new_states[step[nonfinal]], np.full((1, 256), len(nonfinal), np.int32)])
