"""A run's parts, built from its config in the order in which a mistake is cheapest to find.

Nothing is compiled here: a bad field, file or device is an error within seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from oarjax.config import Config, ConfigError, DatasetConfig, LoraConfig
from oarjax.credit.answer_span import find_answers, find_units, whole_completion, with_reference
from oarjax.credit.answer_text import CUES
from oarjax.credit.keywords import KeywordTable, keyword_table
from oarjax.credit.method import CreditMethod
from oarjax.credit.methods import scorer, weigher
from oarjax.credit.probe import Probe, Reading
from oarjax.data import arithmetic as builtin
from oarjax.data.hf import load_params, read_config, read_tokenizer_folder
from oarjax.data.problems import Problem, load_problems
from oarjax.data.streams import Encoded, PromptStream, encode_pairs, encode_problems
from oarjax.data.tokenizer import encode, load_tokenizer, pad_id, stop_ids, text_of, token_bytes
from oarjax.grading.grader import Grader
from oarjax.grading.recorded import Grading
from oarjax.grading.rewards import Sample
from oarjax.models.lora import init_adapters
from oarjax.models.policy import Policy
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.sharding import batch_spec
from oarjax.models.weights import abstract_params, parameter_count
from oarjax.rl.grpo import overlong_penalty
from oarjax.runs.durable import storage_errors
from oarjax.system.devices import choose_platform, make_mesh, use_compilation_cache
from oarjax.system.plugins import import_object
from oarjax.system.processes import (
    check_shared,
    gather_grades,
    is_first,
    join_processes,
    only_first,
    share,
    to_devices,
    to_host,
)
from oarjax.training.adapters import trained_count, trained_shapes
from oarjax.training.checks import check_failures, check_grading, check_lengths, check_report
from oarjax.training.custom import check_loss, check_weights, find_loss, find_method
from oarjax.training.layout import check_layouts, policy_of, rollout_layout, stored_dtype_of
from oarjax.training.minibatches import bucket, take
from oarjax.training.programs import RolloutLayout, Shardings, TokenLoss
from oarjax.types import AnswerSpan, Grades, Params, PromptBatch, Rollout, TrainState


@dataclass(frozen=True)
class Session:
    """What stays the same while a policy is trained."""

    cfg: Config
    console: Console
    folder: Path
    mesh: Mesh
    source: Path  # the HF folder that the policy was read from
    model: QwenConfig
    policy: Policy
    compute_dtype: Any
    tokenizer: PreTrainedTokenizerFast
    table: list[bytes]  # bytes of every token id
    stop_ids: tuple[int, ...]
    pad_id: int
    train: Encoded
    held_out: Encoded | None
    pairs: Encoded | None  # for the warm start

    def with_config(self, cfg: Config) -> Session:
        """The same parts under a config that differs only in how the policy is trained."""
        return replace(self, cfg=cfg)

    @property
    def wants_memory(self) -> bool:
        """Whether a run begins with its table of memory."""
        asked = self.cfg.report.memory
        return asked == "on" or (asked == "auto" and self.mesh.devices.flat[0].platform != "cpu")

    @property
    def first(self) -> bool:
        """Whether this process writes the run's files; the others compute the same and write nothing."""
        return is_first()

    def fetch(self, tree: Any) -> Any:
        """Arrays as numpy, whole on every process."""
        return to_host(tree)

    @cached_property
    def rollout(self) -> RolloutLayout:
        """The policy as it samples."""
        return rollout_layout(self.cfg, self.model, self.mesh)

    def prompts(self) -> PromptStream:
        """The training problems, rollout.prompts at a time, from the first."""
        return PromptStream(
            self.train,
            prompts=self.cfg.rollout.prompts,
            bucket=self.cfg.rollout.prompt_bucket,
            pad_id=self.pad_id,
            seed=self.cfg.seed,
            shuffle=self.cfg.data.shuffle,
        )

    def place(self, tree: Any, layout: str) -> Any:
        """Numpy arrays to the devices.

        "prompts" divides axis 0 for the sampler; for the training layout "rows" divides axis 0, "microbatches" axis 1.
        """
        if layout == "prompts":
            return to_devices(tree, self.rollout.rows)
        lead = {"rows": (), "microbatches": (None,)}.get(layout)
        if lead is None:
            raise ValueError(f"layout: expected prompts, rows or microbatches, got {layout!r}")
        return to_devices(tree, NamedSharding(self.mesh, PartitionSpec(*lead, *batch_spec())))

    def find_answers(self, rollout: Rollout) -> AnswerSpan:
        answer, unit = self.cfg.credit.answer, self.cfg.credit.masking.unit
        made = np.asarray(rollout.completion)
        ids = np.asarray(rollout.tokens)[:, -made.shape[1] :]
        if answer.style == "none":
            span = whole_completion(ids, made, self.table)
        else:
            span = find_answers(ids, made, self.table, style=answer.style, pattern=answer.pattern)
        if unit == "token":
            return span
        return replace(span, units=find_units(ids, made, self.table, unit=unit))  # type: ignore[arg-type]

    @cached_property
    def endings(self) -> dict[int, tuple[list[int], list[int]]]:
        """Token ids of the cue and of the reference answer of every training problem, for answer.source reference.

        Raises:
            ConfigError: a style without a cue of its own, or a reference without tokens.
        """
        answer = self.cfg.credit.answer
        cue = CUES.get(answer.style) if answer.cue is None else answer.cue
        if cue is None:
            raise ConfigError(f"credit.answer.cue: style {answer.style} has none of its own; give one")
        before = encode(self.tokenizer, cue)
        found = {i: (before, encode(self.tokenizer, p.reference)) for i, p in self.train.by_index.items()}
        for i, (_, target) in found.items():
            if not target:
                raise ConfigError(f"credit.answer.source: problem {i} has an empty reference answer; set own")
        return found

    @cached_property
    def ending_room(self) -> int:
        """Positions that the longest cue and reference answer take, rounded up."""
        return bucket(max(len(cue) + len(target) for cue, target in self.endings.values()), 8, 1 << 30)

    def probed(self, rollout: Rollout, span: AnswerSpan, problems: np.ndarray) -> tuple[Rollout, AnswerSpan]:
        """Rollouts with cue and reference answer in the place of their own answer."""
        group = len(rollout.ended) // len(problems)
        endings = [self.endings[int(p)] for p in np.repeat(problems, group)]
        instead, at = with_reference(rollout, span, endings, room=self.ending_room)
        unit = self.cfg.credit.masking.unit
        if unit == "token":
            return instead, at
        made = np.asarray(instead.completion)
        ids = np.asarray(instead.tokens)[:, -made.shape[1] :]
        return instead, replace(at, units=find_units(ids, made, self.table, unit=unit))  # type: ignore[arg-type]

    @cached_property
    def custom_probe(self) -> Probe | None:
        """The probe of credit.probe.function.

        Raises:
            ConfigError: it is not to be found, or not a Probe.
        """
        place = self.cfg.credit.probe.function
        if place is None:
            return None
        try:
            probe = import_object(place, field="credit.probe.function", expected=Probe)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if probe.kind not in ("distribution", "scalar") or probe.reads not in ("answer", "completion"):
            raise ConfigError(
                f"credit.probe.function: {place} has kind {probe.kind!r} and reads {probe.reads!r}; expected kind "
                "distribution or scalar, and reads answer or completion"
            )
        return probe

    @cached_property
    def custom_method(self) -> CreditMethod | None:
        """The method of credit.function, where credit.method is custom."""
        return find_method(self.cfg)

    @cached_property
    def custom_loss(self) -> TokenLoss | None:
        """The loss of loss.function."""
        return find_loss(self.cfg)

    def completions(self, rollout: Rollout) -> list[str]:
        """The generated texts, stop tokens and other special tokens left out. Untrusted."""
        length = rollout.completion.shape[1]
        ids = np.asarray(rollout.tokens)[:, -length:]
        return [text_of(row[mask].tolist(), self.table) for row, mask in zip(ids, np.asarray(rollout.completion))]

    def submit(
        self, grader: Grading, problems: Mapping[int, Problem], batch: PromptBatch, rollout: Rollout
    ) -> Callable[[], Grades]:
        """Start grading a rollout; calling the result waits for the grades, overlong penalty included.

        Every process grades its share of the rows, and all of them get all the grades.
        """
        cfg, lengths = self.cfg.grading, rollout.completion.sum(1)
        group = len(rollout.ended) // len(batch.problem)
        mine = share(len(rollout.ended))
        samples = [
            Sample(
                prompt=problems[int(p)].prompt,
                completion=text,
                answer=problems[int(p)].reference,
                ended=bool(ended),
                tokens=int(length),
            )
            for p, text, ended, length in zip(
                np.repeat(batch.problem, group)[mine],
                self.completions(take(rollout, mine)),
                rollout.ended[mine],
                lengths[mine],
            )
        ]
        pending = grader.submit(samples)

        @cache  # asked for more than once, and all processes must gather as often
        def wait() -> Grades:
            grades = gather_grades(pending.result())
            if cfg.overlong_window == 0:
                return grades
            penalty = overlong_penalty(
                jnp.asarray(lengths),
                max_length=self.cfg.rollout.max_new,
                window=cfg.overlong_window,
                penalty=cfg.overlong_penalty,
            )
            return replace(
                grades,
                rewards=grades.rewards - np.asarray(penalty, np.float32),
                per_reward={**grades.per_reward, "overlong": -np.asarray(penalty, np.float32)},
            )

        return wait

    def keyword_table(self) -> KeywordTable | None:
        """How this tokenizer spells the words of method keywords; None for other methods."""
        cfg = self.cfg.credit
        if cfg.method != "keywords":
            return None
        try:
            return keyword_table(cfg.keywords.words, partial(encode, self.tokenizer), self.table)
        except ValueError as error:
            raise ConfigError(f"credit.keywords.words: {error}; give words that its tokens can spell") from error

    def check_credit(self, where: str = "") -> None:
        """Build the method of credit, so that what cannot run is told now and not after the warm start.

        Raises:
            ConfigError: with ``where`` before it.
        """
        cfg = self.cfg.credit
        try:
            mask_id = cfg.masking.mask_id
            if mask_id is not None and not 0 <= mask_id < self.model.vocab_size:
                raise ConfigError(
                    f"credit.masking.mask_id: {mask_id} is not a token; the vocabulary has {self.model.vocab_size}"
                )
            own = {"custom_probe": self.custom_probe, "custom_method": self.custom_method}
            scorer(cfg, self.policy, temperature=1.0, pad_id=self.pad_id, **own)
            if self.custom_probe is not None:
                self._check_probe(self.custom_probe)
            weigh = weigher(cfg, keyword_table=self.keyword_table(), custom_method=self.custom_method)
            if self.custom_method is not None:
                check_weights(weigh, self.custom_method, place=f"credit.function: {cfg.function}")
            if cfg.answer.source == "reference":
                _ = self.endings
        except ConfigError as error:
            raise ConfigError(f"{where}{error}") from error

    def _check_probe(self, probe: Probe) -> None:
        """Trace a probe of one's own at two rows' shapes; computes nothing.

        Raises:
            ConfigError: with what it raised, or the shape that it gave.
        """
        rows, made = 2, 8
        hidden = jax.ShapeDtypeStruct((rows, made, self.model.hidden_size), jnp.float32)
        tokens: Any = jax.ShapeDtypeStruct((rows, made), jnp.int32)  # shapes instead of arrays
        there: Any = jax.ShapeDtypeStruct((rows, made), bool)
        reading = Reading(tokens, there, there)
        place = f"credit.probe.function: {self.cfg.credit.probe.function}"
        rank, wanted = (2, f"logits [{rows}, outcomes]") if probe.kind == "distribution" else (1, f"scores [{rows}]")
        read = partial(probe.read, self.policy)
        try:
            found = jax.eval_shape(read, abstract_params(self.model, dtype=jnp.float32), hidden, reading)
        except Exception as error:
            raise ConfigError(
                f"{place} fails on hidden states {hidden.shape}: {type(error).__name__}: {error}; for kind "
                f"{probe.kind} it must give {wanted}"
            ) from error
        shape = getattr(found, "shape", None)
        if shape is None or shape[:1] != (rows,) or len(shape) != rank:
            raise ConfigError(
                f"{place} gives {shape or type(found).__name__} for hidden states {hidden.shape}; for kind "
                f"{probe.kind} it must give {wanted}"
            )

    def grader(self) -> Grader:
        cfg, answer = self.cfg.grading, self.cfg.credit.answer
        return Grader(
            tuple((r.name, r.weight) for r in cfg.rewards),
            plugins=cfg.plugins,
            workers=cfg.workers,
            deadline=cfg.deadline,
            memory_mb=cfg.memory_mb,
            style="boxed" if answer.style == "none" else answer.style,
            pattern=answer.pattern,
        )

    def load(self, layout: Shardings, *, source: Path | None = None) -> Params:
        """The policy's weights, laid out over the mesh."""
        dtype = stored_dtype_of(self.cfg, self.mesh)
        return load_params(source or self.source, self.model, dtype=dtype, shardings=layout.params)


