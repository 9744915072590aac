"""``oarjax sample``: print completions of a policy."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.text import Text

from oarjax.data.hf import load_params, read_config
from oarjax.data.streams import pad_prompts
from oarjax.data.tokenizer import load_tokenizer, pad_id, render_prompt, stop_ids, text_of, token_bytes
from oarjax.errors import ConfigError
from oarjax.evaluate.fields import drawing
from oarjax.evaluate.target import find_target, target_params
from oarjax.models.qwen import make_policy
from oarjax.report.files import make_console, visible
from oarjax.rollout.sampler import Decoding, group_keys
from oarjax.rollout.segments import SegmentedSampler
from oarjax.rollout.source import Batch, SamplerSource, Spent, requested, rollout_of, turns_of
from oarjax.rollout.stop_strings import cut_text, stop_table
from oarjax.run.grades import start_environments
from oarjax.run.hints import played_turns
from oarjax.run.source import rendering, reply_of
from oarjax.sources.episodes import EpisodeSource
from oarjax.sources.records import line_of
from oarjax.step.sampling import row_keys
from oarjax.storage.durable import Lines, storage_errors
from oarjax.storage.trust import check_trust, code_places
from oarjax.system.devices import choose_platform, use_compilation_cache


def run(
    policy: str,
    prompts: list[str],
    template: str,
    count: int,
    max_new: int,
    family: str | None,
    asked: dict[str, float | None],
    stop: list[str],
    seed: int,
    record: Path | None = None,
    trust_code: bool = False,
) -> None:
    """Sample, print and record; ``asked`` holds sampling settings that override the family's, or else the defaults.

    Of a run with an environment, episodes; an environment's ``reset`` gets the prompt as the column that holds it.

    Raises:
        UntrustedCode: the run's environment is not known to be the user's own, and ``trust_code`` was not given.
    """
    how = drawing(family, **asked)
    if template not in ("auto", "chat", "plain"):
        raise ConfigError(f"--template: expected auto, chat or plain, got {template}")
    if not 0 < how["top_p"] <= 1:
        raise ConfigError(f"--top-p: expected a share in (0, 1], got {how['top_p']}")
    if record is not None and (record.suffix != ".jsonl" or record.exists() or not record.parent.is_dir()):
        raise ConfigError(f"--record: expected the name of a new .jsonl file in a folder, got {record}")
    target = find_target(policy)
    cfg = target.cfg if template == "auto" else None
    environment = None if cfg is None else cfg.rollout.environment
    if environment is not None and environment.taskset is not None:
        raise ConfigError("oarjax sample: verifiers plays tasks, no prompts; see the run's report, or give --template")
    if record is not None and environment is not None:
        raise ConfigError("--record: records are of single turns, and the run plays episodes; leave it out")
    if environment is not None and cfg is not None and target.folder is not None:
        places = [code for code in code_places(cfg) if code.startswith("rollout.environment.")]
        check_trust(places, target.folder, source=str(target.folder / "config.yaml"), trusted=trust_code)
    compute = jnp.float32 if choose_platform("auto") == "cpu" else jnp.bfloat16
    use_compilation_cache("~/.cache/oarjax/xla")
    model, folder = read_config(target.policy, revision=target.revision)
    tokenizer = load_tokenizer(folder)
    if template == "chat" and tokenizer.chat_template is None:
        raise ConfigError("--template: this policy's tokenizer has no chat template; use plain")
    asks: dict[str, Any] = {"template": template, "system_prompt": None, "prompt_format": "{prompt}"}
    if cfg is not None:
        asks = rendering(cfg.data, environment)
    elif template == "auto":
        asks["template"] = "plain" if tokenizer.chat_template is None else "chat"
    stops, pad = stop_ids(folder, tokenizer), pad_id(tokenizer)
    ids = [render_prompt(tokenizer, p, **asks) for p in prompts]
    longest = max(map(len, ids))
    if longest + max_new > model.max_position_embeddings:
        raise ConfigError(
            f"--max-new: {longest} prompt tokens and {max_new} new ones exceed the checkpoint's "
            f"max_position_embeddings = {model.max_position_embeddings}"
        )
    batch = pad_prompts(ids, length=-(-longest // 64) * 64, pad_id=pad, problems=range(len(ids)))
    table, console = token_bytes(tokenizer, model.vocab_size), make_console()
    functions = make_policy(model, compute_dtype=compute)
    decoding = Decoding(max_new, stop_ids=stops, pad_id=pad, stop_table=stop_table(stop, table), **how)
    draw = SegmentedSampler(functions, decoding, keys_of=partial(group_keys, group_size=count), group=count)
    if target.checkpoint is None:
        params = load_params(folder, model, dtype=compute)
    else:
        params = jax.tree.map(lambda x: x.astype(compute), target_params(target, model, folder)[0])
    sample_batch = Batch(batch, jax.random.key(seed), 0, 0, count, max_new)
    reply = None if cfg is None else reply_of(environment, cfg.data, tokenizer, stops)
    if environment is not None and cfg is not None and reply is not None:
        later_turns = SegmentedSampler(functions, decoding, keys_of=row_keys, group=1)
        source = SamplerSource(draw, Spent, lambda params: params, lambda tree: tree, jax.device_get, later_turns)
        source.sync(params, 0)
        with start_environments(environment, cfg.grading) as environments:
            columns = [{cfg.data.train.prompt_field: prompt} for prompt in prompts]
            text = lambda ids: cut_text(text_of(ids, table), stop)  # noqa: E731
            episodes = EpisodeSource(source, environments, text, reply, columns.__getitem__, most=environment.turns)
            rollout = rollout_of(sample_batch, requested(sample_batch, episodes.draw(sample_batch)), pad_id=pad)
    else:
        rollout = jax.device_get(draw(params, batch, jax.random.key(seed)))
    if record is not None:
        with storage_errors(record), closing(Lines(record)) as lines:
            for request, turn in zip(sample_batch.requests, turns_of(sample_batch, rollout, version=0), strict=True):
                lines.write(line_of(request, turn))
            lines.sync()
    for row in range(len(rollout.ended)):
        if row % count == 0:
            console.print(Text(visible(prompts[row // count]), style="dim"))
        cut = "" if rollout.ended[row] else f"  [cut at {max_new} tokens]"
        if rollout.origin is not None and rollout.origin.failed is not None and rollout.origin.failed[row]:
            cut = f"  [the environment failed: {visible(rollout.origin.failed[row])}]"
        transcript = Text()
        for turn in played_turns(rollout, table, rows=[row])[0]:
            observed = "\n" + turn.observed.strip("\n") + "\n" if transcript else turn.observed
            transcript.append(Text(visible(observed), style="dim")).append(Text(visible(cut_text(turn.text, stop))))
        console.print(transcript.append(Text(cut, style="yellow")))
