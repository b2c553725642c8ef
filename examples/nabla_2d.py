"""Data x pipeline parallelism, after Nabla's 2D example: four stages, each replicated over two devices.

    python examples/nabla_2d.py              in one process, on eight fake devices
    python examples/nabla_2d.py --ray        on four Ray actors of two devices each

The model is that of ``nabla_gpipe.py``, unchanged. Only the mesh has one more axis, ``"dp"``, and
``in_specs`` shard every microbatch over it; XLA adds the all-reduce of the gradients.
"""

import argparse

import common
import nabla_gpipe
from jax.sharding import PartitionSpec as P

import mpmd

NUM_REPLICAS = 2
NUM_MICROBATCHES = 4


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    common.add_mesh_arguments(parser)
    args = parser.parse_args(argv)
    axes = {"stage": nabla_gpipe.NUM_STAGES, "dp": NUM_REPLICAS}
    if not args.ray:
        common.fake_devices(nabla_gpipe.NUM_STAGES * NUM_REPLICAS)

    params, xs, ys = nabla_gpipe.make_data(NUM_MICROBATCHES)
    batch_spec = P(None, "dp")  # of [microbatches, microbatch_size, dim]
    with common.open_mesh(axes, on_ray=args.ray, address=args.address) as mesh:
        step = mpmd.mpmd_jit_with_loop(
            nabla_gpipe.loss_and_gradients, mpmd_mesh=mesh, in_specs=(P(), batch_spec, batch_spec)
        )
        nabla_gpipe.assert_parity(step(params, xs, ys), params, xs, ys)
    print("the gradients of the 2D pipeline are those of JAX")


if __name__ == "__main__":
    main()
