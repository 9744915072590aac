"""Open a run: every part that a config names, built once, on first use.

    run = open_run(cfg, console)     # reads config, checkpoint, tokenizer and data; compiles nothing
    run.steps.sample(...)            # the device programs: traced and compiled once per run and shape
    run.load()                       # the weights, in the training layout

A plan for remote devices, or a benchmark on random tokens, supplies its parts:

    run = Run(cfg, model=model, mesh=mesh, stop_ids=(0,), pad_id=0)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from oarjax.config.schema import Config
from oarjax.credit.methods.keywords import KeywordTable
from oarjax.credit.resolved import ResolvedMethod
from oarjax.data.hf import load_params, read_config
from oarjax.data.problems import Problem
from oarjax.data.streams import Encoded, PromptStream
from oarjax.data.tokenizer import encode, load_tokenizer, pad_id, stop_ids, text_of, token_bytes
from oarjax.environments.pool import Environments
from oarjax.errors import ConfigError
from oarjax.grading.grader import Grader
from oarjax.grading.recorded import Grading
from oarjax.models.policy import Policy
from oarjax.models.qwen_config import QwenConfig
from oarjax.models.weights import parameter_count
from oarjax.report.files import token_texts
from oarjax.rollout.source import Source
from oarjax.rollout.stop_strings import cut_text
from oarjax.run.adapters import start_adapters, trained_count, trained_shapes
from oarjax.run.apart import Apart, describe_mesh, learning_mesh, open_apart
from oarjax.run.checks import check_grading, check_lengths, check_processes, check_report
from oarjax.run.custom import CustomFunctions, check_credit, find_credit, find_custom
from oarjax.run.endings import reference_endings
from oarjax.run.grades import RolloutGrading, grader_of, open_environments, written_turns
from oarjax.run.hints import HintReader, hints_of, spelled_keywords
from oarjax.run.layout import check_layouts, param_shardings, rollout_layout, rows_sharding, training_layout
from oarjax.run.parts import Parts
from oarjax.run.policy import bind_policy, compute_dtype_of, stored_dtype_of, turned_on
from oarjax.run.source import order_of, policy_path, read_pairs, read_prompts, reply_of
from oarjax.run.teacher import check_teacher, policy_of, read_teacher
from oarjax.sources.driven import DriverLink
from oarjax.sources.episodes import play
from oarjax.step.minibatches import bucket, widest_prompt
from oarjax.step.programs import RolloutLayout, Shardings, make_optimizer, make_steps
from oarjax.step.spans import Ending, find_spans, with_endings
from oarjax.step.state import new_state
from oarjax.step.steps import Steps
from oarjax.system.devices import choose_platform, use_compilation_cache
from oarjax.system.peers import PEERS
from oarjax.system.processes import is_first, join_processes, to_devices, to_host
from oarjax.types import AnswerSpan, Grades, Params, PromptBatch, Rollout, TrainState

SHARED = "_checkpoint mesh model source tokenizer table stop_ids pad_id train held_out pairs".split()  # noqa: SIM905
"""Parts that do not depend on how the policy is trained."""


class Run:
    """The parts of a run, each built once, on first use; supplied ``parts`` are used as they are."""

    def __init__(
        self, cfg: Config, console: Console | None = None, *, evaluates: bool = False, **parts: Unpack[Parts]
    ) -> None:
        self.cfg = cfg
        self.console = console or Console(quiet=True)
        self._evaluates = evaluates  # errors name data.eval and --out, as `oarjax evaluate` does
        self._supplied = frozenset(parts)
        vars(self).update(parts)  # replaces the cached properties of the same names

    def with_config(self, cfg: Config) -> Run:
        """Return a run whose config differs only in how the policy is trained; it shares tokenizer and data."""
        if cfg == self.cfg:
            return self
        run = Run(cfg, self.console, evaluates=self._evaluates, folder=self.folder)
        run._supplied = self._supplied
        vars(run).update({name: vars(self)[name] for name in SHARED if name in vars(self)})
        return run

    # Policy, tokenizer and data --------------------------------------------------------------------------------------

    @cached_property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.cfg.run_dir).expanduser()

    @cached_property
    def mesh(self) -> Mesh:
        """The devices that learn, arranged for training."""
        return learning_mesh(self.cfg.mesh, None if self._evaluates else self.cfg.rollout.devices)

    @cached_property
    def _checkpoint(self) -> tuple[QwenConfig, Path]:
        option = "--out" if self._evaluates else "run_dir=..."
        path = policy_path(self.cfg.policy, self.folder, seed=self.cfg.seed, option=option)
        return read_config(path, revision=self.cfg.policy.revision)

    @cached_property
    def model(self) -> QwenConfig:
        """The policy's architecture."""
        return self._checkpoint[0]

    @cached_property
    def source(self) -> Path:
        """The Hugging Face folder that the policy is read from."""
        if not self.has_data:
            raise ValueError("Run: this run has a model and a mesh, but no tokenizer, data or weights; use open_run")
        return self._checkpoint[1]

    @property
    def has_data(self) -> bool:
        """False for a run of a model and a mesh alone."""
        return "model" not in self._supplied or "source" in self._supplied

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The policy's tokenizer."""
        return load_tokenizer(self.source)

    @cached_property
    def table(self) -> list[bytes]:
        """The bytes of every token id."""
        return token_bytes(self.tokenizer, self.model.vocab_size)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end a completion."""
        return stop_ids(self.source, self.tokenizer)

    @cached_property
    def pad_id(self) -> int:
        """The token id that fills prompts on the left and completions on the right."""
        return pad_id(self.tokenizer)

    @cached_property
    def train(self) -> Encoded:
        """The problems to train on, or to evaluate on."""
        where, data = "data.eval" if self._evaluates else "data.train", self.cfg.data
        options = {"mixture": data.mixture, "environment": self.cfg.rollout.environment}
        return read_prompts(data, data.train, self.tokenizer, where=where, **options)

    @cached_property
    def held_out(self) -> Encoded | None:
        """The held-out problems of data.eval."""
        data = self.cfg.data.eval
        asks = {"where": "data.eval", "environment": self.cfg.rollout.environment}
        return None if data is None else read_prompts(self.cfg.data, data, self.tokenizer, **asks)

    @cached_property
    def pairs(self) -> Encoded | None:
        """Prompts and completions to imitate in the warm start."""
        cfg, parts = self.cfg, (self.tokenizer, self.stop_ids, self.cfg.rollout.environment, self.reply)
        return None if cfg.sft is None else read_pairs(cfg.sft, cfg.data, *parts)

    @cached_property
    def reply(self) -> Callable[[str], list[int]] | None:
        """The ids of what an environment says, after a stop id; None for single turns."""
        return reply_of(self.cfg.rollout.environment, self.cfg.data, self.tokenizer, self.stop_ids)

    # Device programs -------------------------------------------------------------------------------------------------

    @cached_property
    def compute_dtype(self) -> Any:
        """The dtype of matmul operands."""
        return compute_dtype_of(self.cfg.policy, self.mesh)

    @cached_property
    def policy(self) -> Policy:
        """The policy's functions, for training."""
        return bind_policy(self.cfg.policy, self.model, self.mesh, adapter_scale=self.cfg.lora.scale)

    @cached_property
    def _optimizer(self) -> tuple[optax.GradientTransformation, optax.Schedule]:
        return make_optimizer(self.cfg, function=self.custom.optimizer)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer of the iterations; the warm start has its own."""
        return self._optimizer[0]

    @property
    def schedule(self) -> optax.Schedule:
        """Learning rate of each update."""
        return self._optimizer[1]

    @cached_property
    def layout(self) -> Shardings:
        """Shardings of the training layout."""
        return training_layout(self.cfg.lora, self.model, self.mesh, self.optimizer)

    @cached_property
    def rollout_layout(self) -> RolloutLayout:
        """The policy for sampling, with the layout of its arrays."""
        return rollout_layout(self.cfg.policy, self.cfg.rollout, self.cfg.lora, self.model, self.mesh)

    @cached_property
    def apart(self) -> Apart | None:
        """The sampler of rollout.devices; None where rollouts are drawn on the devices that learn."""
        if self.cfg.rollout.devices is None or self._evaluates or "mesh" in self._supplied:
            return None
        return open_apart(self.cfg.policy, self.cfg.rollout, self.cfg.lora, self.model, self.mesh, self.steps.sample)

    @cached_property
    def steps(self) -> Steps:
        """The device programs. They are bound only here, so each is traced and compiled once per shape."""
        return make_steps(
            self.policy,
            self.optimizer,
            self.layout,
            self.cfg,
            stop_ids=self.stop_ids,
            pad_id=self.pad_id,
            token_bytes=self.table if self.cfg.rollout.stop else (),
            rollout=self.rollout_layout,
            keyword_table=self.keyword_table,
            method=self.credit,
            custom_loss=self.custom.loss,
            custom_advantages=self.custom.advantages,
            reference_policy=policy_of(read_teacher(self.cfg.loss.teacher, self.cfg.policy, self.mesh)),
        )

    def load(self, *, source: Path | None = None) -> Params:
        """Read the policy's weights, or those of another folder, into the training layout."""
        dtype = stored_dtype_of(self.cfg.policy, self.cfg.lora, self.mesh)
        shardings = param_shardings(self.model, self.mesh)
        return load_params(source or self.source, self.model, dtype=dtype, shardings=shardings)

    def new_state(self, params: Params, *, copy: bool = True) -> TrainState:
        """Create the state at step 0; see ``oarjax.step.state.new_state``."""
        lora = {"lora": self.cfg.lora, "adapters": start_adapters(self.cfg.lora, self.model)}
        return new_state(params, self.optimizer, self.layout, seed=self.cfg.seed, copy=copy, **lora)

    def place(self, tree: Any, layout: str) -> Any:
        """Move numpy arrays to the devices: "prompts" for the sampler, "rows" and "microbatches" (axis 1) to train."""
        rows = self.rollout_layout.rows if layout == "prompts" else rows_sharding(self.mesh, layout)
        return to_devices(tree, rows)

    def fetch(self, tree: Any) -> Any:
        """Return arrays as numpy, whole on every process."""
        return to_host(tree)

    @property
    def compiles_ahead(self) -> bool:
        """True if every program is compiled in the background of the first iterations."""
        return turned_on(self.cfg.compile_ahead, self.mesh)

    @property
    def prompt_step(self) -> int:
        """Step of prompt widths: the whole width if programs are compiled ahead."""
        return widest_prompt(self.cfg.data, self.cfg.rollout) if self.compiles_ahead else self.cfg.rollout.prompt_bucket

    @property
    def first(self) -> bool:
        """True in the process that writes the run's files; the others compute the same but write nothing."""
        return is_first()

    @property
    def wants_memory(self) -> bool:
        """True if the run reports the memory of its programs before the first update."""
        return turned_on(self.cfg.report.memory, self.mesh)

    # Credit ----------------------------------------------------------------------------------------------------------

    @cached_property
    def credit(self) -> ResolvedMethod:
        """The method of credit.method, with its settings and the probe of credit.probe.function."""
        return find_credit(self.cfg.credit)

    @cached_property
    def custom(self) -> CustomFunctions:
        """The functions that loss.function and the like name."""
        return find_custom(self.cfg)

    @cached_property
    def keyword_table(self) -> KeywordTable | None:
        """The tokenizer's spellings of the configured keywords; None for methods without keywords."""
        if "keyword_table" not in self.credit.signals:
            return None
        return spelled_keywords(self.cfg.credit.keywords.words, partial(encode, self.tokenizer), self.table)

    @cached_property
    def endings(self) -> dict[int, Ending]:
        """Cue and reference answer of every training problem, for credit.answer.source reference."""
        return reference_endings(self.cfg.credit.answer, self.tokenizer, self.train.by_index)

    @cached_property
    def ending_room(self) -> int:
        """Maximum number of positions that cue and reference answer add to a completion, rounded up; 0 without data."""
        if self.cfg.credit.answer.source != "reference" or not self.has_data:
            return 0
        longest = max(len(cue) + len(target) for cue, target in self.endings.values())
        return bucket(longest + self.wants_outcome, 8)

    @property
    def wants_outcome(self) -> bool:
        """True if the joint probability of the reference answer and its end is read."""
        return self.credit.kind == "values" or self.cfg.advantage.soft != "off"

    def find_answers(self, rollout: Rollout) -> AnswerSpan:
        """Find the reasoning and the answer of every completion, as credit.answer asks."""
        return find_spans(self.cfg.credit, rollout, self.table)

    def probed(self, rollout: Rollout, span: AnswerSpan, problems: np.ndarray) -> tuple[Rollout, AnswerSpan]:
        """Replace the answers of completions with the cue and the reference answer."""
        group = len(rollout.ended) // len(problems)
        endings = [self.endings[int(p)] for p in np.repeat(problems, group)]
        stop = self.stop_ids[0] if self.wants_outcome else None
        options = {"room": self.ending_room, "token_bytes": self.table, "stop_id": stop}
        return with_endings(self.cfg.credit, rollout, span, endings, **options)

    @cached_property
    def hints(self) -> HintReader | None:
        """The reader of what the credit method wants beside rollouts of training problems; None if nothing."""
        return self.hints_for(self.train.by_index)

    def hints_for(self, problems: Mapping[int, Problem]) -> HintReader | None:
        """Return what the credit method reads beside rollouts of these problems; None if nothing."""
        roll, parts = self.cfg.rollout, (self.tokenizer, self.table, self.pad_id)
        return hints_of(self.credit, self.cfg.data, problems, *parts, roll.prompt_bucket, roll.environment is not None)

    def check_credit(self, where: str = "") -> None:
        """Build the credit method, so that a bad config fails now and not after the warm start.

        Raises:
            ConfigError: the method cannot run; the message begins with ``where``.
        """
        try:
            check_credit(self.credit, self.policy, self.model, pad_id=self.pad_id, keyword_table=self.keyword_table)
            if self.cfg.credit.answer.source == "reference":
                _ = self.endings
        except ConfigError as error:
            raise ConfigError(f"{where}{error}") from error

    def prompts(self, share: Callable[[int], float] | None = None) -> PromptStream:
        """Return an endless stream of training problems, rollout.prompts at a time; ``share`` as in PromptStream."""
        order, count = order_of(self.cfg.data, self.cfg.seed, share), self.cfg.rollout.prompts
        return PromptStream(self.train, order, prompts=count, bucket=self.prompt_step, pad_id=self.pad_id)

    def texts(self, rollout: Rollout) -> list[str]:
        """Decode what the policy wrote without special tokens, each turn cut before a stop string. Untrusted."""
        stop = self.cfg.rollout.stop
        return ["\n".join(cut_text(text_of(ids, self.table), stop) for ids in row) for row in written_turns(rollout)]

    def tokens(self, rollout: Rollout) -> list[list[str]]:
        """Decode what the policy wrote token by token."""
        return [token_texts([self.table[i] for ids in row for i in ids]) for row in written_turns(rollout)]

    @cached_property
    def environments(self) -> Environments | DriverLink | None:
        """The processes that play rollout.environment, started; they end with this process or ``close``."""
        return open_environments(self.cfg.rollout.environment, self.cfg.grading, str(self.source))

    def episodes(self, source: Source, problems: Encoded) -> Source:
        """Return a source of episodes from one of turns; without rollout.environment, the same."""
        environment, environments, reply = self.cfg.rollout.environment, self.environments, self.reply
        if isinstance(environments, DriverLink):
            return environments.episodes(source, problems, self.cfg.rollout, self.stop_ids, len(self.table))
        if environment is None or environments is None or reply is None:
            return source
        return play(source, environments, environment, reply, problems, self.table, self.cfg.rollout.stop)

    def grader(self) -> Grader:
        """Start the workers that grade completions."""
        return grader_of(self.cfg.grading, self.cfg.credit.answer)

    def grading(
        self, grader: Grading, problems: Mapping[int, Problem], batch: PromptBatch, *, group: int
    ) -> RolloutGrading:
        """Open the grading of ``group`` completions of every prompt; each process grades its share of them."""
        row_problems = [problems[int(p)] for p in np.repeat(batch.problem, group)]
        return RolloutGrading(self.cfg.rollout, self.cfg.grading, grader, row_problems, self.table, group=group)

    def submit(
        self, grader: Grading, problems: Mapping[int, Problem], batch: PromptBatch, rollout: Rollout
    ) -> Callable[[], Grades]:
        """Start grading a whole rollout; calling the result waits for all grades, overlong penalty included."""
        group = len(rollout.ended) // len(batch.problem)
        return self.grading(grader, problems, batch, group=group).rest(rollout)

    def facts(self) -> dict[str, object]:
        """Describe the run for the banner and the report."""
        cfg, trains = self.cfg, "every weight"
        if cfg.lora.rank:
            trains = f"adapters of rank {cfg.lora.rank}, {trained_count(cfg.lora, self.model):,} parameters"
        return {
            "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
            "mesh": describe_mesh(self.mesh, self.apart),
            "policy": f"{cfg.policy.path}, {parameter_count(self.model):,} parameters",
            "trains": trains,
            "computes in": self.compute_dtype,
            "stop ids": ", ".join(map(str, self.stop_ids)),
            "train": f"{len(self.train)} problems, {self.train.dropped} over {cfg.data.max_prompt} tokens left out",
            "held out": "none" if self.held_out is None else f"{len(self.held_out)} problems",
            "run folder": self.folder,
        }


