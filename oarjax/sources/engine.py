"""Draw rollouts with an engine over HTTP: vLLM's token endpoint, ids in, ids and log-probs out.

    vllm serve FOLDER --enable-scale-out --logprobs-mode processed_logprobs

A request per row, without a seed. Its log-probs must be those of the distribution that was drawn from, after
temperature and filters (``processed_logprobs``); ``probe`` checks that. Replies are not trusted: one of another prompt,
with ids and log-probs that do not belong together, a wrong end or other weights is no answer. What fails is asked for
again, ``rollout.engine.retries`` times; if that fails too, the run ends, the rows so far are recorded, and the same
command draws the others.

The engine draws with the weights that it was started with.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from jaxtyping import Int

from oarjax.config.learning import EngineConfig, RolloutConfig
from oarjax.errors import UserError
from oarjax.rollout.source import Batch, Report, Request, RowId, Spent, Turn
from oarjax.sources.records import EndedTable, line_of, turn_of
from oarjax.sources.turns import Rules, check_turn
from oarjax.system.http import Reply, post
from oarjax.system.processes import gather, is_first
from oarjax.types import Params

ENDPOINT = "/inference/v1/generate"
MISSING = -9999.0
"""vLLM's log-prob of a token that it has none of."""

BYTES_PER_TOKEN = 256
"""Size limit of a reply per token; vLLM's have about 100."""

PAUSE = 0.5
"""Seconds before the first retry, doubled for each further one."""


class EngineError(UserError, RuntimeError):
    """Raised when an engine does not draw what it is asked to. Exit code 75: the same command resumes the run."""

    exit_code = 75


class Unfit(UserError):
    """Raised for an engine that is set up in another way than needed. Exit code 2."""


class Faulty(ValueError):
    """An answer that cannot be used."""


