"""``oarjax plan``: what it refuses and states, with made-up answers of the compiler, and twice with the compiler."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from typer.testing import CliRunner

from oarjax.cli import app
from oarjax.config.loading import parse_config
from oarjax.costs import RowTokens, clean_flops, masked_flops
from oarjax.data.hf_files import CheckpointError
from oarjax.errors import ConfigError
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import decoder_of, parameter_count
from oarjax.run.shapes import times_again
from oarjax.system.chips import GIB
from oarjax.tools.plan import command as planning
from oarjax.tools.plan.architecture import architecture_fields
from oarjax.tools.plan.credit_costs import QWEN_7B
from oarjax.tools.plan.programs import shapes_of, with_method
from oarjax.tools.plan.published_sizes import PUBLISHED
from oarjax.tools.plan.sums import ANSWER, model_flops
from oarjax.tools.plan.table import describe, headline, markdown, rows_of
from oarjax.tools.plan.topology import TopologyError, find_slice
from oarjax.tools.plan.worker import too_large

LOOP = (ROOT / "tests" / "golden" / "hlo" / "loop.txt").read_text()
MODELS = ROOT / "docs" / "models.md"

TINY = {
    "model_type": "qwen2",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def config(path="Qwen/Qwen2.5-7B", **changes):
    tree = {
        "run_dir": "unused",
        "policy": {"path": path, "head_chunk": 256},
        "mesh": {"data": 1, "fsdp": 4},
        "plan": {"topology": "v5e-4"},
        "data": {"train": {"source": "unused"}, "max_prompt": 128},
        "rollout": {"prompts": 8, "group_size": 4, "max_new": 128},
        "update": {"microbatch": 8},
        "eval": {"batch": 8},
    }
    return parse_config(tree | changes)


# --- What is known without a compiler --------------------------------------------------------------------------------


def test_slices_by_both_of_their_names():
    for name in ("v5e-64", "v5litepod-64", "v5e:8x8", " V5E:8x8"):
        assert find_slice(name).name == "v5e:8x8"
    assert (find_slice("v5p-32").name, find_slice("v5p-32").chips) == ("v5p:2x2x4", 16)  # it counts cores
    assert find_slice("v5p:4x4x4").product == "v5p-128"
    assert find_slice("v6e-16").name == "v6e:4x4"
    for name in ("v7x-8", "tpu7x-8", "v7x:2x2x1", "tpu7x:2x2x1"):
        ironwood = find_slice(name)
        assert (ironwood.name, ironwood.product, ironwood.chips, ironwood.devices) == ("tpu7x:2x2x1", "v7x-8", 4, 8)
    with pytest.raises(TopologyError, match=r"topology v6e-12 is not known; accepted: v6e-1 or v6e:1x1, v6e-4"):
        find_slice("v6e-12")


def test_published_sizes_add_up_to_the_published_totals():
    totals = {
        "Qwen/Qwen2.5-0.5B": 494_032_768,
        "Qwen/Qwen2.5-1.5B": 1_543_714_304,
        "Qwen/Qwen2.5-7B": 7_615_616_512,
        "Qwen/Qwen2.5-Math-7B": 7_615_616_512,
        "Qwen/Qwen2.5-32B": 32_763_876_352,
        "Qwen/Qwen3-4B": 4_022_468_096,
        "Qwen/Qwen3-8B": 8_190_735_360,
        "Qwen/Qwen3-32B": 32_762_123_264,
        "Qwen/Qwen3-30B-A3B": 30_532_122_624,
        "Qwen/Qwen3-235B-A22B": 235_093_634_560,
        "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    }
    assert {n: parameter_count(QwenConfig.from_hf(PUBLISHED[n])) for n in totals} == totals
    assert decoder_of(QwenConfig.from_hf(PUBLISHED["Qwen/Qwen2.5-7B"])) == QWEN_7B
    experts = decoder_of(QwenConfig.from_hf(PUBLISHED["Qwen/Qwen3-30B-A3B"]))
    assert 3.0e9 < experts.trunk_params + experts.head_params < 3.1e9  # A3B, without the embedding
    mixed = decoder_of(QwenConfig.from_hf(PUBLISHED["Qwen/Qwen3.6-35B-A3B"]))
    assert 2.9e9 < mixed.trunk_params + mixed.head_params < 3.1e9  # A3B, the shared expert among it
    hybrid = QwenConfig.from_hf(PUBLISHED["Qwen/Qwen3.5-27B"])
    assert parameter_count(hybrid) == pytest.approx(26.9e9, rel=0.001)
    # per token and delta net two reads and a write of 48 x 128 x 128 numbers, and 4 taps of 10,240 channels
    assert decoder_of(hybrid).memory_flops == 48 * (6 * 48 * 128 * 128 + 2 * 4 * 10_240)
    assert decoder_of(hybrid).layers == 16


def test_the_table_of_sizes_in_the_docs_is_the_count_of_weights():
    """Every checkpoint known without a network has a place in it, and no other."""
    lines = MODELS.read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[1:-1] for line in lines if re.match(r"\| Qwen\S+B[^|]*\| \d", line)]
    table = {f"Qwen/{name.strip()}": numbers for names, *numbers in rows for name in names.split(",")}
    assert set(table) == set(PUBLISHED)
    for name, (parameters, layers, width) in table.items():
        model = QwenConfig.from_hf(PUBLISHED[name])
        count = f"{parameter_count(model):,}", str(model.num_hidden_layers), str(model.hidden_size)
        assert count == (parameters.strip(), layers.strip(), width.strip()), name


def test_sizes_come_from_a_folder_first(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert architecture_fields(str(tmp_path))["hidden_size"] == 256
    assert architecture_fields("Qwen/Qwen3-8B")["intermediate_size"] == 12288
    with pytest.raises(CheckpointError, match="nowhere/nothing is not a folder here, not among the checkpoints"):
        architecture_fields("nowhere/nothing")


def test_what_a_plan_refuses_before_it_compiles(monkeypatch):
    monkeypatch.setattr(planning, "compile_apart", lambda *a, **k: pytest.fail("compiled"))
    settings = {"work": [("update", None)], "cache": "unused", "timeout": 1, "jobs": 1}
    with pytest.raises(ConfigError, match=r"no topology; give --topology v5e-16, or set plan.topology"):
        planning.topology_of(None)
    long = config("Qwen/Qwen2.5-Math-7B", rollout={"prompts": 8, "group_size": 4, "max_new": 4096})
    with pytest.raises(ConfigError, match=r"= 4224 tokens, more than the checkpoint's max_position_embeddings = 4096"):
        planning.plan("x", long, where=find_slice("v5e-4"), fields=PUBLISHED["Qwen/Qwen2.5-Math-7B"], **settings)
    with pytest.raises(ConfigError, match="--credit: unknown method oar_x; accepted: oar_p, oar_screened"):
        planning.methods_of("oar_p,oar_x")
    with pytest.raises(ConfigError, match="--phases: unknown program in 'train'; accepted: reshard, sample"):
        planning.phases_of("train", config())
    with pytest.raises(ConfigError, match="--phases: this run scores and updates in two passes"):
        planning.phases_of("fused", config(credit={"method": "oar_p"}))


def test_work_is_the_phases_and_further_methods():
    cfg = config()
    work = planning.work_of(cfg, planning.phases_of("update,score", cfg), ("oar_p", "oar_g"))
    assert work == [("score", None), ("score", "oar_p"), ("update", None)]
    assert with_method(cfg, "oar_p").credit.method == "oar_p"
    assert with_method(cfg, "keywords").credit.method == "uniform"


def test_a_run_that_scores_and_updates_in_one_pass_is_planned_so():
    one_pass, two = config(), config(credit={"method": "oar_p"})
    assert planning.phases_of("", one_pass) == ("reshard", "sample", "fused", "apply")
    assert planning.phases_of("", two) == ("reshard", "sample", "score", "update", "apply")
    assert planning.phases_of("", one_pass, experts=True) == planning.phases_of("", two)
    work = planning.work_of(one_pass, ("fused", "apply"), ("oar_f", "oar_p"))
    assert work == [("fused", None), ("score", "oar_f"), ("score", "oar_p"), ("apply", None)]
    assert planning.work_of(two, ("score", "update"), ("oar_g",)) == [
        ("score", None),
        ("score", "oar_g"),
        ("update", None),
    ]
    model = QwenConfig.from_hf(PUBLISHED["Qwen/Qwen2.5-7B"])
    score, update, fused = (model_flops(name, model, one_pass) for name in ("score", "update", "fused"))
    s = shapes_of(one_pass)
    clean = s.rows * clean_flops(decoder_of(model), RowTokens(s.prompt, s.completion))
    assert score + update - fused == pytest.approx(clean)  # the update's forward is the clean pass


def test_the_compilers_refusal_is_read():
    said = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (27.91G) exceeds "
        "available HBM (15.75G)."
    )
    found = too_large(said, 1.0)
    assert (found["needs"], found["has"]) == (27.91 * GIB, 15.75 * GIB)
    assert too_large("RESOURCE_EXHAUSTED: something else", 5.0)["needs"] is None


# --- With made-up answers of the compiler ----------------------------------------------------------------------------


def answer(tmp_path: Path, phase: str, *, peak: float = 3.0, text: str | None = LOOP, beside: float = 1.0) -> dict:
    key = f"{phase}-{peak}"
    program = {
        "name": "",
        "key": key,
        "steps": 1,
        "beside": beside * GIB,
        "seconds": 5.0,
        "cpu_seconds": 4.0,
        "cached": False,
    }
    found = {
        "resident": {"params": 1 * GIB, "optimizer": 2 * GIB, "gradients": 1 * GIB},
        "versions": {"jax": "1.2", "libtpu": "3.4"},
        "mesh": {"slice": 1, "data": 1, "expert": 1, "fsdp": 4, "tensor": 1},
        "ways": [[4, {"ring": 2, "every": 2, "hops": 2}]],
    }
    if text is None:
        program |= {"needs": peak * GIB, "has": 15.75 * GIB, "message": "RESOURCE_EXHAUSTED"}
    else:
        (tmp_path / f"{key}.hlo.gz").write_bytes(gzip.compress(text.replace("splash_mha_fwd.7", "other").encode()))
        program |= {"memory": {"peak": peak * GIB, "arguments": 0, "outputs": 0, "aliased": 0}}
    return found | {"programs": [program]}


def planned(tmp_path: Path, answers: list[dict], work: list[tuple[str, str | None]], **changes) -> dict:
    cfg = config(**changes)
    fields = dict(PUBLISHED["Qwen/Qwen2.5-7B"])
    return planning.document("configs/x.yaml", cfg, find_slice("v5e-4"), fields, work, answers, cache=tmp_path)


ALL = [("reshard", None), ("sample", None), ("fused", None), ("apply", None)]


@pytest.fixture
def no_kernels(monkeypatch):
    """The stored program's only kernel has a name of its own."""
    monkeypatch.setattr("oarjax.tools.plan.sums.kernel_flops", lambda name, operands, **_: 0.0)


