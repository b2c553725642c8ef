"""Modules of portable code with a function for each of many equations."""

from __future__ import annotations

from collections.abc import Iterator

from jax.extend import mlir as portable
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from mpmd.compat import stable_custom_calls

MAIN = "main"
"""The name of the function that ``jax.export`` runs."""

_OF_THE_HOST = ("infeed", "outfeed", "send", "recv")
"""Operations that wait for another program."""


def faults_of(module: ir.Module) -> list[str]:
    """The operations of a module that do more than compute, at any depth.

    XLA finds the function of a custom call by its name. Some of these functions call Python, or read memory
    at an address that the module names. So no custom call is permitted but those that ``jax.export`` writes.
    """
    stable = stable_custom_calls()
    faults: list[str] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        kind = operation.name.partition(".")[2]
        if kind == "custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target not in stable:
                faults.append(f"a custom call of {target}")
        elif kind in _OF_THE_HOST:
            faults.append(operation.name)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return list(dict.fromkeys(faults))


class Module:
    """A portable artifact, from which functions are taken.

    Args:
      code: the artifact. Raises an error of MLIR's when it is damaged.

    Attributes:
      faults: as of ``faults_of``. A module that has one must not be run.
    """

    def __init__(self, code: bytes):
        self.code = code
        self._context = mlir.make_ir_context()
        with self._context, ir.Location.unknown():
            self._module = portable.deserialize_portable_artifact(code)
            self.faults = faults_of(self._module)
            self._functions = {
                ir.StringAttr(each.attributes["sym_name"]).value: each
                for each in self._module.body.operations
                if each.operation.name == "func.func"
            }

    def alone(self, name: str) -> bytes:
        """A function with those that it calls, as the main function of an artifact of its own.

        Raises: ``KeyError`` when there is no such function.
        """
        with self._context, ir.Location.unknown():
            module = ir.Module.create()
            for attribute in ("mhlo.num_partitions", "mhlo.num_replicas", "jax.uses_shape_polymorphism"):
                if attribute in self._module.operation.attributes:
                    module.operation.attributes[attribute] = self._module.operation.attributes[attribute]
            for needed in self._needed(name):
                module.body.append(self._functions[needed].operation.clone())
            main = module.body.operations[0]
            main.attributes["sym_name"] = ir.StringAttr.get(MAIN)
            main.attributes["sym_visibility"] = ir.StringAttr.get("public")
            return portable.serialize_portable_artifact(module, stablehlo.get_current_version(), True)

    def _needed(self, name: str) -> list[str]:
        """The names of a function and of those that it calls, at any depth; its own first."""
        needed = {name: None}
        waiting = [name]
        while waiting:
            for callee in _callees(self._functions[waiting.pop()]):
                if callee not in needed:
                    needed[callee] = None
                    waiting.append(callee)
        return list(needed)


def _callees(function: ir.OpView) -> list[str]:
    names: list[str] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        attributes = operation.attributes
        for position in range(len(attributes)):
            names.extend(_symbols(attributes[position].attr))
        return ir.WalkResult.ADVANCE

    function.operation.walk(visit)
    return names


def _symbols(attribute: ir.Attribute) -> Iterator[str]:
    """The names of functions that an attribute has."""
    if isinstance(attribute, ir.FlatSymbolRefAttr):
        yield attribute.value
    elif isinstance(attribute, ir.ArrayAttr):
        for each in attribute:
            yield from _symbols(each)
