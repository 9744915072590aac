"""Read a study's config (arms and seeds of one run config) and plan its runs with their folders.

A study is a YAML file plus ``key.sub=value`` overrides, like a run. Everything is checked before the first run.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from oarjax.config.changes import explained
from oarjax.config.loading import apply_override, find_config, parse_config, read_tree
from oarjax.config.schema import Config
from oarjax.config.section import Count, Section, fields_of
from oarjax.errors import ConfigError

Changes = dict[str, Any]
"""Fields to change: nested, with dotted names (``credit.gate.tau: 0.2``), or both."""

FREE = ("advantage", "credit", "loss", "optim", "update")
"""Sections in which arms may differ. All arms share the start, problems, rollouts and evaluation."""
COUNTS = ("rollout.prompts", "rollout.group_size")
"""Fields of the rollouts in which they may differ as well: an arm may have more rollouts than the others."""
FIXED = ("update.refills", "credit.answer.style", "credit.answer.pattern")
"""Fields of these sections in which arms may not differ: they change the rollouts or the rewards."""


def _different(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"expected at least one seed, each once, got {list(seeds)}")
    return seeds


Seeds = Annotated[tuple[Count, ...], AfterValidator(_different)]


class SweepConfig(Section):
    """Every combination of values for some of an arm's fields."""

    of: str = Field(description="the arm that the fields are changed in")
    over: dict[str, tuple[Any, ...]] = Field(description="dotted field -> its values; two fields make a heat map")
    seeds: Seeds

    @field_validator("over", mode="before")
    @classmethod
    def _dotted(cls, value: Any) -> Any:
        return flat(value) if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _values(self) -> SweepConfig:
        bad = [name for name, values in self.over.items() if len({json.dumps(v) for v in values}) < max(len(values), 1)]
        if not self.over or bad:
            what = f"of {', '.join(bad)}" if bad else "for at least one field"
            raise ValueError(f"over: expected at least one value {what}, each once")
        return self


class ChooseConfig(Section):
    """A field, such as the learning rate, whose value is chosen for each arm on seeds of its own.

    Every arm runs with every value on these seeds, and with the best value on the study's seeds.
    """

    field: str = Field(description="dotted field that no arm sets, such as optim.lr")
    values: tuple[Any, ...]
    beyond: tuple[float, ...] = Field(
        default=(),
        description="numbers outside values; while the best value of an arm is the smallest or the largest of those it "
        "ran with, it runs with the next of these on that side",
    )
    by: Literal["mean", "lower"] = Field(
        default="mean", description="what is best: the largest mean area, or mean - its standard error over the seeds"
    )
    seeds: Seeds

    @model_validator(mode="after")
    def _values(self) -> ChooseConfig:
        if len({json.dumps(v) for v in self.values}) < max(len(self.values), 2):
            raise ValueError(f"values: expected at least two values, each once, got {list(self.values)}")
        if self.beyond:
            if not all(isinstance(value, int | float) for value in self.values):
                raise ValueError(f"beyond: expected numbers as values, got {list(self.values)}; leave beyond out")
            inside = [value for value in self.beyond if min(self.values) <= value <= max(self.values)]
            if inside or len(set(self.beyond)) < len(self.beyond):
                raise ValueError(f"beyond: expected numbers outside values, each once, got {list(self.beyond)}")
        if self.by == "lower" and len(self.seeds) < 2:
            raise ValueError("by: lower needs two seeds for a standard error; add one, or set mean")
        return self

    def with_next(self, tried: tuple[Any, ...], best: Any) -> tuple[Any, ...]:
        """Add the next value of ``beyond`` to an arm's, in order, if its best stands at their edge."""
        higher = [value for value in self.beyond if value > best] if best == max(tried) else []
        lower = [value for value in self.beyond if value < best] if best == min(tried) else []
        return tuple(sorted((*tried, *sorted(higher)[:1], *sorted(lower)[-1:]))) if higher or lower else tried


