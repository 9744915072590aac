"""The manifest for GKE: its fields are those of the JobSet API, and what it says of a slice agrees. Nothing runs it."""

import copy
import json

import jsonschema
import pytest
from conftest import ROOT

from oarjax.config.loading import load_config
from oarjax.storage.stop import RESUMABLE
from oarjax.system.yaml_tree import read_yaml
from oarjax.tools.plan.topology import find_slice

SCHEMA = json.loads((ROOT / "tests" / "golden" / "tpu" / "jobset.schema.json").read_text())
MANIFEST = read_yaml((ROOT / "tpu" / "gke" / "jobset.yaml").read_text())


def job(manifest):
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]


def misspelt(manifest):
    job(manifest)["backofLimit"] = job(manifest).pop("backoffLimit")


def restarted_by_kubernetes(manifest):
    job(manifest)["template"]["spec"]["restartPolicy"] = "OnFailure"


def without_a_driver(manifest):
    del job(manifest)["template"]["spec"]["volumes"][0]["csi"]["driver"]


def test_the_manifest_has_the_form_of_the_api():
    jsonschema.validate(MANIFEST, SCHEMA)


@pytest.mark.parametrize("fault", [misspelt, restarted_by_kubernetes, without_a_driver])
def test_a_fault_in_the_manifest_is_noticed(fault):
    manifest = copy.deepcopy(MANIFEST)
    fault(manifest)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, SCHEMA)


def test_machines_chips_and_arguments_agree():
    pod = job(MANIFEST)["template"]["spec"]
    where = find_slice(f"v7x:{pod['nodeSelector']['cloud.google.com/gke-tpu-topology']}")
    (container,) = pod["containers"]
    assert where.name.startswith(pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"])
    assert job(MANIFEST)["parallelism"] == job(MANIFEST)["completions"] == where.chips // 4
    assert container["resources"]["limits"] == container["resources"]["requests"] == {"google.com/tpu": 4}
    (rule,) = job(MANIFEST)["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert RESUMABLE not in rule["onExitCodes"]["values"]  # a run that was stopped is started again
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"]: "/bucket" for volume in pod["volumes"]}
    assert all(" " not in volume["csi"]["volumeAttributes"]["mountOptions"] for volume in pod["volumes"])
    config, *overrides = container["args"]
    cfg = load_config(ROOT / "configs" / f"{config}.yaml", overrides)
    assert cfg.run_dir.startswith("/bucket/")
    assert cfg.mesh.slice == MANIFEST["spec"]["replicatedJobs"][0]["replicas"]
