"""Bad input through the command: one readable message, exit code 2, no program compiled and no run begun."""

import hashlib
import json
import os
import re
import shutil
import sys

import ml_dtypes  # noqa: F401
import numpy as np
import pytest
import yaml
from conftest import CACHE, ROOT
from safetensors.numpy import load_file, save_file

from oarjax.cli import main
from oarjax.config.rules import _is_reserved
from oarjax.data.hf import export, load_params, read_config
from oarjax.data.tasks.arithmetic import write_builtin_policy
from oarjax.tools.bench.measure import counted_compilations

ROWS = [{"question": f"{n}+1=", "answer": f"#### {n + 1}"} for n in range(8)]


class Begun(BaseException):
    """The run got past everything that is checked."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A small policy in several shards."""
    folder = tmp_path_factory.mktemp("policy")
    one = write_builtin_policy(folder / "one", seed=0, hidden=16, layers=2, heads=2, kv_heads=1, ffn=16)
    cfg, _ = read_config(one)
    return export(folder / "shards", cfg, load_params(one, cfg), source=one, shard_bytes=4000)


@pytest.fixture
def policy(sound, tmp_path):
    """A copy that a test may break."""
    return shutil.copytree(sound, tmp_path / "policy")


@pytest.fixture
def train(policy, tmp_path, monkeypatch, capfd):
    """``oarjax train`` on the copy with some fields changed: what it says, after what must hold for every mistake."""

    def begin(*_, **__):
        raise Begun

    monkeypatch.setattr("oarjax.training.command.start_policy", begin)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def command(*overrides: str) -> str:
        tree = {
            "run_dir": str(tmp_path / "run"),
            "device": "cpu",
            "compilation_cache": str(CACHE),
            "policy": {"path": str(policy)},
            "data": {"template": "plain", "max_prompt": 24, "train": {"source": str(tmp_path / "rows.jsonl")}},
            "rollout": {"prompts": 4, "group_size": 4, "max_new": 12, "prompt_bucket": 16, "completion_bucket": 12},
            "grading": {"rewards": [{"name": "exact"}], "workers": 1},
            "credit": {"answer": {"style": "hash"}},
            "update": {"microbatch": 8},
            "report": {"html": False},
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
        monkeypatch.setattr(sys, "argv", ["oarjax", "train", str(tmp_path / "run.yaml"), *overrides])
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("TERM", "dumb")
        capfd.readouterr()
        with counted_compilations() as compiled, pytest.raises(SystemExit) as end:
            main()
        out, err = capfd.readouterr()
        assert end.value.code == 2
        assert compiled.count == 0
        assert "Traceback" not in out + err
        assert err.startswith("error: ")
        assert not (tmp_path / "run" / "config.yaml").exists()
        return err

    return command


def test_without_a_mistake_the_run_begins(train):
    with pytest.raises(Begun):
        train()


def edit(policy, **fields):
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(config | fields))


def tensors(shard, change):
    held = load_file(shard)
    change(held)
    save_file(held, shard, metadata={"format": "pt"})


def first_shard(policy):
    return sorted(policy.glob("*.safetensors"))[0]


def truncated(policy):
    first_shard(policy).write_bytes(first_shard(policy).read_bytes()[:-4])


def longer(policy):
    first_shard(policy).write_bytes(first_shard(policy).read_bytes() + b"\0" * 4)


def header_alone(policy):
    first_shard(policy).write_bytes(first_shard(policy).read_bytes()[:8])


def moved(policy):
    """The index says that the last norm is in the first shard."""
    index = policy / "model.safetensors.index.json"
    tree = json.loads(index.read_text())
    tree["weight_map"]["model.norm.weight"] = first_shard(policy).name
    index.write_text(json.dumps(tree))


def renamed(policy):
    index = policy / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model.norm.weight", "model.nrom.weight"))


def elsewhere(policy):
    index = policy / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(first_shard(policy).name, "../" + first_shard(policy).name))


def changed_bits(policy):
    shard = first_shard(policy)
    sums = [f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in sorted(policy.glob("*.safetensors"))]
    (policy / "SHA256SUMS").write_text("".join(sums))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def unknown_sums(policy):
    (policy / "SHA256SUMS").write_text("d41d8cd98f00b204e9800998ecf8427e  model.safetensors\n")


def missing_sums(policy):
    (policy / "SHA256SUMS").write_text("0" * 64 + "  model-00009.safetensors\n")


