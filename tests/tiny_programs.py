"""The device programs of a tiny run, as a run builds them."""

import jax
import tiny

from oarjax.system.devices import make_mesh
from oarjax.training.shapes import build, parts_for


def one_mesh():
    return make_mesh(slice=1, data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])


def built(**changes):
    cfg = tiny.config(data__max_prompt=6, rollout__prompt_bucket=6, **changes)
    return build(parts_for(cfg, tiny.model(), one_mesh(), stop_ids=(tiny.STOP,), pad_id=tiny.PAD))
