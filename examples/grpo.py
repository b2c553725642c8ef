"""GRPO on a toy language task: a trainer, a frozen reference and a sampler, each on groups of its own.

    python examples/grpo.py              in one process, on five fake devices
    python examples/grpo.py --ray        on four Ray actors

The model, a base model that knows a little of it, has to write four digits in reverse. The sampler draws
several answers to each prompt, a rule rewards each digit that is right, and the trainer, a pipeline of two
stages, raises the probability of answers that are better than the others to their prompt (Shao et al. 2024,
"DeepSeekMath", section 4.1). The sampler, which is tensor parallel and has a cache of keys and values, draws
the next batch while the trainer learns from the last one. Every few steps ``mpmd.reshard`` gives it the
trainer's weights. All draws are of a fixed seed, and the reward of the last steps has a bar to pass.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
from collections.abc import Sequence

import common
import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpmd

PARTS = {"trainer": {"stage": 2}, "reference": {"stage": 1}, "sampler": {"stage": 1, "model": 2}}
DIGITS, NUM_PROMPTS, NUM_ANSWERS = 4, 16, 8  # digits of a prompt and of an answer; answers to each prompt
CONFIG = gpt.GPTConfig(
    num_layers=2, d_model=32, num_heads=4, seq_len=2 * DIGITS - 1, num_stages=2, vocab_size=10
)
CLIP, KL_WEIGHT = 0.2, 0.01
OPTIMIZER = optax.adam(2e-3)
BASE_STEPS, BASE_OPTIMIZER = 45, optax.adam(3e-3)
RELATIVE_LIMIT = 1e-4  # of the norm of the log-probabilities
RISE_PER_STEP = 0.004  # of the mean reward: less is a failure


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    if not args.ray:
        common.fake_devices(5)
    base = base_model(jax.random.key(0))
    with common.open_parts(PARTS, args.ray, args.address, args.transport) as mesh:
        rewards = learn(args, mesh, base)
    first, _, last = (float(third.mean()) for third in np.array_split(np.array(rewards), 3))
    needed = RISE_PER_STEP * args.steps * 2 / 3
    print(f"mean reward of the first third of steps {first:.3f}, of the last third {last:.3f}")
    if not last - first >= needed:
        raise AssertionError(f"the reward rises by {last - first:.3f}, less than {needed:.3f}")


def learn(args: argparse.Namespace, mesh, base: dict) -> list[float]:
    """The mean reward of each step."""
    rng, keys = np.random.default_rng(1), iter(jax.random.split(jax.random.key(1), args.steps + 2))
    sample, reference, train = compile_steps(mesh, base)
    state = mpmd.reshard((base, OPTIMIZER.init(base)), to=train)
    frozen, weights = mpmd.reshard(base, to=reference), mpmd.reshard(base, to=sample)
    prompts = draw_prompts(rng)
    drawn = sample(weights, prompts, next(keys))
    rewards = []
    for number in range(1, args.steps + 1):
        rewarded, batch, prompts = prompts, drawn, draw_prompts(rng)
        drawn = sample(weights, prompts, next(keys))  # the next batch, at the same time as what follows
        reward = reward_of(rewarded, np.asarray(batch["tokens"]))
        scores = reference(frozen, mpmd.reshard(batch["tokens"], to=reference, argnum=1))
        if number == 1:  # with the same weights
            common.assert_close("the sampler's scores", batch["scores"], np.asarray(scores), RELATIVE_LIMIT)
        batch = {**batch, "reference": scores, "advantages": advantages_of(reward)}
        batch = mpmd.reshard(batch, to=train, argnum=1)
        state, loss = train(state, batch)
        if number % args.every == 0:
            weights = mpmd.reshard(state[0], to=sample)
        rewards.append(float(reward.mean()))
        print(f"step {number}: reward {rewards[-1]:.3f}, loss {float(loss):+.4f}", flush=True)
    print_overlap(train, (state, batch), sample, (weights, prompts, next(keys)))
    return rewards


def print_overlap(train, train_args: tuple, sample, sample_args: tuple) -> None:
    """Profiles training and, as long as that takes, sampling; prints how long both were at work."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        training = pool.submit(train.profile, *train_args, steps=5)
        sampling = []
        while not training.done():
            sampling.append(sample.profile(*sample_args))
    trained, sampled = tasks_of([training.result()]), tasks_of(sampling)
    both = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in trained for b in sampled)
    whole = sum(end - start for start, end in trained)
    print(f"the trainer was at work for {whole / 1e6:.1f} ms, the sampler in {both / 1e6:.1f} ms of them")
    assert both, "sampling and training were never under way at the same time"