def sums_of_one(policy):
    changed_bits(policy)
    first, *_ = (policy / "SHA256SUMS").read_text().splitlines()
    (policy / "SHA256SUMS").write_text(f"{hashlib.sha256(first_shard(policy).read_bytes()).hexdigest()}{first[64:]}\n")


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def whole_numbers(policy):
    tensors(first_shard(policy), lambda t: t.update({k: v.astype(np.int8) for k, v in t.items()}))


def leading(policy, to):
    """A file that an export would copy is a link."""
    (policy / "tokenizer_note.txt").symlink_to(to)


def pickled(policy):
    for file in (*policy.glob("*.safetensors"), policy / "model.safetensors.index.json"):
        file.unlink()
    (policy / "pytorch_model.bin").write_bytes(b"\x80\x04")


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (truncated, "is not a complete safetensors file"),
        (longer, "is not a complete safetensors file"),
        (header_alone, "is not a complete safetensors file"),
        (
            lambda p: first_shard(p).unlink(),
            "shards named in model.safetensors.index.json are missing (model-00001-of-",
        ),
        (moved, "no tensor model.norm.weight, which model.safetensors.index.json places there; fetch both again"),
        (renamed, "1 tensor missing: model.norm.weight; config.json and the weights do not belong together"),
        (elsewhere, "expected the names of files beside it, got '../model-00001-of-"),
        (changed_bits, "expected SHA-256 "),
        (unknown_sums, "SHA256SUMS line 1: expected a SHA-256 and a file name; regenerate it or delete it"),
        (missing_sums, "model-00009.safetensors is missing, and SHA256SUMS names it; fetch the folder again"),
        (sums_of_one, "SHA256SUMS does not name model-00002-of-"),
        (lambda p: a_pipe(p / "config.json"), "config.json is not a file; fetch the folder again"),
        (lambda p: a_pipe(first_shard(p)), "are missing (model-00001-of-"),
        (
            whole_numbers,
            "expected a dtype of F64, F32, F16, BF16, got I8; use a checkpoint that is not quantised",
        ),
        (pickled, "pytorch_model.bin is a pickle, which is never opened: convert it to safetensors"),
        (lambda p: (p / "model.safetensors.index.json").write_text("[]"), "is not an index of shards (no weight_map)"),
        (lambda p: (p / "model.safetensors.index.json").write_text("{"), "index.json is not valid JSON"),
        # a checkpoint of another model
        (
            lambda p: edit(p, hidden_size=8, head_dim=8),
            "(32, 8) of config.json, got ",
        ),
        (lambda p: edit(p, num_hidden_layers=3), "tensors missing: model.layers.2."),
        (lambda p: edit(p, num_hidden_layers=1), "tensors not part of this architecture: model.layers.1."),
        (lambda p: edit(p, tie_word_embeddings=False), "1 tensor missing: lm_head.weight"),
        (
            lambda p: edit(p, model_type="llama"),
            "model_type = 'llama': this architecture is not supported",
        ),
        # config.json itself
        (lambda p: (p / "config.json").unlink(), "no config.json; expected a Hugging Face checkpoint folder"),
        (lambda p: (p / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda p: (p / "config.json").write_bytes(b'{"vocab_size": "\xff"}'), "config.json is not valid JSON"),
        (lambda p: (p / "config.json").write_text("[" * 100_000), "config.json is not valid JSON"),
        (lambda p: (p / "config.json").write_text("[]"), "config.json: expected an object, got list; fetch it again"),
        (lambda p: edit(p, vocab_size="many"), "vocab_size = 'many', expected a positive integer"),
        (lambda p: edit(p, num_key_value_heads=0), "num_key_value_heads = 0, expected a positive integer"),
        (
            lambda p: edit(p, num_hidden_layers=10**9),
            "num_hidden_layers = 1000000000, expected a positive integer up to",
        ),
        (lambda p: edit(p, rms_norm_eps="small"), "rms_norm_eps = 'small', expected a positive number"),
        (lambda p: (p / "SHA256SUMS").write_text("\n"), "SHA256SUMS names no file and checks nothing"),
        (lambda p: leading(p, "/etc/hostname"), "is a link to /etc/hostname, outside its folder"),
        (lambda p: leading(p, "nowhere.json"), "tokenizer_note.txt is not a file"),
        (lambda p: leading(p, "tokenizer_note.txt"), "tokenizer_note.txt is not a file"),
    ],
)
def test_folders_that_are_no_whole_checkpoint(train, policy, harm, says):
    harm(policy)
    assert says in train()


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokenizer.json", None, "expected tokenizer.json, or vocab.json with merges.txt"),
        ("tokenizer.json", b"{}", "cannot be read"),
        ("tokenizer.json", b"\xff\xfe", "cannot be read"),
        (
            "generation_config.json",
            b'{"eos_token_id": 31}',
            "eos_token_id: expected ids of the tokenizer beside it (up to 26), got 31",
        ),
        ("generation_config.json", b'{"eos_token_id": ["2"]}', "(up to 26), got '2'"),
        ("generation_config.json", b"[]", "is not a JSON object"),
        *(
            (file, b'{"a":' * 20_000, "")
            for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
        ),
    ],
)
def test_tokenizers_that_do_not_fit(train, policy, file, content, says):
    if content is None:
        (policy / file).unlink()
    else:
        (policy / file).write_bytes(content)
    assert says in train()


