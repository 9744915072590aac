"""What notebooks show, and the commands as functions for them."""

import io
import math

import pytest
from conftest import CACHE
from hostile_page import EVIL, Reader, completion, runs

import oarjax
from oarjax import notebook
from oarjax.config.loading import parse_config
from oarjax.data.problems import load_problems
from oarjax.errors import ConfigError
from oarjax.notebook import show_completions, show_credit, show_curves, show_lab, show_lab_figure, show_tokens
from oarjax.report.files import CompletionsWriter, MetricsWriter, read_metrics
from oarjax.stats import Interval
from oarjax.storage.stop import Stopped
from oarjax.tools.lab.results import LabCompletion, LabResult, MethodResult

UNDEFINED = Interval(math.nan, math.nan, math.nan, 0)


def lab(**changes) -> LabResult:
    figures = {"spearman": Interval(0.5, 0.4, 0.6, 3), "forwards": Interval(2.0, 2.0, 2.0, 1)}
    figures |= {"recall_exact": Interval(0.7, 0.6, 0.8, 3)}
    completions = [
        LabCompletion(
            prompt="1+1=", answer="2", reference="2", reward=1.0, tokens=["1+1", "=2;", "#### ", "2"],
            is_reasoning=[True, True, False, False], is_answer=[False, False, False, True], direct=[False] * 4,
            total=[False] * 4, known=[], wrong=[], scores={"OAR-P": [0.0, 1.0, 0.0, 0.0], "GRPO": [1.0] * 4},
            weights={"OAR-P": [0.1, 1.9, 1.0, 1.0], "GRPO": [1.0] * 4},
        )
    ]  # fmt: skip
    fields = {
        "title": "demo",
        "facts": {},
        "share": 0.1,
        "interval": "95% intervals",
        "oracles": {},
        "best": {},
        "methods": [MethodResult("OAR-P", {}, figures), MethodResult("GRPO", {}, {"spearman": UNDEFINED})],
        "completions": completions,
    }
    return LabResult(**(fields | changes))


def test_curves_of_folders_and_of_records(tmp_path):
    with MetricsWriter(tmp_path / "run") as writer:
        writer.write(1, {"reward": 0.25})
        writer.write(2, {"reward": 0.75})
    shown = show_curves({"mine": [{"iteration": 1, "reward": 0.5}], "theirs": tmp_path / "run"})
    read = Reader(shown._repr_html_())
    assert read.tags.count("figure") == 1
    assert "theirs, iteration 2: 0.750" in read.text
    assert ("path", "class", "c1 d0 line") in read.attributes
    assert "Shown" in repr(shown)


def test_chosen_curves_come_in_their_order():
    chosen = show_curves({"a": [{"iteration": 1, "reward": 0.5, "length": 9.0}]}, metrics=("length", "reward"))
    assert chosen.html.index("mean length") < chosen.html.index("mean reward")
    with pytest.raises(ValueError, match=r"expected metrics among reward, pass_at_1, length.*, got rewards"):
        show_curves(runs(), metrics=("rewards",))


def test_nothing_yet_is_said():
    assert "No iteration has been finished yet." in show_curves({}).html
    assert "No completion has been saved yet." in show_completions([]).html


def test_completions_of_a_run_are_coloured(tmp_path):
    with CompletionsWriter(tmp_path / "completions.jsonl") as writer:
        writer.write(1, [completion()])
    read = Reader(show_completions(tmp_path).html)
    styles = [value for _, name, value in read.attributes if name == "style"]
    assert "background: rgb(var(--boost) / 0.28)" in styles
    assert "1+1=2↵\n#### 2" in read.text


def test_tokens_once_for_each_set_of_weights():
    shown = show_tokens(["a", "b"], {"first": [0.0, 2.0], "second": [1.0, 1.0]}, answer=[False, True], title="ab?")
    read = Reader(shown.html)
    assert [value for _, name, value in read.attributes if name == "data-tip"] == [
        "weight 0.000", "weight 2.000, answer", "weight 1.000", "weight 1.000, answer",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="one entry per token in each field"):
        show_tokens(["a", "b"], {"short": [1.0]})


