"""A study's config: what it comes to run by run, and every kind of mistake."""

import copy

import pytest
import yaml
from conftest import ROOT

from oarjax.config.loading import parse_config
from oarjax.errors import ConfigError
from oarjax.tools.study import config
from oarjax.tools.study.config import load_study, make_plan, merged, slug

BASE = {
    "run_dir": "unused",
    "iterations": 3,
    "device": "cpu",
    "policy": {"path": "p"},
    "data": {"train": {"source": "t.jsonl"}, "eval": {"source": "e.jsonl"}},
    "credit": {"gate": {"tau": 0.4}},
}
STUDY = {
    "run_dir": "runs/s",
    "base": BASE,
    "arms": {
        "GRPO": {"credit.method": "uniform"},
        "OAR-G": {"credit": {"method": "oar_g", "gate.boost": 2.0}},
        "half OAR-P": {"credit.method": "oar_p", "credit.gate": {"boost": 1.0}, "optim.lr": 1e-5},
    },
    "seeds": [0, 5],
    "against": ["GRPO"],
    "sweep": {"of": "OAR-G", "over": {"credit.gate.tau": [0.2, 0.4], "credit.gate.boost": [1.0, 2.0]}, "seeds": [5, 6]},
    "quick": {"seeds": [0], "base.iterations": 1, "sweep": None},
}


@pytest.fixture
def write(tmp_path):
    def put(**changes):
        path = tmp_path / "study.yaml"
        path.write_text(
            yaml.safe_dump(
                merged(STUDY, {k.replace("__", "."): v for k, v in changes.items()}, where=""), sort_keys=False
            )
        )
        return path

    return put


def test_arms_are_the_base_with_fields_changed(write):
    plan = make_plan(load_study(write(), ["run_dir=/x"]))
    assert list(plan.arms) == ["GRPO", "OAR-G", "half OAR-P"]
    half = plan.arms["half OAR-P"]
    assert [run.seed for run in half] == [0, 5]
    assert [run.config.run_dir for run in half] == ["/x/seed0/half-oar-p", "/x/seed5/half-oar-p"]
    assert [run.config.seed for run in half] == [0, 5]
    cfg = half[1].config
    assert (cfg.credit.method, cfg.credit.gate.boost, cfg.credit.gate.tau, cfg.optim.lr) == ("oar_p", 1.0, 0.4, 1e-5)
    assert cfg.iterations == 3
    assert plan.arms["GRPO"][0].config.optim.lr == 1e-6  # no arm's change reaches another
    assert str(half[1].home) == "/x/seed5"
    assert plan.starts[5].run_dir == "/x/seed5"


def test_every_set_of_changes_is_validated_once(write, monkeypatch):
    """Not once for every seed: validating a run takes 30 ms, and a study has hundreds."""
    sources = []
    monkeypatch.setattr(config, "parse_config", lambda tree, source: (sources.append(source), parse_config(tree))[1])
    plan = make_plan(load_study(write(seeds=list(range(9)))))
    cells = [f"sweep tau {tau}, boost {boost}" for tau in (0.2, 0.4) for boost in (1.0, 2.0)]
    assert sorted(sources) == sorted(["base", *(f"arms.{name}" for name in plan.arms), *cells])
    configs = [run.config for run in plan.runs]
    assert all(run == parse_config(run.model_dump()) for run in configs)
    assert len({(run.seed, run.run_dir) for run in configs}) == len(configs) == 3 * 9 + 4 * 2 - 2


