"""The products and kernels of a profile: casts, kernels of ``mpmd.cost``, and attention of JAX."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.compiler.jaxprs import work
from mpmd.compiler.jaxprs.canonical import canonical
from mpmd.compiler.jaxprs.rules import shared_dimensions
from mpmd.language.decisions import planning
from mpmd.planner.cluster import Cluster
from mpmd.planner.profiling.open_step import profile_of, profile_step
from mpmd.planner.trials.device_work import device_work

LENGTH = 256


def shaped(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def step_of(loss):
    def step(weights, batch):
        return mpmd.treduce(
            lambda x: jax.grad(loss)(weights, x), batch, schedule=mpmd.GPipe(1), operation=mpmd.Mean
        )

    return step


def the_layer(loss, weights):
    """The only layer of the profile of a loss of weights and rows."""
    batch = shaped(2, 4, LENGTH, 32)
    return profile_of(step_of(loss), (weights, batch), {}).layers[0]


def test_a_profile_has_products_and_kernels():
    def loss(weights, x):
        return jnp.sum((jax.nn.relu(x @ weights["up"]) @ weights["down"]) ** 2)

    work = the_layer(loss, {"up": shaped(32, 64), "down": shaped(64, 32)}).forward
    products = work.products["product float32"]
    assert (products.operations, products.kernels) == (2 * 2 * 4 * LENGTH * 32 * 64, 2)
    assert 2 <= work.kernels <= 6


def test_the_gradients_of_two_readers_are_all_reduced_as_one_sum():
    def loss(weights, x):
        h = jnp.sin(x @ weights["in"])
        return jnp.sum(((h @ weights["gate"]) * jnp.sin(h @ weights["up"])) @ weights["down"])

    weights = {"in": shaped(32, 32), "gate": shaped(32, 128), "up": shaped(32, 128), "down": shaped(128, 32)}
    backward = the_layer(loss, weights).divisions["model"].backward
    stream = 4 * 4 * LENGTH * 32
    assert backward.nbytes >= 2 * stream
    assert (backward.merged_nbytes, backward.merged_number) == (stream, 1)


def test_a_profile_has_the_bytes_of_the_casts_of_weights():
    half = jnp.bfloat16

    def loss(weights, x):
        return jnp.sum((x.astype(half) @ weights["w"].astype(half)).astype(jnp.float32) ** 2 * weights["b"])

    layer = the_layer(loss, {"w": shaped(32, 64), "b": shaped(64)})
    assert (layer.weights, layer.gathered) == (4 * (32 * 64 + 64), 2 * 32 * 64 + 4 * 64)


def attention(q, k, v):
    scores = jax.nn.softmax(jnp.einsum("bthe,bshe->bhts", q, k))
    return jnp.einsum("bhts,bshe->bthe", scores, v)


def attention_loss(kernel):
    def loss(weights, x):
        q, k, v = (jnp.einsum("btd,dhe->bthe", x, weights[name]) for name in "qkv")
        return jnp.sum(jnp.einsum("bthe,hed->btd", kernel(q, k, v), weights["o"]) ** 2)

    return loss


def sorted_attention(q, k, v):
    return attention(q[:, jnp.argsort(jnp.sum(q, (0, 2, 3)))], k, v)


ATTENTION_WEIGHTS = {**{name: shaped(32, 4, 8) for name in "qkv"}, "o": shaped(4, 8, 32)}
SCORES = 4 * 4 * 4 * LENGTH * LENGTH
"""The bytes of the scores of a microbatch."""


def in_a_scan(kernel):
    """Each row by itself."""

    def scanned(*operands):
        return jax.lax.map(lambda rows: kernel(*(row[None] for row in rows))[0], operands)

    return scanned


AROUND = {
    "plain": lambda kernel: kernel,
    "remat outside": jax.checkpoint,
    "vmap": lambda kernel: jax.vmap(lambda *row: kernel(*(x[None] for x in row))[0]),
    "scan": in_a_scan,
}
EACH_AROUND = pytest.mark.parametrize("around", AROUND)


@functools.cache
def layer_of_kernel(around, function=attention, **numbers):
    """The layer whose attention is a kernel of the numbers of ``mpmd.cost``."""
    kernel = mpmd.cost(function, **numbers)
    return the_layer(attention_loss(AROUND[around](kernel)), ATTENTION_WEIGHTS)


@functools.cache
def layer_of_equations():
    return the_layer(attention_loss(attention), ATTENTION_WEIGHTS)


@pytest.mark.usual("remat inside", "choices inside")
@pytest.mark.parametrize(
    ("around", "function"),
    [
        *((around, attention) for around in AROUND),
        ("plain", jax.checkpoint(attention)),
        ("plain", sorted_attention),
    ],
    ids=[*AROUND, "remat inside", "choices inside"],
)
def test_the_values_within_a_kernel_are_in_no_memory(around, function):
    by_equations, as_kernel = layer_of_equations(), layer_of_kernel(around, function)
    assert by_equations.forward.nbytes > 2 * SCORES and by_equations.residuals > SCORES
    assert as_kernel.forward.nbytes < SCORES and as_kernel.backward.nbytes < SCORES
    assert as_kernel.residuals < SCORES and as_kernel.forward.temporaries < SCORES
    assert as_kernel.divisions["model"].largest == by_equations.divisions["model"].largest == 4


def test_a_plan_counts_a_kernel_by_its_operands_and_results():
    avals = [shaped(4, LENGTH, 4, 8)] * 3

    def work_of(function):
        gradients = jax.grad(lambda *operands: jnp.sum(jax.checkpoint(function)(*operands) ** 2), (0, 1, 2))
        with planning():
            jaxpr, _ = canonical(jax.make_jaxpr(gradients)(*avals))
        return device_work(jaxpr, [((), (), (), ())] * 3, {})[0]

    by_equations, kernel = work_of(attention), work_of(mpmd.cost(attention, forward=0.5, backward=0.5))
    assert by_equations.nbytes > 8 * SCORES and by_equations.temporaries > SCORES
    assert kernel.nbytes < SCORES and kernel.temporaries < SCORES
    assert kernel.kernels < by_equations.kernels
    products = [work.products["batched_product float32"].operations for work in (kernel, by_equations)]
    # Of seven products of the equations, rematerialisation repeats one, which a kernel's factor has.
    assert products[0] == products[1] * 6 / 7 / 2


def of_sine(x):
    return x * jnp.sin(x)


def of_cosine(x):
    return x * jnp.cos(x)


def one_kernel(x):
    return mpmd.cost(lambda x: of_cosine(of_sine(x)))(x)


def two_kernels(x):
    return mpmd.cost(of_cosine)(mpmd.cost(of_sine)(x))


VALUE = 4 * 4 * LENGTH * 32
"""The bytes of a microbatch's values."""


