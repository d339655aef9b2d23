"""Bits of the whole model on a GPU: engine (paged) against trainer (packed), toy models.

The logprobs compared are those that the sampler drew with, as int32 views, on every token.
"""

from __future__ import annotations

import random

import pytest
import torch
from gpu import HALVES, module, needs_gpu
from toy_models import toy_folder
from train_samples import drawn

from rollout import Engine, EngineConfig, SamplingParams
from shared_ops.attest import attest
from shared_ops.model.lora_config import NO_LORA, LoraConfig
from trainer import Trainer, TrainerConfig, TrainSample

pytestmark = needs_gpu
FAMILIES = ("llama", "qwen2", "qwen3")
LENGTHS = (1, 3, 15, 16, 17, 63, 64, 65, 130, 257)
ENGINES = {
    "default": {},
    "chunks of 33": {"prefill_chunk": 33, "max_batch_tokens": 70},
    "pages of 64": {"page_size": 64, "prefix_cache": False},
    "page pressure": {"page_size": 8, "num_pages": 130},
    "two at a time": {"max_sequences": 2, "page_size": 3},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {family: toy_folder(base / family, family) for family in FAMILIES}


def prompts(seed: int) -> list[list[int]]:
    source = random.Random(seed)
    shared = [source.randrange(3, 110) for _ in range(max(LENGTHS))]
    return [
        [*shared[: length // 2], *(source.randrange(3, 110) for _ in range(length - length // 2))]
        for length in LENGTHS
    ]


def rollout(engine: Engine, seed: int) -> list[TrainSample]:
    params = [
        SamplingParams(max_tokens=70, n=3, temperature=(1.0, 0.7, 0.0)[i % 3], seed=seed)
        for i in range(len(LENGTHS))
    ]
    return [
        TrainSample(
            prompt_ids=completion.prompt_ids,
            completion_ids=completion.token_ids,
            behaviour_logprobs=completion.logprobs,
            advantage=completion.sample_index - 1.0,
            policy_versions=completion.policy_versions,
            temperature=params[index].temperature,
            request_id=completion.request_id,
        )
        for index, group in enumerate(engine.generate(prompts(seed), params))
        for completion in group
    ]


def differing(trainer: Trainer, samples: list[TrainSample]) -> tuple[int, int]:
    """(tokens compared, tokens whose float32 bits differ)."""
    scored = torch.cat(trainer.logprobs(samples))
    drawn = torch.tensor([x for sample in samples for x in sample.behaviour_logprobs])
    assert scored.isfinite().all() and scored.unique().numel() > 100
    return len(drawn), int((scored.view(torch.int32) != drawn.view(torch.int32)).sum())


def pair(
    folder, dtype: torch.dtype, exact: bool = True, lora: LoraConfig = NO_LORA, **settings
) -> tuple[Trainer, Engine]:
    name = str(dtype).removeprefix("torch.")
    trainer = Trainer(
        folder,
        TrainerConfig(
            device="cuda", dtype=name, exact=exact, learning_rate=3e-3,
            mode="bitwise" if exact else "none", lora=lora,
        ),
    )  # fmt: skip
    settings |= {"device": "cuda", "dtype": name, "exact": exact, "lora": lora}
    return trainer, Engine(folder, EngineConfig(**settings))


@HALVES
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", [0, 1, 8])
def test_the_engines_logprobs_are_the_trainers_through_steps(folders, family, dtype, rank) -> None:
    """With adapters, captured decode steps see each publication in the same buffers."""
    trainer, engine = pair(folders[family], dtype, lora=LoraConfig(rank=rank))
    for turn in range(3):
        manifest, tensors = trainer.publish()
        engine.load_weights(manifest, tensors)
        assert engine.weights_digest() == manifest.digest
        samples = rollout(engine, seed=turn)
        compared, different = differing(trainer, samples)
        assert compared > 300 and different == 0
        stats = trainer.step([sample for sample in samples if sample.temperature])
        assert stats.tokens_compared > 200 and stats.tokens_differing == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_completions_do_not_depend_on_the_engines_limits(folders, family) -> None:
    given = {}
    for name, settings in ENGINES.items():
        _, engine = pair(folders[family], torch.bfloat16, **settings)
        given[name] = [
            (sample.completion_ids, sample.behaviour_logprobs) for sample in rollout(engine, seed=9)
        ]
    assert all(each == given["default"] for each in given.values())


def test_attested_schedules_keep_parity(folders, tmp_path, monkeypatch) -> None:
    """Tiles first, then the vendor library where it was proved."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    products = module("products")
    trainer, engine = pair(folders["qwen2"], torch.bfloat16, cuda_graphs=False)
    monkeypatch.setattr(products, "_outside", {})
    before = rollout(engine, seed=6)
    attest(engine.model_config, device="cuda", dtype="bfloat16").raise_if_broken()
    shape = products.Shape(64, 64, torch.bfloat16, torch.bfloat16)
    assert products.choose(100, shape) is None
    samples = rollout(engine, seed=6)
    assert [x.behaviour_logprobs for x in samples] == [x.behaviour_logprobs for x in before]
    assert differing(trainer, samples)[1] == 0
    assert trainer.step([x for x in samples if x.temperature]).tokens_differing == 0


def test_float32_on_the_gpu_is_exact_too(folders) -> None:
    trainer, engine = pair(folders["qwen3"], torch.float32)
    compared, different = differing(trainer, rollout(engine, seed=4))
    assert compared > 300 and different == 0


def test_ordinary_ops_differ(folders) -> None:
    """The control: the tests above can fail."""
    trainer, engine = pair(folders["llama"], torch.bfloat16, exact=False)
    compared, different = differing(trainer, rollout(engine, seed=2))
    assert different > compared // 10


def test_training_twice_gives_the_same_weights(folders) -> None:
    digests = []
    for _ in range(2):
        trainer, engine = pair(folders["qwen3"], torch.bfloat16)
        samples = [sample for sample in rollout(engine, seed=1) if sample.temperature]
        for _ in range(5):
            trainer.step(drawn(trainer, samples))
        digests.append(trainer.publish()[0].digest)
    assert digests[0] == digests[1]
