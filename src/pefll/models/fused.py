"""Any network, rewritten so that a layer and what follows it are one operation.

`torch.fx` records what a module does; in the record, convolutions with their pooling and ReLU become `conv_block`, and
linear layers with their ReLU become `linear_block`. Nobody has to write a model in a special way for that.
"""

from __future__ import annotations

import copy
import operator
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from pefll.ops.blocks import conv_block, conv_chain, linear_block

_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_LINEAR = ("input", "weight", "bias")
_POOL = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")

_RELUS = (F.relu, F.relu_, torch.relu, torch.relu_)
_RELU_METHODS = ("relu", "relu_")
_POOLS = (F.max_pool2d, torch.max_pool2d)
_SUMS = (operator.add, operator.iadd, torch.add)
_SUM_METHODS = ("add", "add_")
_RESHAPES = {"view": "reshape", "view_as": "reshape_as"}
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


def fused(module: nn.Module) -> nn.Module:
    """Return a module that computes what `module` does, in fewer operations.

    It has the very same parameters and buffers, under the same names. A module that cannot be recorded (its Python code
    looks at the numbers, say), or that has hooks, which rewriting would skip, is returned as it is.
    """
    if any(_has_hooks(layer) for layer in module.modules()):
        return module
    try:
        # Recording runs the module's code, which may write to the module: to a copy, then.
        with torch.enable_grad():
            graph = _Recorder().trace(copy.deepcopy(module))
    except Exception:  # noqa: BLE001 - whatever code a user has written, it can still be run as it is
        return module
    if not _names_are_kept(graph, module) or not _settle_writes(graph, module):
        return module
    changed = False
    for node in list(graph.nodes):
        changed |= _fuse_convolution(graph, node, module) or _fuse_linear(graph, node, module)
    if not changed or any(node.target in ("as_strided", torch.as_strided) for node in graph.nodes):
        return module
    _chain_blocks(graph, module)
    _reshape_instead(graph)
    # The module itself with another `forward`: a GraphModule would lose parameters that are not used, and their order.
    result = copy.copy(module)
    forward = type(fx.GraphModule(module, graph)).forward
    result.forward = types.MethodType(forward, result)
    return result


class _Recorder(fx.Tracer):
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


def _fuse_convolution(graph: fx.Graph, node: fx.Node, module: nn.Module) -> bool:
    layer = _layer(node, module)
    if type(layer) is nn.Conv2d and layer.padding_mode == "zeros" and _only_input(node):
        found = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation, "groups": layer.groups}
    elif node.op == "call_function" and node.target is F.conv2d:
        found = _bind(node, _CONVOLUTION)
    else:
        return False
    numbers = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1} | found
    numbers["padding"] = 0 if numbers["padding"] == "valid" else numbers["padding"]
    if not all(_is_pair(numbers[name]) for name in ("stride", "padding", "dilation", "groups")):
        return False
    chain, relu, pool = _followers(node, module, pools=True)
    with graph.inserting_before(node):
        x, weight, bias = _operands(graph, node, layer, found)
        rest = (numbers["stride"], numbers["padding"], numbers["dilation"], numbers["groups"], relu, pool)
        block = graph.call_function(conv_block, (x, weight, bias, *rest))
    _replace(graph, chain, block)
    return True


def _chain_blocks(graph: fx.Graph, module: nn.Module) -> None:
    """Make one `conv_chain` of blocks that feed nothing but each other."""
    for node in list(graph.nodes):
        chain = [node]
        while (follower := _next_block(chain[-1])) is not None:
            chain.append(follower)
        if len(chain) == 1:
            continue
        with graph.inserting_before(chain[-1]):
            blocks = tuple(block.args[1:] for block in chain)
            feeds_convolution = _feeds_convolution(chain[-1], module)
            together = graph.call_function(conv_chain, (chain[0].args[0], blocks, feeds_convolution))
        _replace(graph, chain, together)


def _next_block(node: fx.Node) -> fx.Node | None:
    """Return the block that alone uses this one, if nothing happens between the two."""
    follower = node.next
    while follower.op == "get_attr":
        follower = follower.next
    fits = node.target is follower.target is conv_block and list(node.users) == [follower] and follower.args[0] is node
    return follower if fits and node not in follower.args[1:] else None


def _feeds_convolution(node: fx.Node, module: nn.Module) -> bool:
    """Whether a convolution reads what this gives, with nothing but sums and ReLU between: a network with shortcuts."""
    seen: set[fx.Node] = set()
    ahead = list(node.users)
    while ahead:
        user = ahead.pop()
        if user.target in (conv_block, conv_chain):
            return True
        if user not in seen and (_is_relu(user, module) or _is_sum(user)):
            seen.add(user)
            ahead.extend(user.users)
    return False


