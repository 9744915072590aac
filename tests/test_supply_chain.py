"""What the package never does: run text, open a pickle, trust a folder's code, or fetch what was not asked for."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "oarjax"
FILES = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}

MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "code", "codeop"}
"""That turn bytes or text into objects or code."""
CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
METHODS = {"sympify", "parse_expr", "lambdify", "eval_expr", "literal_eval", "loads_pickle", "fromstring", "fromfile"}
LOADERS = {("torch", "load"), ("yaml", "load"), ("yaml", "load_all"), ("yaml", "unsafe_load"), ("yaml", "full_load")}
LOADERS |= {("jax", "pure_callback"), ("joblib", "load"), ("np", "fromfile"), ("jnp", "fromfile")}
ALLOWED = {("grading/no_eval.py", "builtins.compile"), ("grading/sandbox_child.py", "compile")}
ALLOWED |= {("grading/sandbox_child.py", "exec")}
ALLOWED |= {("grading/crossing.py", name) for name in ("compile", "exec", "__import__")}
"""Of what lambdify wrote, after it was found to be arithmetic; of programs to grade, in a process locked in first."""


def calls(tree):
    """(written name of the callee, node) of every call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield ast.unparse(node.func), node


def offences(name: str, tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(a.name for a in node.names)]
        found += [f"imports {m}" for m in modules if m.split(".")[0] in MODULES | METHODS | CALLS]
    for callee, node in calls(tree):
        owner, _, last = callee.rpartition(".")
        keywords = {k.arg: k.value for k in node.keywords}
        bad = (last in CALLS and owner in ("", "builtins")) or last in METHODS or (owner, last) in LOADERS
        for flag in ("allow_pickle", "trust_remote_code", "weights_only"):
            value = keywords.get(flag)
            bad |= value is not None and not (
                isinstance(value, ast.Constant) and value.value is (flag == "weights_only")
            )
        if bad and (name, callee) not in ALLOWED:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("name", FILES)
def test_no_text_becomes_code_and_no_pickle_is_opened(name):
    assert offences(name, FILES[name]) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import torch; torch.load('x')",
        "import numpy as np; np.load('x', allow_pickle=True)",
        "eval('1')",
        "exec(text)",
        "sympy.sympify(text)",
        "from sympy import sympify",
        "from sympy.parsing.sympy_parser import parse_expr",
        "sympy.lambdify(x, y)",
        "yaml.load(text, Loader=yaml.Loader)",
        "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=flag)",
        "torch.load(x, weights_only=False)",
    ],
)
def test_the_check_sees(line):
    assert offences("x.py", ast.parse(line))


def test_transformers_runs_no_code_of_a_folder():
    """Where the class is chosen by what a folder says, remote code is refused in so many words."""
    seen = []
    for name, tree in FILES.items():
        for callee, node in calls(tree):
            if callee.startswith("Auto") and callee.endswith(".from_pretrained"):
                values = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert values.get("trust_remote_code") == "False", f"{name} line {node.lineno}: {callee}"
                seen.append(callee)
    assert "AutoTokenizer.from_pretrained" in seen


def test_every_download_takes_a_revision():
    seen = set()
    for name, tree in FILES.items():
        for callee, node in calls(tree):
            last = callee.rpartition(".")[2]
            if last in ("hf_hub_download", "snapshot_download", "load_dataset"):
                keywords = {k.arg for k in node.keywords}
                assert "revision" in keywords, f"{name} line {node.lineno}: {callee}"
                if last == "snapshot_download":
                    assert "allow_patterns" in keywords, f"{name} line {node.lineno}: no pickles are to be fetched"
                seen.add(last)
    assert seen == {"hf_hub_download", "snapshot_download", "load_dataset"}


def test_a_policy_is_one_commit_of_what_was_asked_for(data, tmp_path, monkeypatch):
    """config.json by the revision given, the rest by the commit that this named; no pickle is asked for."""
    import shutil

    from oarjax.data import hf

    commit = shutil.copytree(data / "policy" / "qwen2_tied", tmp_path / "snapshots" / ("c0ffee" * 7)[:40])
    asked = []

    def download(name, file, *, revision):
        asked.append((name, file, revision))
        return str(commit / file)

    def snapshot(name, *, revision, allow_patterns):
        asked.append((name, tuple(allow_patterns), revision))
        return str(commit)

    monkeypatch.setattr(hf, "hf_hub_download", download)
    monkeypatch.setattr(hf, "snapshot_download", snapshot)
    _, folder = hf.read_config("some/policy", revision="v1.0")
    assert folder == commit
    (_, first, given), (_, patterns, pinned) = asked
    assert (first, given) == ("config.json", "v1.0")
    assert pinned == commit.name
    assert not [p for p in patterns if p.endswith((".bin", ".pt", ".pth", ".pkl", ".py")) or p in ("*", "*.*")]
    asked.clear()
    hf.read_tokenizer_folder("some/tokenizer", revision="abc")
    assert [revision for _, _, revision in asked] == ["abc"]
