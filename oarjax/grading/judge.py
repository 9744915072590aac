"""Score completions by an HTTP service: an async reward with retries, and a range for its scores.

    from oarjax import reward
    from oarjax.grading.judge import HttpJudge

    reward("judge")(HttpJudge("http://localhost:8000/score", low=0.0, high=1.0))

``grading.concurrency`` requests run at once, each for ``grading.call_deadline`` seconds in all. Replies are not
trusted: one that is not JSON, too long, or not a number within the range counts as a failed attempt. A sample
without a valid score is ungraded or a timeout, never a 0. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from oarjax.grading.rewards import Sample
from oarjax.system.http import Reply, names_host, post
from oarjax.system.secrets import hide, mark_secret

MAX_BYTES = 1 << 20
"""Size limit of a reply."""

THREADS = 128  # requests at once, whatever grading.concurrency says


class JudgeError(RuntimeError):
    """Raised when a judge gives no valid score, with the failure of the last attempt."""


def request_of(sample: Sample) -> dict[str, Any]:
    """Return the request's JSON: prompt, answer and columns of the dataset, and apart from them what the policy wrote.

    A completion may hold text that asks a judge that is a language model for a high score. JSON keeps it in its field;
    the service must keep it out of its instructions.
    """
    return {
        "trusted": {"prompt": sample.prompt, "answer": sample.answer, "columns": sample.columns},
        "untrusted": {"completion": sample.completion},
    }


def read_score(reply: Any) -> Any:
    """Return the field "score" of a reply's JSON."""
    return reply["score"]


class HttpJudge:
    """Ask a service for the score of a sample: POST JSON, read a number.

    Args:
        url: http:// or https://.
        low, high: range of valid scores.
        retries: further attempts after a failed one: no connection, no reply in ``timeout`` seconds, status 408, 425,
            429 or 5xx, or an invalid score. Other statuses are not retried.
        timeout: seconds per attempt.
        backoff: seconds before the first retry, doubled for each further one; a longer Retry-After is obeyed.
        key_env: environment variable whose value, without blanks around it, is sent as a bearer token. It is masked in
            every error.
        request, score: functions from the sample to the request's JSON, and from the reply's JSON to the score.

    Raises:
        ValueError: an argument out of range, or ``key_env`` names no variable whose value is a key.
    """

    def __init__(
        self,
        url: str,
        *,
        low: float = 0.0,
        high: float = 1.0,
        retries: int = 3,
        timeout: float = 15.0,
        backoff: float = 0.5,
        key_env: str | None = None,
        request: Callable[[Sample], Any] = request_of,
        score: Callable[[Any], Any] = read_score,
    ):
        self._place = urlsplit(url)
        if self._place.scheme not in ("http", "https") or not names_host(url):
            raise ValueError(f"HttpJudge: expected an http:// or https:// address, got {url!r}")
        if not low < high or retries < 0 or timeout <= 0 or backoff < 0:
            raise ValueError(
                f"HttpJudge: expected low < high, retries >= 0, timeout > 0 and backoff >= 0, got {low}, {high}, "
                f"{retries}, {timeout} and {backoff}"
            )
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        self._key = ""
        if key_env is not None:
            mark_secret(key_env)
            self._key = os.environ.get(key_env, "").strip()
            if not self._key:
                raise ValueError(f"HttpJudge: the environment variable {key_env} is not set; export the service's key")
            if not (self._key.isascii() and self._key.isprintable()):
                raise ValueError(
                    f"HttpJudge: the value of {key_env} has characters that no header can hold; export the key again"
                )
            self._headers["Authorization"] = f"Bearer {self._key}"
        self._low, self._high, self._retries = low, high, retries
        self._timeout, self._backoff = timeout, backoff
        self._request, self._score = request, score
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="judge")

    async def __call__(self, sample: Sample) -> float:
        """Return the score of a sample.

        Raises:
            JudgeError: no attempt gave a valid one.
            TimeoutError: the last attempt had no reply in time.
        """
        try:
            return await self._ask(sample)
        except Exception as error:  # of a custom request function, or of a service that sends the key back
            text = f"{type(error).__name__}: {error}"
            if not self._key or hide(text, {self._key}) == text:
                raise
            hidden = hide(str(error), {self._key})
        raise JudgeError(hidden)

    async def _ask(self, sample: Sample) -> float:
        body = json.dumps(self._request(sample)).encode()
        for attempt in range(self._retries + 1):
            pause = self._backoff * 2**attempt
            try:
                reply = await self._post(body)
                if reply.status == 200:
                    return self._checked(reply.body)
                failure: Exception = JudgeError(f"the judge answered with status {reply.status}")
                pause = max(pause, reply.retry_after or 0.0)
                if reply.status not in (408, 425, 429) and reply.status < 500:
                    raise failure
            except TimeoutError:
                failure = TimeoutError(f"the judge did not answer within {self._timeout:g} s")
            except (OSError, http.client.HTTPException) as error:
                failure = JudgeError(f"the judge cannot be reached: {type(error).__name__}: {error}")
            except InvalidScore as error:
                failure = JudgeError(str(error))
            if attempt == self._retries:
                raise failure
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    async def _post(self, body: bytes) -> Reply:
        return await post(
            self._place, body, self._headers, timeout=self._timeout, most=MAX_BYTES, threads=self._threads
        )

    def _checked(self, body: bytes) -> float:
        if len(body) > MAX_BYTES:
            raise InvalidScore(f"the judge's reply is longer than {MAX_BYTES} bytes")
        try:
            score = self._score(json.loads(body))
        except Exception as error:  # the reader may be custom; RecursionError for deep nesting
            what = f"{type(error).__name__}: {str(error)[:200]}"
            raise InvalidScore(f"the judge's reply cannot be read: {what}") from None
        if isinstance(score, bool) or not isinstance(score, int | float) or not _is_finite(score):
            description = "too large" if isinstance(score, int) and abs(score) > 1 else repr(str(score)[:50])
            raise InvalidScore(f"the judge's score is {description}; expected a number")
        if not self._low <= score <= self._high:
            raise InvalidScore(f"the judge's score is {float(score):g}; expected {self._low} to {self._high}")
        return float(score)


class InvalidScore(ValueError):
    """A reply without a valid score."""


def _is_finite(score: int | float) -> bool:
    try:
        return math.isfinite(score)
    except OverflowError:  # an integer of hundreds of digits
        return False
