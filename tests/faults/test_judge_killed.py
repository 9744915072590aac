"""A run whose reward asks a server, killed with signal 9 while the server is being asked, and resumed."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from pathlib import Path

import micro
import pytest
import yaml
from judge_server import Answering, serving

from oarjax.report.files import read_metrics
from oarjax.storage.durable import read_lines

pytestmark = pytest.mark.slow

TRIED, EVALUATED = 2, 8
"""Samples that every start of the command tries the rewards on, and those of an evaluation."""


class Judge(Answering):
    """Score a completion by its digest; note who asks, and once ``hold`` requests have come keep them waiting."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            self.server.asked[body] += 1
            held = self.server.hold is not None and self.server.asked.total() > self.server.hold
        if held:
            self.server.reached.set()
            self.server.over.wait()
            self.close_connection = True
            return
        self.answer(json.dumps({"score": hashlib.sha256(body).digest()[0] / 255}).encode())


@pytest.fixture
def server():
    with serving(Judge, asked=Counter(), hold=None, reached=threading.Event()) as server:
        yield server


def judged(folder: Path, port: int) -> Path:
    """Write a micro run whose first reward is the judge's score, four requests at a time."""
    config = micro.micro_config(folder)
    (folder / "judge.py").write_text(
        "from oarjax import reward\nfrom oarjax.grading.judge import HttpJudge\n\n"
        f"reward('judge')(HttpJudge('http://127.0.0.1:{port}/score', timeout=600.0))\n"
    )
    tree = yaml.safe_load(config.read_text())
    rewards = [{"name": "judge"}, {"name": "exact", "weight": 0.5}]
    tree["grading"] |= {"rewards": rewards, "plugins": [str(folder / "judge.py")], "concurrency": 4}
    config.write_text(yaml.safe_dump(tree))
    return config


def graded(run: Path) -> int:
    """Count the samples of finished iterations and their evaluations, and those of the next with verdicts on disk."""
    done = read_metrics(run / "metrics.jsonl")[1:]  # the first line is the start's evaluation
    count = sum(int(line["groups_drawn"]) * 4 + EVALUATED * (line["iteration"] % 3 == 0) for line in done)
    path = run / "verdicts" / f"{len(done) + 1:06d}.jsonl"
    return count + sum(len(line["verdicts"]) for line in read_lines(path))


def test_killed_while_it_asks_a_judge_it_asks_again_only_what_had_no_verdict(tmp_path, server):
    config = judged(tmp_path, server.server_address[1])
    whole, run = tmp_path / "whole", tmp_path / "killed"
    code, text = micro.finish(config, whole)
    assert code == 0, text
    total = server.asked.copy()

    server.asked.clear()
    server.hold = total.total() * 4 // 5  # in the fifth iteration: the checkpoint of the second is there for certain
    process = micro.start(config, run)
    assert server.reached.wait(timeout=300), micro.output(run)
    process.kill()
    process.wait()
    kept, before = graded(run), server.asked.copy()
    lost = before.total() - TRIED - EVALUATED - kept  # the start's evaluation is in start.json
    assert kept > 0
    assert lost > 0  # asked, without a verdict on disk

    server.hold = None
    server.over.set()
    server.asked.clear()
    code, text = micro.finish(config, run)
    assert code == 0, text
    assert "resuming after iteration" in text
    assert micro.differing(micro.result(run), micro.result(whole)) == []
    assert server.asked.total() == total.total() - EVALUATED - kept
    assert total - (before + server.asked) == Counter()
