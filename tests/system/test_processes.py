"""What processes agree on, seen with one process and with stand-ins; two real ones are in test_two_processes.py."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oarjax.config.loading import parse_config
from oarjax.errors import ConfigError
from oarjax.grading.rewards import reward
from oarjax.run.checks import check_processes
from oarjax.system import processes
from oarjax.system.devices import DeviceError
from oarjax.system.processes import join_processes, pod_hosts
from oarjax.types import Grades

ALONE = {"coordinator": None, "processes": None, "process": None, "timeout": 300}


@pytest.fixture
def asked(monkeypatch):
    """What jax.distributed.initialize is called with."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **told: calls.append(told))
    return calls


def test_one_process_starts_nothing(asked):
    join_processes(**ALONE)
    assert not asked


def test_processes_are_told_or_find_out(asked, monkeypatch):
    join_processes(coordinator="10.0.0.2:8476", processes=4, process=3, timeout=60)
    monkeypatch.setattr(processes, "pod_hosts", lambda: 4)
    join_processes(**ALONE)
    assert asked[0]["coordinator_address"] == "10.0.0.2:8476"
    assert (asked[0]["num_processes"], asked[0]["process_id"]) == (4, 3)
    assert asked[1] == {"initialization_timeout": 300 + processes.GRACE}  # JAX's own detection does the rest
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    join_processes(**ALONE)
    assert len(asked) == 2


def test_jax_cannot_start(monkeypatch):
    def taken(**_):
        raise RuntimeError("the port is taken")

    monkeypatch.setattr(jax.distributed, "initialize", taken)
    says = "process 1 of 2 could not join the others at h:1: the port is taken"
    with pytest.raises(DeviceError, match=says):
        join_processes(coordinator="h:1", processes=2, process=1, timeout=7)


def test_others_that_do_not_come(monkeypatch):
    """The wait ends with words and without JAX."""
    ended, late = [], threading.Event()

    def never(**_):
        late.wait(60)

    monkeypatch.setattr(processes, "_give_up", lambda error: (ended.append(str(error)), late.set()))
    monkeypatch.setattr(processes, "pod_hosts", lambda: 2)
    monkeypatch.setattr(jax.distributed, "initialize", never)
    join_processes(**ALONE | {"timeout": 0})
    assert "this host of the TPU pod did not reach the others at the first host within 0 s. Start the same" in ended[0]


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"coordinator": "h:1"}, "coordinator, processes and process must be set together; set all three or none"),
        ({"processes": 2, "process": 0}, "set all three or none"),
        ({"coordinator": "h", "processes": 2, "process": 0}, "expected host:port such as .*, got 'h'"),
        ({"coordinator": "h:1", "processes": 2, "process": 2}, "expected a number below processes = 2, got 2"),
    ],
)
def test_sections_that_cannot_be(section, says):
    tree = {"run_dir": "r", "policy": {"path": "p"}, "data": {"train": {"source": "s"}}, "distributed": section}
    with pytest.raises(ConfigError, match=f"distributed.*{says}"):
        parse_config(tree)


@pytest.fixture
def tpu_machine(tmp_path, monkeypatch):
    """A machine with TPU chips, and what its metadata server answers."""
    attributes: dict[str, str] = {}

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            found = attributes.get(self.path.rsplit("/", 1)[1])
            known = found is not None and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write((found or "").encode() if known else b"")

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
    for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES", "MEGASCALE_NUM_SLICES", "TPU_SKIP_MDS_QUERY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processes, "find_spec", lambda name: name)
    (tmp_path / "accel0").touch()
    yield tmp_path, attributes
    server.shutdown()
    server.server_close()


def test_hosts_of_a_pod(tpu_machine, monkeypatch):
    chips, attributes = tpu_machine
    assert pod_hosts(chips) == 1  # no such attribute: a single machine, or Colab
    attributes["worker-network-endpoints"] = "a:0:10.0.0.1,b:1:10.0.0.2,c:2:10.0.0.3,d:3:10.0.0.4"
    assert pod_hosts(chips) == 4
    attributes["tpu-env"] = "ACCELERATOR_TYPE: 'v5p-32'\nMEGASCALE_NUM_SLICES: '2'\n"
    assert pod_hosts(chips) == 8
    assert pod_hosts(chips / "none") == 1  # no chips here
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    assert pod_hosts(chips) == 2
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "3")
    assert pod_hosts(chips) == 6


