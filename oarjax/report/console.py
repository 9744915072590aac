"""Terminal output of a run: start-up banner, live progress, seconds per phase, warnings with a remedy.

On hosts other than the first, pass ``Console(quiet=True)``.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from oarjax.config.inputs import BUILTIN_POLICIES
from oarjax.config.schema import Config
from oarjax.credit.record import MEASURES
from oarjax.report.files import Metrics, make_console, short, visible
from oarjax.storage.stop import Stop, Stopped

LIVE = (
    {
        "reward": "reward",  # mean
        "pass_at_1": "pass@1",  # held-out, a share
        "length": "length",  # mean, tokens of a completion
        "truncated": "truncated",  # share of completions
    },
    {
        "zero_variance": "equal groups",  # share of groups without a gradient
        "grad_norm": "grad norm",
        "entropy": "entropy",  # mean, nats
        "ess": "ESS",  # effective sample size of the token weights, a share of the reasoning
        "tokens_per_second": "tok/s",
    },
)
"""Metrics of the live lines, and their labels there."""
SHARES = ("pass_at_1", "truncated", "zero_variance")
"""Metrics that are shown in percent."""
COMPILING = "compiling: the first one takes longer"
MINUTE = 60.0
"""Seconds between lines that say that the first step is not done."""

# Progress and time ------------------------------------------------------------------------------------------------


class PhaseTimer:
    """Measure the seconds of each named phase of an iteration.

    Wrap each phase in ``with timer.phase("sample"): ...`` and call ``timer.lap()`` once per iteration. Phases may nest:
    the outer phase does not count the inner phase's time, so the phases add up to the wall time.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._inner: list[float] = []
        self._start = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self._clock()
        self._inner.append(0.0)
        try:
            yield
        finally:
            spent = self._clock() - start
            inside = self._inner.pop()
            if self._inner:
                self._inner[-1] += spent
            self._seconds[name] = self._seconds.get(name, 0.0) + spent - inside

    def lap(self) -> dict[str, float]:
        """Return each phase's seconds since the last lap, with "other" for the rest and "total" for the sum."""
        now = self._clock()
        total = now - self._start
        laps = self._seconds | {"other": max(total - sum(self._seconds.values()), 0.0), "total": total}
        self._seconds, self._start = {}, now
        return laps


