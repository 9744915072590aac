"""Two-step accidents: a second command, another input, somebody else's files."""

import dataclasses
import errno
import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import micro
import numpy as np
import pytest
import unsound
import yaml

import oarjax.evaluate.command
import oarjax.tools.replay.command
from oarjax.cli import main
from oarjax.config.loading import load_config
from oarjax.config.schema import Config
from oarjax.data.hf import read_config
from oarjax.data.peft import write_adapters
from oarjax.data.tasks.arithmetic import write_builtin_policy
from oarjax.errors import UserError
from oarjax.evaluate.export import run as export
from oarjax.grading.grader import local_rewards
from oarjax.models.lora import init_adapters
from oarjax.models.weights import abstract_params
from oarjax.report.files import make_console
from oarjax.run.inputs import check_inputs, pin_threads, seal_start
from oarjax.run.run import open_run
from oarjax.storage.bad_batches import Header, read_bad_batch, write_bad_batch, write_params
from oarjax.storage.durable import storage_errors
from oarjax.storage.folder import claim, locked, run_id
from oarjax.storage.inputs import read_inputs
from oarjax.storage.manifest import write_manifest
from oarjax.storage.stop import Stop
from oarjax.storage.trust import code_places, note_trusted
from oarjax.tools.replay.command import open_replay
from oarjax.training.command import claim_folder, start_policy, train_once


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NPROC", raising=False)


def everything(folder):
    """Path -> content and time of all files but locks."""
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file() and p.name != "lock"}


def command(monkeypatch, *arguments):
    """The exit code of a command line in this process."""
    monkeypatch.setattr(sys, "argv", ["oarjax", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def rows(path, count=8):
    lines = [{"question": f"{n}+1=", "answer": f"#### {n + 1}"} for n in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def begun(tmp_path):
    """Its config and folder: a run that has recorded its inputs and made its warm start."""
    config = micro.micro_config(tmp_path)
    tree = yaml.safe_load(config.read_text())
    plugin = tmp_path / "mine.py"
    plugin.write_text("SCORE = 1.0\n")
    tree["data"]["train"] = {"source": str(rows(tmp_path / "rows.jsonl"))}
    tree["grading"]["plugins"] = [str(plugin)]
    config.write_text(yaml.safe_dump(tree))
    cfg = load_config(config)
    run = open_run(cfg)
    with locked(run.folder):
        assert check_inputs(run).words() == ""
        claim(run.folder, cfg)
        write_builtin_policy(run.folder / "start", seed=3, hidden=16, layers=1, heads=2, kv_heads=2, ffn=16)
        seal_start(run.folder, run.folder / "start")
    return config, run.folder


def test_a_refused_second_command_changes_no_byte(tmp_path, monkeypatch, capsys):
    config = micro.micro_config(tmp_path)
    run = tmp_path / "run"
    with locked(run):
        cfg = load_config(config, ["policy.path=builtin:arithmetic"])
        open_run(cfg)
        claim(run, cfg)
        before = everything(run)
        assert run / "policy" / "model.safetensors" in before
        for change in ("seed=1", "seed=0"):
            assert command(monkeypatch, "train", config, "policy.path=builtin:arithmetic", change) == 2
            assert "is in use by process" in capsys.readouterr().err
            assert everything(run) == before


def test_the_builtin_policy_of_a_run_that_resumes_is_not_written_again(tmp_path):
    cfg = load_config(micro.micro_config(tmp_path), ["policy.path=builtin:arithmetic"])
    run = open_run(cfg)
    claim(run.folder, cfg)
    (run.folder / "start").mkdir()
    before = everything(run.folder)
    open_run(cfg)
    assert everything(run.folder) == before


def change_rows(folder):
    rows(folder / "rows.jsonl", 9)


def change_column(folder):
    """A field that only a custom reward reads."""
    path = folder / "rows.jsonl"
    path.write_text(path.read_text().replace('"answer"', '"tests": "assert True", "answer"', 1))


def change_plugin(folder):
    (folder / "mine.py").write_text((folder / "mine.py").read_text().replace("1.0", "0.5"))


def change_policy(folder):
    write_builtin_policy(folder / "policy", seed=9, hidden=16, layers=1, heads=2, kv_heads=2, ffn=16)


def change_template(folder):
    path = folder / "policy" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"extra": 1}))


