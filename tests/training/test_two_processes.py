"""Two real processes over gloo, four virtual devices each: the same run as one process with eight, and less memory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
import starts
import stub_engine
import yaml
from conftest import ROOT, virtual_devices
from safetensors.numpy import load_file

from oarjax.data.hf import export, load_params, read_config
from oarjax.data.hf_files import read_fields
from oarjax.data.tasks.arithmetic import write_builtin_policy
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import abstract_params
from oarjax.report.files import read_completions, read_metrics

pytestmark = pytest.mark.slow

TINY = {
    "iterations": 2,
    "device": "cpu",
    "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
    "data": {
        "template": "plain",
        "max_prompt": 5,  # three problems out of four are longer
        "train": {"source": "builtin:arithmetic", "split": "train", "limit": 40, "arithmetic": {"terms": 2}},
    },
    "sft": {
        "data": {"source": "builtin:arithmetic", "split": "sft", "limit": 20, "arithmetic": {"terms": 2}},
        "steps": 2,
        "batch": 8,
        "microbatch": 8,
        "max_length": 48,
    },
    "rollout": {"prompts": 8, "group_size": 4, "max_new": 8, "prompt_bucket": 16, "completion_bucket": 8},
    "grading": {"rewards": [{"name": "even_length"}], "workers": 1},
    "credit": {"answer": {"style": "regex", "pattern": "[0-9]"}},
    "update": {"microbatch": 8},
    "optim": {"lr": 1e-3, "warmup": 0},
    "eval": {"batch": 8},
    "checkpoint": {"every": 1, "keep": 5},
    "report": {"completions": 8, "html": False},
}
REWARD = """
from oarjax.grading.rewards import reward


@reward("even_length")
def even_length(sample):
    return float(sample.tokens % 2 == 0)
