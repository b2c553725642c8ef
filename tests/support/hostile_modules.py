"""Portable modules of somebody who means harm, written by hand."""

from jax.extend import mlir as portable
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

_CALL = """
    %1 = stablehlo.custom_call @xla_ffi_python_cpu_callback(%0) {
      api_version = 4 : i32, backend_config = {index = 1234605616436508552 : ui64}
    } : (tensor<f32>) -> tensor<f32>
"""
_TYPED_CALL = "%1 = stablehlo.custom_call @{}(%0) : (tensor<f32>) -> tensor<f32>"

BODIES = {
    "a custom call of xla_ffi_python_cpu_callback": _CALL,
    "a custom call of xla_python_cpu_callback": _TYPED_CALL.format("xla_python_cpu_callback"),
    "a custom call of of_somebody_else": _TYPED_CALL.format("of_somebody_else"),
    "stablehlo.infeed": """
    %2 = stablehlo.create_token : !stablehlo.token
    %1, %3 = "stablehlo.infeed"(%2) {infeed_config = "", layout = [[]]}
      : (!stablehlo.token) -> (tensor<f32>, !stablehlo.token)
    """,
    "stablehlo.outfeed": """
    %2 = stablehlo.create_token : !stablehlo.token
    %3 = "stablehlo.outfeed"(%0, %2) {outfeed_config = ""}
      : (tensor<f32>, !stablehlo.token) -> !stablehlo.token
    %1 = stablehlo.add %0, %0 : tensor<f32>
    """,
    "stablehlo.send": """
    %2 = stablehlo.create_token : !stablehlo.token
    %3 = "stablehlo.send"(%0, %2) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 2>, is_host_transfer = true
    } : (tensor<f32>, !stablehlo.token) -> !stablehlo.token
    %1 = stablehlo.add %0, %0 : tensor<f32>
    """,
    "stablehlo.recv": """
    %2 = stablehlo.create_token : !stablehlo.token
    %1, %3 = "stablehlo.recv"(%2) {
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 3>, is_host_transfer = true
    } : (!stablehlo.token) -> (tensor<f32>, !stablehlo.token)
    """,
}
"""Operations that leave XLA, by the names that a message has for them."""


def with_function(code: bytes, body: str) -> bytes:
    """A portable artifact with one more function, which has the operations within a branch."""
    context = mlir.make_ir_context()
    with context, ir.Location.unknown():
        module = portable.deserialize_portable_artifact(code)
        added = ir.Module.parse(f"""
          func.func private @of_somebody_else(%arg: tensor<i1>, %0: tensor<f32>) -> tensor<f32> {{
            %r = "stablehlo.if"(%arg) ({{
              {body}
              stablehlo.return %1 : tensor<f32>
            }}, {{
              stablehlo.return %0 : tensor<f32>
            }}) : (tensor<i1>) -> tensor<f32>
            return %r : tensor<f32>
          }}
        """)
        module.body.append(added.body.operations[0].operation.clone())
        return portable.serialize_portable_artifact(module, stablehlo.get_current_version(), True)
