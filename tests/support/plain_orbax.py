"""Restores a checkpoint in a process without this project, in each of Orbax's ways, and prints digests.

python plain_orbax.py CHECKPOINT < the pickled pytree to restore, with shapes and dtypes
"""

import json
import pickle
import sys

import jax
import orbax.checkpoint as ocp
from digests import digests
from orbax.checkpoint import v1

sys.modules["mpmd"] = sys.modules["cluster"] = None  # so that importing them fails


def main(path, target):
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)
            if isinstance(leaf, jax.ShapeDtypeStruct)
            else leaf
        ),
        target,
    )
    ways = {
        "PyTreeCheckpointer": lambda: ocp.PyTreeCheckpointer().restore(path),
        "StandardCheckpointer": lambda: ocp.StandardCheckpointer().restore(path),
        "StandardCheckpointer with a target": lambda: ocp.StandardCheckpointer().restore(path, target),
        "v1": lambda: v1.load(path),
        "v1 with a target": lambda: v1.load(path, target),
    }
    found = {}
    for name, restore in ways.items():
        tree = restore()
        found[name] = digests(tree["state"]), tree["epoch"], tree["none"]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], pickle.load(sys.stdin.buffer))