"""


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def run_together(commands: list[list[str]], *, devices: int, logs: Path, timeout: float = 900) -> list[int]:
    """Exit codes of commands that run at the same time, each with its output in a file; none outlives the test.

    A command is the arguments of ``oarjax``, or of the interpreter if they begin with an option.
    """
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": virtual_devices(devices), "PYTHONPATH": str(ROOT)}
    started: list[subprocess.Popen | starts.Started] = []
    try:
        for number, command in enumerate(commands):
            path = logs / f"{number}.log"
            path.write_text("")
            if command[0].startswith("-"):
                with path.open("w") as log:
                    process = subprocess.Popen(
                        [sys.executable, *command], env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT
                    )
            else:
                process = starts.Started(command, log=path, environment=environment)
            started.append(process)
        return [process.wait(timeout) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def train(config: Path, folder: Path, *overrides: str, processes: int, devices: int = 8) -> tuple[list[int], list[str]]:
    """Run ``oarjax train`` on so many devices: the exit code of each process, and what it printed."""
    command = ["train", str(config), f"run_dir={folder}", *overrides]
    told = [f"distributed.coordinator=127.0.0.1:{free_port()}", f"distributed.processes={processes}"]
    logs = folder.with_name(folder.name + "-logs")
    logs.mkdir(exist_ok=True)
    numbers = range(processes)
    commands = [[*command, *([*told, f"distributed.process={n}"] if processes > 1 else [])] for n in numbers]
    codes = run_together(commands, devices=devices // processes, logs=logs)
    return codes, [(logs / f"{n}.log").read_text() for n in numbers]


def trained(config: Path, folder: Path, *overrides: str, processes: int, devices: int = 8) -> list[str]:
    """What each process of a run printed that came to its end."""
    codes, said = train(config, folder, *overrides, processes=processes, devices=devices)
    assert codes == [0] * processes, "\n\n".join(text[-3000:] for text in said)
    return said


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    (folder / "mine.py").write_text(REWARD)
    policy = write_builtin_policy(folder / "policy", seed=0, hidden=16, layers=1, heads=4, kv_heads=2, ffn=32)
    tree = TINY | {"policy": {"path": str(policy)}, "compilation_cache": str(folder / "cache")}
    tree["grading"] = {**TINY["grading"], "plugins": [str(folder / "mine.py")]}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tree))
    return folder / "tiny.yaml"


def same_weights(a: Path, b: Path) -> None:
    one, two = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert set(one) == set(two)
    for name in one:
        # Of 1, not of the largest: Adam divides gradients by their size, and the rounding of those near 0 with them.
        largest = max(np.abs(one[name]).max(), 1.0)
        np.testing.assert_allclose(two[name], one[name], rtol=0, atol=1e-5 * largest, err_msg=name)


def same_runs(a: Path, b: Path) -> None:
    one, two = read_metrics(a / "metrics.jsonl"), read_metrics(b / "metrics.jsonl")
    assert [line["iteration"] for line in one] == [line["iteration"] for line in two]
    exact = ("reward", "length", "rows_used", "completion_tokens", "prompt_tokens", "groups_drawn")
    for x, y in zip(one, two):
        assert {n: x[n] for n in exact if n in x} == {n: y[n] for n in exact if n in y}
        for name in ("loss", "grad_norm", "entropy"):
            if name in x:
                assert y[name] == pytest.approx(x[name], rel=1e-5, abs=1e-6), name
    assert sum(line.get("rows_used", 0) for line in one) > 0
    drawn = [[(i, row.tokens, row.reward) for i, row in read_completions(f / "completions.jsonl")] for f in (a, b)]
    assert drawn[0] == drawn[1]
    weights = [[row.weights for _, row in read_completions(f / "completions.jsonl")] for f in (a, b)]
    for x, y in zip(*weights):  # the gate stretches a row's scores to 0..1, and their rounding with them
        np.testing.assert_allclose(y, x, rtol=0, atol=1e-3)
    same_weights(a / "export", b / "export")


def result(folder: Path) -> tuple[dict[str, bytes], list[dict[str, float]], bytes]:
    """All that a run leaves, but for what a clock said."""
    clock = ("time", "seconds/", "tokens_per_second", "mfu")
    lines = [
        {name: value for name, value in line.items() if not name.startswith(clock)}
        for line in read_metrics(folder / "metrics.jsonl")
    ]
    weights = {name: array.tobytes() for name, array in load_file(folder / "export" / "model.safetensors").items()}
    return weights, lines, (folder / "completions.jsonl").read_bytes()


def test_two_processes_train_as_one_and_go_on_over_another_mesh(config, tmp_path):
    one, two, moved = (tmp_path / name for name in ("one", "two", "moved"))
    trained(config, one, processes=1)
    first, second = trained(config, two, processes=2)
    same_runs(one, two)
    dropped = re.search(r"(\d+) problems, (\d+) over 5 tokens left out", first)  # before they are dealt to processes
    assert dropped, first
    assert int(dropped[1]) < int(dropped[2])
    for words in ("run folder", "OAR-G 1/2", "policy"):  # the first process speaks for both
        assert words in first, words
        assert words not in second, words

    # Resumed from the first iteration's checkpoint by two processes over another mesh.
    shutil.copytree(two, moved)
    shutil.rmtree(moved / "checkpoints" / "000002")
    said, _ = trained(config, moved, "mesh={data: 4, fsdp: 1, tensor: 2}", processes=2)
    assert "resuming after iteration 1" in said
    same_runs(one, moved)


def test_two_processes_draw_with_an_engine_as_one_does(config, tmp_path):
    """The first process asks, in a thread beside the update, and both compare the engine with the weights they hold."""
    tree = yaml.safe_load(config.read_text())
    policy = Path(tree["policy"]["path"])
    model, _ = read_config(policy)
    served = export(tmp_path / "served", model, load_params(policy, model), source=policy, untie=True)
    del tree["sft"]
    tree |= {"iterations": 3, "update": TINY["update"] | {"lag": 1}}
    for processes, name in ((1, "one"), (2, "two")):
        with stub_engine.engine(served, repeats=True) as server:
            where = {"url": f"http://127.0.0.1:{server.server_port}", "weights": str(tmp_path / f"{name}-weights")}
            tree["rollout"] = TINY["rollout"] | {"engine": where | {"dtype": "float32", "retries": 0}}
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree))
            trained(tmp_path / f"{name}.yaml", tmp_path / name, processes=processes)
            assert server.paths.count("/collective_rpc") == 3  # a drill's weights, and those of two versions
    same_runs(tmp_path / "one", tmp_path / "two")


@pytest.fixture(scope="module")
def games(config) -> Path:
    """Write a config of episodes beside the other: games that halve at random, credit by turns and inside of them."""
    tree = yaml.safe_load(config.read_text())
    tree["policy"]["path"] = "builtin:turns"
    tree["data"] |= {name: {"source": "builtin:guess", "split": name, "limit": 8} for name in ("train", "eval")}
    tree["sft"] |= {
        "data": {"source": "builtin:guess", "split": "sft", "limit": 480},
        "steps": 60,
        "optim": {"lr": 1e-3},
    }
    tree["optim"] |= {"function": "optax.sgd", "lr": 0.1}  # Adam would divide rounding by gradients near 0
    tree["rollout"] |= {"max_new": 32, "completion_bucket": 32, "environment": {"name": "builtin:guess", "turns": 3}}
    tree["grading"]["rewards"] = [{"name": "environment"}, {"name": "even_length"}]
    tree["credit"] |= {"method": "turn_oar"}
    tree["eval"] |= {"samples": 2}
    config.with_name("games.yaml").write_text(yaml.safe_dump(tree))
    return config.with_name("games.yaml")


def test_one_device_and_eight_of_two_processes_play_the_same_episodes(games, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    trained(games, one, "mesh={data: 1, fsdp: 1, tensor: 1}", processes=1, devices=1)
    trained(games, two, "sft=null", f"policy.path={one / 'start'}", processes=2)  # the warm start takes long on eight
    same_runs(one, two)
    for x, y in zip(read_metrics(one / "metrics.jsonl"), read_metrics(two / "metrics.jsonl")):
        names = ("turns", "observed_tokens", "truncated", "pass_at_1", "pass@2", "eval/length", "decode_steps")
        assert {n: x[n] for n in names if n in x} == {n: y[n] for n in names if n in y}
    assert all(line["turns"] > 1.5 for line in read_metrics(one / "metrics.jsonl") if line["iteration"])


MEMORY = """
import json, sys
import jax
from jax.sharding import NamedSharding
from pathlib import Path
from oarjax.system.mesh import make_mesh
from oarjax.data.hf import export, load_params, read_config
from oarjax.system.processes import join_processes, wait_for_all
from oarjax.models.weights import logical_axes
from oarjax.models.sharding import param_specs