class StudyConfig(Section):
    run_dir: str = Field(description="folder of the study; with --quick, -quick is appended")
    base: dict[str, Any] = Field(
        description="the run config that arms change: its fields, or a file: beside this one, in an override here"
    )
    arms: dict[str, Changes] = Field(description="name to show -> fields changed, in: " + ", ".join(FREE))
    seeds: Seeds
    against: tuple[str, ...] = Field(default=(), description="arms that the others are compared with, seed by seed")
    primaries: tuple[tuple[str, str], ...] = Field(
        default=(), description="pairs of arms whose areas are tested against each other, by Holm over all pairs"
    )
    choose: ChooseConfig | None = None
    confirm: bool = Field(default=True, description="false: end once values are chosen, before any other run")
    records: str | None = Field(
        default=None,
        description="file with a line per finished run, to keep when run folders are gone; its runs are not run again",
    )
    sweep: SweepConfig | None = None
    quick: Changes | None = Field(default=None, description="fields of the study that --quick changes")

    @model_validator(mode="after")
    def _arms_exist(self) -> StudyConfig:
        problems = [
            f"{where}: no arm is called {name!r}; the arms are {', '.join(self.arms)}"
            for where, name in [
                *(("against", n) for n in self.against),
                *(("primaries", n) for pair in self.primaries for n in pair),
                *_swept(self.sweep),
            ]
            if name not in self.arms
        ]
        if not self.arms:
            problems.append("arms: expected at least one")
        slugs = [slug(name) for name in self.arms]
        problems += [
            f"arms.{name}: expected a name with a unique folder name, got {folder!r}"
            for name, folder in zip(self.arms, slugs)
            if not folder or slugs.count(folder) > 1 or folder in TAKEN
        ]
        if self.choose is not None:
            problems += [
                f"arms.{name}: sets {self.choose.field}, which choose.field chooses; leave it out of one of the two"
                for name, changes in self.arms.items()
                if self.choose.field in flat(changes)
            ]
            if common := sorted(set(self.choose.seeds) & set(self.seeds)):
                problems.append(f"choose.seeds: expected other seeds than the study's, got {common} in both")
        if problems:
            raise ValueError("\n".join(problems))
        return self


TAKEN = ("start", "policy", "sweep", "choose")
"""Folder names within a seed's folder that arms may not take."""


def _swept(sweep: SweepConfig | None) -> list[tuple[str, str]]:
    return [] if sweep is None else [("sweep.of", sweep.of)]


@dataclass(frozen=True)
class Planned:
    """A run of a study. ``config.run_dir`` is its folder, within its seed's folder."""

    name: str  # of the arm, or the cell's fields
    seed: int
    config: Config
    home: Path  # the seed's folder, with its warm start
    records: Path | None = None  # of the study
    digest: str = ""  # of the fields that the study sets for it, its seed included


@dataclass(frozen=True)
class Cell:
    """A combination of the sweep's values, with its run for every seed."""

    values: tuple[Any, ...]  # in the order of sweep.over
    runs: tuple[Planned, ...]


@dataclass(frozen=True)
class StudyPlan:
    study: StudyConfig
    root: Path
    starts: dict[int, Config]  # by seed: the base config in the seed's folder
    arms: dict[str, tuple[Planned, ...]]  # by arm, in the order of the seeds; only those whose value is chosen
    cells: tuple[Cell, ...]
    trials: dict[str, tuple[tuple[Planned, ...], ...]] = field(default_factory=dict)  # by arm, per value it is tried at
    tried: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # by arm, values of ``choose``

    @property
    def values(self) -> list[Any]:
        """List the values of ``choose`` that any arm is tried at, as they are given; with ``beyond``, in order."""
        values = [value for tried in self.tried.values() for value in tried]
        distinct = [value for n, value in enumerate(values) if value not in values[:n]]
        return sorted(distinct) if self.study.choose is not None and self.study.choose.beyond else distinct

    @property
    def runs(self) -> list[Planned]:
        """List every run once, trials first, the arms of a seed together, the sweep last."""
        ordered = [run for values in self.trials.values() for runs in values for run in runs]
        ordered += [run for runs in zip(*self.arms.values()) for run in runs]
        ordered += [run for runs in zip(*(cell.runs for cell in self.cells)) for run in runs]
        return list({run.config.run_dir: run for run in ordered}.values())

    @property
    def total(self) -> int:
        """Count the runs of the whole study, those of arms whose value is not chosen yet included."""
        return len(self.runs) + (len(self.study.arms) - len(self.arms)) * len(self.study.seeds)