def open_session(cfg: Config, console: Console, *, evaluates: bool = False) -> Session:
    """Build a run's parts: config against checkpoint and data first, devices next, weights not at all.

    ``evaluates``: errors name what ``oarjax evaluate`` takes, data.eval and --out for data.train and run_dir.

    Raises:
        ConfigError: fields that do not fit the checkpoint, tokenizer or devices.
        DeviceError, UnsupportedModel, CheckpointError, TokenizerError, DataError: from the parts themselves.
    """
    check_grading(cfg)
    check_report(cfg)
    join_processes(**cfg.distributed.model_dump())
    choose_platform(cfg.device)
    console.quiet = console.quiet or not is_first()
    check_failures(cfg, processes=jax.process_count())
    use_compilation_cache(cfg.compilation_cache)
    folder = Path(cfg.run_dir).expanduser()
    mesh = make_mesh(**cfg.mesh.model_dump())
    model, source = read_config(
        _policy_path(cfg, folder, "--out" if evaluates else "run_dir=..."), revision=cfg.policy.revision
    )
    check_layouts(cfg, model, mesh)
    check_lengths(cfg, model)
    trained_shapes(cfg.lora, model)  # adapters that it cannot have are told now
    tokenizer = load_tokenizer(source)
    stops, pad = stop_ids(source, tokenizer), pad_id(tokenizer)
    table = token_bytes(tokenizer, model.vocab_size)

    def read(data: DatasetConfig, where: str) -> Encoded:
        return encode_problems(
            load_problems(data, where=where),
            tokenizer,
            template=cfg.data.template,
            system_prompt=cfg.data.system_prompt,
            prompt_format=cfg.data.prompt_format,
            thinking=cfg.data.thinking,
            max_prompt=cfg.data.max_prompt,
        )

    pairs = None
    if cfg.sft is not None:
        pairs = encode_pairs(
            load_problems(cfg.sft.data, where="sft.data"),
            tokenizer,
            template=cfg.data.template,
            system_prompt=cfg.data.system_prompt,
            prompt_format=cfg.data.prompt_format,
            thinking=cfg.data.thinking,
            max_length=cfg.sft.max_length,
            stop_id=stop_token(tokenizer, stops),
        )
    policy, compute = policy_of(cfg, model, mesh)
    session = Session(
        cfg=cfg,
        console=console,
        folder=folder,
        mesh=mesh,
        source=source,
        model=model,
        policy=policy,
        compute_dtype=compute,
        tokenizer=tokenizer,
        table=table,
        stop_ids=stops,
        pad_id=pad,
        train=read(cfg.data.train, "data.eval" if evaluates else "data.train"),
        held_out=None if cfg.data.eval is None else read(cfg.data.eval, "data.eval"),
        pairs=pairs,
    )
    session.check_credit()
    if session.custom_loss is not None:
        check_loss(session.custom_loss, cfg)
    return session


