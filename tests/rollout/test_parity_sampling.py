"""Greedy decoding live against transformers' generate (extra parity), and how tests/golden/sampling was made.

``python tests/rollout/test_parity_sampling.py tests/golden`` writes the golden files again, from the checkpoints in
tests/golden/policy: 4 left-padded prompts, 16 greedy tokens, their log-probs at temperature 1.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

KINDS = ["qwen2_tied", "qwen3_untied"]
NEW = 16


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed (extra parity)")


def prompts(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids i32[4, 12] and validity of prompts of 12, 7, 4 and 1 tokens."""
    valid = np.arange(12) >= 12 - np.array([12, 7, 4, 1])[:, None]
    ids = np.random.default_rng(seed).integers(0, 64, valid.shape, dtype=np.int32)
    return np.where(valid, ids, 0).astype(np.int32), valid


def generate(folder: Path, ids: np.ndarray, valid: np.ndarray, stop_ids: list[int] | None = None) -> dict:
    """transformers' greedy tokens (0 after a stop id), log-probs of them, and which rows stopped.

    Without stop ids, two are chosen that stop some rows and not all.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    batch = {"input_ids": torch.tensor(ids, dtype=torch.long), "attention_mask": torch.tensor(valid, dtype=torch.long)}

    def run(stops):
        return model.generate(
            **batch,
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=stops,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )

    if stop_ids is None:
        free = run([63_000]).sequences[:, ids.shape[1] :].numpy()  # an id that is never generated
        pairs = [[int(a), int(b)] for a in free[0, 4:] for b in free[1, 2:] if a != b]
        stop_ids = next(p for p in pairs if 0 < np.isin(free, p).any(1).sum() < len(ids))
    out = run(stop_ids)
    tokens = out.sequences[:, ids.shape[1] :].numpy().astype(np.int32)
    steps = torch.log_softmax(torch.stack(out.logits, 1), -1).numpy()
    logps = np.take_along_axis(steps, tokens[..., None].astype(np.int64), -1)[..., 0]
    stopped = np.isin(tokens, stop_ids)
    alive = np.cumsum(stopped, 1) - stopped == 0
    spare = NEW - tokens.shape[1]
    return {
        "ids": ids,
        "valid": valid,
        "stop_ids": np.array(stop_ids, np.int32),
        "tokens": np.pad(np.where(alive, tokens, 0), ((0, 0), (0, spare))),
        "logps": np.pad(np.where(alive, logps, 0), ((0, 0), (0, spare))).astype(np.float32),
        "ended": stopped.any(1),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_yarn", "qwen3_tied", "moe_delta_untied", "next_untied"])
def test_greedy_equals_generate(kind, torch, data):
    """What the kinds with golden tokens lack (YaRN, experts, delta nets), other prompts."""
    import jax
    import jax.numpy as jnp

    from oarjax.data.hf import load_params, read_config
    from oarjax.models.qwen import make_policy
    from oarjax.rollout.sampler import sample
    from oarjax.types import PromptBatch

    want = generate(data / "policy" / kind, *prompts(seed=11))
    cfg, folder = read_config(data / "policy" / kind)
    policy, params = make_policy(cfg, remat="none"), load_params(folder, cfg, dtype=jnp.float32)
    batch = PromptBatch(jnp.asarray(want["ids"]), jnp.asarray(want["valid"]), jnp.arange(4, dtype=jnp.int32))
    got = jax.jit(
        lambda params: sample(
            policy,
            params,
            batch,
            jax.random.key(0),
            group_size=1,
            max_new=NEW,
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            stop_ids=tuple(want["stop_ids"].tolist()),
            pad_id=0,
        )
    )(params)
    np.testing.assert_array_equal(got.tokens[:, 12:], want["tokens"])
    np.testing.assert_array_equal(got.ended, want["ended"])
    np.testing.assert_allclose(got.behaviour_logps, want["logps"], atol=1e-4)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    (root / "sampling").mkdir(exist_ok=True)
    for seed, kind in enumerate(KINDS):
        golden = generate(root / "policy" / kind, *prompts(seed))
        print(kind, golden["ended"], golden["tokens"].tolist())
        np.savez_compressed(root / "sampling" / f"{kind}.npz", **golden)