def load_study(path: str | Path, overrides: list[str] | tuple[str, ...] = (), *, quick: bool = False) -> StudyConfig:
    """Read a study's YAML file, apply the overrides and, with ``quick``, its section ``quick``, and validate it.

    Raises:
        ConfigError: as for ``load_config``; also if the section ``quick`` or the base's file is missing.
    """
    path = find_config(path)
    tree = read_tree(path)
    _read_base(tree, path.parent)
    for override in overrides:
        apply_override(tree, override)
        _read_base(tree, Path())  # an override may name a file, and the next one a field of it
    study = _validate(tree, source=str(path))
    if quick and study.quick is None:
        raise ConfigError(
            f"{path}: has no section quick; leave --quick out, or add the section, with the fields that it changes"
        )
    if quick and study.quick is not None:
        changes = {"run_dir": f"{study.run_dir}-quick"} | study.quick
        study = _validate(merged(tree, changes, where="quick"), source=f"{path} with --quick")
    return study


def _read_base(tree: dict[str, Any], folder: Path) -> None:
    """Replace the name of the base's file with its fields."""
    if isinstance(tree.get("base"), str):
        tree["base"] = read_tree(folder / tree["base"])


def _validate(tree: dict[str, Any], *, source: str) -> StudyConfig:
    try:
        return StudyConfig.model_validate(tree)
    except ValidationError as error:
        raise explained(error, StudyConfig, source=source) from None


def make_plan(
    study: StudyConfig,
    chosen: Mapping[str, Any] | None = None,
    tried: Mapping[str, tuple[Any, ...]] | None = None,
) -> StudyPlan:
    """Plan every run of a study; with ``choose``, the arms' own runs only for those whose value is ``chosen``.

    ``tried`` are the values that arms are tried at, in the place of ``choose.values``.

    Raises:
        ConfigError: an arm or a cell is not a valid run, or does not share the start and the rollouts of the others.
    """
    base, root, sweep = study.base, Path(study.run_dir).expanduser(), study.sweep
    choose, chosen = study.choose, chosen or {}
    seeds = (*(choose.seeds if choose else ()), *study.seeds, *(sweep.seeds if sweep else ()))

    validated: dict[str, tuple[Config, dict[str, Any]]] = {}
    records = None if study.records is None else Path(study.records).expanduser()

    def config(changes: Changes, seed: int, folder: Path, where: str) -> tuple[Config, dict[str, Any]]:
        """Validate each set of changes once: a study's seeds and folders are valid for any of them."""
        run_fields, key = {"seed": seed, "run_dir": str(folder)}, json.dumps(changes, default=repr)
        if key not in validated:
            fields = merged(base, changes, where=where)
            validated[key] = parse_config(fields | run_fields, source=where), fields
        cfg, fields = validated[key]
        return cfg.model_copy(update=run_fields), fields

    def planned(name: str, changes: Changes, seed: int, folder: str, where: str) -> Planned:
        cfg, fields = config(changes, seed, home(seed) / folder, where)
        _check_equal(starts[seed], cfg, where)
        return Planned(name, seed, cfg, home(seed), records, digest_of(fields, seed) if records else "")

    def home(seed: int) -> Path:
        return root / f"seed{seed}"

    def with_value(changes: Changes, value: Any) -> Changes:
        return changes if choose is None else merged(changes, {choose.field: value}, where="choose")

    starts = {seed: config({}, seed, home(seed), "base")[0] for seed in seeds}
    if starts[seeds[0]].data.eval is None:
        raise ConfigError("base.data.eval: a study compares held-out pass@1; set data.eval")
    tried = {} if choose is None else dict.fromkeys(study.arms, choose.values) | dict(tried or {})
    trials = {
        name: tuple(
            tuple(
                planned(f"{name}, {value}", with_value(changes, value), seed, trial(name, value), f"arms.{name}")
                for seed in choose.seeds
            )
            for value in tried[name]
        )
        for name, changes in study.arms.items()
        if choose is not None
    }
    arms = {
        name: tuple(
            planned(name, with_value(changes, chosen.get(name)), seed, slug(name), f"arms.{name}")
            for seed in study.seeds
        )
        for name, changes in study.arms.items()
        if choose is None or name in chosen
    }
    names: dict[str, str] = {}
    for name in study.arms:
        twin = names.setdefault(_content(trials[name][0][0].config if trials else arms[name][0].config), name)
        if twin != name:
            raise ConfigError(f"arms.{name}: is the same run as arms.{twin}; change one of its fields, or leave it out")
    if sweep is None:
        return StudyPlan(study, root, starts, arms, (), trials, tried)
    trained = {_content(run.config): run for runs in arms.values() for run in runs}
    cells = []
    for values in itertools.product(*sweep.over.values()):
        fields = dict(zip(sweep.over, values))
        name = ", ".join(f"{field.rpartition('.')[2]} {value}" for field, value in fields.items())
        changes = merged(merged({}, study.arms[sweep.of], where=sweep.of), fields, where="sweep.over")
        runs = [planned(name, changes, seed, f"sweep/{slug(name)}", f"sweep {name}") for seed in sweep.seeds]
        cells.append(Cell(values, tuple(trained.get(_content(run.config), run) for run in runs)))
    return StudyPlan(study, root, starts, arms, tuple(cells), trials, tried)


