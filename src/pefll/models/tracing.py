"""Traces modules, that is, records them as graphs of operations, which other code can rewrite."""

from __future__ import annotations

import copy
import operator
from threading import get_ident
from typing import Any

import torch
from torch import fx, nn

from pefll.core import process

# Methods that always return a view, each with the similar method that may return a copy.
RESHAPES = {"view": "reshape", "view_as": "reshape_as"}
# Operations that only read a tensor's shape.
_ABOUT = ("size", "dim", getattr, len)
# Operations that may return a view of their first argument.
_VIEWS = (
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "permute"),
    *("transpose", "t", "movedim", "swapaxes", "expand", "expand_as", "narrow", "select", "getitem", "chunk", "split"),
    *("tensor_split", "unbind", "unfold", "contiguous", "detach", "to", "float", "type_as", "diagonal", "dropout"),
)
_VIEW_LAYERS = (nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout)
# In-place operators with their out-of-place equivalents.
_WRITES: dict[Any, Any] = {
    getattr(operator, f"i{name}"): getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
}


def trace(module: nn.Module) -> fx.Graph | None:
    """Return the graph of a module; None if it cannot be traced, or if the graph would compute something else.

    This excludes Python code that branches on values, hooks (a rewritten graph would skip them), and `as_strided`.
    """
    if any(_has_hooks(layer) for layer in module.modules()):
        return None
    try:
        # Trace a copy, because tracing runs the module's code, which may change the module.
        with torch.enable_grad():
            graph = _GraphTracer().trace(copy.deepcopy(module))
    except Exception:  # noqa: BLE001 - a user's code may raise anything; it still runs without a graph
        return None
    if any(node.target in ("as_strided", torch.as_strided) for node in graph.nodes):
        return None
    return graph if _names_are_kept(graph, module) and _settle_writes(graph, module) else None


class Tracer(fx.Tracer):
    """A thread-safe `fx.Tracer`.

    While torch traces, it replaces `nn.Module.__call__` and `__getattr__` for the whole process. So modules in other
    threads also call the methods below, but these must trace the modules of one thread only. Two traces at the same
    time could leave the replacements there for ever. A lock prevents that.
    """

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Return the graph of a module."""
        self._thread = get_ident()
        with process.lock:
            return super().trace(root, concrete_args)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace a layer; in another thread, just call it."""
        if get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return the proxy of a module's attribute; in another thread, the attribute itself."""
        if get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


class _GraphTracer(Tracer):
    """Also traces buffers by name, so that they can be replaced by copies on another device or of another type."""

    proxy_buffer_attributes = True

    def create_node(self, *arguments: Any, **options: Any) -> fx.Node:
        """Add an operation to the graph; NotImplementedError if a graph cannot express its mode."""
        if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise NotImplementedError  # a graph would not repeat `torch.no_grad()` or autocast
        return super().create_node(*arguments, **options)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the proxy of a tensor."""
        return _Proxy(node, self)


class _Proxy(fx.Proxy):
    """Traces `x += y` as an in-place operation. torch's proxy traces x = x + y, which does not change views of x."""


def _writing(function: Any) -> Any:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _function in _WRITES:
    setattr(_Proxy, f"__{_function.__name__}__", _writing(_function))


def _has_hooks(layer: nn.Module) -> bool:
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(hooks) or hasattr(layer, "parametrizations")


def _names_are_kept(graph: fx.Graph, module: nn.Module) -> bool:
    """Return whether the graph has only tensors of the module; one made while tracing would become a constant."""
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return all(node.target in names for node in graph.nodes if node.op == "get_attr")


def _settle_writes(graph: fx.Graph, module: nn.Module) -> bool:
    """Replace `x += y` by x + y; return False if later code reads a view of x, which would lack the change.

    `x += y` must go: x may be the result of a fused block, which the backward pass needs. Others, such as `x.add_(y)`,
    stay in the graph. For them, return False if the later view is a `view`: it becomes a `reshape`, which may copy.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if _writes(node, module):
            names = _sharing_memory(node.args[0], module)
            may_miss = node.target in _WRITES or any(name.target in RESHAPES for name in names)
            later = [user for name in names for user in name.users if place[user] > place[node]]
            if may_miss and any(user.target not in _ABOUT for user in later):
                return False
    for node in graph.nodes:
        node.target = _WRITES.get(node.target, node.target)
    return True


def _writes(node: fx.Node, module: nn.Module) -> bool:
    """Return whether an operation changes its first argument."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.kwargs.get("inplace") or getattr(layer_of(node, module), "inplace", False) or node.target in _WRITES:
        return True
    return node.op in ("call_method", "call_function") and _operation_name(node).endswith("_")


def _sharing_memory(node: fx.Node, module: nn.Module) -> set[fx.Node]:
    """Return the nodes that may share memory with a node: the tensor that it is a view of, and all views of that."""
    while _is_view(node, module):
        node = node.args[0]  # type: ignore[assignment]
    found, ahead = {node}, [node]
    while ahead:
        views = [user for user in ahead.pop().users if user not in found and _is_view(user, module)]
        found.update(views)
        ahead.extend(views)
    return found


def _is_view(node: fx.Node, module: nn.Module) -> bool:
    is_one = isinstance(layer_of(node, module), _VIEW_LAYERS) or (
        node.op != "call_module" and _operation_name(node) in _VIEWS
    )
    return is_one and bool(node.args) and isinstance(node.args[0], fx.Node)


def _operation_name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else node.target.__name__


def layer_of(node: fx.Node, module: nn.Module) -> Any:
    """Return the layer that a node calls, or None."""
    return module.get_submodule(str(node.target)) if node.op == "call_module" else None
