"""The decoder's layers in fewer launches, where that was proved to give the same bits."""

from torch import Tensor

from shared_ops.fused.op import add_rmsnorm, gated_linear, may_gate, rotated_heads, rotated_queries
from shared_ops.model.adapters import LayerAdapters, project
from shared_ops.model.config import ModelConfig
from shared_ops.model.kv import KV
from shared_ops.model.weights import Layer, Weights
from shared_ops.opset import OpSet


def run_layers(
    config: ModelConfig,
    weights: Weights,
    adapters: list[LayerAdapters],
    ops: OpSet,
    x_TD: Tensor,
    angles: tuple[Tensor, Tensor],
    kv: KV,
) -> Tensor:
    """From embedded tokens [T, D] to hidden states after the final norm, without gradients."""
    layers, eps = weights.layers, config.norm_eps
    normed_TD = ops.rmsnorm(x_TD, layers[0].attention_norm_D, eps)
    for index, layer in enumerate(layers):
        out_TD = _attention(config, ops, index, layer, adapters[index], normed_TD, angles, kv)
        x_TD, normed_TD = add_rmsnorm(x_TD, out_TD, layer.mlp_norm_D, eps)
        inner_TF = _gated(ops, layer, adapters[index], normed_TD)
        out_TD = project(ops, adapters[index].down, inner_TF, layer.down_DF)
        is_last = index + 1 == len(layers)
        norm_D = weights.final_norm_D if is_last else layers[index + 1].attention_norm_D
        x_TD, normed_TD = add_rmsnorm(x_TD, out_TD, norm_D, eps)
    return normed_TD


def _gated(ops: OpSet, layer: Layer, adapters: LayerAdapters, x_TD: Tensor) -> Tensor:
    if adapters.gate_up is None and may_gate(x_TD):
        return gated_linear(x_TD, layer.gate_up_2FD)
    return ops.swiglu(project(ops, adapters.gate_up, x_TD, layer.gate_up_2FD))


def _attention(
    config: ModelConfig,
    ops: OpSet,
    index: int,
    layer: Layer,
    adapters: LayerAdapters,
    x_TD: Tensor,
    angles,
    kv: KV,
) -> Tensor:
    qkv_TN = project(ops, adapters.qkv, x_TD, layer.qkv_ND, layer.qkv_bias_N)
    heads, norms = (config.num_heads, config.num_kv_heads), None
    if layer.q_norm_E is not None and layer.k_norm_E is not None:
        norms = layer.q_norm_E, layer.k_norm_E
    given, places = (qkv_TN, heads, norms, angles, config.norm_eps), kv.places(index)
    if places is None:
        v_TKE = qkv_TN.view(len(x_TD), -1, config.head_dim)[:, sum(heads) :]
        o_THE = kv.attend(index, *rotated_heads(*given), v_TKE)
    else:
        o_THE = kv.attend(index, rotated_queries(*given, places), None, None)
    return project(ops, adapters.output, o_THE.reshape(len(x_TD), -1), layer.output_DN)
