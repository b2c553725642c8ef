"""A student learns from a teacher: two models of different sizes, each on a part of the mesh.

    python examples/distillation.py              in one process, on five fake devices
    python examples/distillation.py --ray        on five Ray actors

The teacher, a GPT in three stages, learns the text. Then it only scores bytes, and the student, in two
stages, learns to have the same scores (Hinton et al. 2015). The teacher scores a batch while the student
learns from the one before, and its scores go from group to group by ``mpmd.reshard``. Losses, parameters and
Adam's moments of both are compared with plain JAX.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import common
import gpt
import jax
import jax.numpy as jnp
import optax
import text_data

import mpmd

PARTS = {"teacher": {"stage": 3}, "student": {"stage": 2}}
TEACHER = gpt.GPTConfig(num_layers=3, d_model=32, num_heads=2, seq_len=16, num_stages=3)
STUDENT = gpt.GPTConfig(num_layers=2, d_model=16, num_heads=2, seq_len=16, num_stages=2)
BATCH_SIZE, NUM_MICROBATCHES, TEMPERATURE = 8, 4, 2.0
OPTIMIZER = optax.adam(1e-2, eps=1e-6)
RELATIVE_LIMIT = 1e-4  # of each leaf's norm


class Steps(NamedTuple):
    """Of the teacher, its training and its scores; of the student, its training."""

    teach: Any
    score: Any
    learn: Any


def main(argv: list[str] | None = None) -> None:
    args = common.parse_steps(__doc__, argv)
    if not args.ray:
        common.fake_devices(5)
    text, _ = text_data.standard_library()
    batches = [text_data.random_batch(text, (BATCH_SIZE, 16), 0, step) for step in range(args.steps + 1)]
    plain = run(plain_steps(), batches, lambda scores: scores)
    with common.open_parts(PARTS, args.ray, args.address, args.transport) as mesh:
        steps = pipelined_steps(mesh, batches[0])
        pipelined = run(steps, batches, lambda scores: mpmd.reshard(scores, to=steps.learn, argnum=2))
        for name, groups in mesh.parts.items():
            print(f"{name}: groups {[*groups]}")
        pipelined = mpmd.to_host(pipelined)
    for name, actual in pipelined.items():
        common.assert_close(name, actual, plain[name], RELATIVE_LIMIT)
    first, last = pipelined["losses of the student"][0], pipelined["losses of the student"][-1]
    print(f"the student's divergence from the teacher: {float(first):.3f} nats, then {float(last):.3f}")


def run(steps: Steps, batches: Sequence[tuple], to_student) -> dict[str, Any]:
    """Trains the teacher with all batches, then the student with the teacher's scores.

    Args:
      to_student: copies scores to where the student's step reads them.
    """
    teacher, student = initial_state(0, TEACHER), initial_state(1, STUDENT)
    teacher_losses, student_losses = [], []
    for tokens, targets in batches:
        teacher, loss = steps.teach(teacher, tokens, targets)
        teacher_losses.append(loss)
    tokens, _ = batches[0]
    scores = steps.score(teacher[0], tokens)
    for next_tokens, _ in batches[1:]:
        next_scores = steps.score(teacher[0], next_tokens)  # at the same time as the student's step
        student, loss = steps.learn(student, tokens, to_student(scores))
        student_losses.append(loss)
        tokens, scores = next_tokens, next_scores
    return {
        "losses of the teacher": teacher_losses,
        "losses of the student": student_losses,
        "teacher": teacher,
        "student": student,
    }


def pipelined_steps(mesh, batch: tuple) -> Steps:
    """The steps, compiled for the parts of the mesh."""
    tokens, _ = batch
    on_teacher, on_student = mesh.part("teacher"), mesh.part("student")
    teacher, student = initial_state(0, TEACHER), initial_state(1, STUDENT)
    differentiate = functools.partial(mpmd.value_and_grad, num_microbatches=NUM_MICROBATCHES)
    teach = make_train_step(differentiate(teacher_loss, schedule=mpmd.Std1F1B(3)))
    learn = make_train_step(differentiate(student_loss, schedule=mpmd.Std1F1B(2)))
    scores = jax.ShapeDtypeStruct((*tokens.shape, TEACHER.vocab_size), jnp.float32)
    return Steps(
        mpmd.jit(teach, on_teacher, donate_argnums=0).compile(teacher, *batch),
        mpmd.jit(pipelined_scores, on_teacher).compile(teacher[0], tokens),
        mpmd.jit(learn, on_student, donate_argnums=0).compile(student, tokens, scores),
    )


def plain_steps() -> Steps:
    """The steps on one device, with whole batches."""
    return Steps(
        jax.jit(make_train_step(jax.value_and_grad(teacher_loss))),
        jax.jit(lambda params, tokens: gpt.logits(params, tokens, TEACHER)),
        jax.jit(make_train_step(jax.value_and_grad(student_loss))),
    )


def teacher_loss(params: dict, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    return gpt.loss(params, tokens, targets, TEACHER)


def pipelined_scores(params: dict, tokens: jax.Array) -> jax.Array:
    """The teacher's scores, float32[batch, seq_len, vocab_size]; microbatches pass its stages."""
    scores = mpmd.treduce(
        lambda rows: gpt.logits(params, rows, TEACHER),
        mpmd.microbatches(tokens, NUM_MICROBATCHES),
        schedule=mpmd.ForwardOnly(3, 3),
        operation=mpmd.Concat(),
    )
    return scores.reshape(*tokens.shape, -1)


def student_loss(params: dict, tokens: jax.Array, teacher_scores: jax.Array) -> jax.Array:
    """The divergence of the student's distribution from the teacher's, both softened, in nats per byte."""
    scores = gpt.logits(params, tokens, STUDENT)
    logs = jax.nn.log_softmax(teacher_scores / TEMPERATURE)
    return jnp.sum(jnp.exp(logs) * (logs - jax.nn.log_softmax(scores / TEMPERATURE)), axis=-1).mean()


def initial_state(seed: int, config: gpt.GPTConfig) -> tuple[dict, optax.OptState]:
    params = gpt.init_params(jax.random.key(seed), config)
    return params, OPTIMIZER.init(params)


def make_train_step(differentiate):
    """The step of one batch: tokens, int32[batch, seq_len], and what the loss compares with."""

    def train_step(state, tokens, expected):
        params, opt_state = state
        loss, grads = differentiate(params, tokens, expected)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return train_step


if __name__ == "__main__":
    main()