def test_a_line_without_end(train, tmp_path, monkeypatch):
    monkeypatch.setattr("oarjax.data.rows.LONGEST", 50)
    (tmp_path / "long.jsonl").write_text(json.dumps({"question": "1+1=" * 20, "answer": "2"}))
    assert "long.jsonl line 1: longer than 50 bytes" in train(f"data.train.source={tmp_path / 'long.jsonl'}")


def test_a_tokenizer_larger_than_the_vocabulary(train, policy):
    edit(policy, vocab_size=20)
    for shard in policy.glob("*.safetensors"):
        tensors(shard, lambda t: t.update({k: v[:20] for k, v in t.items() if k == "model.embed_tokens.weight"}))
    assert "the tokenizer has ids up to 26, but the model's vocabulary only 20: they do not belong together" in train()


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ messages[0].content ", "the chat template fails on the prompt '0+1='"),
        (
            "{{ raise_exception('no system turn') }}",
            "the chat template fails on the prompt '0+1=' (TemplateError: no system",
        ),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        (
            "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
            "(TooLong: it ran longer than 1 s)",
        ),
        ("", "the prompt '0+1=' encodes to no tokens"),
    ],
)
def test_chat_templates_that_fail(train, policy, template, says, monkeypatch):
    monkeypatch.setattr("oarjax.data.tokenizer.TEMPLATE_SECONDS", 1.0)
    path = policy / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    assert says in train("data.template=chat")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            b'{"prompt": "1+1=", "answer": "2"}\n',
            "rows.jsonl line 1: no field 'question', only 'prompt', 'answer'; set data.train.",
        ),
        (
            b'{"question": "1+1=", "answer": "2"}\n{"question": "1+1="}\n',
            "rows.jsonl line 2: no field 'answer', only 'question'",
        ),
        (
            b'{"question": ["1+1="], "answer": "2"}\n',
            "line 1: field 'question', message 0 is '1+1='; expected a role",
        ),
        (b"", "rows.jsonl holds no rows"),
        (b'{"question": NaN, "answer": "2"}\n', "line 1: field 'question' is nan; expected text or a number"),
        (
            b'{"question": "1+1=", "answer": " "}\n' * 3,
            "field 'answer' is blank in all 3 rows; set data.train.answer_field",
        ),
        (b'{"question": "", "answer": "2"}\n', "field 'question' is blank in all 1 rows; set data.train.prompt_field"),
        (b'{"question": "1+1=", "answer": "2"}\n\xff\xfe\n', "rows.jsonl line 2: not JSON"),
        (b'{"question": "1+1=", "answer": ' + b"9" * 5000 + b"}\n", "rows.jsonl line 1: not JSON"),
        (b"[" * 100_000 + b"\n", "rows.jsonl line 1: not JSON"),
        (b'{"question": "three apples", "answer": "2"}\n', "rows.jsonl line 1: the tokenizer cannot encode"),
    ],
)
def test_rows_that_cannot_be_used(train, tmp_path, content, says):
    path = tmp_path / "bad" / "rows.jsonl"
    path.parent.mkdir()
    path.write_bytes(content)
    assert says in train(f"data.train.source={path}")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data.max_prompt=2"], "all 8 prompts are longer than 2 tokens; raise data.max_prompt"),
        (
            ["rollout.group_size=1"],
            "rollout.group_size: grpo needs at least 2 completions per prompt, got 1; raise it, or set",
        ),
        (["update.microbatch=3"], "update.microbatch: 3 does not divide the 16 rows of a minibatch"),
        (["iterations=on"], "iterations: expected a number, got true"),
        (["optim.lr=no"], "optim.lr: expected a number, got false"),
        (["update.minibatches=3"], "update.minibatches: 3 does not divide rollout.prompts = 4"),
        (["grading.rewards=[{name: maths}]"], "(did you mean math?)"),  # of all that other tests have registered
        (["grading.rewards=[{name: zzz}]"], "grading.rewards: no reward is called 'zzz'; known are code,"),
        (["grading.deadlien=3"], "grading.deadlien: no such field (did you mean deadline?)"),
        (
            ["policy.path=~nouser/policy"],
            "policy.path: ~nouser/policy names the home folder of a user unknown to this machine",
        ),
        (["rolout.prompts=4"], "rolout: no such field (did you mean rollout?)"),
        (
            ["lora.targets=[q]"],
            "lora.rank: alpha, targets and start have no effect with rank 0; set lora.rank=32, or",
        ),
        (["mesh={data:1}"], "mesh.data:1: no such field (in YAML a space must follow the colon)"),
        (["credit.method=oar_h"], "credit.method: expected one of oar_p, oar_screened"),
        (["iterations=1" + "0" * 400], "iterations: expected at most 2147483647"),
        (["rollout.prompts=2147483648"], "rollout.prompts: expected at most 2147483647"),
        (["grading.workers=9000"], "Input should be less than or equal to 1024"),
        (["seed=9223372036854775808"], "seed: Input should be less than 9223372036854775808"),
        (["export.folder=metrics.jsonl"], "export.folder: metrics.jsonl is reserved for other files of the run"),
        (
            ["run_dir=gs://b/runs/x"],
            "run_dir: gs://b/runs/x is an address, and only paths are read and written here; mo",
        ),
        (["run_dir=gs://b/runs/x"], "mount the bucket (gcsfuse --implicit-dirs b ~/b) and set a path below ~/b"),
        (
            ["optim.settings={momentum: .nan}"],
            "optim.settings: momentum: expected finite numbers, got nan; set a finite",
        ),
        (
            ["advantage.settings.cap=[1, {a: .inf}]"],
            "advantage.settings: cap: expected finite numbers, got [1, {'a': inf",
        ),
        (["run_dir=''"], "run_dir: '' names nothing, as an unset variable of a shell does; set a path"),
        (["policy.path='  '"], "policy.path: '  ' names nothing"),
        (["optim.lr=null"], "optim.lr: Input should be a valid number, got null"),
        (["data.train.source=s3://b/rows.jsonl"], "data.train.source: s3://b/rows.jsonl is an address"),
        (["data.eval.source=hf://datasets/x"], "set its hub name"),
        (["data.mixture=[{source: 'gs://b/x.jsonl'}]"], "data.mixture.0.source: gs://b/x.jsonl is an address"),
        (["compilation_cache=gs:/b"], "compilation_cache: gs:/b is an address"),
        (["lora={rank: 1, start: 'gs://b/a'}"], "lora.start: gs://b/a is an address"),
        (["grading.plugins=['gs://b/a.py']"], "grading.plugins: gs://b/a.py is an address"),
        (['policy.path="a\\0b"'], r"policy.path: 'a\x00b' holds a NUL, which no path may; remove it"),
        (["data.train.source=" + "a" * 5000], "is longer than a path may be (255 bytes a name, 4000 in all)"),
    ],
)
def test_configs_that_cannot_run(train, overrides, says):
    assert says in train(*overrides)


def test_every_name_of_a_run_is_refused_as_an_export():
    """Those that docs/run_folder.md lists, but the export itself."""
    lines = (ROOT / "docs" / "run_folder.md").read_text().splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    names = {name.split("/")[0] for cell in cells for name in re.findall(r"`([^`]+)`", cell)} - {"export"}
    assert len(names) > 20
    refused = {name for name in names if _is_reserved(name.replace("*", "1"))}
    assert refused == names


@pytest.mark.parametrize("case", ["loop", "long", "through a file"])
def test_a_folder_that_cannot_be_is_not_tried_again(train, tmp_path, case):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("")
    deep = "/".join("a" * 250 for _ in range(15))  # each name may be, and the whole by itself
    folder = {
        "loop": tmp_path / "loop",
        "long": tmp_path / deep / ("b" * 200),
        "through a file": tmp_path / "file" / "x",
    }
    said = train(f"run_dir={folder[case]}")  # ends with 2
    assert "set another" in said or "choose another path" in said or "set a shorter one" in said
