"""Accuracy of scores and gradients of whole models: error against transformers in float64 is at
most twice transformers' own in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from toy_models import ENTRIES, toy_folder
from train_samples import unscored
from transformers import AutoModelForCausalLM

from trainer import Trainer, TrainerConfig, TrainSample

SAMPLES = [
    replace(sample, temperature=(1.0, 0.6, 1.7)[index % 3])
    for index, sample in enumerate(unscored(6, seed=4))
]
TOTAL = sum(len(sample.completion_ids) for sample in SAMPLES)


def logprobs_of(model, sample: TrainSample) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: logits over the temperature, padded rows shut out, log softmax, chosen; and
    the sum of the entropies."""
    tokens = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
    logits_TV = model(tokens).logits[0, len(sample.prompt_ids) - 1 : -1, :ENTRIES]
    logprobs_TV = (logits_TV / sample.temperature).log_softmax(-1)
    chosen_T = logprobs_TV.gather(1, torch.tensor(sample.completion_ids)[:, None]).squeeze(1)
    return chosen_T, -(logprobs_TV.exp() * logprobs_TV).sum()


def transformers_of(folder, dtype: torch.dtype, bonus: float):
    """Scores, and gradients of the mean over tokens of -A log pi - bonus x entropy (the policy
    gradient and the entropy bonus)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model.eval()
    scores, entropies = zip(*[logprobs_of(model, sample) for sample in SAMPLES], strict=True)
    terms = [sample.advantage * values.sum() for sample, values in zip(SAMPLES, scores)]  # noqa: B905
    (-(sum(terms) + bonus * sum(entropies)) / TOTAL).backward()
    gradients = {name: leaf.grad.double() for name, leaf in model.named_parameters()}
    return torch.cat(scores).detach().double(), gradients


def ours(folder, bonus: float):
    config = TrainerConfig(micro_batch_tokens=70, entropy_coefficient=bonus)
    trainer = Trainer(folder, config)
    scores = trainer.logprobs(SAMPLES)
    samples = [
        replace(sample, behaviour_logprobs=values.tolist())
        for sample, values in zip(SAMPLES, scores, strict=True)
    ]
    holder = trainer._held.masters.to(torch.float32, "cpu")
    for leaf, gradient in zip(holder.leaves(), trainer._accumulate(samples)[1], strict=True):
        leaf.copy_(gradient)
    return torch.cat(scores).double(), {n: view.double() for n, view in holder.views().items()}


@pytest.mark.parametrize(
    ("family", "bonus"), [("llama", 0.0), ("qwen2", 0.0), ("qwen3", 0.0), ("qwen3", 0.4)]
)
def test_scores_and_gradients_are_as_close_to_float64_as_transformers(tmp_path, family, bonus):
    folder = toy_folder(tmp_path / family, family)
    exact_scores, exact = transformers_of(folder, torch.float64, bonus)
    plain_scores, plain = transformers_of(folder, torch.float32, bonus)
    scores, gradients = ours(folder, bonus)
    allowed = 2 * (plain_scores - exact_scores).abs().max()
    assert (scores - exact_scores).abs().max() <= allowed
    assert gradients.keys() == exact.keys()
    for name, wanted in exact.items():
        error = (gradients[name] - wanted).norm()
        assert error <= 2 * (plain[name] - wanted).norm() + 1e-7 * wanted.norm(), name