def tasks_of(profiles: Sequence[mpmd.Profile]) -> list[list[int]]:
    """The spans in which tasks ran on a part's groups, ascending, in nanoseconds of the driver's clock."""
    spans = sorted(
        (recorded.called + task.start, recorded.called + task.end)
        for profile in profiles
        for recorded, step in zip(profile.recorded, profile.steps, strict=True)
        for process in step.processes
        for task in process.tasks
    )
    merged: list[list[int]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([start, end])
    return merged


def compile_steps(mesh, base: dict):
    """The steps of the three parts: of sampling, of the reference's scores and of training."""
    rows = NUM_PROMPTS * NUM_ANSWERS
    tokens = jax.ShapeDtypeStruct((rows, 2 * DIGITS), jnp.int32)
    scores = jax.ShapeDtypeStruct((rows, DIGITS), jnp.float32)
    advantages = jax.ShapeDtypeStruct((rows,), jnp.float32)
    batch = {"tokens": tokens, "scores": scores, "reference": scores, "advantages": advantages}
    specs = gpt.param_specs(CONFIG), None, None
    sample = mpmd.jit(sample_answers, mesh.part("sampler"), in_shardings=specs)
    sample = sample.compile(base, draw_prompts(np.random.default_rng(0)), jax.random.key(0))
    in_one_stage = functools.partial(score_answers, config=dataclasses.replace(CONFIG, num_stages=1))
    reference = mpmd.jit(in_one_stage, mesh.part("reference")).compile(base, tokens)
    train = mpmd.jit(train_step, mesh.part("trainer"), donate_argnums=0)
    return sample, reference, train.compile((base, OPTIMIZER.init(base)), batch)


def sample_answers(params: dict, prompts: jax.Array, key: jax.Array) -> dict:
    """Draws answers to prompts, int32[rows, DIGITS].

    Returns: ``tokens``, prompts and answers, int32[rows, 2 * DIGITS]; ``scores``, log-probabilities of the
      answers' digits, float32[rows, DIGITS].
    """
    rows = prompts.shape[0]
    shape = (CONFIG.num_layers, rows, CONFIG.seq_len, CONFIG.num_heads, CONFIG.d_model // CONFIG.num_heads)
    padded = jnp.pad(prompts, ((0, 0), (0, CONFIG.seq_len - DIGITS)))

    def decode(carry, position_and_key):
        """One digit: of the prompt, or the one that was drawn last."""
        caches, drawn = carry
        position, key = position_and_key
        digit = jnp.where(position < DIGITS, padded[:, position], drawn)
        x = params["token_embedding"][digit] + params["position_embedding"][position]
        updated = []
        for layer, block in enumerate(params["blocks"]):
            x, cache = cached_block(block, x, [cache[layer] for cache in caches], position)
            updated.append(cache)
        logits = gpt.layer_norm(params["head_norm"], x) @ params["head"]
        drawn = jax.random.categorical(key, logits).astype(jnp.int32)
        score = jnp.take_along_axis(jax.nn.log_softmax(logits), drawn[:, None], axis=1)[:, 0]
        caches = [jnp.stack(of_layers) for of_layers in zip(*updated, strict=True)]
        return (caches, drawn), (drawn, score)

    start = [jnp.zeros(shape), jnp.zeros(shape)], jnp.zeros(rows, jnp.int32)
    positions = jnp.arange(CONFIG.seq_len), jax.random.split(key, CONFIG.seq_len)
    _, (drawn, scores) = jax.lax.scan(decode, start, positions)
    answers, scores = drawn[DIGITS - 1 :].T, scores[DIGITS - 1 :].T
    return {"tokens": jnp.concatenate([prompts, answers], axis=1), "scores": scores}


def cached_block(params: dict, x: jax.Array, cache: list[jax.Array], position: jax.Array):
    """``gpt.block`` of one position, float32[rows, d_model], after those whose keys and values are cached."""
    rows = x.shape[0]
    qkv = gpt.layer_norm(params["attention_norm"], x) @ params["qkv"]
    query, key, value = jnp.moveaxis(qkv.reshape(rows, CONFIG.num_heads, 3, -1), 2, 0)
    keys, values = (
        jax.lax.dynamic_update_index_in_dim(cached, new, position, axis=1)
        for cached, new in zip(cache, (key, value), strict=True)
    )
    scores = jnp.einsum("bhd,bkhd->bhk", query, keys) / np.sqrt(query.shape[-1])
    weights = jax.nn.softmax(jnp.where(jnp.arange(CONFIG.seq_len) <= position, scores, -jnp.inf))
    attended = jnp.einsum("bhk,bkhd->bhd", weights, values).reshape(rows, -1)
    x = x + attended @ params["attention_out"]
    hidden = jax.nn.gelu(gpt.layer_norm(params["mlp_norm"], x) @ params["mlp_in"])
    return x + hidden @ params["mlp_out"], (keys, values)


def score_answers(params: dict, tokens: jax.Array, config: gpt.GPTConfig = CONFIG) -> jax.Array:
    """The log-probabilities, float32[rows, DIGITS], of the answers in ``tokens``, behind their prompts."""
    logits = gpt.logits(params, tokens[:, :-1], config)[:, DIGITS - 1 :]
    answers = tokens[:, DIGITS:, None]
    return jnp.take_along_axis(jax.nn.log_softmax(logits), answers, axis=2)[:, :, 0]


def grpo_loss(params: dict, batch: dict) -> jax.Array:
    """The clipped objective, with a penalty for leaving the reference."""
    scores = score_answers(params, batch["tokens"])
    ratio = jnp.exp(scores - batch["scores"])
    advantages = batch["advantages"][:, None]
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
    difference = batch["reference"] - scores
    divergence = jnp.exp(difference) - difference - 1
    return (KL_WEIGHT * divergence - gain).mean()


def train_step(state, batch: dict):
    params, opt_state = state
    differentiate = mpmd.value_and_grad(grpo_loss, num_microbatches=4, schedule=mpmd.Std1F1B(2))
    loss, grads = differentiate(params, batch)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return (optax.apply_updates(params, updates), opt_state), loss


def draw_prompts(rng: np.random.Generator) -> np.ndarray:
    """Prompts, each so often as it is to have answers: int32[NUM_PROMPTS * NUM_ANSWERS, DIGITS]."""
    prompts = rng.integers(10, size=(NUM_PROMPTS, DIGITS), dtype=np.int32)
    return np.repeat(prompts, NUM_ANSWERS, axis=0)


def reward_of(prompts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The share of an answer's digits that are right, float32[rows]."""
    return (tokens[:, DIGITS:] == prompts[:, ::-1]).mean(axis=1, dtype=np.float32)


def advantages_of(reward: np.ndarray) -> np.ndarray:
    """Rewards by the mean and the deviation of those to the same prompt, float32[rows]."""
    of_prompts = reward.reshape(NUM_PROMPTS, NUM_ANSWERS)
    centered = of_prompts - of_prompts.mean(axis=1, keepdims=True)
    return (centered / (of_prompts.std(axis=1, keepdims=True) + 1e-4)).reshape(-1)


def base_model(key: jax.Array) -> dict:
    """A model that has seen a little of the task, by plain JAX."""

    def step(carry, key):
        params, opt_state = carry
        prompts = jax.random.randint(key, (NUM_PROMPTS, DIGITS), 0, 10)
        tokens = jnp.concatenate([prompts, prompts[:, ::-1]], axis=1)
        grads = jax.grad(lambda params: -score_answers(params, tokens).mean())(params)
        updates, opt_state = BASE_OPTIMIZER.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), None

    params = gpt.init_params(key, CONFIG)
    carry = params, BASE_OPTIMIZER.init(params)
    return jax.jit(functools.partial(jax.lax.scan, step))(carry, jax.random.split(key, BASE_STEPS))[0][0]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="train steps, three at least (default: 30)")
    parser.add_argument("--every", type=int, default=2, help="steps between copies of weights (default: 2)")
    common.add_mesh_arguments(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