def trial(arm: str, value: Any) -> str:
    """Return the folder of an arm's runs with a value of ``choose``, within a seed's folder."""
    return f"choose/{slug(arm)}/{slug(str(value))}"


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Copy a nested dict with changed fields. Dots in names lead into sections; mappings are merged.

    Raises:
        ConfigError: a dotted name leads into a value.
    """
    out = copy.deepcopy(dict(tree))
    for key, value in changes.items():
        *parents, leaf = key.split(".")
        node = out
        for name in parents:
            node[name] = {} if node.get(name) is None else node[name]
            node = node[name]
            if not isinstance(node, dict):
                raise ConfigError(f"{where}: {key}: {name} is a value and has no field {leaf}")
        present = node.get(leaf)
        inside = isinstance(value, Mapping) and isinstance(present, Mapping | None)
        node[leaf] = merged(present or {}, value, where=where) if inside else copy.deepcopy(value)
    return out


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to one mapping with dotted names; of two values for the same name the last counts."""
    out: dict[str, Any] = {}
    for name, value in tree.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return out


def slug(name: str) -> str:
    """Turn a name into a folder name: letters, digits and dots, all else as single dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")


def digest_of(fields: Mapping[str, Any], seed: int) -> str:
    """Return a short digest of a run's fields as they are written, but its folder: a new default changes none."""
    text = json.dumps({**fields, "run_dir": None, "seed": seed}, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _content(cfg: Config) -> str:
    """Return the config without the run's folder, to compare runs."""
    return json.dumps(cfg.model_dump(mode="json", exclude={"run_dir"}), sort_keys=True)


def _check_equal(base: Config, arm: Config, where: str) -> None:
    """Check that an arm differs only in how the policy learns from rollouts, and in how many it has."""
    paths = [
        f"{section}.{field}" if fields_of(type(base_value)) else section
        for section in type(base).model_fields
        if section != "run_dir" and (base_value := getattr(base, section)) != (arm_value := getattr(arm, section))
        for field in (fields_of(type(base_value)) or [""])
        if field == "" or getattr(base_value, field) != getattr(arm_value, field)
    ]
    forbidden = [p for p in paths if p not in COUNTS and (p.split(".")[0] not in FREE or p in FIXED)]
    base_answer, arm_answer = base.credit.answer, arm.credit.answer  # rewards read these too
    forbidden += [f"credit.answer.{f}" for f in ("style", "pattern") if vars(base_answer)[f] != vars(arm_answer)[f]]
    if forbidden:
        raise ConfigError(
            f"{where}: expected changes in {', '.join((*FREE, *COUNTS))} (except {', '.join(FIXED)}), got "
            f"{', '.join(forbidden)}; all arms must have the same start, problems and sampling: set it in base"
        )
