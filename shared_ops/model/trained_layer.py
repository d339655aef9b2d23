"""A decoder layer and its gradient as one autograd node: what is cheap is computed twice, not kept.

Kept for the backward are the layer's input, the input of its second norm, the products q k v and
gate up, the attention's output and its row sums. Norms, rotations and swiglu run again: a pass over
values that the backward reads anyway, where keeping their outputs takes nearly as much memory as
all the rest. With `keeps_input_only` the products and the attention run again too, but for the
last product, whose output no gradient needs.

Bits: every gradient is made by the ops' own backwards from the inputs that they had, sums have two
terms, and no op draws or depends on what ran before it. So they are those of autograd over the ops
one by one (tests/test_recompute.py).
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shared_ops.fused.op import add_rmsnorm, rotated_heads
from shared_ops.model.adapters import LayerAdapters
from shared_ops.model.config import ModelConfig
from shared_ops.model.weights import Layer
from shared_ops.schedules import Schedules

LEAVES = (
    "attention_norm_D",
    "qkv_ND",
    "qkv_bias_N",
    "q_norm_E",
    "k_norm_E",
    "output_DN",
    "mlp_norm_D",
    "gate_up_2FD",
    "down_DF",
)
# Each product's weight and bias.
PRODUCTS = {
    "qkv": ("qkv_ND", "qkv_bias_N"),
    "output": ("output_DN", None),
    "gate_up": ("gate_up_2FD", None),
    "down": ("down_DF", None),
}
INPUTS = (*LEAVES, *(f"{name} {part}" for name in PRODUCTS for part in "AB"))
Gradients = dict[str, Tensor | None]


class Around(NamedTuple):
    """What every layer of a forward is run with, besides its tokens, leaves and adapters.

    fuses: whether `shared_ops.fused` may stand for rmsnorm and rope.
    """

    config: ModelConfig
    ops: Schedules
    angles: tuple[Tensor, Tensor]
    starts: list[int]
    keeps_input_only: bool
    fuses: bool

    @property
    def heads(self) -> tuple[int, int, int]:
        config = self.config
        return config.num_heads, config.num_kv_heads, config.num_kv_heads


class Kept(NamedTuple):
    """Of a layer's forward; `x_TD` is the residual stream between attention and mlp."""

    qkv_TN: Tensor
    o_THE: Tensor
    lse_TH: Tensor
    x_TD: Tensor
    gate_up_T2F: Tensor


def trained_layer(around: Around, adapters: LayerAdapters, layer: Layer, x_TD: Tensor) -> Tensor:
    """The layer's output [T, D], differentiable in its input, its leaves and its adapters."""
    leaves = [getattr(layer, name) for name in LEAVES]
    pairs = [getattr(adapters, name) for name in PRODUCTS]
    lora = [x for one in pairs for x in ((one.a_QK, one.b_MR) if one else (None, None))]
    return _TrainedLayer.apply(around, adapters, x_TD, *leaves, *lora)


class _TrainedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, around, adapters, x_TD, *leaves):
        run = _Run(around, Layer(*leaves[: len(LEAVES)]), adapters, {})
        kept = run.forward(x_TD)
        ctx.around, ctx.adapters = around, adapters
        ctx.save_for_backward(x_TD, *leaves, *(() if around.keeps_input_only else kept))
        return run.output(kept)

    @staticmethod
    def backward(ctx, *grads):
        x_TD, *saved = ctx.saved_tensors
        needs = _needs(ctx.needs_input_grad)
        run = _Run(ctx.around, Layer(*saved[: len(LEAVES)]), ctx.adapters, needs)
        kept = run.forward(x_TD) if ctx.around.keeps_input_only else Kept(*saved[len(INPUTS) :])
        dx_TD, gradients = run.mlp_backward(kept, grads[0])
        if needs["attention"]:
            dx_TD = run.attention_backward(kept, x_TD, dx_TD, gradients)
        return None, None, dx_TD, *map(gradients.get, INPUTS)