def test_a_plan_that_fits(tmp_path, no_kernels):
    found = planned(tmp_path, [answer(tmp_path, p) for p, _ in ALL], ALL)
    assert found["fits"]
    assert found["chips"] == 4
    update, applied = found["phases"][-2:]
    assert update["executed"] == 5 * 2 * 32 * 16 * 64
    assert update["hbm"] == {"program": 3 * GIB, "beside": GIB, "total": 4 * GIB, "limit": 15.75 * GIB}
    sent = sum(update["sent"].values())
    assert update["seconds"]["links"] == pytest.approx(sent / 90e9)
    assert update["seconds_in_turn"] == pytest.approx(update["executed"] / 197e12 + sent / 90e9)
    assert found["step"]["executed"] == 4 * update["executed"]
    gathered, turns = sent / 5, 5  # a gather and a reduce-scatter of 4 devices in each of 5 turns
    assert update["links_expected"] == pytest.approx(turns * (gathered / (2 * 45e9 * 0.8) + 2 * 2 * 1e-6))
    assert found["step"]["seconds_expected"] == pytest.approx(sum(p["seconds_expected"] for p in found["phases"]))
    assert update["seconds_expected"] > update["seconds_in_turn"]
    assert found["needs"]["chip_hours"] == pytest.approx(100 * 4 * found["step"]["seconds_expected"] / 3600)
    assert applied["read"] == 2 * 4 * GIB  # params, moments and gradients: read, and written
    assert applied["seconds"]["memory"] == pytest.approx(8 * GIB / 819e9)
    assert applied["model"] == 0
    both = update["seconds_in_turn"] + applied["seconds_in_turn"]
    assert f"scores and update take {both:.1f} s with nothing overlapped" in headline(found)
    page = markdown([found])
    assert "| configs/x.yaml | 4 TPU v5e |" in page
    assert "jax 1.2, libtpu 3.4. **Not measured on a TPU.**" in page
    assert "| together, of 15.75 |" + 5 * " 4.00 |" in page
    names = [row[0] for row in rows_of(found)]
    plain, overlapped = (names.index(f"seconds at least, {how} overlapped") for how in ("nothing", "all"))
    assert plain < overlapped
    assert "8 prompts x 4 rollouts of 128 + 128 tokens" in describe(found)[0]