class Progress:
    """A live bar with the current metrics on a terminal, one plain line per ``every`` updates elsewhere.

    Use as a context manager; while it is open, print through ``progress.console``.

    Args:
        compiles: the first step compiles programs: say so until it is done.
        baseline: held-out pass@1 of the start, shown before the latest; of a resumed run ``latest`` is given too.
        stop: whose notice of a signal stands below the bar until the run has stopped.
    """

    def __init__(
        self,
        total: int,
        *,
        label: str = "train",
        console: Console | None = None,
        every: int = 1,
        compiles: bool = False,
        baseline: float | None = None,
        latest: float | None = None,
        stop: Stop | None = None,
    ):
        self._lines = list[Text]()
        self._moved = threading.Event()  # a step is done, or nothing will come
        self.console = make_console() if console is None else console
        self._compiles, self._stop = compiles, stop
        self._baseline, self._latest = (x if x is not None and math.isfinite(x) else None for x in (baseline, latest))
        self._total, self._label, self._every, self._updates = total, label, every, 0
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            expand=True,
        )
        self._task = self._bar.add_task(label, total=total)
        live = self.console.is_terminal
        self._live = Live(get_renderable=self._drawn, console=self.console, refresh_per_second=2) if live else None

    def update(self, done: int, metrics: Metrics, phases: Mapping[str, float] | None = None) -> None:
        """Show that ``done`` of the total are finished, with the latest metrics and seconds per phase."""
        self._moved.set()
        if "pass_at_1" in metrics:
            self._latest = float(metrics["pass_at_1"])
        # Work without rewards, such as a warm start, has few metrics: show the first ones.
        rows = LIVE if "reward" in metrics else ({name: name for name in list(metrics)[:5]},)
        values = [
            [text for name, label in row.items() if (text := self._value(name, label, metrics)) is not None]
            for row in rows
        ]
        seconds = [f"{name} {value:.1f}s" for name, value in (phases or {}).items() if value >= 0.05 or name == "total"]
        self._updates += 1
        if self._live is not None:
            self._bar.update(self._task, completed=done)
            styled = [*((part, "bold") for part in values), (seconds, "dim")]
            self._lines = [_one_line("   ".join(part), style) for part, style in styled if part]
        elif (self._updates - 1) % self._every == 0 or done == self._total:
            line = f"{self._label} {done}/{self._total}  " + "  ".join([*chain.from_iterable(values), *seconds])
            self.console.print(Text(line.rstrip()), soft_wrap=True)

    def _drawn(self) -> Group:
        """Draw the bar and the latest lines, and the notice of a signal that the run will obey."""
        notice = self._stop.notice if self._stop else ""
        return Group(self._bar, *self._lines, *([_one_line(notice, "bold yellow")] if notice else []))

    def _value(self, name: str, label: str, metrics: Metrics) -> str | None:
        """Format a metric with its label; held-out pass@1 as "45.6% to 73.6%", from the start's to the latest."""
        if name == "pass_at_1":
            known = [share for share in (self._baseline, self._latest) if share is not None]
            shares = [f"{share:.1%}" if math.isfinite(share) else "n/a" for share in known]
            return f"{label} {' to '.join(shares)}" if shares else None
        if name not in metrics:
            return None
        value = float(metrics[name])
        return f"{label} {value:.0%}" if name in SHARES and math.isfinite(value) else f"{label} {short(value)}"

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._lines = [_one_line(COMPILING, "dim")] if self._compiles else []
            self._live.start(refresh=True)
            if self._stop:
                self._stop.displayed = True
        elif self._compiles:
            self.console.print(Text(f"{self._label} {COMPILING}"), soft_wrap=True)
            threading.Thread(target=self._say_that_it_compiles, daemon=True).start()
        return self

    def _say_that_it_compiles(self) -> None:
        """Print a line a minute until the first step is done, where no clock is drawn."""
        minutes = 0
        while not self._moved.wait(MINUTE):
            minutes += 1
            self.console.print(Text(f"{self._label} still in its first step, {minutes} min"), soft_wrap=True)

    def __exit__(self, *_: object) -> None:
        self._moved.set()
        if self._live is not None:
            self._live.stop()
            if self._stop:
                self._stop.displayed = False