def test_credit_by_method_and_its_tables():
    read = Reader(show_credit(lab()).html)
    assert read.text.index("OAR-P") < read.text.index("GRPO")
    assert "OAR-P" not in Reader(show_credit(lab(), methods=("GRPO",)).html).text
    with pytest.raises(ValueError, match=r"expected methods among OAR-P, GRPO.*, got OAR-Q"):
        show_credit(lab(), methods=("OAR-Q",))
    table = Reader(show_lab(lab()).html)
    assert "0.50 ±.10" in table.text
    assert "95% intervals." in table.text
    assert "data:image/png;base64,iVBOR" in show_lab_figure(lab()).html


@pytest.mark.parametrize(
    "shown",
    [
        lambda: show_completions([(1, completion(prompt=EVIL, tokens=[EVIL] * 4))]),
        lambda: show_tokens([EVIL], {EVIL: [2.0]}, title=EVIL),
        lambda: show_curves({EVIL: runs()["GRPO"], "other": runs()["GRPO"]}),
        lambda: show_lab(lab(methods=[MethodResult(EVIL, {}, {"spearman": Interval(0.5, 0.4, 0.6, 3)})])),
    ],
)
def test_what_models_write_is_shown_and_not_obeyed(shown):
    read = Reader(shown().html)
    assert not {"script", "img"} & set(read.tags)
    assert not [name for _, name, _ in read.attributes if name.startswith("on")]
    assert "<U+202E>" in read.text or "<U+202E>" in str(read.attributes)


def test_styles_end_at_their_own_edge():
    css = show_curves(runs()).html.split("<style>")[1].split("</style>")[0]
    selectors = [part.strip() for rule in css.split("}") for part in rule.split("{")[0].split(",")]
    assert all(s.startswith(".oarjax") for s in selectors if s)


# Commands


def config(tmp_path):
    data = {"train": {"source": "builtin:arithmetic"}}
    return parse_config({"run_dir": str(tmp_path / "run"), "policy": {"path": "builtin:arithmetic"}, "data": data})


@pytest.mark.parametrize("name", ["train", "credit_lab", "open_run"])
def test_a_path_is_not_a_config(name, unchecked):
    with pytest.raises(ValueError, match=f"{name}: expected a Config, got 'sums"):
        getattr(oarjax, name)("sums.yaml")


def test_an_interrupted_run_says_how_to_go_on(tmp_path, monkeypatch):
    def stopped(*_, **__):
        raise Stopped

    monkeypatch.setattr(notebook, "train_once", stopped)
    with pytest.raises(KeyboardInterrupt, match="run is saved; run this again to resume it"):
        oarjax.train(config(tmp_path))


def test_the_metrics_so_far_are_watched(tmp_path, monkeypatch):
    def trained(cfg, console, stop, seen, **_):
        with MetricsWriter(tmp_path / "run") as writer:
            for n in (1, 2):
                writer.write(n, {"reward": n / 2})
                seen()

    monkeypatch.setattr(notebook, "train_once", trained)
    watched = []
    folder = oarjax.train(config(tmp_path), watch=lambda records: watched.append([r["reward"] for r in records]))
    assert folder == tmp_path / "run"
    assert watched == [[0.5], [0.5, 1.0], [0.5, 1.0]]


