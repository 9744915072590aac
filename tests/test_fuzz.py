"""Files and arguments that are changed at random: read, or refused with one message; never another error, never long.

Seeded, a fixed number of tries each. OARJAX_FUZZ multiplies them and OARJAX_FUZZ_SEED chooses others.
"""

from __future__ import annotations

import copy
import json
import os
import random
import struct
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import unsound

from oarjax.config.inputs import DatasetConfig
from oarjax.config.loading import parse_config, read_tree
from oarjax.config.schema import Config
from oarjax.config.section import flatten
from oarjax.data.hf_files import check_headers, read_architecture
from oarjax.data.problems import load_problems
from oarjax.data.tasks.arithmetic import write_builtin_policy
from oarjax.errors import UserError
from oarjax.report.files import CompletionRow, read_completions, read_metrics
from oarjax.storage.bad_batches import METADATA, Header, read_bad_batch, write_bad_batch
from oarjax.system.yaml_tree import YamlError, read_yaml

TRIES = int(os.environ.get("OARJAX_FUZZ", "1"))
SEED = int(os.environ.get("OARJAX_FUZZ_SEED", "0"))
DEMO = Path(__file__).parent.parent / "configs" / "demo.yaml"

ODD: list[Any] = [None, True, False, 0, 1, -1, 2, 7, 10**9, 10**30, -(10**30), 0.5, 1e308, -1e308, 1e-320]
ODD += [float("nan"), float("inf"), "", " ", "x", "x" * 10_000, "\x1b[31m", "[bold]", "\ud800", "\x00", "nan", "1e3"]
ODD += ["~nouser", "~nouser/x", "../..", "/dev/null", [], {}, [None], [[]], [1, "a"], {"": 1}, {"a": {"b": []}}]
ODD += ["2020-01-01", "file.py:name", "builtin:arithmetic", "float32", "qwen3", ["full_attention"], [0] * 1000]


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, part in items for place in ((tree, key), *places(part))]


def mutated(tree: Any, draw: random.Random) -> Any:
    """A copy with one to three places replaced, removed, added or swapped."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.randint(1, 3)):
        if not places(tree):
            return tree
        container, key = draw.choice(places(tree))
        act = draw.randrange(6)
        if act == 0 and isinstance(container, dict):
            del container[key]
        elif act == 1 and isinstance(container, dict):
            container[draw.choice(["", "x", str(key) + "s", str(key).upper()])] = draw.choice(ODD)
        elif act == 2:
            other, theirs = draw.choice(places(tree))
            container[key] = copy.deepcopy(other[theirs])
        else:
            container[key] = copy.deepcopy(draw.choice(ODD))
    return tree


def garbled(content: bytes, draw: random.Random) -> bytes:
    """A copy with a few bytes changed, a piece cut out or repeated."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        act = draw.randrange(4)
        if act == 0 and at < len(data):
            data[at] = draw.randrange(256)
        elif act == 1:
            del data[at : at + draw.randrange(20)]
        elif act == 2:
            data[at:at] = data[at : at + 30]
        else:
            data[at:at] = draw.choice([b"\x00", b"\xff", b"[" * 2000, b'"', b"\n", b"&a ", b"*a ", b"{", b"}", b": "])
    return bytes(data)


def fuzz(count: int, attempt: Callable[[random.Random], object], refused: type[Exception] = UserError) -> None:
    """Attempt so often; what is refused must say why in few words. Both must happen, or the fuzzer sees nothing."""
    outcomes = {True: 0, False: 0}
    for number in range(count * TRIES):
        draw = random.Random(f"{SEED} {number}")
        print(f"\rtry {number} of seed {SEED}", end="")  # pytest shows the last one if it fails
        try:
            attempt(draw)
            message = None
        except refused as error:
            message = str(error)
        assert message is None or 0 < len(message) < 20_000
        outcomes[message is None] += 1
    assert min(outcomes.values()) > count // 50, outcomes


def test_config_overrides():
    tree = read_tree(DEMO)
    fields = [*flatten(Config.model_validate(tree).model_dump(mode="json")), "nothing", "policy", "data.train", "sft.x"]

    def attempt(draw: random.Random) -> None:
        changes = []
        for _ in range(draw.randint(1, 2)):
            value = draw.choice(ODD)
            text = value if isinstance(value, str) else json.dumps(value)
            changes.append(f"{draw.choice(fields)}={text}")
        parse_config(read_tree(DEMO, changes))

    fuzz(400, attempt)