def _one_line(text: str, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


@contextmanager
def resumable(console: Console, folder: Path) -> Iterator[None]:
    """Tell the user of a stopped command that it can be resumed."""
    try:
        yield
    except Stopped:
        console.print(f"stopped; the same command resumes with what is in {folder}", markup=False)
        raise


# Warnings and banner ----------------------------------------------------------------------------------------------


Condition = Callable[[float, float, float], bool]
"""(current value, first value, limit) -> True to warn."""


def above(now: float, first: float, limit: float) -> bool:
    return not now <= limit


def reached(now: float, first: float, limit: float) -> bool:
    return now >= limit


def share_of_first(now: float, first: float, limit: float) -> bool:
    return now < limit * first


def below(now: float, first: float, limit: float) -> bool:
    return now < limit


@dataclass(frozen=True)
class Rule:
    """A condition on a metric, and the warning to print: its meaning and the remedy."""

    metric: str
    applies: Condition
    limit: float
    text: str  # with {now}, {first} and {limit}
    key: str = ""  # rules with the same key share one warning; "" = the metric


COLLAPSE = (
    "entropy fell to {now:.3g} nats (it began at {first:.3g}): the policy hardly explores; lower optim.lr, raise "
    "loss.clip_high, or add loss.entropy_bonus"
)
SKIPPED = "of this iteration's updates was not finite, so they were skipped:"
LOWER = "lower optim.lr, or set policy.compute_dtype=float32"
DAMAGED = (
    "set policy.compute_dtype=float32; if it persists, the parameters are damaged: return to an earlier checkpoint"
)

WARNINGS = (
    Rule(
        "truncated",
        above,
        0.2,
        "{now:.0%} of completions were cut at rollout.max_new (more than {limit:.0%}) and graded without their end: "
        "raise rollout.max_new, or set grading.overlong_window so that length is penalised before the cut",
    ),
    Rule(
        "zero_variance",
        reached,
        1.0,
        "every group had equal rewards, so nothing was learned in this iteration: the problems are all too hard or too "
        "easy for this policy, or the reward is always 0; look at completions.jsonl, raise rollout.group_size, or set "
        "update.refills",
    ),
    Rule("entropy", share_of_first, 0.1, COLLAPSE),
    Rule("entropy", below, 1e-3, COLLAPSE),
    Rule(
        "ungraded",
        above,
        0.05,
        "{now:.0%} of completions could not be graded (timeout, crash or None) and were left out: raise "
        "grading.deadline (of batch, group and async rewards grading.call_deadline, of environments their own) or "
        "grading.memory_mb, or return a number",
    ),
    Rule(
        "no_answer",
        above,
        0.5,
        "{now:.0%} of completions have no answer in the style of credit.answer.style: rewards find none to compare, "
        "and credit leaves their tokens at weights of 1; check the style against completions.jsonl, or ask for it in "
        "data.prompt_format",
    ),
    Rule(
        "sampler_gap",
        above,
        0.05,
        "the sampler's and the trainer's log-probabilities differ by {now:.3g} on average: set "
        "loss.off_policy=tis, policy.compute_dtype=float32, or rollout.cache=policy",
    ),
    Rule("nonfinite/loss", above, 0.0, f"the loss of {{now:.0%}} {SKIPPED} {LOWER}", "loss"),
    Rule("nonfinite/gradient", above, 0.0, f"the gradient of {{now:.0%}} {SKIPPED} {LOWER}", "gradient"),
    Rule(
        "nonfinite/params",
        above,
        0.0,
        "{now:.0%} of this iteration's updates would have made parameters infinite and were skipped: lower optim.lr",
    ),
    Rule(
        "nonfinite/importance",
        above,
        0.0,
        "{now:.0%} of completions have token importance that is not finite, so their tokens keep weights of 1: set "
        "policy.compute_dtype=float32, credit.estimator=linearised or another credit.probe.mode, or correct your "
        "credit.probe.function",
    ),
    Rule(
        "nonfinite/weights",
        above,
        0.0,
        "{now:.0%} of completions have token weights that are not finite, so their tokens keep weights of 1: set "
        "another credit.method, or policy.compute_dtype=float32",
    ),
    Rule(
        "negative_weights",
        above,
        0.0,
        "credit.function returned negative weights in {now:.0%} of completions, whose tokens train against their "
        "advantage: clip them with jnp.maximum, or return the tokens' advantages and set kind='advantages'",
    ),
    Rule(
        "nonfinite/advantages",
        above,
        0.0,
        "{now:.0%} of completions have an advantage that is not finite: rewards are too large to add up; lower "
        "them or their grading.rewards weight",
    ),
    *(
        Rule(f"nonfinite/{which}", above, 0.0, f"the {whose} of {{now:.0%}} of completions are not finite: {DAMAGED}")
        for which, whose in {
            "behaviour_logps": "sampler's log-probabilities",
            "old_logps": "trainer's log-probabilities",
            "ref_logps": "reference policy's log-probabilities",
            "entropies": "entropies",
            **{name: f"signal {name}" for name in MEASURES if name != "entropies"},
        }.items()
    ),
)
"""Every warning and its limit. See ``oarjax.step.metrics`` for the metrics that begin with nonfinite/."""
OF_ANSWERS = ("no_answer",)
"""Metrics whose warnings do not apply where neither rewards nor credit read answers."""


class OnceWarnings:
    """Print each warning only the first time it applies; those about answers where ``answers`` are read."""

    def __init__(self, console: Console, *, answers: bool = True):
        self._console = console
        self._rules = [rule for rule in WARNINGS if answers or rule.metric not in OF_ANSWERS]
        self._first: dict[str, float] = {}
        self._printed: set[str] = set()

    def remember(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Read a resumed run's records: keep its first values, and do not repeat its warnings."""
        for record in records:
            for rule, _ in self._applying({name: value for name, value in record.items() if value is not None}):
                self._printed.add(rule.key or rule.metric)

    def check(self, iteration: int, metrics: Metrics) -> list[str]:
        """Print the warnings that apply to these metrics; return the new ones."""
        texts = []
        for rule, message in self._applying(metrics):
            text = f"iteration {iteration}: {message}"
            texts += [text] if self.say(rule.key or rule.metric, text) else []
        return texts

    def _applying(self, metrics: Metrics) -> list[tuple[Rule, str]]:
        """Return the rules that apply with their messages; remember the first finite value of every metric."""
        applying = []
        late, ungraded = float(metrics.get("lag", 0)) > 0, float(metrics.get("ungraded", 0)) == 1
        explained = {"sampler_gap": late, "zero_variance": ungraded}  # other tokens, as they should be; no rewards
        for rule in self._rules:
            if rule.metric not in metrics or explained.get(rule.metric):
                continue
            value = float(metrics[rule.metric])
            if math.isfinite(value):
                self._first.setdefault(rule.metric, value)
            first = self._first.get(rule.metric, value)
            if rule.applies(value, first, rule.limit):
                applying.append((rule, rule.text.format(now=value, first=first, limit=rule.limit)))
        return applying

    def check_sampling(self, *, top_k: int, top_p: float, min_p: float = 0.0, repetition_penalty: float = 1.0) -> None:
        """Warn if rollouts are drawn from another distribution than the trained one."""
        if repetition_penalty != 1.0:
            self.say(
                "penalty",
                f"rollout.repetition_penalty={repetition_penalty:g}: completions are drawn from another distribution "
                "than the loss computes, which biases the gradient; set it to 1 for training",
            )
        if top_k > 0 or top_p < 1.0 or min_p > 0.0:
            self.say(
                "sampling",
                f"rollout.top_k={top_k}, rollout.top_p={top_p:g}, rollout.min_p={min_p:g}: completions are drawn from "
                "a truncated distribution, but the loss uses the full one, which biases the gradient; set top_k=0, "
                "top_p=1 and min_p=0 for training, or loss.off_policy.support=sampled",
            )

    def say(self, key: str, text: str) -> bool:
        """Print a warning unless one with this key has been printed; return True if it was printed now."""
        if key in self._printed:
            return False
        self._printed.add(key)
        self._console.print(Text("warning: ", style="bold yellow").append(Text(text, style="default")), soft_wrap=True)
        return True


def banner(console: Console, facts: Mapping[str, object]) -> None:
    """Print facts as ``key: value`` lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(Text(f"{visible(name)}:"), Text(visible(str(value))))
    console.print(table)


def run_lines(cfg: Config, facts: Mapping[str, object]) -> dict[str, str]:
    """Describe a run in at most twelve lines, from its config and ``Run.facts``; every field is in its config.yaml."""
    roll, loss, optim = cfg.rollout, cfg.loss, cfg.optim
    method = cfg.credit.label
    rewards = [r.name if r.weight == 1 else f"{r.weight:g} x {r.name}" for r in cfg.grading.rewards]
    updates = cfg.update.epochs * cfg.update.minibatches
    kl = f", KL {loss.kl_beta:g}" if loss.kl_beta else ""
    unlearned = ", random weights: no warm start" if cfg.sft is None and cfg.policy.path in BUILTIN_POLICIES else ""
    weighs = cfg.credit.method != "uniform"
    ess = "; ESS: share of the reasoning that its weights use, 1 if all tokens weigh alike" if weighs else ""
    lines = {
        "device": f"{facts['device']}, mesh {facts['mesh']}",
        "policy": f"{facts['policy']}{unlearned}",
        "trains": f"{facts['trains']}, computes in {facts['computes in']}",
        "data": f"{facts['train']}; held out: {facts['held out']}",
        "warm start": None if cfg.sft is None else f"{cfg.sft.steps} steps of {cfg.sft.batch} pairs",
        "iterations": f"{cfg.iterations}"
        + (f", evaluation every {cfg.eval.every}" if cfg.eval.every and cfg.data.eval else ""),
        "rollout": f"{roll.prompts} prompts x {roll.group_size} completions of up to {roll.max_new} tokens, "
        f"temperature {roll.temperature:g}",
        "rewards": ", ".join(rewards),
        "credit": f"{method}; answers in style {cfg.credit.answer.style}{ess}",
        "update": f"{updates} an iteration, {loss.surrogate} loss by {loss.aggregation}{kl}, lr {optim.lr:g} "
        f"({optim.schedule}, {optim.warmup} updates of warm-up)",
        "run folder": facts["run folder"],
        "settings": f"all in {facts['run folder']}/config.yaml",
    }
    return {name: str(line) for name, line in lines.items() if line is not None}
