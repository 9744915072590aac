"""An engine over HTTP for tests: vLLM's token endpoint and its way to new weights, with a tiny policy behind them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from judge_server import Answering, serving

from oarjax.data.hf import load_params, read_config
from oarjax.models.policy import positions_of
from oarjax.models.qwen import make_policy

WIDTH = 64


class Engine(Answering):
    """Draws token by token, and reloads on request; ``kept`` of its server names tensors that it then keeps."""

    server: Any

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = self.path.split("?")[0]
        with self.server.lock:
            self.server.paths.append(path)
            refused = self.server.refuse(self.server.paths)
            if path == "/collective_rpc" and not refused:
                assert asked["method"] == "reload_weights"
                self.reload(Path(asked["kwargs"]["weights_path"]))
            answer = self.draw(asked) if path == "/inference/v1/generate" and not refused else {}
        self.send_error(refused) if refused else self.answer(json.dumps(answer).encode())

    def reload(self, folder: Path) -> None:
        server = self.server
        new = load_params(folder, read_config(folder)[0])
        if server.params is not None:
            old = dict(jax.tree_util.tree_leaves_with_path(server.params))
            new = jax.tree_util.tree_map_with_path(
                lambda path, x: old[path] if name_of(path) in server.kept or "*" in server.kept else x, new
            )
        server.params = new

    def draw(self, asked: dict[str, Any]) -> dict[str, Any]:
        server, how = self.server, asked["sampling_params"]
        ids, entries = list(asked["token_ids"]), []
        noise = server.noise or np.random.default_rng([int(n) for n in asked["request_id"].split("-")])
        assert len(ids) + how["max_tokens"] <= WIDTH
        for _ in range(how["max_tokens"]):
            row, valid = np.zeros((1, WIDTH), np.int32), np.zeros((1, WIDTH), bool)
            row[0, : len(ids)], valid[0, : len(ids)] = ids, True
            logits = np.asarray(server.logits(server.params, row, valid)[len(ids) - 1], np.float64)
            logits = logits / (how["temperature"] or 1.0)
            logps = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            if how["temperature"] == 0 or how["top_k"] == 1:
                token = int(logps.argmax())
            else:
                token = int(noise.choice(len(logps), p=np.exp(logps)))
            entries.append({"token_id": token, "logprob": 0.0 if how["top_k"] == 1 else float(logps[token])})
            ids.append(token)
            if token in how["stop_token_ids"]:
                break
        drawn = [entry["token_id"] for entry in entries]
        finish = "stop" if drawn[-1] in how["stop_token_ids"] else "length"
        choice = {"index": 0, "token_ids": drawn, "logprobs": {"content": entries}, "finish_reason": finish}
        return {"choices": [choice], "usage": {"prompt_tokens": len(asked["token_ids"])}}


def name_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


@contextmanager
def engine(folder: Path, *, repeats: bool = False) -> Iterator[Any]:
    """Serve the policy of a folder, which is untied, as a server that was just started.

    One that ``repeats`` answers a request with these weights the same way every time, which no real one does.
    """
    model, _ = read_config(folder)
    policy = make_policy(model, compute_dtype=jnp.float32)

    @jax.jit
    def logits(params: Any, tokens: Any, valid: Any) -> Any:
        hidden, _ = policy.trunk(params, policy.embed(params, tokens), positions_of(valid), valid)
        return policy.unembed(policy.head(params), hidden[0])

    state = {"logits": logits, "params": load_params(folder, model), "kept": (), "paths": []}
    noise = None if repeats else np.random.default_rng(0)
    with serving(Engine, **state, noise=noise, refuse=lambda paths: 0) as server:
        yield server
