"""What a module computes, as a record of operations that may be rewritten; nothing where a record would not say all."""

from __future__ import annotations

import copy
import operator
from threading import get_ident
from typing import Any

import torch
from torch import fx, nn

from pefll.core import process

# What is always a view, and what may be a copy instead.
RESHAPES = {"view": "reshape", "view_as": "reshape_as"}
# What asks a tensor for its shape; what may give it another name; what writes to it, with what does the same elsewhere.
_ABOUT = ("size", "dim", getattr, len)
_VIEWS = (
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "permute"),
    *("transpose", "t", "movedim", "swapaxes", "expand", "expand_as", "narrow", "select", "getitem", "chunk", "split"),
    *("tensor_split", "unbind", "unfold", "contiguous", "detach", "to", "float", "type_as", "diagonal", "dropout"),
)
_VIEW_LAYERS = (nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout)
_WRITES: dict[Any, Any] = {
    getattr(operator, f"i{name}"): getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
}


def record(module: nn.Module) -> fx.Graph | None:
    """Return what a module computes; None where its code cannot be recorded, or the record would compute another thing.

    That is so where Python code looks at the numbers, say, where there are hooks, which rewriting would skip, and where
    memory is read as it lies.
    """
    if any(_has_hooks(layer) for layer in module.modules()):
        return None
    try:
        # Recording runs the module's code, which may write to the module: to a copy, then.
        with torch.enable_grad():
            graph = _Recorder().trace(copy.deepcopy(module))
    except Exception:  # noqa: BLE001 - whatever code a user has written, it can still be run as it is
        return None
    if any(node.target in ("as_strided", torch.as_strided) for node in graph.nodes):
        return None
    return graph if _names_are_kept(graph, module) and _settle_writes(graph, module) else None


class Tracer(fx.Tracer):
    """Records what a module computes, and nothing of what other threads compute meanwhile.

    While torch records, `nn.Module.__call__` and `__getattr__` are other functions, in the whole process: they call the
    methods below for every module of every thread. Of two recordings at a time, the one that ends last would leave the
    functions of the other there for good.
    """

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Return what a module computes."""
        self._thread = get_ident()
        with process.lock:
            return super().trace(root, concrete_args)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a layer, or let another thread's module compute."""
        if get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return what stands for a module's attribute, or the attribute itself to another thread."""
        if get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


class _Recorder(Tracer):
    """Records buffers by name too, so that they can be replaced by ones on another device or of another type."""

    proxy_buffer_attributes = True

    def create_node(self, *arguments: Any, **options: Any) -> fx.Node:
        """Record an operation, if the record can say all about it."""
        if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise _Unrecordable  # what is computed within `torch.no_grad()` would have a gradient
        return super().create_node(*arguments, **options)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return what stands for a tensor while the module's code runs."""
        return _Proxy(node, self)


class _Proxy(fx.Proxy):
    """Records `x += y` as what it is; torch's own takes it for x = x + y, and forgets other names that x has."""


def _writing(function: Any) -> Any:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _function in _WRITES:
    setattr(_Proxy, f"__{_function.__name__}__", _writing(_function))


class _Unrecordable(Exception):
    pass


def _has_hooks(layer: nn.Module) -> bool:
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(hooks) or hasattr(layer, "parametrizations")


def _names_are_kept(graph: fx.Graph, module: nn.Module) -> bool:
    """Whether all tensors in the record are the module's own; one made while recording would never change again."""
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    names |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return all(node.target in names for node in graph.nodes if node.op == "get_attr")


def _settle_writes(graph: fx.Graph, module: nn.Module) -> bool:
    """Let `x += y` be x + y; return False where another name for x would miss the change.

    It has to be so because blocks keep their results for the backward pass, where nobody may write to them. What writes
    by other means, such as `x.add_(y)`, is recorded as it is, but `reshape`, in the place of `view`, may be a copy.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if _writes(node, module):
            names = _names_of(node.args[0], module)
            may_miss = node.target in _WRITES or any(name.target in RESHAPES for name in names)
            later = [user for name in names for user in name.users if place[user] > place[node]]
            if may_miss and any(user.target not in _ABOUT for user in later):
                return False
    for node in graph.nodes:
        node.target = _WRITES.get(node.target, node.target)
    return True


def _writes(node: fx.Node, module: nn.Module) -> bool:
    """Whether an operation changes its first argument."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.kwargs.get("inplace") or getattr(layer_of(node, module), "inplace", False) or node.target in _WRITES:
        return True
    return node.op in ("call_method", "call_function") and _name(node).endswith("_")


def _names_of(node: fx.Node, module: nn.Module) -> set[fx.Node]:
    """Return the nodes that may be the same memory as one: what it is a view of, and views of that."""
    while _is_view(node, module):
        node = node.args[0]  # type: ignore[assignment]
    found, ahead = {node}, [node]
    while ahead:
        views = [user for user in ahead.pop().users if user not in found and _is_view(user, module)]
        found.update(views)
        ahead.extend(views)
    return found


def _is_view(node: fx.Node, module: nn.Module) -> bool:
    is_one = isinstance(layer_of(node, module), _VIEW_LAYERS) or (node.op != "call_module" and _name(node) in _VIEWS)
    return is_one and bool(node.args) and isinstance(node.args[0], fx.Node)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else node.target.__name__


def layer_of(node: fx.Node, module: nn.Module) -> Any:
    """Return the layer that a node calls; None where it calls none."""
    return module.get_submodule(str(node.target)) if node.op == "call_module" else None