def test_config_files():
    content = DEMO.read_bytes()

    def attempt(draw: random.Random) -> None:
        tree = read_yaml(garbled(content, draw).decode(errors="replace"))
        parse_config(tree if isinstance(tree, dict) else {})

    fuzz(150, attempt, (UserError, YamlError))  # type: ignore[arg-type]


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi")
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BOMB, "more than 20,000 values"),
        ("a: &a [*a]", "an alias refers to itself"),
        ("&a {b: *a}", "an alias refers to itself"),
        ("[" * 5000, "nested too deeply"),
        ("a: !!bool x", "a value does not fit its tag"),
        ("a: !!timestamp x", "does not fit its tag"),
        ("a: " + "9" * 5000, "a value does not fit its tag"),
        ("x" * 1_000_001, "longer than 1,000,000 characters"),
        ("a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
    ],
)
def test_yaml_that_is_refused(text, says):
    with pytest.raises(YamlError, match=says):
        read_yaml(text)


def test_yaml_that_is_read():
    assert read_yaml("run: 2020-01-01\nbad: 2020-99-99") == {"run": "2020-01-01", "bad": "2020-99-99"}
    assert read_yaml("a: &x {b: 1}\nc: *x") == {"a": {"b": 1}, "c": {"b": 1}}
    assert read_yaml("") is None


def test_architectures(tmp_path, unchecked):
    folder = write_builtin_policy(tmp_path / "policy", seed=0, hidden=16, layers=1, heads=2, kv_heads=1, ffn=16)
    fields = json.loads((folder / "config.json").read_text())
    fields["rope_scaling"] = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}

    def attempt(draw: random.Random) -> None:
        (folder / "config.json").write_text(json.dumps(mutated(fields, draw)))
        check_headers(folder, read_architecture(folder))

    fuzz(1100, attempt)


KEPT: dict[str, Any] = {
    **{"kind": "iteration", "number": 12, "minibatch": 1, "step": 11, "wrong": {"update": ["loss"]}, "probe": "last"},
    **{"key": [0, 3], "key_impl": "threefry2x32", "config_file": "config.yaml", "policy": "policy", "params": None},
    **{"compute_dtype": "float32", "platform": "cpu", "versions": {"oarjax": "0.1.0"}},
}


def test_metadata_of_kept_batches(tmp_path, unchecked):
    config = json.loads(json.dumps(parse_config(read_tree(DEMO)).model_dump(mode="json")))
    good = write_bad_batch(tmp_path, Header(**KEPT, config=config), unsound.evidence(), keep=1).read_bytes()
    (size,) = struct.unpack("<Q", good[:8])
    tree, rest = json.loads(good[8 : 8 + size]), good[8 + size :]

    def attempt(draw: random.Random) -> None:
        names = copy.deepcopy(tree)
        if draw.random() < 0.7:
            names["__metadata__"][METADATA] = json.dumps(mutated(json.loads(names["__metadata__"][METADATA]), draw))
        else:
            names = mutated(names, draw)
        text = json.dumps(names).encode()
        if draw.random() < 0.2:
            text = garbled(text, draw)
        (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + rest)
        found, _ = read_bad_batch(tmp_path / "x.safetensors")
        parse_config(found.config)

    fuzz(400, attempt)


def test_lines_of_json(tmp_path, unchecked):
    row = CompletionRow(
        "1+1=", "2", 1.0, "2", "graded", tokens=["2"], weights=[1.0], is_reasoning=[True], is_answer=[False]
    )
    readers = {
        "metrics": (lambda path: read_metrics(path), {"iteration": 1, "time": 1.5, "reward": 0.5, "loss": None}),
        "completions": (lambda path: read_completions(path), {"iteration": 1} | asdict(row)),
        "rows": (lambda path: load_problems(DatasetConfig(source=str(path))), {"question": "1+1=", "answer": "#### 2"}),
    }

    def attempt(draw: random.Random) -> None:
        read, record = readers[draw.choice(list(readers))]
        lines = [json.dumps(mutated(record, draw) if draw.random() < 0.5 else record).encode() for _ in range(3)]
        content = b"\n".join(lines) + b"\n"
        (tmp_path / "x.jsonl").write_bytes(garbled(content, draw) if draw.random() < 0.4 else content)
        read(tmp_path / "x.jsonl")

    fuzz(600, attempt)
