"""Matrix products of compiled functions by oneDNN, on CPUs where that is faster than Intel's MKL.

``torch.compile`` leaves matrix products to MKL, which is half as fast as oneDNN on an AMD EPYC with
AVX-512, and calls oneDNN for weights that never change only. So a pass over the compiled graph
replaces the products by an operator that stands for oneDNN's. Importing this module takes a second,
and fails where a release of torch has other names for what it uses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir, lowering
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.mkldnn_ir import LinearUnary

# Below so many multiplications MKL is faster, since oneDNN takes twelve microseconds to start.
_FEW = 2**20

_library = torch.library.Library("rerpi_rllib", "FRAGMENT")
_library.define("product(Tensor inputs, Tensor weight, Tensor? bias) -> Tensor")
_product = torch.ops.rerpi_rllib.product.default


def _shape(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return inputs.new_empty(inputs.shape[0], weight.shape[0])


torch.library.register_fake("rerpi_rllib::product", _shape, lib=_library)


@lowering.register_lowering(_product, type_promotion_kind=None)
def _call_onednn(inputs: Any, weight: Any, bias: Any) -> Any:
    outputs = LinearUnary.create(inputs, weight, bias, "none", [], "")
    return outputs if isinstance(outputs, ir.TensorBox) else ir.TensorBox.create(outputs)


class UseOneDNN(CustomGraphPass):
    """Replaces the matrix products of a graph by oneDNN's."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        aten = torch.ops.aten
        for node in list(graph.nodes):
            bias: Any = None
            if node.target is aten.mm.default:
                left, right = node.args
            elif node.target is aten.addmm.default and not node.kwargs:
                bias, left, right = node.args
            else:
                continue
            value = left.meta["val"]
            if (
                value.dtype != torch.float32
                or value.device.type != "cpu"
                or value.numel() * right.meta["val"].shape[1] < _FEW
                or (bias is not None and bias.meta["val"].dim() != 1)
            ):
                continue
            with graph.inserting_before(node):
                weight = graph.call_function(aten.permute.default, (right, [1, 0]))
                weight.meta["val"] = right.meta["val"].t()
                product = graph.call_function(_product, (left, weight, bias))
            product.meta = dict(node.meta)
            node.replace_all_uses_with(product)
            graph.erase_node(node)

    def uuid(self) -> Any:
        """Identify the pass, so that torch may keep what it has compiled."""
        return get_hash_for_files((__file__,))