def test_what_does_not_fit_is_named_with_the_remedy(tmp_path, no_kernels):
    too_much = answer(tmp_path, "fused", peak=27.9, text=None)
    found = planned(tmp_path, [*(answer(tmp_path, p) for p in ("reshard", "sample")), too_much], ALL[:-1])
    assert not found["fits"]
    assert found["step"] is None
    assert found["remedies"] == [
        "fused: try a lower update.microbatch, a lower policy.head_chunk, update.fused=never, "
        "optim.moments=bfloat16, lora.rank=32, or more devices"
    ]
    assert ("HBM of the program, GiB per chip", "3.00", "3.00", "27.90") in rows_of(found)
    assert "NO" in markdown([found])


def test_a_program_that_fits_alone_and_not_beside_the_state(tmp_path, no_kernels):
    found = planned(tmp_path, [answer(tmp_path, "sample", peak=14.0, beside=3.0)], [("sample", None)])
    assert not found["fits"]
    assert "rollout.tensor" in found["remedies"][0]


def test_a_phase_needs_what_its_largest_program_does_and_does_what_those_with_steps_do(tmp_path, no_kernels):
    small, large = (answer(tmp_path, "sample", peak=peak) for peak in (3.0, 7.0))
    both = small | {"programs": [*small["programs"], large["programs"][0] | {"steps": 0}]}
    (one,), (two,) = (planned(tmp_path, [found], [("sample", None)])["phases"] for found in (small, both))
    assert one["hbm"]["total"] == 4 * GIB
    assert two["hbm"]["total"] == 8 * GIB
    assert one["executed"] == two["executed"] > 0
    assert two["compile_seconds"] == 2 * one["compile_seconds"]
    refused = answer(tmp_path, "sample", peak=20.0, text=None)["programs"][0]
    found = planned(tmp_path, [small | {"programs": [*small["programs"], refused]}], [("sample", None)])
    assert not found["fits"]


