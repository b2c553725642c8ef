"""What is predicted of a plan's shardings and work, against what XLA makes of it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.compiler.jaxprs.canonical import canonical
from mpmd.ir.specs import dimensions_of
from mpmd.language.decisions import Decisions, decided
from mpmd.planner.all_reduces import AllReduces
from mpmd.planner.trials.device_work import device_work
from mpmd.planner.trials.predicted_plan import predicted_plan
from tests.support.parity import mesh_of
from tests.support.planned_steps import CLUSTER, arguments, marked_step, open_step

SPECS = {
    "batch": [{"up": P(), "bias": P(), "down": P()}] * 4,
    "Megatron": [{"up": P(None, "model"), "bias": P("model"), "down": P("model")}] * 4,
}


@pytest.mark.usual("Megatron")
@pytest.mark.parametrize("weights", SPECS.values(), ids=SPECS)
def test_values_take_as_many_bytes_as_xla_has_for_them(weights):
    args = arguments(cut=True)
    state = (args[1][0]._replace(count=P(), mu=weights, nu=weights), args[1][1])
    in_shardings = (weights, state, P(None, "data"), P(None, "data"))
    with mesh_of(2, data=2, model=2) as mesh:
        step = mpmd.jit(
            decided(marked_step, Decisions(mpmd.Interleaved1F1B(4, 2))),
            mesh,
            in_shardings=in_shardings,
        )
        predicted = predicted_plan(step.lower(*args).compiled.program).plan
        loaded = step.compile(*args).plan
    needed = {executable.name: executable.memory for executable in loaded.executables}
    assert needed.keys() == {executable.name for executable in predicted.executables}
    for executable in predicted.executables:
        memory = needed[executable.name]
        assert executable.memory.inputs == memory.inputs, executable.name
        # XLA's outputs also have a table of pointers.
        assert memory.outputs - 1024 <= executable.memory.outputs <= memory.outputs, executable.name
        assert executable.memory.aliased <= memory.aliased, executable.name


def megatron(x, up, down):
    return jnp.tanh(x @ up) @ down


def work_of(fun, *shapes, specs=(), **mesh):
    """The work of a device on operands of these shapes, which it has whole or divided by ``specs``."""
    avals = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    pairs = zip(shapes, specs or ((),) * len(shapes), strict=True)
    jaxpr, _ = canonical(jax.make_jaxpr(fun)(*avals))
    return device_work(jaxpr, [dimensions_of(spec, len(shape)) for shape, spec in pairs], mesh)[0]


OF_MEGATRON = (8, 16), (16, 64), (64, 16)


def test_ragged_products_are_products_of_all_rows():
    def gradients(tokens, experts):
        sizes = 2 * jnp.arange(2) + 3
        loss = lambda tokens, experts: jax.lax.ragged_dot(tokens, experts, sizes).sum()  # noqa: E731
        return jax.grad(loss, argnums=(0, 1))(tokens, experts)

    work = work_of(gradients, (8, 16), (2, 16, 64))
    (products,) = work.products.values()
    assert [*work.products] == ["product float32"] and products.kernels in (2, 3)
    assert products.operations == products.kernels * 2 * 8 * 16 * 64


def test_products_of_two_kinds_of_fp8_have_the_rate_of_the_first():
    def product(x, w):
        x, w = x.astype("float8_e5m2"), w.astype("float8_e4m3fn")
        return jax.lax.dot(x, w, preferred_element_type="float32")

    assert [*work_of(product, (8, 16), (16, 64)).products] == ["product float8_e5m2"]


@pytest.mark.parametrize(
    ("specs", "moved"),
    [
        ((("data",), ()), {}),
        (((), (None, None, "data")), {}),
        (((None, "data"), (None, "data")), {"data": AllReduces(8 * 64 * 4, 1)}),
        (((), ("data",)), {"data": AllReduces(8 * 64 * 4, 1)}),
    ],
    ids=["rows", "columns", "summed", "groups"],
)
def test_devices_share_ragged_products(specs, moved):
    def product(tokens, experts):
        return jax.lax.ragged_dot(tokens, experts, 2 * jnp.arange(2) + 3)

    shapes = (8, 16), (2, 16, 64)
    whole, divided = work_of(product, *shapes), work_of(product, *shapes, specs=specs, data=2)
    (products,), (all_products,) = divided.products.values(), whole.products.values()
    assert products.operations == all_products.operations / 2 and divided.all_reduces == moved


def test_devices_share_the_function_of_a_shard_map():
    mesh, specs = AbstractMesh((4,), ("data",), (AxisType.Auto,)), (P("data"), P())

    def layer(x, w):
        return x.T @ jnp.tanh(x @ w)

    @jax.shard_map(mesh=mesh, in_specs=specs, out_specs=P())
    def shared(x, w):
        return jax.lax.psum(layer(x, w), "data")

    funs = (lambda x, w: layer(x, w) @ w, lambda x, w: shared(x, w) @ w)
    expected, found = (work_of(fun, (8, 8), (8, 8), specs=specs, data=4) for fun in funs)
    assert (found.products, found.all_reduces) == (expected.products, expected.all_reduces)


def test_to_reshape_what_is_in_memory_takes_no_time():
    def reshaped(x, w):
        return jnp.einsum("abc,cd->abd", x.reshape(4, 8, 16), w)

    work = work_of(reshaped, (32, 16), (16, 8))
    assert work.nbytes == 4 * (32 * 16 + 16 * 8 + 32 * 8) and work.nbytes_beside == 0


def test_scans_repeat_their_bodies():
    def repeated(x, ws, y):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, ws)[0] + y

    work = work_of(repeated, (8, 16), (5, 16, 16), (8, 16))
    assert work.operations == 5 * 2 * 8 * 16 * 16 + 8 * 16


def test_what_is_needed_again_is_in_memory_until_then():
    def keeps(x, up, down):
        hidden = x @ up
        return (hidden @ down) @ up + hidden

    work = work_of(keeps, *OF_MEGATRON)
    assert work.temporaries == (2 * 8 * 64 + 8 * 16) * 4


def test_gradients_that_a_scan_stacks_are_divided_like_their_accumulators():
    def of_layers(accumulators, xs, dys):
        return accumulators + jax.lax.scan(lambda _, xy: (None, xy[0].T @ xy[1]), None, (xs, dys))[1]

    work = work_of(of_layers, (4, 16, 64), (4, 8, 16), (4, 8, 64), specs=((None, "data"),) * 3, data=4)
    assert work.temporaries < 4 * (4 * 16 * 64)
    assert work.all_reduces["data"].nbytes == 4 * 4 * 16 * 64 / 2


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_rows_stay_divided_by_more_devices_than_there_are_microbatches(num_microbatches):
    def prediction(devices):
        choice = mpmd.plan(
            open_step,
            *arguments(num_layers=2),
            cluster=CLUSTER,
            groups=1,
            submesh={"data": devices},
            fsdp=False,
            remat=False,
            num_microbatches=num_microbatches,
            simulate=1,
        )
        return choice.best.prediction

    alone, divided = prediction(1), prediction(4)
    assert divided.memory.residuals == alone.memory.residuals / 4
    assert divided.stage_seconds[0] < 0.7 * alone.stage_seconds[0]


def test_masks_are_made_where_they_are_read():
    def masked(x, ws):
        fill = jnp.broadcast_to(jnp.float32(-1e9), (4, 64, 64))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((64, 64), bool)), (4, 64, 64))

        def layer(x, inputs):
            w, kept, low = inputs
            return jnp.where(kept, x @ w, low), None

        return jax.lax.scan(layer, x, (ws, mask, fill))[0]

    def plain(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    shapes = ((64, 64), (4, 64, 64))
    found, without = (work_of(fun, *shapes) for fun in (masked, plain))
    assert (found.nbytes, found.temporaries) == (without.nbytes, without.temporaries)
