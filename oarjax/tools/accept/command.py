"""``oarjax accept``: check that everything works on this machine, at full speed, in one report to attach to an issue.

The stages run in worker processes, so that a hang or a crash is one red line and not the end. This process touches no
device: on a TPU only one process can.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from oarjax.report.files import make_console, visible
from oarjax.storage.durable import storage_errors
from oarjax.system.json import to_json
from oarjax.tools.accept.check import cells
from oarjax.tools.accept.page import write_accept_page
from oarjax.tools.accept.stages import Stage, chosen, state_of

STYLES = {"ok": "green", "slow": "yellow", "failed": "bold red", "not applicable": "dim", "measured": ""}


def run(out: Path, *, only: str, device: str, folder: Path | None, bucket: Path | None, scale: float = 1.0) -> bool:
    """Run the stages, write the report as JSON and as a page beside it, and return True if none failed.

    Args:
        folder: for the files of the stages, shared by all hosts; None: beside the report, emptied first.
        scale: multiplies every stage's timeout.

    Raises:
        StageError: ``only`` names an unknown stage.
    """
    stages, console = chosen(only), make_console()
    files = (folder or out.with_name(f"{out.stem}-files")).absolute()
    job = {"device": device, "folder": str(files), "bucket": None if bucket is None else str(bucket.absolute())}
    with storage_errors(out):
        if folder is None:
            shutil.rmtree(files, ignore_errors=True)
        files.mkdir(parents=True, exist_ok=True)
        out.parent.mkdir(parents=True, exist_ok=True)
    results = []
    with Workers(job, out.with_suffix(".log")) as workers:
        for stage in stages:
            with console.status(f"{stage.title} ({stage.name})"):
                results.append(workers.run(stage, timeout=stage.timeout * scale))
            show(console, results[-1])
            with storage_errors(out):  # after each stage: if the machine is lost, the results so far are not
                out.write_text(to_json(document(results), indent=1) + "\n", encoding="utf-8")
                write_accept_page(out.with_suffix(".html"), document(results))
    report = document(results)
    for check in report["notable"]:
        console.print(
            f"{check['state']}: {check['stage']}: {visible(check['text'])}", style=STYLES[check["state"]], markup=False
        )
    console.print(f"{report['summary']}; {out} and {out.with_suffix('.html')}", markup=False)
    return report["state"] != "failed"


class Workers:
    """Run stages one after another in a worker process, replaced when it fails; use as a context manager."""

    def __init__(self, job: dict[str, Any], log: Path):
        self._job, self._log = job, log
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, stage: Stage, *, timeout: float) -> dict[str, Any]:
        """Return a stage's result; a worker that hangs or ends is killed, and the next stage gets a new one."""
        start = time.monotonic()
        if stage.own_process:
            self._end()
        try:
            answer = self._ask(stage, start + timeout)
        except TimeoutError:
            answer = {"checks": [], "error": f"not done within {timeout:g} s"}
        except (OSError, EOFError) as error:
            answer = {"checks": [], "error": f"the process ended: {error or 'without a message'}; see {self._log}"}
        if answer["error"] is not None:
            self._end()
        seconds = time.monotonic() - start
        state = state_of(answer["checks"], answer["error"])
        return {"stage": stage.name, "title": stage.title, "state": state, "seconds": seconds, **answer}

    def _ask(self, stage: Stage, until: float) -> dict[str, Any]:
        process = self._process = self._process or self._start()
        if process.stdin is None or process.stdout is None:
            raise OSError("no pipes")
        process.stdin.write(f"{stage.name}\n")
        process.stdin.flush()
        return json.loads(_line(process.stdout, until))

    def _start(self) -> subprocess.Popen[str]:
        with self._log.open("a", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "oarjax.tools.accept.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        if process.stdin is not None:
            process.stdin.write(json.dumps(self._job) + "\n")
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            try:
                process.stdin.close()  # it then ends by itself, unless it hangs
                process.wait(5)
            except (OSError, subprocess.TimeoutExpired):
                process.kill()
        process.wait()


def _line(stream: Any, until: float) -> str:
    """Read a line.

    Raises:
        TimeoutError: none arrived in time.
        EOFError: the stream ended.
    """
    text = ""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while not text.endswith("\n"):
            if not selector.select(max(until - time.monotonic(), 0)):
                raise TimeoutError
            part = os.read(stream.fileno(), 1 << 16).decode()
            if not part:
                raise EOFError
            text += part
    return text


def document(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the report: the stages, a summary in one line, and what failed or was slow, in this order."""
    states = ("failed", "slow", "ok", "not applicable")
    count = {state: sum(r["state"] == state for r in results) for state in states}
    state = next((state for state in ("failed", "slow") if count[state]), "ok")
    summary = ", ".join(f"{number} {name}" for name, number in count.items() if number)
    notable = [
        {"state": state, "stage": result["stage"], "text": text}
        for state in ("failed", "slow")
        for result in results
        for text in _notable(result, state)
    ]
    summary = f"{len(results)} stages: {summary}"
    return {"state": state, "summary": summary, "notable": notable, "stages": results}


def _notable(result: dict[str, Any], state: str) -> list[str]:
    """Return a line for every check of a stage in this state, and for what ended the stage."""
    lines = [result["error"]] if result["error"] is not None and state == "failed" else []
    rows = [cells(check) for check in result["checks"] if check["state"] == state]
    return lines + [f"{name}: {value}, bound {bound or 'yes'}; {note}" for name, _, value, bound, note in rows]


def show(console: Console, result: dict[str, Any]) -> None:
    """Print a stage's checks."""
    verdict = f"{result['state']}, {result['seconds']:.1f} s"
    table = Table(title=f"{result['title']}: {verdict}", title_justify="left", title_style=STYLES[result["state"]])
    for heading in ("check", "state", "value", "bound", "note"):
        table.add_column(heading, justify="right" if heading in ("value", "bound") else "left", overflow="fold")
    for check in result["checks"]:
        table.add_row(*map(visible, cells(check)), style=STYLES[check["state"]])
    if result["error"] is not None:
        table.add_row("", "failed", "", "", visible(result["error"]), style=STYLES["failed"])
    console.print(table)