def stop_token(tokenizer: PreTrainedTokenizerFast, stops: tuple[int, ...]) -> int:
    """The stop id that a completion to imitate ends in: the tokenizer's own where it is one."""
    own = tokenizer.eos_token_id
    return int(own) if own in stops else stops[0]


def _policy_path(cfg: Config, run: Path, given: str) -> str:
    """Where the policy is read from; the built-in ones are written below the run's folder, ``given`` as, first."""
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{given.removesuffix('=...')}: cannot write to {run}: {error}; give another {given}"
        ) from error
    check_shared(run)
    made = run / "policy"
    if cfg.policy.path == "builtin:arithmetic":
        with storage_errors(made):
            only_first(lambda: builtin.write_builtin_policy(made, seed=cfg.seed))
        return str(made)
    if cfg.policy.path == "builtin:random" and cfg.policy.tokenizer is not None:
        tokenizer = read_tokenizer_folder(cfg.policy.tokenizer, revision=cfg.policy.revision)
        with storage_errors(made):
            only_first(lambda: builtin.write_random_policy(made, tokenizer=tokenizer, seed=cfg.seed))
        return str(made)
    return cfg.policy.path


ADAPTERS = 2**31 - 2
"""What a run's key is folded with for the start of its adapters; a step that no run reaches."""


