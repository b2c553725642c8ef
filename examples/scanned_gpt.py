"""Trains the GPT of ``gpt.py`` with its layers written out, and as one ``lax.scan`` over stacked weights.

    python examples/scanned_gpt.py              four groups of one process
    python examples/scanned_gpt.py --ray        on Ray actors
    python examples/scanned_gpt.py --layers 30 --stages 4      stages of 8, 8, 7 and 7 layers

The train step is one for a whole batch, but for the word ``mpmd.value_and_grad``. Both ways have the losses
of ``jax.value_and_grad`` of the whole batch on one device. With the scan, compiling does not take longer the
more layers there are, and each group holds the layers of its stage of every stacked array.
"""

import argparse
import functools
import time

import common
import gpt
import jax
import jax.numpy as jnp
import optax
import text_data

import mpmd

RELATIVE_LIMIT = 1e-4  # of each leaf's norm


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    if not args.ray:
        common.fake_devices(args.stages)
    try:
        config = gpt.GPTConfig(args.layers, args.d_model, args.heads, args.seq_len, args.stages)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    schedule = mpmd.Std1F1B(args.stages)
    in_microbatches = functools.partial(
        mpmd.value_and_grad, num_microbatches=args.microbatches, schedule=schedule
    )
    written_out = functools.partial(gpt.loss, config=config)
    scanned = functools.partial(scanned_loss, config=config)
    params = gpt.init_params(jax.random.key(0), config)
    text, _ = text_data.standard_library()
    shape = (args.batch_size, args.seq_len)
    batches = [text_data.random_batch(text, shape, 0, step) for step in range(args.steps)]

    plain = gpt.train(jax.jit(make_train_step(jax.value_and_grad(written_out))), params, batches)
    with common.open_mesh({"stage": args.stages}, args.ray, args.address, transport=args.transport) as mesh:
        losses = {"plain jax.jit": plain[1]}
        for name, loss, start in (
            ("written out", written_out, params),
            ("scanned", scanned, stacked(params)),
        ):
            step = mpmd.jit(make_train_step(in_microbatches(loss)), mesh, donate_argnums=0)
            began = time.perf_counter()
            step = step.compile(gpt.init_state(start), *batches[0])
            seconds = time.perf_counter() - began
            print(f"{name}: {len(step.plan.executables)} executables, compiled in {seconds:.1f} s")
            trained, losses[name] = gpt.train(step, start, batches)
            expected = plain[0] if name == "written out" else {of: stacked(plain[0][of]) for of in plain[0]}
            common.assert_close(
                f"{name}: parameters and moments", mpmd.to_host(trained), expected, RELATIVE_LIMIT
            )
        print(f"\na stacked array: {trained['params']['blocks']['qkv']!r}")
    print("\nlosses in nats per byte, of\n" + "  ".join(f"{name:>13}" for name in losses))
    for row in zip(*losses.values(), strict=True):
        print("  ".join(f"{loss:13.6f}" for loss in row))
    for name in ("written out", "scanned"):
        common.assert_close(f"{name}: losses", losses[name], losses["plain jax.jit"], RELATIVE_LIMIT)


def scanned_loss(params: dict, tokens: jax.Array, targets: jax.Array, config: gpt.GPTConfig) -> jax.Array:
    """``gpt.loss`` of parameters whose ``"blocks"`` are stacked; as many stages as ``config`` says."""

    def body(x, layer):
        x = gpt.block(layer, x, config.num_heads)
        return mpmd.mark_stage_end(x, num_stages=config.num_stages), None

    x = params["token_embedding"][tokens] + params["position_embedding"]
    x, _ = jax.lax.scan(body, x, params["blocks"])
    scores = gpt.layer_norm(params["head_norm"], x) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()


def stacked(params: dict) -> dict:
    """Parameters of ``gpt.init_params`` with one array for all layers, ``[num_layers, ...]``."""
    return {**params, "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["blocks"])}


def make_train_step(differentiate):
    """The step of one batch, int32[batch_size, seq_len] each: tokens and targets."""

    def train_step(state, tokens, targets):
        loss, gradients = differentiate(state[0], tokens, targets)
        return gpt.updated(state, gradients), loss

    return train_step


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--stages", type=int, default=4, help="stages, each on a group of its own (default: 4)")
    add("--microbatches", type=int, default=4, help="microbatches per step (default: 4)")
    add("--layers", type=int, default=8)
    add("--d-model", type=int, default=64)
    add("--heads", type=int, default=4)
    add("--seq-len", type=int, default=64, help="bytes per sequence (default: 64)")
    add("--batch-size", type=int, default=8, help="sequences per step (default: 8)")
    add("--steps", type=int, default=5)
    common.add_mesh_arguments(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
