"""torch's own ops behind the same signatures: fast, and different with every batch.

Used for `--mode none` and its corrected relatives, for measuring what exactness costs, and as the
negative control of every parity check. No contract holds here.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_ops.logprob.restricted import Restriction, restrict
from shared_ops.lora.spans import Spans, pieces
from shared_ops.opset import OpSet

# Many sequences are padded and run in one call, unless that makes too many positions of each real
# one: on a GPU hundreds of short calls a layer cost more than the padding.
MANY, MOST_PADDING = 16, 4


def linear(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    return F.linear(x_TK, w_NK, bias_N)


def lora(
    y_TN: Tensor, x_TK: Tensor, a_QK: Tensor, b_MR: Tensor, spans: Spans, scale: float
) -> Tensor:
    out_TN = y_TN.clone()
    for columns, z_TR, b_NR in pieces(spans, F.linear(x_TK, a_QK), b_MR):
        out_TN[:, columns] += F.linear(z_TR, b_NR) * scale
    return out_TN


def rmsnorm(x_RD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x_RD, (x_RD.shape[-1],), w_D, eps)


def rope(x_THE: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    first, second = x_THE.float().chunk(2, dim=-1)
    cos, sin = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_THE.dtype)


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


def embedding(token_ids_T: Tensor, w_VD: Tensor) -> Tensor:
    return F.embedding(token_ids_T, w_VD)


def _attend(q_QHE: Tensor, k_NKE: Tensor, v_NKE: Tensor) -> Tensor:
    """Causal attention of one sequence whose queries are the end of its context."""
    queries, positions = q_QHE.shape[0], k_NKE.shape[0]
    reach_Q1 = torch.arange(positions - queries, positions, device=q_QHE.device).unsqueeze(1)
    mask_QN = torch.arange(positions, device=q_QHE.device) <= reach_Q1
    q_1HQE, k_1KNE, v_1KNE = (x.transpose(0, 1).unsqueeze(0) for x in (q_QHE, k_NKE, v_NKE))
    o_1HQE = F.scaled_dot_product_attention(
        q_1HQE, k_1KNE, v_1KNE, attn_mask=mask_QN, enable_gqa=True
    )
    return o_1HQE.squeeze(0).transpose(0, 1)


def packed_attention(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, starts: list[int]) -> Tensor:
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    if len(lengths) >= MANY and len(lengths) * max(lengths) <= MOST_PADDING * starts[-1]:
        return _attend_padded(q_THE, k_TKE, v_TKE, starts, lengths)
    spans = [slice(*pair) for pair in itertools.pairwise(starts)]
    return torch.cat([_attend(q_THE[span], k_TKE[span], v_TKE[span]) for span in spans])


def _attend_padded(
    q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, starts: list[int], lengths: list[int]
) -> Tensor:
    """Causal attention of B sequences in one call, each padded at its end to L positions."""
    places_L = torch.arange(max(lengths))
    real_BL = places_L < torch.tensor(lengths).unsqueeze(1)
    rows_BL = torch.where(real_BL, torch.tensor(starts[:-1]).unsqueeze(1) + places_L, 0)
    real_BL, rows_BL = real_BL.to(q_THE.device), rows_BL.to(q_THE.device)
    q_BHLE, k_BKLE, v_BKLE = (x[rows_BL].transpose(1, 2) for x in (q_THE, k_TKE, v_TKE))
    o_BHLE = F.scaled_dot_product_attention(q_BHLE, k_BKLE, v_BKLE, is_causal=True, enable_gqa=True)
    return o_BHLE.transpose(1, 2)[real_BL]


def paged_attention(q_THE: Tensor, k_pages_PSKE: Tensor, v_pages_PSKE: Tensor, layout) -> Tensor:
    starts, outputs = layout.query_starts, []
    for index, context in enumerate(layout.context_lens):
        pages_P = layout.page_table_BP[index, : -(-context // k_pages_PSKE.shape[1])]
        k_NKE, v_NKE = (x[pages_P].flatten(0, 1)[:context] for x in (k_pages_PSKE, v_pages_PSKE))
        outputs.append(_attend(q_THE[starts[index] : starts[index + 1]], k_NKE, v_NKE))
    return torch.cat(outputs)


def head_logits(hidden_BD: Tensor, head_VD: Tensor) -> Tensor:
    return F.linear(hidden_BD, head_VD).float()


def scaled_logits(
    hidden_BD: Tensor, head_VD: Tensor, temperature_B: Tensor, vocab_limit: int
) -> Tensor:
    logits_BV = head_logits(hidden_BD, head_VD) / temperature_B.unsqueeze(-1)
    masked_V = torch.arange(logits_BV.shape[1], device=logits_BV.device) >= vocab_limit
    return logits_BV.masked_fill(masked_V, float("-inf"))


def select_logprobs(logits_BV: Tensor, tokens_B: Tensor) -> Tensor:
    return logits_BV.log_softmax(-1).gather(1, tokens_B.unsqueeze(1)).squeeze(1)


def token_logprobs(
    hidden_TD: Tensor,
    head_VD: Tensor,
    targets_T: Tensor,
    temperature_T: Tensor,
    vocab_limit: int,
    restriction: Restriction | None = None,
) -> tuple[Tensor, Tensor]:
    logits_TV = scaled_logits(hidden_TD, head_VD, temperature_T, vocab_limit)
    if restriction is not None:
        restrict(logits_TV, temperature_T, restriction, targets_T)
    logprobs_TV = logits_TV.log_softmax(-1)
    entropy_T = -(logprobs_TV.exp() * logprobs_TV.clamp(min=-1e4)).sum(-1)
    return select_logprobs(logits_TV, targets_T), entropy_T


ORDINARY = OpSet(
    linear=linear,
    lora=lora,
    rmsnorm=rmsnorm,
    rope=rope,
    swiglu=swiglu,
    embedding=embedding,
    packed_attention=packed_attention,
    paged_attention=paged_attention,
    head_logits=head_logits,
    scaled_logits=scaled_logits,
    select_logprobs=select_logprobs,
    token_logprobs=token_logprobs,
)