def new_state(
    params: Params,
    tx: optax.GradientTransformation,
    layout: Shardings,
    *,
    seed: int,
    lora: LoraConfig | None = None,
    copy: bool = True,
) -> TrainState:
    """A state at step 0 that owns its arrays, since updates reuse their memory.

    With ``lora`` of a rank the params are frozen below fresh adapters. ``copy``: the params stay as they are, because
    they are needed again; otherwise the state takes their memory over.
    """

    def fresh(params: Params) -> TrainState:
        owned = jax.tree.map(jnp.copy, params)
        key = jax.random.key(seed)
        if lora is None or lora.rank == 0:
            trained, frozen = owned, None
        else:
            start = jax.random.fold_in(key, ADAPTERS)
            trained, frozen = init_adapters(start, params, rank=lora.rank, targets=lora.targets), owned
        return TrainState(
            step=jnp.zeros((), jnp.int32), params=trained, opt_state=tx.init(trained), key=key, frozen=frozen
        )

    return jax.jit(fresh, out_shardings=layout.state, donate_argnums=() if copy else 0)(params)


def facts(session: Session) -> dict[str, object]:
    """What a run is about to do, for the banner and the report."""
    cfg, trains = session.cfg, "every weight"
    if cfg.lora.rank:
        trains = f"adapters of rank {cfg.lora.rank}, {trained_count(cfg.lora, session.model):,} parameters"
    return {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "mesh": ", ".join(f"{axis} {size}" for axis, size in session.mesh.shape.items()),
        "policy": f"{cfg.policy.path}, {parameter_count(session.model):,} parameters",
        "trains": trains,
        "computes in": session.compute_dtype,
        "stop ids": ", ".join(map(str, session.stop_ids)),
        "train": f"{len(session.train)} problems, {session.train.dropped} over {cfg.data.max_prompt} tokens left out",
        "held out": "none" if session.held_out is None else f"{len(session.held_out)} problems",
        "run folder": session.folder,
    }