def _settle_writes(graph: fx.Graph, module: nn.Module) -> bool:
    """Let `x += y` be x + y; return False where another name for x would miss the change.

    It has to be so because blocks keep their results for the backward pass, where nobody may write to them. What writes
    by other means, such as `x.add_(y)`, is recorded as it is, but `reshape`, in the place of `view`, may be a copy.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if _writes(node, module):
            names = _names_of(node.args[0], module)
            parts = node.target in _WRITES or any(name.target in _RESHAPES for name in names)
            later = [user for name in names for user in name.users if place[user] > place[node]]
            if parts and any(user.target not in _ABOUT for user in later):
                return False
    for node in graph.nodes:
        node.target = _WRITES.get(node.target, node.target)
    return True


def _writes(node: fx.Node, module: nn.Module) -> bool:
    """Whether an operation changes its first argument."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.kwargs.get("inplace") or getattr(_layer(node, module), "inplace", False) or node.target in _WRITES:
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
    is_one = isinstance(_layer(node, module), _VIEW_LAYERS) or (node.op != "call_module" and _name(node) in _VIEWS)
    return is_one and bool(node.args) and isinstance(node.args[0], fx.Node)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else node.target.__name__


def _reshape_instead(graph: fx.Graph) -> None:
    """Let `x.view(...)` copy where it must: blocks choose how numbers lie, and often have channels innermost."""
    for node in graph.nodes:
        sizes = (*node.args[1:], *node.kwargs.values())
        if node.op == "call_method" and node.target in _RESHAPES and not isinstance(sizes[0], torch.dtype):
            node.target = _RESHAPES[node.target]
            node.kwargs = {{"size": "shape"}.get(name, name): value for name, value in node.kwargs.items()}


def _fuse_linear(graph: fx.Graph, node: fx.Node, module: nn.Module) -> bool:
    layer = _layer(node, module)
    if type(layer) is nn.Linear and _only_input(node):
        found: dict[str, Any] = {}
    elif node.op == "call_function" and node.target is F.linear:
        found = _bind(node, _LINEAR)
    else:
        return False
    chain, relu, _ = _followers(node, module, pools=False)
    with graph.inserting_before(node):
        block = graph.call_function(linear_block, (*_operands(graph, node, layer, found), relu))
    _replace(graph, chain, block)
    return True


def _operands(graph: fx.Graph, node: fx.Node, layer: nn.Module | None, found: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return where input, weight and bias of a layer, or of a function, come from."""
    if layer is None:
        return found["input"], found["weight"], found.get("bias")
    bias = None if layer.bias is None else graph.get_attr(f"{node.target}.bias")
    return node.args[0], graph.get_attr(f"{node.target}.weight"), bias


def _followers(node: fx.Node, module: nn.Module, pools: bool) -> tuple[list[fx.Node], bool, int]:
    """Return the node with the ReLU and pooling that alone use it, whether there is a ReLU, and the pool's side."""
    chain, relu, pool = [node], False, 1
    while len(chain[-1].users) == 1:
        user = next(iter(chain[-1].users))
        if _is_relu(user, module):
            relu = True
        elif pools and pool == 1 and (side := _pool_side(user, module)):
            pool = side
        else:
            break
        chain.append(user)
    return chain, relu, pool


def _is_relu(node: fx.Node, module: nn.Module) -> bool:
    if node.op == "call_method":
        return node.target in _RELU_METHODS
    return type(_layer(node, module)) is nn.ReLU or (node.op == "call_function" and node.target in _RELUS)


def _is_sum(node: fx.Node) -> bool:
    return node.target in (_SUM_METHODS if node.op == "call_method" else _SUMS)


def _pool_side(node: fx.Node, module: nn.Module) -> int:
    """Return the side of the squares that a node pools, which must neither overlap nor leave gaps; else 0."""
    layer = _layer(node, module)
    if type(layer) is nn.MaxPool2d:
        found = {name: getattr(layer, name) for name in _POOL[1:]}
    elif node.op == "call_function" and node.target in _POOLS:
        found = _bind(node, _POOL)
    else:
        return 0
    side = _square(found.get("kernel_size"))
    stride = found.get("stride")
    plain = (
        (stride is None or stride == () or _square(stride) == side)
        and _square(found.get("padding", 0)) == 0
        and _square(found.get("dilation", 1)) == 1
        and found.get("ceil_mode", False) is False
        and found.get("return_indices", False) is False
    )
    return side if side is not None and plain else 0


def _square(value: Any) -> int | None:
    """Return n for n, (n,) or (n, n)."""
    sides = set(value) if isinstance(value, tuple | list) else {value}
    side = sides.pop() if len(sides) == 1 else None
    return side if isinstance(side, int) else None


def _is_pair(value: Any) -> bool:
    parts = value if isinstance(value, tuple | list) else (value,)
    return len(parts) in (1, 2) and all(isinstance(part, int) for part in parts)


def _layer(node: fx.Node, module: nn.Module) -> Any:
    return module.get_submodule(str(node.target)) if node.op == "call_module" else None


def _only_input(node: fx.Node) -> bool:
    return len(node.args) == 1 and not node.kwargs


def _bind(node: fx.Node, names: tuple[str, ...]) -> dict[str, Any]:
    """Return what a function is called with, by name."""
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _replace(graph: fx.Graph, chain: list[fx.Node], block: fx.Node) -> None:
    chain[-1].replace_all_uses_with(block)
    for node in reversed(chain):
        graph.erase_node(node)
