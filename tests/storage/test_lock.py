"""One process per run folder."""

import errno
import os
import signal
import socket
import subprocess
import sys

import pytest

from oarjax.errors import ConfigError
from oarjax.storage.durable import StorageError
from oarjax.storage.folder import locked

HOLD = "import sys, time; from pathlib import Path; from oarjax.storage.folder import locked\n"
HOLD += "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"


def test_a_folder_in_use_is_refused_until_its_process_is_gone(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(ConfigError, match=f"is in use by process {other.pid} on {socket.gethostname()}; wait until"),
            locked(tmp_path),
        ):
            pass
        os.kill(other.pid, signal.SIGKILL)
    with locked(tmp_path):  # the file is still there
        assert str(os.getpid()) in (tmp_path / "lock").read_text()
        with pytest.raises(ConfigError, match="is in use"), locked(tmp_path):
            pass
    with locked(tmp_path):
        pass


def failing(number):
    def write(*_):
        raise OSError(number, os.strerror(number))

    return write


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_on_a_full_disk_the_lock_holds_without_a_name(tmp_path, monkeypatch, number):
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing(number))
        lock = locked(tmp_path)
        lock.__enter__()
    with pytest.raises(ConfigError, match="is in use by another process"), locked(tmp_path):
        pass
    lock.__exit__(None, None, None)
    with locked(tmp_path):
        pass


def test_a_lock_on_failing_storage_is_a_storage_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "write", failing(errno.EIO))
    with pytest.raises(StorageError, match=r"cannot write .*lock: .*Input/output error"), locked(tmp_path):
        pass