@pytest.mark.parametrize("section", [{}, {"eval": {"source": "other.csv", "answer_field": "answer"}}])
def test_rows_of_the_notebook_take_the_place_of_a_file(tmp_path, monkeypatch, section):
    read = []

    def trained(cfg, *_, **__):
        read.append([[p.prompt for p in load_problems(part)] for part in (cfg.data.train, cfg.data.eval)])

    monkeypatch.setattr(notebook, "train_once", trained)
    rows = [{"ask": f"{n}+1=", "answer": n + 1} for n in range(3)]
    data = {"train": {"source": "missing.csv", "prompt_field": "ask"}} | section
    cfg = parse_config({"run_dir": str(tmp_path), "policy": {"path": "builtin:arithmetic"}, "data": data})
    oarjax.train(cfg, data=rows, eval_data=rows[:1])
    assert read == [[["0+1=", "1+1=", "2+1="], ["0+1="]]]


@pytest.mark.slow
def test_functions_and_rows_of_the_notebook_train(tmp_path):
    """A function as it stands, with a weight, beside a reward by name; columns of the rows reach it."""
    seen = []
    rows = [{"question": f"{n}+1=", "answer": f"#### {n + 1}"} for n in range(4)]

    def brief(sample: oarjax.Sample) -> float:
        seen.append(sample.columns["question"] == sample.prompt)
        return float(sample.tokens < 3)

    tree = config(tmp_path).model_dump(mode="json")
    tree["data"] |= {"template": "plain", "max_prompt": 32}
    tree["rollout"] |= {"prompts": 2, "group_size": 2, "max_new": 4, "prompt_bucket": 16, "completion_bucket": 4}
    tree["credit"] |= {"method": "uniform", "answer": {"style": "hash"}}
    tree |= {"iterations": 1, "compilation_cache": str(CACHE), "export": {"folder": None}, "report": {"html": False}}
    tree["update"]["microbatch"], tree["grading"]["workers"] = 4, 1
    cfg = parse_config(tree)
    folder = oarjax.train(cfg, data=rows, rewards=[(brief, 0.5), "exact"])
    (record,) = read_metrics(folder / "metrics.jsonl")
    assert seen == [True] * 6  # four completions, and the two of the trial before training
    assert record["reward"] == pytest.approx(0.5 * record["reward/brief"] + record["reward/exact"])
    assert oarjax.train(cfg, data=tuple(rows), rewards=[(brief, 0.5), "exact"]) == folder  # finished: nothing to do
    with pytest.raises(
        ConfigError, match=r"was trained from other inputs \(rows/data.train was \w+, is \w+\); restore"
    ):
        oarjax.train(cfg, data=rows[:3], rewards=[(brief, 0.5), "exact"])


def test_warnings_alone_are_printed():
    from oarjax.report.console import OnceWarnings, banner

    console = notebook._WarningsOnly()
    console.file = io.StringIO()
    banner(console, {"device": "cpu"})
    console.rule("seed 0")
    OnceWarnings(console).say("x", "the policy writes too much")
    assert console.file.getvalue() == "warning: the policy writes too much\n"


@pytest.mark.slow
def test_the_parts_of_a_run_fit_together(tmp_path):
    tree = config(tmp_path).model_dump(mode="json")
    tree["data"]["train"] |= {"limit": 8}
    tree["data"] |= {"template": "plain"}
    tree["data"] |= {"max_prompt": 32}
    tree["rollout"] |= {"prompts": 2, "group_size": 2, "max_new": 4, "prompt_bucket": 16}
    tree["credit"]["answer"]["style"] = "hash"
    tree["update"]["microbatch"] = 4
    run = oarjax.open_run(parse_config(tree))
    prompts, problems = next(run.prompts())
    assert [p.index for p in problems] == prompts.problem.tolist()
    import jax

    rollout = oarjax.sample(
        run.policy, run.load(), prompts, jax.random.key(0), group_size=2, max_new=4, temperature=1.0, top_k=0,
        top_p=1.0, stop_ids=run.stop_ids, pad_id=run.pad_id,
    )  # fmt: skip
    texts, tokens = run.texts(rollout), run.tokens(rollout)
    assert texts == ["".join(row) for row in tokens]
    assert [len(row) for row in tokens] == rollout.completion.sum(1).tolist()
    assert run.find_answers(rollout).reasoning.shape == (4, 4)