def flip_start(folder):
    path = folder / "run" / "start" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (change_rows, r"rows/data\.train was "),
        (change_column, r"rows/data\.train was "),
        (change_plugin, r"code/grading\.plugins=.*mine\.py was "),
        (change_policy, r"policy/model\.safetensors was "),
        (change_template, r"policy/tokenizer_config\.json was "),
        (flip_start, r"start/model\.safetensors: is not what the warm start wrote"),
    ],
)
def test_an_input_that_changed_since_is_refused_and_nothing_touched(begun, tmp_path, change, says):
    config, folder = begun
    change(tmp_path)
    before = everything(folder)
    with pytest.raises(UserError, match=says) as error:
        train_once(load_config(config), make_console(), Stop())
    assert error.value.exit_code == 2
    changed = {p for p, what in everything(folder).items() if before.get(p) != what}
    assert changed <= ({folder / "inputs.json"} if change is flip_start else set())


def damage_evaluation(folder):
    (folder / "start.json").write_text("{")


def damage_line(folder):
    (folder / "metrics.jsonl").write_text('{"iteration": 1}\nx\n{"iteration": 2}\n')


def lose_checkpoints(folder):
    (folder / "checkpoints.json").write_text('{"newest": 2}')
    (folder / "checkpoints").mkdir()


def rename_checkpoint(folder):
    (folder / "run.json").write_text("")
    (folder / "checkpoints" / "000009").mkdir(parents=True)
    write_manifest(folder / "checkpoints" / "000009", {"run": "a" * 32, "iteration": 2})


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        pytest.param(damage_evaluation, r"start\.json is not the evaluation that was written", marks=pytest.mark.slow),
        pytest.param(damage_line, r"metrics\.jsonl, line 2: not JSON", marks=pytest.mark.slow),
        pytest.param(lose_checkpoints, "no intact checkpoint is left", marks=pytest.mark.slow),
        (rename_checkpoint, "is of iteration 2: it was renamed"),
    ],
)
def test_a_refused_resume_changes_no_byte(begun, harm, says):
    """But of inputs.json, which may note that files have been read."""
    config, folder = begun
    (folder / "start.json").write_text("null")
    (folder / "facts.json").write_text("{}")
    harm(folder)
    before = everything(folder)
    with pytest.raises(UserError, match=says) as error:
        train_once(load_config(config, ["checkpoint.keep=9"]), make_console(), Stop())
    assert error.value.exit_code == 2
    after = everything(folder)
    assert {p for p in before | after if before.get(p) != after.get(p)} <= {folder / "inputs.json"}


def test_adapters_to_start_from_are_an_input(tmp_path):
    config = micro.micro_config(tmp_path)
    model, _ = read_config(tmp_path / "policy")
    shapes = abstract_params(model, dtype=jnp.float32)
    for seed in (0, 1):
        adapters = init_adapters(jax.random.key(seed), shapes, rank=2, targets=("q",))
        write_adapters(tmp_path / f"peft{seed}", model, adapters, alpha=4.0, base="x")
    (tmp_path / "peft0").rename(tmp_path / "peft")
    lora = "lora={rank: 2, alpha: 4, targets: [q], start: " + str(tmp_path / "peft") + "}"
    run = open_run(load_config(config, [lora]))
    check_inputs(run)
    (run.folder / "start").mkdir()
    assert check_inputs(run).words() == ""
    (tmp_path / "peft").rename(tmp_path / "before")
    (tmp_path / "peft1").rename(tmp_path / "peft")
    with pytest.raises(UserError, match=r"policy/lora\.start/adapter_model\.safetensors was "):
        check_inputs(run)


