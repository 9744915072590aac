"""Draw rollouts with an engine over HTTP: vLLM's token endpoint, ids in, ids and log-probs out.

    vllm serve FOLDER --enable-scale-out --logprobs-mode processed_logprobs

A request per row, without a seed. Its log-probs must be those of the distribution that was drawn from, after
temperature and filters (``processed_logprobs``); ``probe`` checks that. Replies are not trusted: one of another prompt,
with ids and log-probs that do not belong together, a wrong end or other weights is no answer. What fails is asked for
again, ``rollout.engine.retries`` times; if that fails too, the run ends, the rows so far are recorded, and the same
command draws the others.

It draws with the weights that it was started with, or with those that ``Sync`` gives it.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
from jaxtyping import Int

from oarjax.config.learning import EngineConfig, RolloutConfig
from oarjax.errors import UserError
from oarjax.rollout.source import Batch, Report, Request, RowId, Spent, Turn
from oarjax.sources.records import EndedTable, line_of, turn_of
from oarjax.sources.sync import Sync, Weights
from oarjax.sources.turns import Rules, check_turn
from oarjax.system.http import Reply, post
from oarjax.system.processes import gather, is_first
from oarjax.types import Params

T = TypeVar("T")

ENDPOINT = "/inference/v1/generate"
MISSING = -9999.0
"""vLLM's log-prob of a token that it has none of."""

