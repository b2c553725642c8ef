"""A vision encoder and a language model in one train step, each in loops on groups of its own.

    python examples/encoder_and_model.py              in one process, on six fake devices
    python examples/encoder_and_model.py --ray        on six Ray actors

Images are drawn patterns, and the captions that the model learns to write say which. The encoder, in two
stages on two groups, turns an image into embeddings, which the model, in four stages on four groups, has
before the caption. One step has three loops: the encoder forwards; the model forwards and backwards, with the
gradients of the embeddings; and the encoder once more, with these as its cotangents. ``part=`` says where
each loop runs, and embeddings and gradients go straight from group to group. Losses, parameters and moments
are compared with those of plain JAX, which differentiates both models at once.
"""

import common
import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpmd

PARTS = {"encoder": {"stage": 2}, "model": {"stage": 4}}
SIDE, PATCH, NUM_PATTERNS = 8, 4, 4  # pixels of an image and of a patch
NUM_PATCHES = (SIDE // PATCH) ** 2
CAPTION = 4  # tokens
MODEL = gpt.GPTConfig(
    num_layers=4, d_model=16, num_heads=2, seq_len=NUM_PATCHES + CAPTION, num_stages=4, vocab_size=16
)
ENCODER_WIDTH, ENCODER_HEADS, ENCODER_LAYERS = 16, 2, 2
BATCH_SIZE, NUM_MICROBATCHES = 16, 4
OPTIMIZER = optax.adam(1e-2, eps=1e-6)
RELATIVE_LIMIT = 1e-4  # of each leaf's norm


def main(argv: list[str] | None = None) -> None:
    args = common.parse_steps(__doc__, argv)
    if not args.ray:
        common.fake_devices(6)
    rng = np.random.default_rng(0)
    batches = [draw_batch(rng) for _ in range(args.steps)]
    plain = train(jax.jit(plain_step), batches)
    with common.open_parts(PARTS, args.ray, args.address, args.transport) as mesh:
        step = mpmd.jit(pipelined_step, mesh, donate_argnums=0).compile(initial_state(), *batches[0])
        check_groups(step, mesh)
        pipelined = mpmd.to_host(train(step, batches))
    for name, actual in pipelined.items():
        common.assert_close(name, actual, plain[name], RELATIVE_LIMIT)
    losses = pipelined["losses"]
    print(f"the loss of captions: {float(losses[0]):.3f} nats, then {float(losses[-1]):.3f}")


def check_groups(step, mesh) -> None:
    """Asserts that the weights of each model are on the groups of its part, and prints where."""
    (params, _) = step.argument_leaves(0)
    for name, groups in mesh.parts.items():
        used = {group for leaf in jax.tree.leaves(params[name]) for group in leaf.mpmd_idxs}
        print(f"{name}: weights on groups {sorted(used)}")
        assert used == {*groups}, f"{name} is on groups {sorted(used)}, and its part has {[*groups]}"


def train(step, batches) -> dict:
    """Losses, parameters and Adam's moments after a step with each batch."""
    state, losses = initial_state(), []
    for batch in batches:
        state, loss = step(state, *batch)
        losses.append(loss)
    return {"losses": losses, "parameters and moments": state}


def encode(params: dict, images: jax.Array) -> jax.Array:
    """Embeddings, float32[batch, NUM_PATCHES, d_model], of images, float32[batch, SIDE, SIDE]."""
    x = patches_of(images) @ params["patch_embedding"] + params["position_embedding"]
    for layer, block in enumerate(params["blocks"]):
        x = encoder_block(block, x)
        if layer in mpmd.stage_ends(ENCODER_LAYERS, 2):
            x = mpmd.mark_stage_end(x)
    return gpt.layer_norm(params["norm"], x) @ params["projection"]


def patches_of(images: jax.Array) -> jax.Array:
    """Square patches of images: float32[batch, NUM_PATCHES, PATCH * PATCH]."""
    along = SIDE // PATCH
    cut = images.reshape(-1, along, PATCH, along, PATCH)
    return jnp.swapaxes(cut, 2, 3).reshape(-1, NUM_PATCHES, PATCH * PATCH)


def encoder_block(params: dict, x: jax.Array) -> jax.Array:
    """A layer in which all patches see one another; float32[batch, NUM_PATCHES, ENCODER_WIDTH]."""
    qkv = gpt.layer_norm(params["attention_norm"], x) @ params["qkv"]
    query, key, value = jnp.moveaxis(qkv.reshape(*x.shape[:2], ENCODER_HEADS, 3, -1), 3, 0)
    attended = jax.nn.dot_product_attention(query, key, value).reshape(x.shape)
    x = x + attended @ params["attention_out"]
    hidden = jax.nn.gelu(gpt.layer_norm(params["mlp_norm"], x) @ params["mlp_in"])
    return x + hidden @ params["mlp_out"]


def caption_loss(params: dict, embeddings: jax.Array, captions: jax.Array) -> jax.Array:
    """Mean cross-entropy of captions, int32[batch, CAPTION + 1], behind the embeddings of their images."""
    words = params["token_embedding"][captions[:, :-1]]
    x = jnp.concatenate([embeddings, words], axis=1) + params["position_embedding"]
    for layer, block in enumerate(params["blocks"]):
        x = gpt.block(block, x, MODEL.num_heads)
        if layer in MODEL.stage_ends:
            x = mpmd.mark_stage_end(x)
    scores = gpt.layer_norm(params["head_norm"], x[:, NUM_PATCHES:]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, captions[:, 1:]).mean()


def pipelined_step(state, images: jax.Array, captions: jax.Array):
    """The step of both models, whose loops say their parts."""
    params, opt_state = state
    images, captions = mpmd.microbatches((images, captions), NUM_MICROBATCHES)
    embeddings = mpmd.treduce(
        lambda images: encode(params["encoder"], images),
        images,
        schedule=mpmd.ForwardOnly(2, 2),
        operation=mpmd.Concat(),
        part="encoder",
    )
    loss, (model_grads, cotangents) = mpmd.treduce(
        lambda microbatch: jax.value_and_grad(caption_loss, argnums=(0, 1))(params["model"], *microbatch),
        (embeddings, captions),
        schedule=mpmd.Std1F1B(4),
        operation=(mpmd.Mean, (mpmd.Mean, mpmd.Concat())),
        part="model",
    )

    def encoder_grads_of(microbatch):
        images, cotangents = microbatch
        _, pull_back = jax.vjp(lambda params: encode(params, images), params["encoder"])
        return pull_back(cotangents)[0]

    encoder_grads = mpmd.treduce(
        encoder_grads_of,
        (images, cotangents),
        schedule=mpmd.Std1F1B(2),
        operation=mpmd.Mean,
        part="encoder",
    )
    return updated(params, opt_state, {"encoder": encoder_grads, "model": model_grads}), loss


def plain_step(state, images: jax.Array, captions: jax.Array):
    """The same, of the whole batch on one device."""
    params, opt_state = state

    def loss_of(params):
        return caption_loss(params["model"], encode(params["encoder"], images), captions)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return updated(params, opt_state, grads), loss


def updated(params: dict, opt_state, grads: dict):
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def initial_state() -> tuple[dict, optax.OptState]:
    model_key, encoder_key, patch_key, projection_key = jax.random.split(jax.random.key(0), 4)
    config = gpt.GPTConfig(ENCODER_LAYERS, ENCODER_WIDTH, ENCODER_HEADS, seq_len=NUM_PATCHES)
    drawn = gpt.init_params(encoder_key, config)
    encoder = {
        "patch_embedding": jax.random.normal(patch_key, (PATCH * PATCH, ENCODER_WIDTH)) / PATCH,
        "position_embedding": drawn["position_embedding"],
        "blocks": drawn["blocks"],
        "norm": drawn["head_norm"],
        "projection": jax.random.normal(projection_key, (ENCODER_WIDTH, MODEL.d_model)) / 4,
    }
    params = {"encoder": encoder, "model": gpt.init_params(model_key, MODEL)}
    return params, OPTIMIZER.init(params)


def draw_batch(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Images with noise, float32[batch, SIDE, SIDE], and their captions, int32[batch, CAPTION + 1].

    A caption begins with token 0, and says which pattern its image has and the tokens that follow from it.
    """
    patterns = rng.integers(NUM_PATTERNS, size=BATCH_SIZE)
    rows, columns = np.indices((SIDE, SIDE))
    drawn = np.stack([np.sin(rows), np.sin(columns), np.sin(rows + columns), np.sin(rows * columns)])
    images = drawn[patterns] + 0.1 * rng.standard_normal((BATCH_SIZE, SIDE, SIDE))
    words = 1 + (patterns[:, None] + np.arange(CAPTION) * (patterns[:, None] + 1)) % (MODEL.vocab_size - 1)
    captions = np.concatenate([np.zeros((BATCH_SIZE, 1), np.int64), words], axis=1)
    return images.astype(np.float32), captions.astype(np.int32)


if __name__ == "__main__":
    main()