@functools.cache
def _needs(flags: Sequence[bool]) -> dict[str, bool]:
    """Whether a gradient is wanted, by input; of `x`, and of `attention`: anything before the
    mlp."""
    needs = dict(zip(INPUTS, flags[3:], strict=True)) | {"x": flags[2]}
    first = ("x", *LEAVES[: LEAVES.index("mlp_norm_D")], "qkv A", "output A")
    return needs | {"attention": any(needs[name] for name in first)}


class _Run(NamedTuple):
    """One layer's leaves and the ops upon them; nothing here is recorded by autograd."""

    around: Around
    layer: Layer
    adapters: LayerAdapters
    needs: dict[str, bool]

    def forward(self, x_TD: Tensor) -> Kept:
        """All but the last product."""
        qkv_TN = self._product("qkv", self._norm(x_TD, "attention_norm_D"))
        o_THE, lse_TH = self.around.ops.attention.packed_forward(
            *self._rotated(qkv_TN), self.around.starts
        )
        x_TD, normed_TD = self._add_norm(x_TD, self._product("output", o_THE.flatten(1)))
        return Kept(qkv_TN, o_THE, lse_TH, x_TD, self._product("gate_up", normed_TD))

    def output(self, kept: Kept) -> Tensor:
        x_TF = self.around.ops.swiglu.forward(kept.gate_up_T2F)
        return kept.x_TD + self._product("down", x_TF)

    def mlp_backward(self, kept: Kept, dy_TD: Tensor) -> tuple[Tensor, Gradients]:
        """Gradients of `Kept.x_TD`, and of the leaves from there on."""
        swiglu = self.around.ops.swiglu
        gradients: Gradients = {}
        x_TF = swiglu.forward(kept.gate_up_T2F)
        dx_TF = self._product_backward("down", dy_TD, x_TF, True, gradients)
        del x_TF
        d_T2F = swiglu.backward(dx_TF, kept.gate_up_T2F)
        del dx_TF
        names = "mlp_norm_D", "gate_up"
        needs = self.needs["attention"] or self.needs["mlp_norm_D"]
        dx_TD = self._norm_product_backward(names, d_T2F, kept.x_TD, dy_TD, needs, gradients)
        return dx_TD, gradients

    def attention_backward(
        self, kept: Kept, x_TD: Tensor, dy_TD: Tensor, gradients: Gradients
    ) -> Tensor:
        """The gradient of the layer's input; those of the leaves before the mlp are added."""
        do_TN = self._product_backward("output", dy_TD, kept.o_THE.flatten(1), True, gradients)
        assert do_TN is not None
        dq_THE, dk_TKE, dv_TKE = self.around.ops.attention.packed_backward(
            do_TN.view(kept.o_THE.shape), *self._rotated(kept.qkv_TN), kept.o_THE, kept.lse_TH,
            starts=self.around.starts,
        )  # fmt: skip
        del do_TN
        dqkv_TN = torch.empty_like(kept.qkv_TN)
        heads = [*zip(self._heads(kept.qkv_TN), self._heads(dqkv_TN), strict=True)]
        self._rotated_backward("q_norm_E", dq_THE, *heads[0], gradients)
        self._rotated_backward("k_norm_E", dk_TKE, *heads[1], gradients)
        heads[2][1].copy_(dv_TKE)
        del dq_THE, dk_TKE, dv_TKE
        names = "attention_norm_D", "qkv"
        needs = self.needs["x"] or self.needs["attention_norm_D"]
        return self._norm_product_backward(names, dqkv_TN, x_TD, dy_TD, needs, gradients)

    def _norm(self, x_RD: Tensor, name: str) -> Tensor:
        w_D = getattr(self.layer, name)
        return self.around.ops.rmsnorm.forward(x_RD, w_D, self.around.config.norm_eps)

    def _add_norm(self, x_TD: Tensor, y_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream between attention and mlp, and its norm."""
        if self.around.fuses:
            eps = self.around.config.norm_eps
            return add_rmsnorm(x_TD, y_TD, self.layer.mlp_norm_D, eps)
        x_TD = x_TD + y_TD
        return x_TD, self._norm(x_TD, "mlp_norm_D")

    def _product(self, name: str, x_TK: Tensor) -> Tensor:
        weight, bias = PRODUCTS[name]
        bias_N = None if bias is None else getattr(self.layer, bias)
        ops, adapter = self.around.ops, getattr(self.adapters, name)
        y_TN = ops.linear.forward(x_TK, getattr(self.layer, weight), bias_N)
        if adapter is None:
            return y_TN
        lora = adapter.a_QK, adapter.b_MR, adapter.spans, adapter.scale
        return ops.lora.forward(y_TN, x_TK, *lora)[0]

    def _product_backward(
        self, name: str, dy_TN: Tensor, x_TK: Tensor, needs_x: bool, gradients: Gradients
    ) -> Tensor | None:
        """dx; the gradients of the leaves are added."""
        weight, bias = PRODUCTS[name]
        ops, adapter = self.around.ops, getattr(self.adapters, name)
        needs = (needs_x, self.needs[weight], bias is not None and self.needs[bias])
        dx_TK, gradients[weight], dbias_N = ops.linear.backward(
            dy_TN, x_TK, getattr(self.layer, weight), needs=needs
        )
        if bias is not None:
            gradients[bias] = dbias_N
        if adapter is None:
            return dx_TK
        z_TQ = ops.linear.forward(x_TK, adapter.a_QK, None)
        lora = adapter.a_QK, adapter.b_MR, adapter.spans, adapter.scale
        more_TK, gradients[f"{name} A"], gradients[f"{name} B"] = ops.lora.backward(
            dy_TN, x_TK, z_TQ, *lora, needs_dx=needs_x
        )
        return None if dx_TK is None else dx_TK + more_TK

    def _norm_product_backward(
        self,
        names: tuple[str, str],
        dy_TN: Tensor,
        x_TD: Tensor,
        residual_TD: Tensor,
        needs_x: bool,
        gradients: Gradients,
    ) -> Tensor:
        """Of a product of a norm's output: dx through both, and past both by the residual stream;
        the leaves' gradients are added."""
        norm, product = names
        normed_TD = self._norm(x_TD, norm)
        dnormed_TD = self._product_backward(product, dy_TN, normed_TD, needs_x, gradients)
        if dnormed_TD is None:
            return residual_TD
        w_D, eps = getattr(self.layer, norm), self.around.config.norm_eps
        dx_TD, gradients[norm] = self.around.ops.rmsnorm.backward(
            dnormed_TD, x_TD, w_D, eps, residual_RD=residual_TD
        )
        return dx_TD

    def _heads(self, qkv_TN: Tensor) -> Sequence[Tensor]:
        heads, width = self.around.heads, self.around.config.head_dim
        return qkv_TN.view(-1, sum(heads), width).split(heads, dim=1)

    def _rotated(self, qkv_TN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys as the attention takes them, and values."""
        around, layer = self.around, self.layer
        q_THE, k_TKE, v_TKE = self._heads(qkv_TN)
        norms = None
        if layer.q_norm_E is not None and layer.k_norm_E is not None:
            norms = layer.q_norm_E, layer.k_norm_E
        if around.fuses:
            eps = around.config.norm_eps
            return *rotated_heads(qkv_TN, around.heads[:2], norms, around.angles, eps), v_TKE
        if norms:
            q_THE, k_TKE = self._norm(q_THE, "q_norm_E"), self._norm(k_TKE, "k_norm_E")
        rope = around.ops.rope.forward
        return rope(q_THE, *around.angles), rope(k_TKE, *around.angles), v_TKE

    def _rotated_backward(
        self, norm: str, d_THE: Tensor, x_THE: Tensor, out_THE: Tensor, gradients: Gradients
    ) -> None:
        """From the gradient of rotated queries or keys to that of `x_THE`, into `out_THE`."""
        around, w_E = self.around, getattr(self.layer, norm)
        if w_E is None:
            around.ops.rope.backward(d_THE, *around.angles, out_THE=out_THE)
            return
        d_THE = around.ops.rope.backward(d_THE, *around.angles)
        _, gradients[norm] = around.ops.rmsnorm.backward(
            d_THE, x_THE, w_E, around.config.norm_eps, out_RD=out_THE
        )
