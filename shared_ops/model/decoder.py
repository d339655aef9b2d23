"""One dense decoder: always packed, never padded; the KV is an argument."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shared_ops.fused.op import is_allowed
from shared_ops.model.adapters import NO_ADAPTERS, Adapters, project
from shared_ops.model.config import ModelConfig, Recompute
from shared_ops.model.fused_layers import run_layers
from shared_ops.model.kv import KV, PackedSequences
from shared_ops.model.rope_table import RopeTable
from shared_ops.model.trained_layer import Around, trained_layer
from shared_ops.model.weights import Layer, Weights
from shared_ops.opset import EXACT, OpSet, is_exact
from shared_ops.schedules import schedules_for

Observe = Callable[[str, Tensor], None]
Body = Callable[[Layer, Tensor], Tensor]
RunLayer = Callable[[Body, Layer, Tensor], Tensor]


def _ignore(name: str, value: Tensor) -> None:
    """Nobody looks."""


def run_plainly(body: Body, layer: Layer, x_TD: Tensor) -> Tensor:
    """How a layer is run: body(layer, x_TD). Another way may drop and recompute what the body
    saves for the backward, or fetch the layer's leaves first; the values must be the body's."""
    return body(layer, x_TD)


class Decoder:
    """Llama, SmolLM2, Mistral, Qwen2, Qwen2.5 or Qwen3 over given weights.

    Weights and adapters are used as they are, not copied: an in-place update is seen by the next
    call.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: OpSet = EXACT,
        run_layer: RunLayer = run_plainly,
        adapters: Adapters | None = None,
        recompute: Recompute = "none",
    ):
        """run_layer: see `run_plainly`; not asked where layers run fused (ops.fuses).

        recompute: what a layer drops of its forward and computes again in the backward, with the
        same bits: "selective" the outputs of norms, rotations and swiglu, "full" all but its input.
        Exact ops upon packed sequences only; others keep everything.
        """
        self.config, self.weights, self.ops, self.run_layer = config, weights, ops, run_layer
        self.recompute = recompute
        self.adapters = adapters.layers if adapters else [NO_ADAPTERS] * config.num_layers
        self._rope = RopeTable(config.rope, config.head_dim, weights.embed_VD.device)
        self._rope.reserve(min(config.max_positions, 4096))

    @property
    def head_VD(self) -> Tensor:
        """[V, D]: the output head (the embedding itself when tied)."""
        return self.weights.head_VD

    def reserve(self, positions: int) -> None:
        """Prepare for positions 0..positions - 1 (up to 4096 are ready from the start)."""
        self._rope.reserve(positions)

    def __call__(
        self, token_ids_T: Tensor, positions_T: Tensor, kv: KV, observe: Observe | None = None
    ) -> Tensor:
        """Run packed tokens through all layers.

        Args:
            token_ids_T: [T] int64.
            positions_T: [T] int64, each token's index in its sequence.
            kv: keys and values of the sequences in flight.
            observe: called with (op's place, its output) in order, for finding a differing op.

        Returns:
            [T, D] hidden states after the final norm, in the weights' dtype.
        """
        see = observe or _ignore
        angles = self._rope.rows(positions_T)
        x_TD = self.ops.embedding(token_ids_T, self.weights.embed_VD)
        may_fuse = observe is None and self.ops.fuses
        if may_fuse and is_allowed(x_TD, self.config.head_dim, self.ops.needs_proof):
            return run_layers(self.config, self.weights, self.adapters, self.ops, x_TD, angles, kv)
        see("embedding", x_TD)
        around = None if observe else self._around(x_TD, angles, kv)
        for index, layer in enumerate(self.weights.layers):
            body = partial(self._layer, index, angles, kv, see)
            if around:
                body = partial(trained_layer, around, self.adapters[index])
            x_TD = self.run_layer(body, layer, x_TD)
        x_TD = self.ops.rmsnorm(x_TD, self.weights.final_norm_D, self.config.norm_eps)
        see("final rmsnorm", x_TD)
        return x_TD

    def _around(self, x_TD: Tensor, angles: tuple[Tensor, Tensor], kv: KV) -> Around | None:
        """What `trained_layer` takes; None where autograd records the ops one by one."""
        recorded = self.recompute == "none" or not torch.is_grad_enabled()
        if recorded or not is_exact(self.ops) or not isinstance(kv, PackedSequences):
            return None
        with torch.no_grad():
            fuses = is_allowed(x_TD, self.config.head_dim)
        input_only = self.recompute == "full"
        return Around(self.config, schedules_for(x_TD), angles, kv.starts, input_only, fuses)

    def _layer(
        self, index: int, angles, kv: KV, see: Observe, layer: Layer, x_TD: Tensor
    ) -> Tensor:
        def see_layer(name: str, value: Tensor) -> None:
            see(f"layer {index}: {name}", value)

        x_TD = x_TD + self._attention(index, layer, x_TD, angles, kv, see_layer)
        x_TD = x_TD + self._mlp(index, layer, x_TD, see_layer)
        see_layer("residual", x_TD)
        return x_TD

    def _attention(self, index: int, layer: Layer, x_TD, angles, kv: KV, see: Observe) -> Tensor:
        config, ops, adapters = self.config, self.ops, self.adapters[index]
        x_TD = ops.rmsnorm(x_TD, layer.attention_norm_D, config.norm_eps)
        see("rmsnorm before attention", x_TD)
        qkv_TN = project(ops, adapters.qkv, x_TD, layer.qkv_ND, layer.qkv_bias_N, see)
        see("linear qkv", qkv_TN)
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        q_THE, k_TKE, v_TKE = qkv_TN.view(-1, sum(heads), config.head_dim).split(heads, dim=1)
        if layer.q_norm_E is not None and layer.k_norm_E is not None:
            q_THE = ops.rmsnorm(q_THE, layer.q_norm_E, config.norm_eps)
            k_TKE = ops.rmsnorm(k_TKE, layer.k_norm_E, config.norm_eps)
            see("rmsnorm of queries", q_THE)
            see("rmsnorm of keys", k_TKE)
        q_THE, k_TKE = ops.rope(q_THE, *angles), ops.rope(k_TKE, *angles)
        see("rope of queries", q_THE)
        see("rope of keys", k_TKE)
        o_THE = kv.attend(index, q_THE, k_TKE, v_TKE)
        see("attention", o_THE)
        o_TN = o_THE.reshape(x_TD.shape[0], -1)
        out_TD = project(ops, adapters.output, o_TN, layer.output_DN, see=see)
        see("linear attention output", out_TD)
        return out_TD

    def _mlp(self, index: int, layer: Layer, x_TD: Tensor, see: Observe) -> Tensor:
        adapters = self.adapters[index]
        x_TD = self.ops.rmsnorm(x_TD, layer.mlp_norm_D, self.config.norm_eps)
        see("rmsnorm before mlp", x_TD)
        gate_up_T2F = project(self.ops, adapters.gate_up, x_TD, layer.gate_up_2FD, see=see)
        see("linear gate and up", gate_up_T2F)
        x_TF = self.ops.swiglu(gate_up_T2F)
        see("swiglu", x_TF)
        out_TD = project(self.ops, adapters.down, x_TF, layer.down_DF, see=see)
        see("linear down", out_TD)
        return out_TD


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a setting such as "bfloat16".

    Raises:
        ValueError: not one of float32, bfloat16, float16.
    """
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype {name!r} is not supported: use float32, bfloat16 or float16")
    return getattr(torch, name)