def each_row(function):
    return lambda x: jax.lax.map(function, x)


@pytest.mark.usual("plain")
@pytest.mark.parametrize(
    "around", [lambda function: function, jax.vmap, each_row], ids=["plain", "vmap", "scan"]
)
def test_a_value_straight_between_two_kernels_is_in_memory(around):
    """It is written and read, and so is its cotangent."""

    def layer(function):
        def loss(weights, x):
            return jnp.sum((around(function)(x @ weights["up"]) @ weights["down"]) ** 2)

        return the_layer(loss, {"up": shaped(32, 32), "down": shaped(32, 32)})

    one, two = layer(one_kernel), layer(two_kernels)
    assert two.forward.nbytes - one.forward.nbytes == 2 * VALUE
    assert two.backward.nbytes - one.backward.nbytes >= 2 * VALUE


LETTERS = "bthd,bshd,bshd->bthd"
FEW = {"operations": 1e12, "nbytes": 1e8, "backward_operations": 2e12, "backward_bytes": 2e8}
MANY = {"operations": 2e12, "nbytes": 3e8, "backward_operations": 5e12, "backward_bytes": 6e8}


def layers_with_numbers(around):
    """Layers with few and with many operations and bytes, of which heads are divided in the first alone."""
    return (
        layer_of_kernel(around, dimensions=LETTERS, divides=divides, **numbers)
        for divides, numbers in (("bh", FEW), ("b", MANY))
    )