def test_sweep_is_every_combination_and_shares_the_run_that_an_arm_has(write):
    plan = make_plan(load_study(write(), ["run_dir=/x"]))
    assert [cell.values for cell in plan.cells] == [(0.2, 1.0), (0.2, 2.0), (0.4, 1.0), (0.4, 2.0)]
    assert [run.seed for run in plan.cells[0].runs] == [5, 6]
    gates = [cell.runs[0].config.credit.gate for cell in plan.cells]
    assert [(g.tau, g.boost) for g in gates] == [(0.2, 1.0), (0.2, 2.0), (0.4, 1.0), (0.4, 2.0)]
    assert all(cell.runs[0].config.credit.method == "oar_g" for cell in plan.cells)
    folders = [run.config.run_dir for run in plan.cells[3].runs]
    assert folders == ["/x/seed5/oar-g", "/x/seed6/sweep/tau-0.4-boost-2.0"]  # tau .4, boost 2 is OAR-G itself
    assert sorted(plan.starts) == [0, 5, 6]
    # 3 arms x 2 seeds, 4 cells x 2 seeds, one in common; seed by seed, the sweep last
    assert len(plan.runs) == 13
    assert [run.seed for run in plan.runs] == [0] * 3 + [5] * 3 + [5] * 3 + [6] * 4


def test_quick_changes_what_it_says_and_has_a_folder_of_its_own(write):
    whole, quick = load_study(write()), load_study(write(), quick=True)
    assert (whole.run_dir, quick.run_dir) == ("runs/s", "runs/s-quick")
    assert (quick.seeds, quick.sweep) == ((0,), None)
    assert make_plan(quick).arms["GRPO"][0].config.iterations == 1
    assert make_plan(whole).arms["GRPO"][0].config.iterations == 3
    assert list(quick.arms) == list(whole.arms)
    with pytest.raises(ConfigError, match="has no section quick; leave --quick out, or add the section"):
        load_study(write(quick=None), quick=True)


def test_base_may_be_a_file_beside_the_study(write, tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(BASE))
    study = load_study(write(base="run.yaml"))
    assert study.base == BASE
    assert make_plan(study) == make_plan(load_study(write()))
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file"):
        load_study(write(base="none.yaml"))


def test_base_in_an_override_is_a_file_here_or_a_shipped_config(write, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here" / "mine.yaml").write_text(yaml.safe_dump(BASE | {"iterations": 7}))
    assert load_study(write(), ["base=mine.yaml"]).base["iterations"] == 7
    assert load_study("study_grpo", ["base=stories"]).base["run_dir"] == "runs/stories"
    changed = load_study(write(), ["base=mine.yaml", "base.optim.lr=1e-4"]).base
    assert (changed["iterations"], changed["optim"]["lr"]) == (7, 1e-4)


def test_a_study_needs_held_out_problems(write):
    with pytest.raises(ConfigError, match=r"base.data.eval: a study compares held-out pass@1; set data.eval"):
        make_plan(load_study(write(), ["base.data.eval=null"]))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seeds": []}, r"seeds: expected at least one seed, each once, got \[\]"),
        ({"seeds": [1, 1]}, r"seeds: expected at least one seed, each once, got \[1, 1\]"),
        ({"seed": 1}, r"seed: no such field \(did you mean seeds\?\); accepted: against, arms, base"),
        ({"sweep.off": "x"}, r"sweep.off: no such field \(did you mean of\?\); accepted: of, over, seeds"),
        ({"against": ["Grpo"]}, "against: no arm is called 'Grpo'; the arms are GRPO, OAR-G, half OAR-P"),
        ({"sweep.of": "OAR"}, "sweep.of: no arm is called 'OAR'"),
        ({"sweep": {"of": "GRPO", "over": None, "seeds": [0]}}, "sweep.over: .*dictionary"),
        ({"sweep.over": {"seed": []}}, "over: expected at least one value of seed, each once"),
        ({"sweep.over": {"optim.lr": [1.0, 1.0]}}, "over: expected at least one value of optim.lr, each once"),
        ({"primaries": [["OAR-G", "GRP"]]}, "primaries: no arm is called 'GRP'"),
        ({"choose": {"field": "optim.lr", "values": [1.0], "seeds": [7]}}, r"choose: values: expected at least two"),
        ({"choose": {"field": "optim.lr", "values": [1.0, 2.0], "seeds": [5]}}, r"expected other seeds.*\[5\] in both"),
        (
            {"choose": {"field": "optim.lr", "values": [1.0, 2.0], "seeds": [7]}},
            "arms.half OAR-P: sets optim.lr, which",
        ),
        ({"arms": {"grpo": {}}}, "arms.GRPO: expected a name with a unique folder name, got 'grpo'"),
        ({"arms": {"start": {}}}, "arms.start: expected a name with a unique folder name, got 'start'"),
        ({"arms": {"--": {}}}, "arms.--: expected a name with a unique folder name, got ''"),
    ],
)
def test_bad_studies(write, changes, says):
    with pytest.raises(ConfigError, match=says):
        load_study(write(**changes))


