"""Data x pipeline parallelism, after Nabla's 2D example: four stages, each replicated over two devices.

    python examples/nabla_2d.py                      in one process, on eight fake devices
    python examples/nabla_2d.py --ray                on four Ray actors of two devices each
    python examples/nabla_2d.py --ray --processes 2  on eight Ray actors, two for each stage

The step is that of ``nabla_gpipe.py``, with four microbatches. Only the mesh differs: the groups have two
devices along ``"data"``, which split every microbatch; XLA adds the all-reduce of the gradients, and forwards
need none. All three are asserted of what was planned and compiled, so that it fails without data parallelism.
"""

import nabla_gpipe

NUM_REPLICAS = 2
NUM_MICROBATCHES = 4


def main(argv: list[str] | None = None) -> None:
    args = nabla_gpipe.parse_arguments(__doc__, argv, data=NUM_REPLICAS)
    if args.data < 2:
        raise SystemExit("2D is for several replicas of each stage: --data must be at least 2")
    nabla_gpipe.run(args, NUM_MICROBATCHES)
    print("the gradients of the 2D pipeline are those of JAX")


if __name__ == "__main__":
    main()