@pytest.mark.usual("remat outside", "scan")
@EACH_AROUND
def test_the_numbers_of_a_kernel_count_for_each_of_its_calls(around):
    """Its backward reads its operands alone, so rematerialisation calls its forward no second time."""
    few, many = layers_with_numbers(around)
    calls = 4 if around in ("vmap", "scan") else 1
    differences = [
        getattr(getattr(many, task), field) - getattr(getattr(few, task), field)
        for field in ("operations", "nbytes")
        for task in ("forward", "backward")
    ]
    expected = [1e12, 3e12, 2e8, 4e8]
    assert differences == pytest.approx([calls * number for number in expected])


@pytest.mark.usual("remat outside")
@EACH_AROUND
def test_factors_of_a_kernel_are_of_its_forward_and_of_its_backward(around):
    """Also within scans, of whose body the names say nothing."""

    def operations(layer):
        tasks = layer.forward, layer.backward
        return [task.products["batched_product float32"].operations for task in tasks]

    forward, backward = operations(layer_of_kernel(around))
    assert forward == operations(layer_of_equations())[0]
    assert operations(layer_of_kernel(around, forward=0.5, backward=0.75)) == pytest.approx(
        [0.5 * forward, 0.75 * backward]
    )


@pytest.mark.usual("vmap")
@EACH_AROUND
def test_a_kernel_divides_along_the_dimensions_that_it_names(around):
    divided, whole = (layer.divisions["model"] for layer in layers_with_numbers(around))
    assert divided.operations > 0.99 and whole.operations < 0.01
    assert (divided.largest, divided.forward.number) == (4, 1)
    assert whole.forward.number == 3  # queries, keys and values are gathered, or summed whole
    assert whole.forward.nbytes > divided.forward.nbytes


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"operations": -1}, "operations must be a finite number of at least 0, or None, not -1"),
        ({"nbytes": float("inf")}, "nbytes must be a finite number"),
        ({"divides": "b"}, "dimensions and divides belong together"),
        ({"dimensions": "b->", "divides": "h"}, "divides has h, which dimensions='b->' has not"),
        ({"dimensions": "b", "divides": "b"}, "dimensions must be letters for each array"),
    ],
)
def test_numbers_of_no_kernel_are_refused(given, text):
    with pytest.raises(ValueError, match=text):
        mpmd.cost(attention, **given)


def test_dimensions_that_arrays_do_not_have_are_refused():
    kernel = mpmd.cost(jnp.sin, dimensions="ab->ab", divides="a")
    with pytest.raises(ValueError, match=r"dimensions ab are not those of arrays \(3,\)"):
        kernel(np.ones(3))


@pytest.mark.usual("vmap")
@EACH_AROUND
def test_a_kernel_with_numbers_computes_what_its_function_does(around):
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 8, 2, 4)).astype(np.float32)
    kernel = mpmd.cost(attention, operations=1, dimensions=LETTERS, divides="bh")

    def gradients(function):
        return jax.jit(jax.grad(lambda *x: AROUND[around](function)(*x).sum(), (0, 1, 2)))(q, k, v)

    with planning():
        planned = gradients(kernel)
    jax.tree.map(np.testing.assert_array_equal, gradients(kernel), gradients(attention))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), planned, gradients(attention))


def test_a_kernel_closes_over_traced_values_and_takes_what_is_no_array():
    def scaled(x, indices, power, name="plain"):
        return {name: scale * x[indices] ** power}

    def loss(x, scale_of_caller):
        nonlocal scale
        scale = scale_of_caller
        return mpmd.cost(scaled, backward=2.0)(x, np.array([2, 0]), 2, name="x")["x"].sum()

    scale = None
    with planning():
        of_x, of_scale = jax.grad(loss, (0, 1))(np.arange(3.0, dtype=np.float32), np.float32(3))
    np.testing.assert_array_equal(of_x, [0, 0, 12])
    assert of_scale == 4