@pytest.mark.parametrize(
    ("name", "call"), [("start.json", "stat"), ("start.json", "read_text"), ("start/config.json", "stat")]
)
def test_a_start_that_cannot_be_read_is_not_called_a_failed_write(begun, monkeypatch, name, call):
    config, folder = begun
    run = open_run(load_config(config))
    (folder / "start.json").write_text("{}")
    before, real = everything(folder), getattr(Path, call)

    def fails(path, *args, **options):
        if path == folder / name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, call, fails)
        says = rf"^cannot read {folder / name}: .*nothing was changed"
        with pytest.raises(UserError, match=says) as error, storage_errors(folder):
            start_policy(run, run.grader())
    assert error.value.exit_code == 75
    assert everything(folder) == before


def test_threads_are_those_that_the_run_began_with(begun, monkeypatch):
    _, folder = begun
    began = read_inputs(folder).inputs["device/cpu_threads"]
    monkeypatch.setenv("NPROC", "x")  # restored after the test
    monkeypatch.delenv("NPROC")
    pin_threads(folder.parent)
    assert "NPROC" not in os.environ
    pin_threads(folder)
    assert os.environ["NPROC"] == began
    monkeypatch.setenv("NPROC", str(int(began) + 1))
    pin_threads(folder)
    assert os.environ["NPROC"] == str(int(began) + 1)  # the user's word


def test_a_lost_id_is_written_again_and_said(begun, capsys):
    config, folder = begun
    cfg, known = load_config(config), (folder / "run.json").read_text()
    claim_folder(folder, cfg, make_console())
    assert (folder / "run.json").read_text() == known
    (folder / "run.json").write_text("")
    claim_folder(folder, cfg, make_console())
    assert len(run_id(folder)) == 32
    assert "held no id, as after an interrupted copy: it has a new id" in " ".join(capsys.readouterr().out.split())


def test_restart_puts_the_old_run_aside(tmp_path, monkeypatch):
    config = micro.micro_config(tmp_path)
    cfg = load_config(config)
    claim(tmp_path / "run", cfg)
    (tmp_path / "run" / "start").mkdir()
    seen = []
    monkeypatch.setattr(
        "oarjax.training.command.train_once", lambda cfg, *_, **__: seen.append(Path(cfg.run_dir).exists())
    )
    command(monkeypatch, "train", config, "seed=5", "--restart")
    assert seen == [False]
    assert (tmp_path / "run.old" / "start").is_dir()


def test_a_refused_restart_changes_nothing(begun, monkeypatch, capsys, tmp_path):
    config, folder = begun
    before = everything(folder)
    assert command(monkeypatch, "train", config, "policy.path=/nowhere", "--restart") == 2
    assert "/nowhere" in capsys.readouterr().err
    assert {p: what for p, what in everything(folder).items() if p in before} == before
    assert not (tmp_path / "run.old").exists()
    assert command(monkeypatch, "train", config, f"policy.path={folder / 'start'}", "--restart") == 2
    assert "lies in the run that --restart moves aside" in capsys.readouterr().err
    for root in ("/", "/.."):
        assert command(monkeypatch, "train", config, f"run_dir={root}", "--restart") == 2
        assert "run_dir: expected a folder for the run's files, got /" in capsys.readouterr().err


def test_a_changed_function_as_reward_is_another_run(tmp_path):
    cfg = load_config(micro.micro_config(tmp_path), ["grading.rewards=[{name: exact}, {name: mine}]"])

    def inputs_with(mine):
        with local_rewards([(mine, 1.0), "exact"]):
            run = open_run(cfg)
            with locked(run.folder):
                check_inputs(run)
                (run.folder / "start").mkdir(exist_ok=True)

    def mine(sample):
        return 1.0

    inputs_with(mine)
    inputs_with(mine)

    def mine(sample):
        return -1.0

    with pytest.raises(UserError, match="code/reward mine was "):
        inputs_with(mine)


# Files of others --------------------------------------------------------------------------------------------------


