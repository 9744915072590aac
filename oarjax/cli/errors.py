"""Errors that the user can mend, shown as a message instead of a traceback."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from oarjax.cli.health import UnhealthyRun
from oarjax.config import ConfigError
from oarjax.host.bad_batches import BadBatchError
from oarjax.host.devices import DeviceError
from oarjax.host.durable import StorageError
from oarjax.host.grade import GraderError
from oarjax.host.hf import CheckpointError
from oarjax.host.problems import DataError
from oarjax.host.study_jobs import StudyError
from oarjax.host.study_page import PageError
from oarjax.host.tokenizer import TokenizerError
from oarjax.host.topology import TopologyError
from oarjax.models.qwen import UnsupportedModel
from oarjax.sharding import ShardingError

USER_ERRORS = (
    BadBatchError,
    ConfigError,
    DeviceError,
    GraderError,
    CheckpointError,
    DataError,
    PageError,
    StorageError,
    StudyError,
    TokenizerError,
    TopologyError,
    UnhealthyRun,
    UnsupportedModel,
    ShardingError,
)


def show(error: BaseException) -> None:
    console = Console(stderr=True)
    console.print(Text("error: ", style="bold red").append(Text(str(error), style="default")), soft_wrap=True)