folder, out, address, number, fsdp, tensor = sys.argv[1:]
join_processes(coordinator=address, processes=2, process=int(number), timeout=60)
mesh = make_mesh(slice=1, data=-1, fsdp=int(fsdp), tensor=int(tensor))
cfg, source = read_config(folder)
where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(logical_axes(cfg)))
wait_for_all("ready")
now = lambda name: int(next(l for l in open("/proc/self/status") if l.startswith(name)).split()[1]) * 1024
bare = now("VmRSS:")
params = jax.block_until_ready(load_params(source, cfg, shardings=where))
peak = now("VmHWM:")  # of this program alone; ru_maxrss begins with the parent's
blocks = {(id(x), str(s.index)): s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards}
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = now("VmRSS:")
export(Path(out), cfg, params, source=source, shard_bytes=100_000_000)
exported = now("VmHWM:") - before
print(json.dumps({"share": sum(blocks.values()), "above": peak - bare, "exported": exported}))
wait_for_all("done")
"""


@pytest.fixture(scope="module")
def gigabyte(tmp_path_factory):
    """A checkpoint of 1.1 GB in float32, over four files; drawing so many numbers would take most of the test."""
    tiny = write_builtin_policy(tmp_path_factory.mktemp("tiny") / "tiny", seed=0, hidden=16, heads=4, kv_heads=2)
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 17, "vocab_size": 8000}
    fields = read_fields(tiny) | sizes | {"num_attention_heads": 16, "num_key_value_heads": 8}
    (tiny / "config.json").write_text(json.dumps(fields))
    cfg = QwenConfig.from_hf(fields)
    params = jax.tree.map(lambda x: np.broadcast_to(np.float32(0.5), x.shape), abstract_params(cfg, dtype=np.float32))
    folder = tmp_path_factory.mktemp("gigabyte") / "policy"
    export(folder, cfg, params, source=tiny, shard_bytes=300_000_000)
    yield folder
    shutil.rmtree(folder)


def test_each_process_reads_only_what_it_holds_and_writes_file_by_file(gigabyte, tmp_path):
    """Peak resident memory, mapped file pages included, above what the process had before loading, and exporting.

    Matrices are divided along both of their axes.
    """
    fsdp, tensor = 2, 4
    address = f"127.0.0.1:{free_port()}"
    command = ["-c", MEMORY, str(gigabyte), str(tmp_path / "out"), address]
    codes = run_together([[*command, str(n), str(fsdp), str(tensor)] for n in range(2)], devices=4, logs=tmp_path)
    said = [(tmp_path / f"{n}.log").read_text() for n in range(2)]
    assert codes == [0, 0], said
    stored = sum(file.stat().st_size for file in gigabyte.glob("*.safetensors"))
    assert stored > 10**9
    for text in said:
        found = json.loads(text.splitlines()[-1])
        assert found["share"] == pytest.approx(stored / 2, rel=0.01)
        assert found["above"] < 1.3 * found["share"], found
        assert found["exported"] < 0.6 * stored, found  # a file of 100 MB twice, a matrix on each device, programs
        print(f"share {found['share'] / 1e6:.0f} MB, peak {found['above'] / found['share']:.2f} x that;", end=" ")
        print(f"exporting: {found['exported'] / 1e6:.0f} MB more")
    written = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(written) > 8
    assert sum(file.stat().st_size for file in written) == pytest.approx(stored, rel=0.01)


def test_a_process_that_stays_alone_says_so(config, tmp_path):
    """Each of the two, at the same time and with a coordinator of its own."""
    command = ["train", str(config), f"run_dir={tmp_path / 'run'}", "distributed.processes=2", "distributed.timeout=3"]
    told = [[f"distributed.coordinator=127.0.0.1:{free_port()}", f"distributed.process={n}"] for n in range(2)]
    codes = run_together([[*command, *each] for each in told], devices=1, logs=tmp_path, timeout=120)
    for number in range(2):
        said = " ".join((tmp_path / f"{number}.log").read_text().split())
        assert codes[number] == 2, said
        assert f"distributed: process {number} of 2 did not reach the others" in said
        assert "Traceback" not in said


def test_an_error_on_one_process_ends_them_all(config, tmp_path):
    """The first one is refused the folder, while the other waits for it."""
    run = tmp_path / "run"
    run.mkdir()
    with (run / "lock").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        codes, said = train(config, run, processes=2)
    assert codes[0] == 2, said[0]
    assert "is in use by" in said[0]
    assert "Traceback" not in said[0]
    assert codes[1] == 1, said[1]
    assert "no checkpoint is there: start again" in said[1]


CHANGES = ("iterations=12", "checkpoint.keep=9")


@pytest.fixture(scope="module")
def undisturbed(config, tmp_path_factory) -> Path:
    """A run of two processes that nothing disturbs, whose programs are compiled where they are called."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    trained(config, folder, "iterations=12", processes=2)
    return folder