def open_run(
    cfg: Config, console: Console | None = None, *, evaluates: bool = False, hold: Callable[[], object] | None = None
) -> Run:
    """Open a run: check the config against devices, checkpoint and data; load no weights.

    Parts are built in the order in which a mistake is cheapest to find. Nothing is compiled, so a bad field, file or
    device raises an error within seconds.

    Args:
        evaluates: errors name the fields of ``oarjax evaluate``: data.eval and --out instead of data.train and run_dir.
        hold: called on the first process before anything is written to the run's folder, to lock it.

    Raises:
        ConfigError: fields do not fit the checkpoint, tokenizer or devices.
        DeviceError, UnsupportedModel, CheckpointError, TokenizerError, DataError: raised by the parts.
    """
    check_grading(cfg)
    check_report(cfg.report)
    join_processes(**cfg.distributed.model_dump())
    choose_platform(cfg.device)
    run = Run(cfg, console, evaluates=evaluates)
    run.console.quiet = run.console.quiet or not run.first
    check_processes(cfg.checkpoint, cfg.grading, processes=jax.process_count())
    use_compilation_cache(cfg.compilation_cache)
    PEERS.link()
    _ = run.custom  # imported now, and not after minutes in which a file may change
    if hold is not None and run.first:
        hold()
    check_layouts(cfg, run.model, run.mesh)
    check_lengths(cfg, run.model)
    check_teacher(cfg.loss.teacher, run.tokenizer)
    run.custom.check_optimizers(cfg.optim, cfg.sft and cfg.sft.optim, trained_shapes(cfg.lora, run.model))
    start_adapters(cfg.lora, run.model, run.console)
    for part in ("table", "pairs", "train", "held_out"):
        getattr(run, part)
    run.check_credit()
    run.credit.check_groups(cfg.rollout.group_size)
    run.credit.check_updates(epochs=cfg.update.epochs, minibatches=cfg.update.minibatches)
    _ = run.hints  # fails on what cannot be read
    return run
