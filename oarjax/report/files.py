"""Write a run's metrics and sampled completions as JSONL; make untrusted text printable.

Only the first host should write. For TensorBoard and other trackers see ``oarjax.report.trackers``. Metric names are
free; ``oarjax.report.console.LIVE`` and ``WARNINGS`` list those that the progress line and the warnings use.
"""

from __future__ import annotations

import codecs
import io
import math
import os
import sys
import time
import traceback
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, SupportsFloat, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

from oarjax.errors import UserError
from oarjax.storage.durable import DamagedError, Lines, read_lines, storage_errors
from oarjax.system.json import number
from oarjax.system.secrets import masked

Metrics = Mapping[str, SupportsFloat]

RESERVED = ("iteration", "time")


def make_console(stream: Any = None, *, markup: bool = False) -> Console:
    """Return a console, by default on standard output, that survives unencodable text and a closed terminal or pipe.

    Characters that the stream cannot encode are printed as escapes. Without ``markup``, "[bold]" in a name is text.
    """
    lasting = Lasting(sys.stdout if stream is None else stream)
    lasting.escape_unencodable()
    return ShownConsole(file=cast(IO[str], lasting), highlight=False, markup=markup, emoji=False)


class ShownConsole(Console):
    """A console that shows what a terminal would act on instead of sending it, and masks secrets."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print with secrets masked before lines are wrapped, which could divide one."""
        super().print(*map(_without_secrets, objects), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(masked(segment.text)), segment.style)

    def status(self, status: RenderableType, **options: Any) -> Status:
        """Show a spinner with this text; without a terminal, print it once."""
        if not self.is_terminal:
            self.print(f"{status} ...", markup=False)
        return super().status(status, **options)


def _without_secrets(printed: Any) -> Any:
    if isinstance(printed, str):
        return masked(printed)
    if isinstance(printed, Text) and (plain := masked(printed.plain)) != printed.plain:
        return Text(plain, printed.style)
    return printed


def print_error(error: BaseException) -> int:
    """Print an error for the user on standard error, any other with its traceback; return the exit code."""
    console = make_console(sys.stderr)
    if isinstance(error, UserError):
        console.print(Text("error: ", style="bold red").append(Text(str(error), style="default")), soft_wrap=True)
        return error.exit_code
    console.print(Text("".join(traceback.format_exception(error)).rstrip("\n")), soft_wrap=True)
    return 1


class Lasting:
    """Write to a stream until it fails (``| head``, /dev/full, a closed terminal), then discard the output."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        with self._losing():
            if self._stream is not None:  # closed before the process began
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._losing():
            if self._stream is not None:
                self._stream.flush()

    def escape_unencodable(self) -> None:
        """Print characters that the stream cannot encode as escapes."""
        if isinstance(self._stream, io.TextIOWrapper):
            with self._losing():  # it flushes what others left in the stream when it failed
                self._stream.reconfigure(errors="backslashreplace")

    @contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # Also discard its buffer, which would fail again when the process ends.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def visible(text: str) -> str:
    """Make text from a model or a dataset safe to print: escape whatever a terminal would act on or hide.

    Control characters (escape sequences, carriage returns), bidirectional and zero-width characters, surrogates and
    unassigned code points become <U+XXXX>. Newlines and tabs stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in _UNSAFE else f"<U+{ord(c):04X}>" for c in text)


_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def short(value: SupportsFloat) -> str:
    """Format a number in about four characters; n/a if it is not finite."""
    x = float(value)
    if not math.isfinite(x):
        return "n/a"
    if x == 0 or 1e-3 <= abs(x) < 100:
        return f"{x:.3f}" if abs(x) < 10 else f"{x:.1f}"
    return f"{x:,.0f}" if 100 <= abs(x) < 1e7 else f"{x:.1e}"


