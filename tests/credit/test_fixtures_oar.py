"""OAR-P and noisy OAR-G against the published code's golden scores, float64 and float32, and the weights from them."""

import json
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oar_rows import noise_importance

from oarjax.credit.diagnose import spearman
from oarjax.credit.gate import oar_weights
from oarjax.credit.oar.oar_p import masked_token_importance
from oarjax.credit.probe import outcome_probe
from oarjax.data.hf import load_params, read_config
from oarjax.models.qwen import make_policy
from oarjax.types import AnswerSpan

DATA = Path(__file__).parents[1] / "golden" / "oar"
STDS = ("std1e-3", "std1e-2")
MODES = ("last", "last_after_answer", "answer_mean", "answer_joint", "answer_joint_sum")

# Largest error over the largest score. Float64 agrees to rounding (measured: below 5e-13). Float32: 1e-5 for OAR-P and
# for the joint mode at sigma 1e-2. Looser, and why: noisy OAR-G differences two nearly equal distributions; its
# gradient is p_noisy - p_clean, of order sigma, so logits' rounding of 1e-6 weighs 1 / sigma times more. What comes out
# is a draw from that rounding: the same scores (case 4, sigma 1e-2, answer_mean) from batches of 1, 2, 3 or 8 equal
# rows, with or without padding, compiled with or without optimisation, are off by 4e-6 to 3.3e-5 over 16 such
# programs. The published code's own float32 scores are 1.3e-4 off where ours are 1.4e-4, and 3.7e-5 at most at 1e-2.
F32 = {
    "P": 1e-5,
    "G_std1e-2__last": 5e-5,
    "G_std1e-2__last_after_answer": 5e-5,
    "G_std1e-2__answer_mean": 5e-5,
    "G_std1e-2__answer_joint": 1e-5,
    "G_std1e-2__answer_joint_sum": 1e-5,
    "G_std1e-3__last": 3e-4,
    "G_std1e-3__last_after_answer": 3e-4,
    "G_std1e-3__answer_mean": 3e-4,
    "G_std1e-3__answer_joint": 3e-5,
    "G_std1e-3__answer_joint_sum": 3e-5,
}


def tolerance(name: str, dtype: str) -> float:
    return 1e-11 if dtype == "float64" else F32["P" if name.startswith("P") else name]


def golden(folder: Path):
    arrays = np.load(folder / "arrays.npz")
    return arrays, [int(x) for x in arrays["segment_bounds"]]


@cache
def scores(folder: Path, dtype: str) -> dict[str, np.ndarray]:
    """All scores of a case by their golden names, from one compiled program."""
    arrays, (_, start, conclude, answer, end) = golden(folder)
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
        cfg, path = read_config(folder / "model")
        params = load_params(path, cfg, dtype=dtype)
        policy = make_policy(cfg, compute_dtype=dtype, remat="none")
        # One token more than the sequence: "after the answer" is where that one would be predicted.
        tokens = jnp.asarray(np.append(arrays["ids_full"], 0))[None]
        valid = jnp.ones(tokens.shape, bool)
        at = jnp.arange(start, end + 1)[None]
        answers = jnp.stack([(at >= answer) & (at < end), at == end])
        noise = np.zeros((2, 1, end + 1 - start, cfg.hidden_size), dtype)
        for i, std in enumerate(STDS):
            noise[i, 0, : conclude - start] = arrays[f"noise__{std}"]

        def span(mask):
            return AnswerSpan(at < conclude, mask, jnp.ones(1, bool))

        def masked(params, mask, mode):
            return masked_token_importance(
                policy,
                params,
                tokens,
                valid,
                span(mask),
                probe=outcome_probe(mode, temperature=1.0),
                mask_id=int(arrays["pad_id"]),
                chunk=8,
                buckets=3,
            )

        def noisy(params, mask, noise, mode):
            return noise_importance(
                policy, params, tokens, valid, span(mask), noise, estimator="noisy", mode=mode, temperature=1.0
            )

        def everything(params, noise, answers):
            found = {}
            for mode, masks in (("last", answers), ("answer_mean", answers[:1]), ("answer_joint", answers[:1])):
                by_masking = jax.lax.map(lambda m, mode=mode: masked(params, m, mode), masks)
                pairs = (jnp.repeat(masks, 2, axis=0), jnp.tile(noise, (len(masks), 1, 1, 1)))
                by_noise = jax.lax.map(lambda x, mode=mode: noisy(params, *x, mode), pairs)
                for i, name in enumerate((mode, "last_after_answer")[: len(masks)]):
                    found[f"P__{name}"] = by_masking[i]
                    found |= {f"G_{std}__{name}": by_noise[2 * i + j] for j, std in enumerate(STDS)}
            return found

        quickly = {"xla_backend_optimization_level": "0"}  # compiling costs far more than running
        found = jax.jit(everything, compiler_options=quickly)(params, jnp.asarray(noise), answers)
    found = {name: np.asarray(s) for name, s in found.items()}
    assert all((s[:, conclude - start :] == 0).all() for s in found.values()), "scores outside the reasoning"
    found = {name: s[0, : conclude - start] for name, s in found.items()}
    joint = {name: s for name, s in found.items() if name.endswith("joint")}
    return found | {f"{name}_sum": s * (end - answer) for name, s in joint.items()}


