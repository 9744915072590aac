"""Losses, gradients and advantages equal golden arrays made with TRL and with the published OAR loss.

TRL's three batches have right padding (0), masks with holes (1) and an empty row (2); each has 83 configurations.
Nothing here is looser than asked: float32 losses 1e-6 relative, gradients 1e-5 of the largest; float64 1e-12.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oarjax.credit.gate import reshape
from oarjax.rl.advantages import group_advantages
from oarjax.rl.loss import policy_loss
from oarjax.types import TrainBatch

TOLERANCE = {"f32": {"loss": 1e-6, "gradient": 1e-5}, "f64": {"loss": 1e-12, "gradient": 1e-12}}
DTYPE = {"f32": jnp.float32, "f64": jnp.float64}


@pytest.fixture(params=["f32", "f64"])
def precision(request):
    with jax.enable_x64(request.param == "f64"):
        yield request.param


def settings_of(config):
    """The keyword scalars of policy_loss for one of TRL's configurations."""
    cispo = config["loss_type"] == "cispo"
    return {
        "surrogate": "cispo" if cispo else "clip",
        "aggregation": "dapo" if cispo else config["loss_type"],
        "level": config["importance_sampling_level"],
        "clip_low": config["epsilon_low"],
        "clip_high": config["epsilon_high"],
        "ratio_cap": config["epsilon_high"],  # TRL has one field for both
        "dual_clip": config["delta"],
        "kl_beta": config["beta"],
        "max_length": config["max_completion_length"],
        "rows": "all",
    }


def value_and_gradient(logps, batch, **settings):
    def total(logps):
        mean, metrics = policy_loss(logps, jnp.zeros_like(logps), batch, **settings)
        return mean.total, (mean.count, metrics)

    (value, (count, metrics)), gradient = jax.value_and_grad(total, has_aux=True)(logps)
    return value, count, gradient, metrics


def make_batch(mask, advantages, old_logps, ref_logps):
    rows, tokens = mask.shape
    return TrainBatch(
        tokens=jnp.zeros((rows, tokens), jnp.int32),
        valid=mask,
        completion=mask,
        advantages=advantages,
        old_logps=old_logps,
        ref_logps=ref_logps,
        behaviour_logps=None,
    )


def test_trl_losses_and_gradients(data, precision):
    """Every configuration; the batches differ only in their arrays and counts, hence one vmap over them."""
    files = [data / "losses" / f"trl_batch{n}" for n in range(3)]
    meta = [json.loads(f.with_suffix(".json").read_text())["configs"] for f in files]
    golden = [np.load(f.with_suffix(".npz")) for f in files]

    def stacked(name):
        return jnp.asarray(np.stack([g[name] for g in golden]), DTYPE[precision])

    logps, old, ref, mask = stacked("logps"), stacked("old_logps"), stacked("ref_logps"), stacked("mask") > 0
    advantages = {
        "advantages": jnp.broadcast_to(stacked("advantages")[..., None], logps.shape),
        "advantages_token": stacked("advantages_token"),
    }
    for same in zip(*meta):
        config = same[0]

        def run(logps, mask, advantages, old, ref, config=config):
            batch = make_batch(mask, advantages, old if config["uses_old_logps"] else None, ref)
            return value_and_gradient(logps, batch, **settings_of(config))

        arguments = (logps, mask, advantages[config["advantages"]], old, ref)
        totals, counts, gradients, metrics = jax.tree.map(np.asarray, jax.vmap(run)(*arguments))
        for i, (theirs, arrays) in enumerate(zip(same, golden)):
            assert theirs["name"] == config["name"]
            # TRL divides dapo and cispo by the tokens of the whole optimizer step, of which this is one microbatch
            whole_step = theirs["loss_type"] in ("dapo", "cispo")
            count = theirs["num_items_in_batch"] if whole_step else counts[i]
            key, where = f"{theirs['name']}__{precision}", f"batch {i}, {theirs['name']}"
            loss, gradient = arrays[f"loss__{key}"], arrays[f"grad__{key}"]
            np.testing.assert_allclose(
                totals[i] / count, loss, rtol=TOLERANCE[precision]["loss"], err_msg=f"loss of {where}"
            )
            np.testing.assert_allclose(
                gradients[i] / count,
                gradient,
                rtol=0,
                atol=TOLERANCE[precision]["gradient"] * np.abs(gradient).max(),
                err_msg=f"gradient of {where}",
            )
            check_metrics(theirs, {name: float(m.value[i]) for name, m in metrics.items()}, where)


def check_metrics(config, ours, where):
    """Clip shares and KL as TRL logs them (per token; its sequence-level shares are over rows)."""
    logged = config["metrics"]
    if logged.get("kl") is not None:
        np.testing.assert_allclose(ours["kl"], logged["kl"], rtol=1e-5, err_msg=f"kl of {where}")
    if config["importance_sampling_level"] == "token" and config["loss_type"] != "cispo":
        pair = [ours["clip_low"], ours["clip_high"]]
        theirs = [logged["clip_ratio_low_mean"], logged["clip_ratio_high_mean"]]
        np.testing.assert_allclose(pair, theirs, atol=1e-6, err_msg=f"clip shares of {where}")


def test_copies_are_the_golden_files(data, shared):
    for copy in sorted((data / "losses").iterdir()):
        assert copy.read_bytes() == (shared / "fixtures" / "losses" / copy.name).read_bytes(), copy.name


@pytest.mark.parametrize("name", ["binary_G8", "real_G4", "nan_G5", "pair_G2"])
def test_group_advantages(data, name, precision):
    golden = np.load(data / "losses" / "group_advantages.npz")
    rewards, size = jnp.asarray(golden[f"rewards__{name}"], DTYPE[precision]), int(golden[f"group_size__{name}"])
    for scale in ("group", "batch", "none"):
        theirs = golden[f"advantages__{name}__{scale}__{precision}"]
        ours = group_advantages(rewards, group_size=size, scale=scale)
        tolerance = {"f32": 1e-6, "f64": 1e-12}[precision] * np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance, err_msg=scale)


@pytest.mark.parametrize("credit", ["oar", "plain"])
@pytest.mark.parametrize("ratio", ["old", "onpolicy"])
def test_published_oar_loss(data, credit, ratio, precision):
    """Weights laid from the first completion token, ones after, cut at T; clip .2 both ways; the rows' means."""
    golden = np.load(data / "losses" / "official_oar_loss.npz")

    def array(name):
        return jnp.asarray(golden[name], DTYPE[precision])

    logps, mask = array("logps"), array("mask") > 0
    weights = array("weights_padded")[:, : mask.shape[1]] if credit == "oar" else jnp.ones_like(logps)
    batch = make_batch(
        mask, reshape(array("advantages"), weights, mask), array("old_logps") if ratio == "old" else None, None
    )
    total, count, gradient, _ = value_and_gradient(
        logps, batch, aggregation="grpo", clip_low=0.2, clip_high=0.2, max_length=mask.shape[1], rows="all"
    )
    key = f"{credit}__{ratio}__{precision}"
    loss, slope = golden[f"loss__{key}"], golden[f"grad__{key}"]
    np.testing.assert_allclose(total / count, loss, rtol=TOLERANCE[precision]["loss"])
    np.testing.assert_allclose(
        gradient / count, slope, rtol=0, atol=TOLERANCE[precision]["gradient"] * np.abs(slope).max()
    )