def test_a_pair_whose_hosts_are_slow_told_to_stop_and_lost_ends_the_same(config, undisturbed, tmp_path):
    """One host stands still, then it alone is told to stop; each is killed once: the same commands end the run.

    All compile in the background, and the run that they are compared with does not.
    """
    run, logs = tmp_path / "run", [tmp_path / f"{number}.log" for number in range(2)]
    with pair(config, run, logs, *CHANGES, "compile_ahead=on") as both:
        wait_for(both, run / "checkpoints" / "000001", logs)
        pause(both[1], 5.0)
        both[0].send_signal(signal.SIGTERM)
        codes = [process.wait(120) for process in both]
    said = [log.read_text() for log in logs]
    assert codes == [75, 75], said
    assert "stopped; the same command resumes" in said[0]
    assert all("Traceback" not in text for text in said), said
    for killed in (1, 0):
        reached = max(int(each.name) for each in (run / "checkpoints").glob("0*") if each.name.isdigit())
        assert reached < 12
        with pair(config, run, logs, *CHANGES, "compile_ahead=on") as both:
            wait_for(both, run / "checkpoints" / f"{reached + 1:06}", logs)
            both[killed].kill()
            code, text = both[1 - killed].wait(60), " ".join(logs[1 - killed].read_text().split())
        # The first one coordinates the others, which JAX may end before they do; the scripts start both again.
        if killed or code != -signal.SIGABRT:
            assert code == 75, text
            assert "another process of the run ended or cannot be reached" in text
            assert "the same command on every host resumes the run" in text
            assert "Traceback" not in text
    with pair(config, run, logs, *CHANGES, "compile_ahead=on") as both:
        wait_for(both, run / "checkpoints" / f"{reached + 2:06}", logs)
        pause(both[0], 5.0)
        assert [process.wait(300) for process in both] == [0, 0], [log.read_text() for log in logs]
    assert result(run) == result(undisturbed)


@contextlib.contextmanager
def pair(config: Path, run: Path, logs: list[Path], *overrides: str) -> Iterator[list[starts.Started]]:
    """Start a run of two processes; none of them outlives the block."""
    command = ["train", str(config), f"run_dir={run}", *overrides, "distributed.processes=2"]
    told = f"distributed.coordinator=127.0.0.1:{free_port()}"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": virtual_devices(4), "PYTHONPATH": str(ROOT)}
    both = [
        starts.Started([*command, told, f"distributed.process={n}"], log=log, environment=environment)
        for n, log in enumerate(logs)
    ]
    try:
        yield both
    finally:
        for process in both:
            process.kill()
            process.wait()


def wait_for(both: list[starts.Started], path: Path, logs: list[Path]) -> None:
    end = time.monotonic() + 500
    while not path.exists():
        assert time.monotonic() < end
        assert both[0].poll() is None, logs[0].read_text()
        time.sleep(0.05)


def pause(process: starts.Started, seconds: float) -> None:
    process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    process.send_signal(signal.SIGCONT)