@pytest.mark.parametrize("numbers", [{}, FEW | {"dimensions": "ab,bc->ac", "divides": "a"}])
@pytest.mark.parametrize(
    "derived",
    [
        lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
        lambda f: jax.vmap(lambda row: jax.jvp(lambda row: f(row[None])[0], (row,), (row,))[1]),
        lambda f: lambda x: jax.jvp(jax.grad(lambda x: f(x).sum()), (x,), (x,))[1],
    ],
    ids=["forward", "forward of rows", "forward over reverse"],
)
def test_a_kernel_may_be_differentiated_in_either_mode_while_a_plan_is_made(derived, numbers):
    def product(x, w):
        return jnp.tanh(x @ w)

    def gradient(function):
        return jax.grad(lambda x: jnp.sum(derived(lambda x: function(x, w))(x) ** 2))(x)

    x, w = np.random.default_rng(0).normal(size=(2, 3, 3)).astype(np.float32)
    with planning():
        planned = gradient(mpmd.cost(product, **numbers))
    np.testing.assert_allclose(planned, gradient(product), rtol=1e-4)


@pytest.mark.parametrize("numbers", [{}, FEW | {"dimensions": "ab,b,b->ab,b", "divides": "a"}])
def test_a_kernel_with_a_derivative_of_its_own_and_integers_is_differentiated_for_each_row(numbers):
    @jax.custom_vjp
    def tripled(x):
        return x

    def taken(x, scale, order):
        return tripled(x * scale)[:, order], order

    def gradients(function):
        def loss(x, scale):
            return jnp.sum(jax.vmap(lambda rows: function(rows, scale, np.array([2, 0, 1]))[0])(x) ** 2)

        return jax.grad(loss, (0, 1))(x, x[0, 0])

    tripled.defvjp(lambda x: (x, None), lambda _, cotangent: (3 * cotangent,))
    x = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    with planning():
        planned = gradients(mpmd.cost(taken, **numbers))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), planned, gradients(taken))


@pytest.mark.usual("plain")
@pytest.mark.parametrize("around", [lambda function: function, jax.vmap], ids=["plain", "vmap"])
def test_a_kernel_closes_over_masks_and_indices_of_its_layer(around):
    def masked(x):
        mask, order = x > 0, jnp.argsort(x[:, 0])
        return mpmd.cost(lambda x: jnp.where(mask, x * jnp.sin(x), 0)[order])(x)

    def loss(weights, x):
        return jnp.sum((around(masked)(x @ weights["up"]) @ weights["down"]) ** 2)

    shapes = {"up": shaped(32, 32), "down": shaped(32, 32)}
    assert the_layer(loss, shapes).backward.operations > 0


def layers_in_a_scan(kernel):
    """A loss whose three layers are a scan over stacked weights."""

    def layer(x, weights):
        q, k, v = (jnp.einsum("btd,dhe->bthe", x, weights[name]) for name in "qkv")
        return x + jnp.einsum("bthe,hed->btd", kernel(q, k, v), weights["o"]), None

    return lambda weights, x: jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)


OF_LAYERS = {name: shaped(3, *weight.shape) for name, weight in ATTENTION_WEIGHTS.items()}


@pytest.mark.usual("plain")
@pytest.mark.parametrize(
    ("loss", "weights"),
    [(attention_loss, ATTENTION_WEIGHTS), (layers_in_a_scan, OF_LAYERS)],
    ids=["plain", "scan over layers"],
)
def test_a_plan_keeps_no_residuals_of_kernels(loss, weights):
    """Of what the equations keep, a kernel keeps what they keep under ``jax.checkpoint``: its operands."""
    cluster = Cluster(1, 1, 1e12, 1e9, 1e11)
    flash = dataclasses.replace(cluster, flash_attention=True)

    def memory(function, cluster):
        args = weights, shaped(2, 4, LENGTH, 32)
        fixed = {"schedule": "Std1F1B", "remat": False, "simulate": 1}
        best = mpmd.plan(step_of(loss(function)), *args, cluster=cluster, **fixed).best.prediction
        assert best.source == "simulation"
        return best.memory

    scores = SCORES * (3 if weights is OF_LAYERS else 1)
    by_equations, kernel, of_flash = (
        memory(function, of)
        for function, of in ((attention, cluster), (mpmd.cost(attention), cluster), (of_jax, flash))
    )
    assert by_equations.residuals > scores > kernel.residuals >= of_flash.residuals
    assert max(kernel.temporaries, of_flash.temporaries) < SCORES < by_equations.temporaries