def token_texts(tokens: Sequence[bytes]) -> list[str]:
    """Decode each token of a sequence; the joined texts are exactly the sequence's text.

    A character whose bytes are spread over several tokens belongs to the token with its last byte; bytes that are not
    UTF-8 become the replacement character.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = [decoder.decode(token) for token in tokens]
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts


# Metrics ----------------------------------------------------------------------------------------------------------


class MetricsWriter:
    """Write every iteration's metrics to metrics.jsonl in a folder.

    A line is {"iteration": n, "time": unix seconds, name: value, ...} in strict JSON: values that are not finite are
    null. Every line is flushed, so that a killed run keeps its lines; an incomplete last line is dropped when the file
    is opened again. Without a ``folder`` nothing is written: only one of several processes writes.

    Args:
        folder: created if missing.
        position: bytes of metrics.jsonl to keep, as ``sync`` returned them; None = all complete lines.

    Raises:
        StorageError: the file cannot be written, here or in any method.
    """

    def __init__(self, folder: Path | None, *, position: int | None = None):
        self._file = None
        if folder is not None:
            with storage_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
            self._file = Lines(folder / "metrics.jsonl", position=position)
        self.short = self._file.short if self._file else 0  # bytes of ``position`` that the file lacks

    def write(self, iteration: int, metrics: Metrics) -> None:
        """Append one line. Two lines of one iteration (training, then evaluation) are merged when read."""
        clash = [name for name in RESERVED if name in metrics]
        if clash:
            raise ValueError(f"metric name {clash[0]!r} is reserved for the writer; choose another name")
        values = {name: float(value) for name, value in metrics.items()}
        if self._file is not None:
            record = {"iteration": iteration, "time": round(time.time(), 3)}
            self._file.write(record | values)

    def sync(self) -> int | None:
        """Sync the lines to disk; return the file's size in bytes, None without a file."""
        return None if self._file is None else self._file.sync()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a metrics.jsonl as one record per iteration, in order; null becomes None. Empty if there is no file.

    Lines of the same iteration are merged. A run resumed from an earlier iteration replaces the later records. A
    half-written last line is ignored.

    Raises:
        DamagedError: a line before the last one is damaged, or is not of a run.
        StorageError: the file cannot be read.
    """
    records: list[dict[str, Any]] = []
    for line, record in enumerate(read_lines(path), 1):
        values = {name: value for name, value in record.items() if name != "iteration"}
        odd = next((n for n, v in values.items() if v is not None and not isinstance(v, int | float)), None)
        if not isinstance(record.get("iteration"), int) or odd is not None:
            raise DamagedError(
                f"{path}, record {line}: expected an iteration and numbers, got {odd or 'iteration'} = "
                f"{record.get(odd or 'iteration')!r:.100}; put a good copy of the file there, or remove the line"
            )
        while records and records[-1]["iteration"] > record["iteration"]:
            records.pop()
        if records and records[-1]["iteration"] == record["iteration"]:
            records[-1] = records[-1] | record
        else:
            records.append(record)
    return records


# Completions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShownTurn:
    """A turn of an episode."""

    tokens: int  # of the row's, that the policy wrote in it
    observed: str  # what the environment said before it, as the row holds it
    reward: float  # the environment's


@dataclass(frozen=True)
class CompletionRow:
    """A sampled completion, to save and to show. The four per-token sequences have one entry per generated token."""

    prompt: str
    completion: str
    reward: float  # the weighted sum; NaN = ungraded
    answer: str | None  # extracted from the completion; None = no answer
    verdict: str  # of the grader: graded, unparseable, timeout, ...
    note: str = ""  # why the verdict is not "graded"
    rewards: Mapping[str, float] = field(default_factory=dict)  # by reward function
    advantage: float = math.nan  # of the whole completion, before reshaping
    reference: str | None = None  # the right answer
    tokens: Sequence[str] = ()  # text of each token
    weights: Sequence[float] = ()  # 1 = as in plain GRPO
    is_reasoning: Sequence[bool] = ()
    is_answer: Sequence[bool] = ()
    turns: Sequence[ShownTurn] = ()  # of an episode; empty without an environment


class CompletionsWriter:
    """Write sampled completions to a JSONL file, one per line: {"iteration": n, and the fields of CompletionRow}.

    ``position`` and ``path`` None act as ``position`` and ``folder`` None in MetricsWriter.

    Raises:
        StorageError: the file cannot be written, here or in any method.
    """

    def __init__(self, path: Path | None, *, position: int | None = None):
        self._file = None if path is None else Lines(path, position=position)
        self.short = self._file.short if self._file else 0

    def write(self, iteration: int, rows: Sequence[CompletionRow]) -> None:
        for row in rows:
            if self._file is not None:
                self._file.write({"iteration": iteration} | asdict(row))

    def sync(self) -> int | None:
        """Sync the lines to disk; return the file's size in bytes, None without a file."""
        return None if self._file is None else self._file.sync()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> CompletionsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_completions(path: Path) -> list[tuple[int, CompletionRow]]:
    """Read the lines of a completions.jsonl as (iteration, row).

    Raises:
        DamagedError: a line before the last one is damaged, or is not of a run.
        StorageError: the file cannot be read.
    """
    rows = []
    for line, record in enumerate(read_lines(path), 1):
        try:
            rows.append((int(record.pop("iteration")), _completion_row(record)))
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise DamagedError(
                f"{path}, record {line}: not a completion of a run ({type(error).__name__}: {error}); put a good copy "
                "of the file there, or remove the line"
            ) from None
    return rows


def _completion_row(record: dict[str, Any]) -> CompletionRow:
    numbers: dict[str, Any] = {name: number(record[name]) for name in ("reward", "advantage")}
    weights = [number(w) for w in record["weights"]]
    rewards = {str(k): number(v) for k, v in record["rewards"].items()}
    fields = [(int(turn["tokens"]), str(turn["observed"]), number(turn["reward"])) for turn in record.get("turns", ())]
    turns = tuple(ShownTurn(*turn) for turn in fields)
    row = CompletionRow(**(record | numbers | {"weights": weights, "rewards": rewards, "turns": turns}))
    texts = (row.prompt, row.completion, row.verdict, row.note, row.answer or "", row.reference or "", *row.tokens)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a text is none")
    if not len(row.tokens) == len(row.weights) == len(row.is_reasoning) == len(row.is_answer):
        raise ValueError("its tokens, weights and marks differ in number")
    if turns and sum(turn.tokens for turn in turns) != len(row.tokens):
        raise ValueError("its turns have other tokens")
    return row


def show_completions(console: Console, iteration: int, rows: Sequence[CompletionRow], *, limit: int = 600) -> None:
    """Print completions. Untrusted text is cut and printed as plain text, without markup or control characters."""
    for row in rows:
        verdict = "" if row.verdict == "graded" else f"  {visible(row.verdict)}"
        head = Text(f"iteration {iteration}{verdict}  reward {short(row.reward)}", style="bold")
        if row.answer is not None:
            head.append(f"  answer {visible(row.answer)[:80]}")
        if row.reference is not None:
            head.append(f"  expected {visible(row.reference)[:80]}")
        console.print(head)
        console.print(Text(cut(visible(row.prompt), limit), style="dim"))
        console.print(Text(cut(visible(row.completion), limit)))


def cut(text: str, limit: int) -> str:
    """Return the first ``limit`` characters, and the number of those left out."""
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text) - limit} more characters)"