@pytest.fixture
def foreign(tmp_path):
    """A run folder that somebody sent: everything that its config can name writes a file when it is imported."""
    canary = tmp_path / "canary"
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(canary)!r}, 'w').close()\nraise RuntimeError('imported')\n")
    tree = yaml.safe_load(micro.micro_config(tmp_path).read_text())
    tree["loss"] = {"function": f"{evil}:loss"}
    tree["grading"]["plugins"] = [str(evil)]
    tree["credit"] |= {"method": "custom", "function": f"{evil}:method", "probe": {"function": f"{evil}:probe"}}
    (tmp_path / "evil.yaml").write_text(yaml.safe_dump(tree))
    cfg = load_config(tmp_path / "evil.yaml")
    run = claim(tmp_path / "run", cfg)
    write_builtin_policy(run / "export", seed=0, hidden=16, layers=1, heads=2, kv_heads=2, ffn=16)
    params = write_params(run / "bad_batches", {"w": np.zeros(1)}, kind="iteration", step=0)
    header = Header(
        kind="iteration",
        number=1,
        minibatch=1,
        step=0,
        wrong={"update": ["loss"]},
        probe="last",
        key=[0, 0],
        key_impl="threefry2x32",
        config=cfg.model_dump(mode="json"),
        config_file="",
        policy=str(run / "export"),
        compute_dtype="float32",
        platform="cpu",
        versions={},
        params=params,
    )
    batch = write_bad_batch(run / "bad_batches", header, unsound.evidence(), keep=1)
    yield run, batch, cfg, canary
    sys.modules.pop("oarjax_plugin_evil", None)


@pytest.mark.parametrize("what", ["replay", "evaluate"])
def test_code_of_others_is_not_imported(foreign, monkeypatch, capsys, what):
    run, batch, _, canary = foreign
    monkeypatch.setattr(sys, "stdin", open("/dev/null", encoding="utf-8"))  # noqa: SIM115
    target = batch if what == "replay" else run
    assert command(monkeypatch, what, target) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "names Python code that is not known to be yours" in said
    assert "pass --trust-code" in said
    assert not canary.exists()


@pytest.mark.parametrize("how", ["--trust-code", "noted"])
@pytest.mark.parametrize("what", ["replay", "evaluate"])
def test_code_that_is_trusted_or_own_is_run(foreign, what, how):
    run, batch, cfg, canary = foreign
    if how == "noted":
        assert note_trusted(run, code_places(cfg)) is None
    trust = how == "--trust-code"
    settings = {"data": None, "k": None, "temperature": None, "prompt": "auto", "out": None, "overrides": []}
    commands = {
        "replay": lambda: oarjax.tools.replay.command.run(batch, device="cpu", as_json=True, trust_code=trust),
        "evaluate": lambda: oarjax.evaluate.command.run(str(run), as_json=True, trust_code=trust, **settings),
    }
    with pytest.raises(UserError, match="imported"):  # what the file raises
        commands[what]()
    assert canary.exists()


def test_a_replay_ignores_what_a_file_says_about_its_machine(foreign, tmp_path):
    """JAX executes what lies in a compilation cache, and the folder may come with the file."""
    run, batch, _, _ = foreign
    header = read_bad_batch(batch)[0]
    hostile = {"compilation_cache": str(run / "cache"), "run_dir": str(tmp_path / "elsewhere"), "device": "tpu"}
    hostile |= {"distributed": {"coordinator": "10.0.0.1:1", "processes": 2, "process": 1}, "profile": [1, 1]}
    hostile |= {"report": {"to": ["wandb"]}, "export": {"folder": "export/../.."}, "mesh": {"fsdp": 64}}
    header = dataclasses.replace(header, config={**header.config, **hostile})
    cfg = open_replay(header, batch, device="cpu", console=make_console(), trust_code=True).cfg
    assert not (run / "cache").exists()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "home" / ".cache" / "oarjax" / "xla")
    plain = Config(run_dir=str(run), policy=cfg.policy, data=cfg.data)
    assert all(getattr(cfg, name) == getattr(plain, name) for name in hostile)


def test_an_export_imports_nothing(foreign, tmp_path):
    run, _, _, canary = foreign
    export(str(run), tmp_path / "out", "keep")
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert not canary.exists()