def test_no_metadata_server(tpu_machine, monkeypatch):
    chips, attributes = tpu_machine
    attributes["worker-network-endpoints"] = "a,b"
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    assert pod_hosts(chips) == 1
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY")
    monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:9")
    assert pod_hosts(chips) == 1


def test_alone_everything_is_one_s_own(tmp_path):
    made = []
    processes.only_first(lambda: made.append(1))
    processes.check_shared(tmp_path / "not even there")
    assert made == [1]
    assert processes.is_first()
    assert processes.from_first(lambda: 7) == 7
    assert processes.gather({"a": [1, None]}) == [{"a": [1, None]}]
    np.testing.assert_array_equal(processes.share(5), [0, 1, 2, 3, 4])
    fetched = processes.to_host({"x": jnp.arange(3), "y": np.ones(2)})
    assert isinstance(fetched["x"], np.ndarray)


def pretend(monkeypatch, count: int, index: int):
    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(jax, "process_index", lambda: index)


def test_every_row_has_one_grader(monkeypatch):
    rows = []
    for index in range(3):
        pretend(monkeypatch, 3, index)
        rows.append(processes.share(8).tolist())
    assert rows == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_grades_of_all_shares(monkeypatch):
    """Two processes of one and two rows. JSON stands between them: NaN, null and odd text must come through."""
    parts = [
        Grades(
            np.asarray([0.1], np.float32),
            {"exact": np.asarray([0.1], np.float32)},
            ["graded"],
            [None],
            ["\ud800 \u2028"],
        ),
        Grades(
            np.asarray([np.nan, 1], np.float32),
            {"exact": np.asarray([np.nan, 1], np.float32)},
            ["timeout", "graded"],
            ["", "7"],
            ["t", ""],
        ),
    ]
    sent = []
    monkeypatch.setattr(processes, "gather", lambda mine: sent.append(json.loads(json.dumps(mine))) or sent)
    pretend(monkeypatch, 2, 0)
    processes.gather_grades(parts[0])
    together = processes.gather_grades(parts[1])
    np.testing.assert_array_equal(together.rewards, np.asarray([0.1, np.nan, 1], np.float32))
    np.testing.assert_array_equal(together.per_reward["exact"], together.rewards)
    assert together.rewards.dtype == np.float32
    assert together.verdicts == ["graded", "timeout", "graded"]
    assert together.answers == [None, "", "7"]
    assert together.notes == ["\ud800 \u2028", "t", ""]


def test_several_processes_stop_where_one_cannot_write_and_grade_rows_alone():
    """Whatever joined them: on a pod no field of the config says that there are several."""
    tree = {"run_dir": "r", "policy": {"path": "p"}, "data": {"train": {"source": "s"}}}
    cfg = parse_config(tree | {"checkpoint": {"on_failure": "warn"}})
    check_processes(cfg.checkpoint, cfg.grading, processes=1)
    with pytest.raises(ConfigError, match=r"checkpoint.on_failure: warn needs a single process, got 2; set stop"):
        check_processes(cfg.checkpoint, cfg.grading, processes=2)
    check_processes(cfg.checkpoint.model_copy(update={"on_failure": "stop"}), cfg.grading, processes=2)
    reward("of_groups", per="group")(len)
    wide = parse_config(tree | {"grading": {"rewards": [{"name": "of_groups"}]}})
    check_processes(wide.checkpoint, wide.grading, processes=1)
    with pytest.raises(ConfigError, match=r"of_groups sees whole groups or batches, but each of 4 processes"):
        check_processes(wide.checkpoint, wide.grading, processes=4)


def test_a_lost_process_is_said_in_a_sentence(monkeypatch):
    """75 where there is a checkpoint to resume from; other errors, and those of a single process, stay as they are."""
    text = "INTERNAL: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"

    def failing(error, *, saved=True):
        with processes.peers_watched(lambda: saved):
            raise error

    lost = jax.errors.JaxRuntimeError(text)
    with pytest.raises(jax.errors.JaxRuntimeError, match="gloo"):
        failing(lost)
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    for saved, code in ((True, 75), (False, 1)):
        with pytest.raises(processes.PeerLost, match="another process of the run ended") as error:
            failing(lost, saved=saved)
        assert error.value.exit_code == code
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        failing(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"))