@pytest.mark.parametrize(
    ("arm", "says"),
    [
        ({"credit.metod": "x"}, r"arms.bad: 1 bad field\n  credit.metod: no such field \(did you mean method\?\)"),
        ({"rollout.temperature": 0.5}, "arms.bad: expected changes in advantage, .*, got rollout.temperature; "),
        ({"seed": 9, "iterations": 9}, "arms.bad: .*, got iterations; "),  # the study gives seeds
        ({"update.refills": 2}, "arms.bad: .*, got update.refills; .*same start, problems and sampling"),
        ({"data.eval.source": "other.jsonl"}, "arms.bad: .*, got data.eval; "),
        ({"credit.answer": {"style": "hash"}}, "arms.bad: .*, got credit.answer.style; .*set it in base"),
        ({"credit.method": "uniform"}, "arms.bad: is the same run as arms.GRPO; change one of its fields"),
        ({"iterations.x": 1}, r"arms.bad: 1 bad field\n  iterations: .*got {'x': 1}"),
    ],
)
def test_arms_that_would_not_be_comparable(write, arm, says):
    with pytest.raises(ConfigError, match=says):
        make_plan(load_study(write(arms={"bad": arm})))


def test_merging_leaves_its_arguments_alone():
    tree, changes = {"a": {"b": 1, "c": 2}}, {"a.b": 3, "a": {"d.e": 4}}
    before = copy.deepcopy((tree, changes))
    assert merged(tree, changes, where="x") == {"a": {"b": 3, "c": 2, "d": {"e": 4}}}
    assert (tree, changes) == before
    with pytest.raises(ConfigError, match=r"arms\.b: a\.b: a is a value and has no field b"):
        merged({"a": 1}, {"a.b": 1}, where="arms.b")
    assert merged({"a": None}, {"a.b": 1}, where="x") == {"a": {"b": 1}}
    assert merged({"a": {"b": 1}}, {"a": None}, where="x") == {"a": None}


def test_slugs():
    assert [slug(s) for s in ("OAR-G", "screened OAR-P", "tau 0.4, boost 2.0", "../x")] == [
        "oar-g",
        "screened-oar-p",
        "tau-0.4-boost-2.0",
        "x",
    ]


def test_the_shipped_study_compares_what_it_says():
    study = load_study(ROOT / "configs" / "study_demo.yaml")
    plan = make_plan(study)
    methods = {name: runs[0].config.credit.method for name, runs in plan.arms.items()}
    assert methods["GRPO"] == "uniform"
    assert set(methods.values()) == {"uniform", "oar_g", "oar_p", "oar_f", "oar_screened", "entropy", "permuted"}
    assert len(study.seeds) >= 8
    assert study.against == ("GRPO", "permuted OAR-G")
    assert len(plan.cells) == 18
    assert len(plan.runs) == 7 * 8 + 18 * 3 - 3  # tau .4, boost 2 is OAR-G's own
    assert study.run_dir == "runs/study-demo"
    assert len(make_plan(load_study(ROOT / "configs" / "study_demo.yaml", quick=True)).runs) == 7 * 3
