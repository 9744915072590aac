"""Build a tiny run from a model and a mesh alone."""

import jax
import tiny

from oarjax.run.run import Run
from oarjax.system.mesh import make_mesh


def one_mesh():
    return make_mesh(slice=1, data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])


def built(**changes):
    cfg = tiny.config(data__max_prompt=6, rollout__prompt_bucket=6, **changes)
    return Run(cfg, model=tiny.model(), mesh=one_mesh(), stop_ids=(tiny.STOP,), pad_id=tiny.PAD)