def check_scores(folder: Path, dtype: str):
    arrays, _ = golden(folder)
    found = scores(folder, dtype)
    assert {n.split("__", 1)[1] for n in found} == set(MODES)
    for name, score in found.items():
        truth = arrays[f"scores__{name}__f64"]
        error = np.abs(score - truth).max() / np.abs(truth).max()
        assert error < tolerance(name, dtype), f"{name} {dtype}: error {error:.1e} of the largest score"


def check_weights(folder: Path, dtype: str):
    """From tokens and parameters to the golden weights: probe, score, normalise, gate, mass."""
    arrays, _ = golden(folder)
    settings = json.loads((folder / "case.json").read_text())["weight_settings"]
    for name, score in scores(folder, dtype).items():
        truth = arrays[f"weights__{name}__f64"]
        if np.isnan(truth).any():
            continue  # a signed score below -1; the gate's own tests say what we do
        # Weights answer to errors of the scores through min-max and the gate: their slope is at most
        # boost / (1 - c) or 1 / c in h, then the mass. 100 covers the steepest of these cases.
        allowed = 100 * tolerance(name, dtype) + 1e-8  # published: + 1e-8 in the mass
        with jax.enable_x64(dtype == "float64"):
            rows = jnp.asarray(score)[None], jnp.ones((1, len(score)), bool)
            for setting, expected in zip(settings, truth, strict=True):
                weights = oar_weights(
                    *rows,
                    tau=setting["tau"],
                    boost=setting["beta"],
                    mass="kept" if setting["sum_to_L"] else "free",
                    signs="signed",
                )
                error = np.abs(np.asarray(weights[0]) - expected).max()
                assert error < allowed, f"{name} {dtype} {setting}: weights off by {error:.1e}"


ALWAYS = [(0, "float64")]
"""Compiling is all that these cost; the other pairs are slow tests."""


@pytest.mark.parametrize(("case", "dtype"), ALWAYS)
def test_scores_and_weights_equal_the_published_ones(case, dtype):
    check_scores(DATA / f"case{case}", dtype)
    check_weights(DATA / f"case{case}", dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, "float64") for case in range(1, 6)), (4, "float32")],
)
def test_the_other_cases(case, dtype, request):
    folder = DATA / f"case{case}"
    if not folder.exists():
        folder = request.getfixturevalue("shared") / "fixtures" / "oar" / f"case{case}"
    check_scores(folder, dtype)
    check_weights(folder, dtype)


def rounding(folder: Path, estimator: str) -> tuple[float, float, int]:
    """bfloat16 matmul operands against float64, 32 draws at sigma 1e-3: median error, Spearman, tokens."""
    arrays, (_, start, conclude, answer, end) = golden(folder)
    cfg, path = read_config(folder / "model")
    tokens = jnp.asarray(arrays["ids_full"])[None]
    at, n = jnp.arange(start, end)[None], conclude - start
    span = AnswerSpan(at < conclude, at >= answer, jnp.ones(1, bool))
    noise = 1e-3 * np.random.default_rng(0).standard_normal((32, 1, end - start, cfg.hidden_size))
    found = {}
    for compute, dtype in (("float64", "float64"), ("bfloat16", "float32")):
        params = load_params(path, cfg, dtype=dtype)
        policy = make_policy(cfg, compute_dtype=compute, remat="none")

        def one(noise, params=params, policy=policy):
            valid = jnp.ones(tokens.shape, bool)
            return noise_importance(
                policy, params, tokens, valid, span, noise, estimator=estimator, mode="answer_mean", temperature=1.0
            )[0, :n]

        found[compute] = jax.jit(jax.vmap(one))(jnp.asarray(noise, dtype))
    truth, rounded = found["float64"], found["bfloat16"].astype(jnp.float64)
    error = jnp.median(jnp.median(jnp.abs(rounded - truth) / truth, axis=1))
    agreement = jnp.median(spearman(truth, rounded, jnp.ones(truth.shape, bool)))
    return float(error), float(agreement), n


@pytest.mark.slow
@pytest.mark.parametrize("case", range(6))
def test_linearised_survives_bfloat16(case, x64, highest_precision, request):
    """Measured: errors 3.0% to 6.0% with answer_mean, Spearman .990 or more; docs/numerics.md says what rounds."""
    folder = DATA / f"case{case}"
    if not folder.exists():
        folder = request.getfixturevalue("shared") / "fixtures" / "oar" / f"case{case}"
    error, agreement, tokens = rounding(folder, "linearised")
    assert error < (0.065 if case == 3 else 0.05)  # 5% for all six while q, k, v, gate and up were float32
    assert agreement > 0.98 or tokens < 20


@pytest.mark.slow
def test_noisy_does_not_survive_bfloat16(x64, highest_precision):
    """Case 4: measured 239% and .65."""
    error, agreement, _ = rounding(DATA / "case4", "noisy")
    assert error > 0.3
    assert agreement < 0.9