class EngineSource:
    """Draw row by row with an engine; the first process asks it and tells the others.

    Args:
        rules: what a turn must be.
    """

    together = False

    def __init__(self, engine: EngineConfig, rollout: RolloutConfig, rules: Rules) -> None:
        self._engine, self._rollout, self._rules = engine, rollout, rules
        self._address = urlsplit(engine.url.rstrip("/") + ENDPOINT)
        self._threads = ThreadPoolExecutor(engine.concurrency, thread_name_prefix="engine")
        self._weights: Any = None  # as the probe's answer names them

    def probe(self) -> None:
        """Draw the only token that top_k=1 leaves: its log-prob is 0, if it is of what was drawn from.

        Raises:
            EngineError: the engine cannot be reached, or does not answer.
            Unfit: its log-probs are others.
        """
        prompt = np.asarray(self._rules.stop_ids[:1] or (0,), np.int32)
        request = Request(RowId(0, 0, 0), prompt, 1, (), 1)
        turns, failure = self._ask([request], lambda turn: None, sampling={"top_k": 1})
        if failure is not None:
            raise EngineError(f"rollout.engine: {failure}")
        if abs(float(turns[0].logps[0])) > 1e-4:
            raise Unfit(
                f"rollout.engine: with top_k=1 a token has the log-prob {turns[0].logps[0]:.4g} instead of 0, so it is "
                "not of the distribution that was drawn from; start vllm serve with --logprobs-mode processed_logprobs"
            )

    def sync(self, params: Params, version: int) -> None:
        """Accept the start's weights, which the engine was started with.

        Raises:
            Unfit: they are others.
        """
        if version > 0:
            raise Unfit("rollout.engine: the engine cannot be given new weights; set iterations=1")

    def draw(
        self, batch: Batch, report: Report | None = None, *, rows: Int[np.ndarray, "r"] | None = None
    ) -> list[Turn]:
        """Draw rows, each reported as it ends.

        Raises:
            EngineError: some rows could not be drawn.
        """
        requests, failure, lines = batch.requests, None, []
        if rows is not None:
            requests = [requests[b] for b in rows]
        if is_first():
            table = EndedTable(batch)
            turns, failure = self._ask(requests, lambda turn: report and report(table.ended([turn])))
            asked = {request.id: request for request in requests}
            lines = [line_of(asked[turn.id], turn) for turn in turns]
        failure, lines = gather([failure, lines])[0]
        if failure is not None:
            raise EngineError(
                f"rollout.engine: {len(lines)} of {len(requests)} rows were drawn, then {failure}; once the engine "
                "works again, the same command draws the others"
            )
        return [turn_of(line) for line in sorted(lines, key=lambda line: line["row"])]

    def spent(self) -> Spent:
        """Return no counts: the engine keeps them."""
        return Spent()

    def close(self) -> None:
        """Stop waiting for replies."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ask(
        self, requests: Sequence[Request], ended: Callable[[Turn], object], *, sampling: dict[str, Any] | None = None
    ) -> tuple[list[Turn], str | None]:
        """Return the turns of requests in the order in which they end, and the first failure, after which none begins.

        ``ended`` is called on this thread.
        """
        done: queue.SimpleQueue[Turn | BaseException | None] = queue.SimpleQueue()
        running: list[tuple[asyncio.AbstractEventLoop, Any]] = []

        async def every() -> None:
            running.append((asyncio.get_running_loop(), asyncio.current_task()))
            room, over = asyncio.Semaphore(self._engine.concurrency), asyncio.Event()

            async def one(request: Request) -> None:
                async with room:
                    if over.is_set():
                        return
                    try:
                        done.put(await self._turn(request, over, sampling or {}))
                    except Exception as error:
                        over.set()
                        done.put(error)

            await asyncio.gather(*map(one, requests))

        def work() -> None:
            try:
                with suppress(asyncio.CancelledError):
                    asyncio.run(every())
            finally:
                done.put(None)

        threading.Thread(target=work, name="engine", daemon=True).start()
        turns, failure, finished = [], None, False
        try:
            while (news := done.get()) is not None:
                if isinstance(news, Turn):
                    turns.append(news)
                    ended(news)
                elif not isinstance(news, Faulty | OSError):
                    raise news
                else:
                    failure = failure or str(news)
            finished = True
        finally:
            if not finished and running:  # requests in flight would keep this process from ending
                loop, task = running[0]
                with suppress(RuntimeError):  # it has just ended
                    loop.call_soon_threadsafe(task.cancel)
        return turns, failure

    async def _turn(self, request: Request, over: asyncio.Event, sampling: dict[str, Any]) -> Turn:
        body = json.dumps(self._body(request, sampling)).encode()
        failure: Exception = Faulty("it was not asked")
        for attempt in range(self._engine.retries + 1):
            pause = PAUSE * 2**attempt
            try:
                reply = await post(
                    self._address,
                    body,
                    {"Content-Type": "application/json", "Accept": "application/json"},
                    timeout=self._engine.deadline,
                    most=65536 + BYTES_PER_TOKEN * request.max_new,
                    threads=self._threads,
                )
                if reply.status == 200:
                    return self._read(request, reply.body)
                failure = Faulty(f"the engine answered with status {reply.status}: {_shown(reply)}")
                pause = max(pause, reply.retry_after or 0.0)
                if reply.status not in (408, 425, 429) and reply.status < 500:
                    break
            except TimeoutError:
                failure = TimeoutError(f"the engine did not answer within {self._engine.deadline:g} s")
            except (OSError, http.client.HTTPException) as error:
                failure = OSError(f"the engine cannot be reached: {type(error).__name__}: {error}")
            except Faulty as error:
                failure = error
            if attempt == self._engine.retries or over.is_set():
                break
            await asyncio.sleep(pause)
        raise failure

    def _body(self, request: Request, sampling: dict[str, Any]) -> dict[str, Any]:
        """Return the request's JSON. All that changes a draw is written out: the server's defaults do not apply."""
        roll = self._rollout
        params = {
            "n": 1,
            "max_tokens": request.max_new,
            "temperature": roll.temperature,
            "top_k": roll.top_k or -1,
            "top_p": roll.top_p,
            "min_p": roll.min_p,
            "repetition_penalty": 1.0,
            "logprobs": 1,
            "stop_token_ids": list(self._rules.stop_ids),
            "ignore_eos": True,  # our stop ids alone end a row
            "detokenize": False,
            **sampling,
        }
        name = "-".join(map(str, request.id))
        body = {"request_id": name, "token_ids": request.tokens.tolist(), "sampling_params": params, "stream": False}
        return body if self._engine.model is None else body | {"model": self._engine.model}

    def _read(self, request: Request, body: bytes) -> Turn:
        """Read a turn from a reply.

        Raises:
            Faulty: it is none; says why.
        """
        try:
            reply = json.loads(body)
            (choice,) = reply["choices"]
            ids, content, finish = choice["token_ids"], choice["logprobs"]["content"], choice["finish_reason"]
            named, logps = [_token_id(entry) for entry in content], [float(entry["logprob"]) for entry in content]
            asked = (reply.get("usage") or {}).get("prompt_tokens", len(request.tokens))
            weights = [_version(span) for span in choice.get("weight_versions") or ()]
            if named != ids:
                raise ValueError("the log-probs are of other tokens")
            if asked != len(request.tokens):
                raise ValueError(f"the answer is to a prompt of {asked} tokens, not {len(request.tokens)}")
            if any(not math.isfinite(x) or x <= MISSING for x in logps):
                raise ValueError("log-probs are missing")
            turn = Turn(
                request.id, np.asarray(ids), np.asarray(logps, np.float32), np.zeros(len(ids), np.int32), finish
            )
            if turn.tokens.dtype != np.int64:
                raise ValueError("ids are not integers")
            turn = turn._replace(tokens=turn.tokens.astype(np.int32))
            check_turn(turn, request.max_new, self._rules)
            if self._weights is None:
                self._weights = weights[:1]
            if any([w] != self._weights for w in weights):
                raise ValueError(f"the tokens are of the weights {weights}, the first ones were of {self._weights}")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            what = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
            raise Faulty(f"the engine's answer cannot be used: {what:.300}") from None
        return turn


def _token_id(entry: dict[str, Any]) -> int:
    """Return the id that a log-prob is of: ``token_id``, or in older servers ``token``: "token_id:17"."""
    return entry["token_id"] if "token_id" in entry else int(str(entry["token"]).removeprefix("token_id:"))


def _version(span: dict[str, Any]) -> dict[str, Any]:
    """Return what a span of tokens says of the weights, without its bounds."""
    return {name: value for name, value in span.items() if name not in ("start", "end")}


def _shown(reply: Reply) -> str:
    return reply.body[:200].decode("utf-8", "replace")