def test_a_plan_says_what_the_size_of_groups_saves(tmp_path, no_kernels):
    """A position of Qwen2.5-7B has 2 * 2 * 28 * 4 * 128 bytes of keys and values, and one row prefills 1/8 of eight."""
    found = planned(tmp_path, [answer(tmp_path, "sample")], [("sample", None)])
    s, (own, single) = found["shapes"], found["prompts"].values()
    assert own["bytes"] == 57344 * s["prompts"] * s["prompt"]
    assert single["bytes"] == 57344 * s["rows"] * s["prompt"]
    rest = own["flops"] / (1 - own["flops"])  # prefill over all else, which the size of groups does not change
    more = s["rows"] / s["prompts"] * rest
    assert single["flops"] == pytest.approx(more / (1 + more))
    (line,) = (line for line in describe(found) if line.startswith("Prompts, once per group of"))
    assert f"{single['flops']:.1%} of a step's model FLOPs" in line


def test_a_plan_says_what_turns_compute_again(tmp_path, no_kernels):
    """Turns 2 to 4 begin after 1/4, 2/4 and 3/4 of a row; rows are padded to a quarter, half or all of it."""
    assert times_again(4, 512) == {128: 1, 256: 1, 512: 1}
    assert times_again(2, 1024) == {256: 0, 512: 1, 1024: 0}
    assert planned(tmp_path, [answer(tmp_path, "sample")], [("sample", None)])["again"] is None
    rollout = {"prompts": 8, "group_size": 4, "max_new": 512, "environment": {"name": "builtin:guess", "turns": 4}}
    found = planned(tmp_path, [answer(tmp_path, "sample")], [("sample", None)], rollout=rollout)
    again, widths = found["again"], [128 + beyond for beyond in (128, 256, 512)]
    assert again["positions"] == 32 * sum(widths)
    d = decoder_of(QwenConfig.from_hf(dict(PUBLISHED["Qwen/Qwen2.5-7B"])))
    flops = 32 * sum(clean_flops(d, RowTokens(width, 0)) for width in widths)
    assert again["flops"] / (1 - again["flops"]) == pytest.approx(flops / found["phases"][0]["model"])
    assert any("40,960 positions an iteration" in line for line in describe(found))