MOST = 65536
"""Size limit of a reply without tokens."""

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

    def __init__(
        self,
        engine: EngineConfig,
        rollout: RolloutConfig,
        rules: Rules,
        *,
        weights: Weights | None = None,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._engine, self._rollout, self._rules = engine, rollout, rules
        self._threads = ThreadPoolExecutor(engine.concurrency, thread_name_prefix="engine")
        self._named: Any = None  # weights as the first answer with them names them
        self._version, self._pending = 0, None  # params that the engine does not have yet
        self._cancelled = threading.Event()
        self._running: list[tuple[asyncio.AbstractEventLoop, Any]] = []
        self._sync = None
        if weights is not None:
            self._sync = Sync(weights, reload=self._reload, ask=self._greedy, drill=engine.drill, say=say)

    def probe(self) -> None:
        """Draw the only token that top_k=1 leaves: its log-prob is 0, if it is of what was drawn from.

        Raises:
            EngineError: the engine cannot be reached, or does not answer.
            Unfit: its log-probs are others.
        """
        if self._sync is not None:  # a run that died while it gave the engine weights has left it paused
            self._all_of({"/resume": {}})
        prompt = np.asarray(self._rules.stop_ids[:1] or (0,), np.int32)
        request = Request(RowId(0, 0, 0), prompt, 1, (), 1)
        (turn,) = self._drawn([request], lambda turn: None, sampling={"top_k": 1})
        if abs(float(turn.logps[0])) > 1e-4:
            raise Unfit(
                f"rollout.engine: with top_k=1 a token has the log-prob {turn.logps[0]:.4g} instead of 0, so it is "
                "not of the distribution that was drawn from; start vllm serve with --logprobs-mode processed_logprobs"
            )

    def sync(self, params: Params, version: int) -> None:
        """Draw with these parameters from now on; the engine is given them once something is drawn.

        Raises:
            Unfit: there is no way to give it any.
        """
        if self._sync is None and version > 0:
            raise Unfit("rollout.engine: the engine cannot be given new weights; set rollout.engine.weights")
        self._version, self._pending = version, params

    def ready(self) -> None:
        """Give the engine its parameters now, so that draws read nothing of them.

        Raises:
            StaleWeights: it does not draw with them.
        """
        if self._sync is not None and self._pending is not None:
            self._sync.push(self._pending)
        self._pending = None

    def cancel(self) -> None:
        """Give up the requests in flight, from another thread than that which draws; the draw raises EngineError."""
        self._cancelled.set()
        for loop, task in self._running:
            with suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(task.cancel)

    def draw(
        self, batch: Batch, report: Report | None = None, *, rows: Int[np.ndarray, "r"] | None = None
    ) -> list[Turn]:
        """Draw rows, each reported as it ends.

        Raises:
            EngineError: some rows could not be drawn, or the draw was cancelled.
            StaleWeights: the engine does not draw with the weights that it was given.
        """
        self.ready()
        requests, table = batch.requests, EndedTable(batch)
        if rows is not None:
            requests = [requests[b] for b in rows]
        return self._drawn(requests, lambda turn: report and report(table.ended([turn])))

    def _greedy(self, requests: list[Request]) -> list[Turn]:
        """Draw the likeliest tokens, with log-probs at temperature 1 and without filters."""
        plain = {"temperature": 0.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0}
        return self._drawn(requests, lambda turn: None, sampling=plain)

    def _drawn(
        self, requests: list[Request], ended: Callable[[Turn], object], *, sampling: dict[str, Any] | None = None
    ) -> list[Turn]:
        """Draw requests on the first process, and return their turns on every one, in the order of their rows."""
        failure, lines = None, []
        if is_first():
            turns, failure = self._ask(requests, ended, sampling=sampling)
            by_id = {request.id: request for request in requests}
            lines = [line_of(by_id[turn.id], turn) for turn in turns]
        failure, lines = gather([failure, lines])[0]
        if failure is not None:
            raise EngineError(
                f"rollout.engine: {len(lines)} of {len(requests)} rows were drawn, then {failure}; the same command "
                "draws the others, once the engine works"
            )
        return [turn_of(line) for line in sorted(lines, key=lambda line: line["row"])]

    def _reload(self, folder: str) -> None:
        """Let the engine read its weights from a folder. Requests that a run that died has left are ended."""
        load = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        self._all_of({"/pause?mode=abort": {}, "/collective_rpc": load, "/reset_prefix_cache": {}, "/resume": {}})
        self._named = None

    def _all_of(self, calls: dict[str, dict[str, Any]]) -> None:
        """Make calls in turn, on the first process.

        Raises:
            EngineError: one failed.
        """
        failure, target = None, ""
        if is_first():
            try:
                with ThreadPoolExecutor(1) as thread:  # this one may have a loop of its own, as in notebooks
                    for target, body in calls.items():
                        send = self._send(target, body, lambda reply: None, most=MOST, over=None)
                        thread.submit(asyncio.run, send).result()
            except (Faulty, OSError) as error:
                failure = f"{target}: {error}"
        if (failure := gather(failure)[0]) is not None:
            raise EngineError(f"rollout.engine: {failure}; the server needs VLLM_SERVER_DEV_MODE=1 to take weights")

    def spent(self) -> Spent:
        """Return what syncs took since the last call; other counts the engine keeps."""
        return Spent() if self._sync is None else self._sync.spent()

    def close(self) -> None:
        """Stop waiting for replies."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ask(
        self, requests: Sequence[Request], ended: Callable[[Turn], object], *, sampling: dict[str, Any] | None = None
    ) -> tuple[list[Turn], str | None]:
        """Return the turns of requests in the order in which they end, and the first failure, after which none begins.

        ``ended`` is called on this thread.
        """
        results: queue.SimpleQueue[Turn | BaseException | None] = queue.SimpleQueue()
        running = self._running = []

        async def every() -> None:
            running.append((asyncio.get_running_loop(), asyncio.current_task()))
            room, over = asyncio.Semaphore(self._engine.concurrency), asyncio.Event()

            async def one(request: Request) -> None:
                async with room:
                    if over.is_set() or self._cancelled.is_set():
                        return
                    try:
                        results.put(await self._turn(request, over, sampling or {}))
                    except Exception as error:
                        over.set()
                        results.put(error)

            await asyncio.gather(*map(one, requests))

        def work() -> None:
            try:
                with suppress(asyncio.CancelledError):
                    asyncio.run(every())
            finally:
                results.put(None)

        threading.Thread(target=work, name="engine", daemon=True).start()
        turns, failure, finished = [], None, False
        try:
            while (news := results.get()) is not None:
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
        return turns, "the run stopped" if self._cancelled.is_set() else failure

    async def _turn(self, request: Request, over: asyncio.Event, sampling: dict[str, Any]) -> Turn:
        body, max_bytes = self._body(request, sampling), MOST + BYTES_PER_TOKEN * request.max_new
        return await self._send(ENDPOINT, body, partial(self._read, request), most=max_bytes, over=over)

    async def _send(
        self, target: str, body: dict[str, Any], read: Callable[[bytes], T], *, most: int, over: asyncio.Event | None
    ) -> T:
        """Post JSON and return what ``read`` finds in the reply, retrying until ``over`` is set."""
        address, content = urlsplit(self._engine.url.rstrip("/") + target), json.dumps(body).encode()
        named = f"the engine at {self._engine.url}"
        failure: Exception = Faulty("it was not asked")
        for attempt in range(self._engine.retries + 1):
            pause = PAUSE * 2**attempt
            try:
                reply = await post(
                    address,
                    content,
                    {"Content-Type": "application/json", "Accept": "application/json", **_authorization()},
                    timeout=self._engine.deadline,
                    most=most,
                    threads=self._threads,
                )
                if reply.status == 200:
                    return read(reply.body)
                failure = Faulty(f"{named} answered with status {reply.status}: {_shown(reply)}")
                pause = max(pause, min(reply.retry_after or 0.0, self._engine.deadline))
                if reply.status not in (408, 425, 429) and reply.status < 500:
                    break
            except TimeoutError:
                failure = TimeoutError(f"{named} did not answer within {self._engine.deadline:g} s")
            except (OSError, http.client.HTTPException) as error:
                failure = OSError(f"{named} cannot be reached: {type(error).__name__}: {error}")
            except Faulty as error:
                failure = error
            if attempt == self._engine.retries or (over is not None and over.is_set()):
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
            logged_ids, logps = [_token_id(entry) for entry in content], [float(entry["logprob"]) for entry in content]
            prompt_length = (reply.get("usage") or {}).get("prompt_tokens", len(request.tokens))
            weights = [_version(span) for span in choice.get("weight_versions") or ()]
            if logged_ids != ids:
                raise ValueError("the log-probs are of other tokens")
            if prompt_length != len(request.tokens):
                raise ValueError(f"the answer is to a prompt of {prompt_length} tokens, not {len(request.tokens)}")
            if any(not math.isfinite(x) or x <= MISSING for x in logps):
                raise ValueError("log-probs are missing")
            turn = Turn(
                request.id,
                np.asarray(ids),
                np.asarray(logps, np.float32),
                np.full(len(ids), self._version, np.int32),
                finish,
            )
            if turn.tokens.dtype != np.int64:
                raise ValueError("ids are not integers")
            turn = turn._replace(tokens=turn.tokens.astype(np.int32))
            check_turn(turn, request.max_new, self._rules)
            if self._named is None:
                self._named = weights[:1]
            if any([w] != self._named for w in weights):
                raise ValueError(f"the tokens are of the weights {weights}, the first ones were of {self._named}")
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


def _authorization() -> dict[str, str]:
    """Return the header with the server's key, which vLLM reads from the same variable."""
    key = os.environ.get("VLLM_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _shown(reply: Reply) -> str:
    return reply.body[:200].decode("utf-8", "replace")
