"""Rewrites a user's network so that a layer with its pooling and ReLU becomes one operation.

`torch.fx` traces the module. In the graph, convolutions with pooling and ReLU become `conv_block`. Linear layers with
ReLU become `linear_block`.
"""

from __future__ import annotations

import copy
import operator
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from pefll.backend.blocks import conv_block, conv_chain, linear_block
from pefll.core.reference import fast
from pefll.models.network import fused as plain
from pefll.models.tracing import RESHAPES, layer_of, trace

_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_LINEAR = ("input", "weight", "bias")
_POOL = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")

_RELUS = (F.relu, F.relu_, torch.relu, torch.relu_)
_RELU_METHODS = ("relu", "relu_")
_POOLS = (F.max_pool2d, torch.max_pool2d)
_SUMS = (operator.add, torch.add)
_SUM_METHODS = ("add", "add_")
# These keep channels innermost between convolutions: elementwise functions, and pooling outside of blocks.
_TRANSPARENT_LAYERS = {
    *{nn.SiLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.Mish, nn.Softplus, nn.ReLU6},
    *{nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid, nn.Softsign, nn.LogSigmoid, nn.Identity, nn.Dropout, nn.Dropout2d},
    *{nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d},
}
_TRANSPARENT_FUNCTIONS = {
    *{F.silu, F.gelu, F.leaky_relu, F.elu, F.selu, F.celu, F.mish, F.softplus, F.relu6, F.hardswish, F.hardtanh},
    *{F.tanh, F.sigmoid, torch.tanh, torch.sigmoid, torch.mul, operator.mul, F.dropout, F.dropout2d},
    *{F.max_pool2d, torch.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d},
}
_TRANSPARENT_METHODS = {"tanh", "sigmoid", "mul", "clamp"}
# These normalisations are several times slower if channels are innermost.
_NORMALISATIONS = (nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm2d, nn.LocalResponseNorm)
_NORMALISES = {F.group_norm, torch.group_norm, F.layer_norm, torch.layer_norm, F.instance_norm, F.local_response_norm}


@fast(plain, when=lambda module: True)
def fused(module: nn.Module) -> nn.Module:
    """Return a module that computes the same as `module` in fewer operations.

    The result shares the parameters and buffers, under the same names. Two kinds of modules are returned unchanged:
    those that cannot be traced, because their code reads values of tensors, and those with hooks, because the rewritten
    module would skip the hooks.
    """
    graph = trace(module)
    if graph is None:
        return module
    changed = False
    for node in list(graph.nodes):
        changed |= _fuse_convolution(graph, node, module) or _fuse_linear(graph, node, module)
    if not changed:
        return module
    innermost = not any(_normalises(node, module) for node in graph.nodes)
    _chain_blocks(graph, module, innermost)
    _replace_views(graph)
    # Copy the module and replace `forward`. A GraphModule would lose unused parameters and the parameters' order.
    result = copy.copy(module)
    result.forward = types.MethodType(type(fx.GraphModule(module, graph)).forward, result)
    return result


def _fuse_convolution(graph: fx.Graph, node: fx.Node, module: nn.Module) -> bool:
    layer = layer_of(node, module)
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


def _chain_blocks(graph: fx.Graph, module: nn.Module, innermost: bool) -> None:
    """Join consecutive blocks into a `conv_chain` if nothing else reads their outputs, and set `feeds_convolution`.

    `innermost` says whether channels may be innermost between blocks.
    """
    for node in list(graph.nodes):
        chain = [node]
        while (follower := _next_block(chain[-1])) is not None:
            chain.append(follower)
        if len(chain) > 1:
            with graph.inserting_before(chain[-1]):
                blocks = tuple(block.args[1:] for block in chain)
                feeds_convolution = innermost and _feeds_convolution(chain[-1], module)
                joined = graph.call_function(conv_chain, (chain[0].args[0], blocks, feeds_convolution))
            _replace(graph, chain, joined)
        elif node.target is conv_block:
            node.args = (*node.args, innermost and _feeds_convolution(node, module))


def _next_block(node: fx.Node) -> fx.Node | None:
    """Return the block that directly follows this node and alone reads its output, or None."""
    follower = node.next
    while follower.op == "get_attr":
        follower = follower.next
    fits = node.target is follower.target is conv_block and list(node.users) == [follower] and follower.args[0] is node
    return follower if fits and node not in follower.args[1:] else None


def _feeds_convolution(node: fx.Node, module: nn.Module) -> bool:
    """Whether a convolution reads the node's output, directly or after operations that keep the memory layout.

    Sums (shortcuts), pooling and elementwise functions keep the layout.
    """
    seen: set[fx.Node] = set()
    ahead = list(node.users)
    while ahead:
        user = ahead.pop()
        if user.target in (conv_block, conv_chain):
            return True
        if user not in seen and (_is_relu(user, module) or _is_sum(user) or _is_transparent(user, module)):
            seen.add(user)
            ahead.extend(user.users)
    return False


def _replace_views(graph: fx.Graph) -> None:
    """Replace `x.view(...)` by operations that may copy. `view` would fail if a block puts channels innermost."""
    for node in graph.nodes:
        sizes = (*node.args[1:], *node.kwargs.values())
        if node.op == "call_method" and node.target in RESHAPES and not isinstance(sizes[0], torch.dtype):
            node.target = RESHAPES[node.target]
            node.kwargs = {{"size": "shape"}.get(name, name): value for name, value in node.kwargs.items()}


def _fuse_linear(graph: fx.Graph, node: fx.Node, module: nn.Module) -> bool:
    layer = layer_of(node, module)
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
    """Return the nodes for the input, weight and bias of a layer or a function."""
    if layer is None:
        return found["input"], found["weight"], found.get("bias")
    bias = None if layer.bias is None else graph.get_attr(f"{node.target}.bias")
    return node.args[0], graph.get_attr(f"{node.target}.weight"), bias


def _followers(node: fx.Node, module: nn.Module, pools: bool) -> tuple[list[fx.Node], bool, int]:
    """Return a node with the ReLU and pooling nodes after it, whether there is a ReLU, and the pooling side."""
    chain, relu, pool = [node], False, 1
    while len(chain[-1].users) == 1:  # nothing else may read the output of a node in the chain
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
    return type(layer_of(node, module)) is nn.ReLU or (node.op == "call_function" and node.target in _RELUS)


def _is_transparent(node: fx.Node, module: nn.Module) -> bool:
    if node.op == "call_method":
        return node.target in _TRANSPARENT_METHODS
    return type(layer_of(node, module)) in _TRANSPARENT_LAYERS or (
        node.op == "call_function" and node.target in _TRANSPARENT_FUNCTIONS
    )


def _normalises(node: fx.Node, module: nn.Module) -> bool:
    return isinstance(layer_of(node, module), _NORMALISATIONS) or (
        node.op == "call_function" and node.target in _NORMALISES
    )


def _is_sum(node: fx.Node) -> bool:
    return node.target in (_SUM_METHODS if node.op == "call_method" else _SUMS)


def _pool_side(node: fx.Node, module: nn.Module) -> int:
    """Return the side of a pooling node's windows; 0 for other nodes, and for windows that overlap or leave gaps."""
    layer = layer_of(node, module)
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


def _only_input(node: fx.Node) -> bool:
    return len(node.args) == 1 and not node.kwargs


def _bind(node: fx.Node, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments of a function call by name."""
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _replace(graph: fx.Graph, chain: list[fx.Node], block: fx.Node) -> None:
    chain[-1].replace_all_uses_with(block)
    for node in reversed(chain):
        graph.erase_node(node)