# Attention of JAX.


def of_jax(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@functools.cache
def layer_of_jax(around, flash_attention):
    args = ATTENTION_WEIGHTS, shaped(2, 4, LENGTH, 32)
    step = step_of(attention_loss(AROUND[around](of_jax)))
    return profile_step(step, args, {}, flash_attention=flash_attention).profiles[0].layers[0]


@pytest.mark.usual("plain")
@EACH_AROUND
def test_attention_of_jax_is_a_kernel_on_a_cluster_that_runs_it_so(around):
    by_equations, flash = layer_of_jax("plain", False), layer_of_jax(around, True)
    assert by_equations.forward.nbytes > SCORES > flash.forward.nbytes
    assert flash.backward.nbytes < by_equations.backward.nbytes / 4
    assert flash.residuals < SCORES and flash.forward.temporaries < SCORES
    name = "batched_product float32"
    assert flash.forward.products[name].operations == by_equations.forward.products[name].operations
    if around == "plain":
        more = flash.backward.products[name].operations / by_equations.backward.products[name].operations
        assert more == pytest.approx(1.25)


@pytest.mark.parametrize(("size", "kind"), [(2, "product"), (4, "batched_product")])
def test_a_batch_with_one_product_for_each_device_is_of_plain_products(size, kind):
    """As the gradients of weights that each device sums by itself."""
    operands = shaped(size, 8, 16), shaped(size, 16, 8)
    jaxpr = jax.make_jaxpr(jnp.matmul)(*operands).jaxpr
    found = device_work(jaxpr, [(("data",), (), ())] * 2, {"data": 2})[0].products
    assert list(found) == [f"{kind} float32"] and found[f"{kind} float32"].operations == size * 8 * 8 * 16


@pytest.mark.parametrize(("is_kernel", "dtypes"), [(True, ["bfloat16"]), (False, ["bfloat16", "float32"])])
def test_a_kernel_of_attention_multiplies_in_the_dtype_of_its_operands(is_kernel, dtypes):
    """Its equations multiply gradients of scores in float32 by keys in bfloat16."""
    fun = mpmd.cost(jax.nn.dot_product_attention) if is_kernel else jax.nn.dot_product_attention
    operands = [shaped(2, 16, 4, 8, dtype=jnp.bfloat16)] * 3
    with planning():
        gradients = jax.grad(lambda *qkv: fun(*qkv).astype(float).sum(), (0, 1, 2))
        jaxpr, _ = canonical(jax.make_jaxpr(gradients)(*operands))
    found, _ = device_work(jaxpr, [((),) * 4] * 3, {})
    assert sorted(found.products) == [f"batched_product {dtype}" for dtype in dtypes]


@pytest.mark.parametrize(("causal", "factor"), [(False, 1.0), (True, 0.5)])
def test_cudnn_attention_has_two_products_and_five_in_its_backward(causal, factor):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    rows, length, heads, size = 2, 16, 4, 8
    array, none = shaped(rows, length, heads, size, dtype=jnp.bfloat16), shaped(0, dtype=jnp.bfloat16)
    mask = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
    params = {
        "scale": 1.0, "seed": 0, "dropout_rate": 0.0, "variadic_args": (False, False),
        "mask_type": mask.value, "layout": cudnn.AttentionLayout.BTNH.value, "sliding_window_length": None,
    }  # fmt: skip

    def calls(*operands):
        out, statistics = cudnn._dot_product_attention_fwd_p_wrapper.bind(
            *operands, is_training=True, **params
        )
        return cudnn._dot_product_attention_bwd_p_wrapper.bind(*operands, statistics, out, out, **params)

    forward, backward = jax.make_jaxpr(calls)(*[array] * 3, *[none] * 7).eqns[-2:]
    of_product = 2 * rows * heads * length**2 * size
    assert [work.operations(eqn) for eqn in (forward, backward)] == [
        factor * 2 * of_product,
        factor * 5 * of_product,
    ]
    assert work.product_kind(forward) == "batched_product bfloat16"
    for eqn in (forward, backward):
        assert [one.ins[0] for one in shared_dimensions(eqn)] == [0, 2]