def test_little_room_is_said(tmp_path, no_kernels):
    found = planned(tmp_path, [answer(tmp_path, "sample", peak=14.5)], [("sample", None)])
    assert found["notes"] == ["sample leaves less than 5% of HBM free, and the runtime wants some for itself."]


# --- The compiler itself ---------------------------------------------------------------------------------------------


@pytest.fixture
def libtpu():
    try:
        planning.compiler_version()
    except TopologyError:
        pytest.skip("libtpu is not installed (extra aot)")


@pytest.fixture
def command(libtpu, unchecked, monkeypatch):
    """Run the command in this process as a user does, which compiles in others: (exit code, output)."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["plan", *arguments])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, done.output

    return run


@pytest.mark.slow
def test_a_small_run_is_compiled_for_a_tpu(tmp_path, command):
    """Executed FLOPs are those of the formula, the state is updated in place, and OAR-P has a form for TPUs."""
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text(json.dumps(TINY))
    tree = config(str(tmp_path / "policy")).model_dump(mode="json")
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(tree))
    out, cache = tmp_path / "plan.json", str(tmp_path / "cache")
    settings = ("--json", str(out), "--cache", cache, "--phases", "sample,fused,apply", "--credit", "oar_p")
    code, said = command(str(tmp_path / "small.yaml"), *settings, "credit.masking.buckets=1")
    assert code == 0, said
    assert "does not fit" not in said
    (found,) = json.loads(out.read_text())
    sample, fused, masked, applied = found["phases"]
    assert applied["aliased"] >= 0.99 * (found["resident"]["params"] + found["resident"]["optimizer"])
    assert 0 < applied["seconds_together"] < fused["seconds_in_turn"]
    assert 0.9 < sample["share"] <= 1.05
    assert fused["executed"] * 4 == pytest.approx(found["expected_fused"], rel=0.03)
    assert fused["kernels"] > 0  # attention by Pallas
    assert fused["aliased"] >= 0.99 * found["resident"]["params"]  # the sums of gradients, which it adds to
    assert all(p["moved"] + p["passed"] > 0 for p in found["phases"])
    assert all(p["seconds_expected"] > p["seconds_together"] for p in found["phases"])
    assert masked["method"] == "oar_p"
    # The method asks for each suffix from its own token on; one bucket computes all of them from the first.
    row, sizes = RowTokens(128, 128, 128 - ANSWER), decoder_of(QwenConfig.from_hf(TINY))
    asked, done = (masked_flops(sizes, row, share=1.0, buckets=buckets) for buckets in (None, 1))
    assert 0.5 < masked["share"] * done / asked <= 1.05
    assert sample["hbm"]["total"] < fused["hbm"]["total"] < GIB


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "slices"), [("v5e-4", 2), ("v7x-8", 1)])
def test_eight_devices_are_compiled_for(topology, slices, tmp_path, command):
    """A row on each: the sum of the gradients goes over the network between two slices, or four chips have them all."""
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text(json.dumps(TINY))
    mesh = {"slice": slices, "data": 1, "fsdp": 8 // slices}
    tree = config(str(tmp_path / "policy"), mesh=mesh).model_dump(mode="json")
    (tmp_path / "slices.yaml").write_text(yaml.safe_dump(tree))
    out = tmp_path / "plan.json"
    settings = ("--json", str(out), "--cache", str(tmp_path / "cache"), "--phases", "update", "--topology", topology)
    code, said = command(str(tmp_path / "slices.yaml"), *settings)
    assert code == 0, said
    (found,) = json.loads(out.read_text())
    (update,) = found["phases"]
    assert update["chips"] == 8
    assert update["executed"] * 8 == pytest.approx(found["expected"], rel=0.03)
    assert update["kernels"] > 0
    assert update["aliased"] >= 0.99 * found["resident"]["params"]
    # A program's key is the same from any folder, and after lines of its source have moved.
    (program,) = (tmp_path / "cache").glob("*.hlo.gz")
    assert str(ROOT) not in gzip.decompress(program.read_bytes()).decode()


@pytest.mark.slow
def test_a_policy_that_is_too_large_is_told(tmp_path, command):
    (tmp_path / "large.yaml").write_text(yaml.safe_dump(config().model_dump(mode="json")))
    settings = ("--phases", "update", "--cache", str(tmp_path / "cache"))
    code, said = command(str(tmp_path / "large.yaml"), *settings)
    assert code == 1, said
    assert "NO" in said
    assert "does not fit: update: try a lower update.microbatch, a lower policy.head_chunk" in said
