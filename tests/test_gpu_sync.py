"""Weights from process to process on one GPU: bits, refusals, memory; and the digest's kernel."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from gpu import needs_gpu
from other_engine import OtherEngine
from toy_models import toy_folder

from rollout import Engine, EngineConfig, LoraConfig, SamplingParams
from rollout.actor import RolloutActor
from shared_ops.checksum.op import checksums
from shared_ops.model.config import ModelConfig
from shared_ops.model.sharing import Sharer, SharingError, gpu_of
from shared_ops.model.weights import Weights, WeightsError, digest_of, load_folder
from trainer import TrainerConfig, TrainSample
from trainer.actor import TrainerActor
from trainer.publish import publish

pytestmark = needs_gpu
PROMPTS = [[1, 20, 30], [5], [1, *range(20, 60)], [9, 8, 7, 6]]
PARAMS = SamplingParams(max_tokens=24, n=4, ignore_eos=True, seed=3)
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_folder(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


def config_of(rank: int = 0) -> EngineConfig:
    return EngineConfig(device="cuda", dtype="bfloat16", lora=LoraConfig(rank=rank), num_pages=400)


@pytest.fixture(scope="module")
def other(folder):
    engine = OtherEngine(folder, config_of())
    yield engine
    engine.close()


def weights_of(folder) -> Weights:
    return load_folder(folder, ModelConfig.from_folder(folder), torch.bfloat16, "cuda")


def change(weights: Weights, factor: float) -> None:
    for leaf in weights.leaves():
        leaf.mul_(factor)


def share(sharer: Sharer, version: int, weights: Weights):
    manifest, tensors = publish(version, weights)
    return manifest, sharer.share(tensors)


def test_captured_steps_of_another_process_draw_with_what_was_shared(folder, other) -> None:
    """Through updates in place, against an engine in this process; updates change what is drawn."""
    here, weights, sharer = Engine(folder, config_of()), weights_of(folder), Sharer()
    rows, keys, counts = [], set(), []
    for version in range(4):
        manifest, shared = share(sharer, version, weights)
        other.ask("load_weights", manifest, shared)
        here.load_weights(*publish(version, weights))
        assert other.ask("weights_digest") == manifest.digest == here.weights_digest()
        groups = here.generate(PROMPTS, PARAMS)
        rows.append([(one.token_ids, one.logprobs) for group in groups for one in group])
        assert other.ask("drawn", PROMPTS, PARAMS) == rows[-1] and len(rows[-1]) == 16
        keys.add(shared.key)
        counts.append(other.ask("captured"))
        change(weights, 1.25)
    assert len(keys) == 1 and counts[0] == counts[-1] > 0
    assert all(first != second for first, second in pairwise(rows))


@pytest.mark.parametrize("rank", [0, 8])
def test_a_trainer_proves_every_token_of_an_engine_in_another_process(folder, other, rank) -> None:
    engine = OtherEngine(folder, config_of(rank)) if rank else other
    lora = LoraConfig(rank=rank)
    config = TrainerConfig(device="cuda", dtype="bfloat16", learning_rate=1e-2, lora=lora)
    trainer, rows, compared = TrainerActor(folder, config), [], 0
    assert trainer.gpu() == engine.ask("gpu") == gpu_of(torch.device("cuda", 0)) != ""
    for _ in range(3):
        manifest, shared = trainer.share()
        assert len(shared.storages) < len(shared.views) == len(manifest.names)
        engine.ask("load_weights", manifest, shared)
        groups = engine.ask("generate", PROMPTS, PARAMS)
        rows.append([one.logprobs for group in groups for one in group])
        samples = [TrainSample.of(one, one.sample_index - 1.5) for group in groups for one in group]
        stats = trainer.step(samples)
        assert stats.tokens_differing == 0
        compared += stats.tokens_compared
    assert compared > 600 and rows[0] != rows[1] != rows[2]
    if rank:
        engine.close()


def test_weights_that_changed_after_publishing_are_refused(folder, other) -> None:
    weights, sharer = weights_of(folder), Sharer()
    manifest, shared = share(sharer, 7, weights)
    other.ask("load_weights", manifest, shared)
    change(weights, 1.25)
    with pytest.raises(WeightsError, match=r"^weights version 7: digest .* publish them again$"):
        other.ask("load_weights", manifest, shared)
    with pytest.raises(RuntimeError, match="call load_weights again"):
        other.ask("drawn", PROMPTS, PARAMS)
    other.ask("load_weights", *share(sharer, 8, weights))
    assert len(other.ask("drawn", PROMPTS, PARAMS)) == 16


def test_what_does_not_fit_changes_nothing(folder, other) -> None:
    weights, sharer = weights_of(folder), Sharer()
    manifest, shared = share(sharer, 1, weights)
    other.ask("load_weights", manifest, shared)
    manifest, tensors = publish(2, weights.to(torch.float32, "cuda"))
    with pytest.raises(WeightsError, match="the engine's dtype is bfloat16"):
        other.ask("load_weights", manifest, Sharer().share(tensors))
    manifest, tensors = publish(2, weights)
    tensors.pop(manifest.names[3])
    with pytest.raises(WeightsError, match="missing"):
        other.ask("load_weights", manifest, sharer.share(tensors))
    assert other.ask("version") == 1 and other.ask("drawn", PROMPTS, PARAMS)


@pytest.mark.parametrize("moves", [False, True], ids=["in place", "in new storages"])
def test_fifty_publications_keep_no_memory(folder, other, moves) -> None:
    weights, sharer = weights_of(folder), Sharer()
    nbytes = sum(leaf.nbytes for leaf in weights.leaves())
    used = []
    for version in range(55):
        if moves:
            weights = weights.to(torch.bfloat16, "cuda")
        change(weights, -1.0)
        other.ask("load_weights", *share(sharer, version, weights))
        there = other.ask("allocated")
        torch.cuda.synchronize()
        used.append((torch.cuda.memory_allocated(), there, -torch.cuda.mem_get_info()[0]))
    (own, there, device), last = used[4], used[-1]
    assert last[0] - own <= (4 * nbytes if moves else 0)
    assert last[1] == there and last[2] - device <= 8 * MIB


def test_expandable_segments_are_left_to_host_memory(folder, monkeypatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(SharingError, match="PYTORCH_CUDA_ALLOC_CONF asks for expandable segments"):
        share(Sharer(), 1, weights_of(folder))


def test_the_kernels_checksums_are_the_references() -> None:
    """Every length around a word, a block and a piece; views; dtypes; many tensors in one call."""
    generator = torch.Generator().manual_seed(5)
    whole = torch.randint(256, (3 << 20,), generator=generator, dtype=torch.uint8)
    near = [base + more for base in (0, 8192, 524288, 1 << 20) for more in (0, 1, 7, 8, 9)]
    tensors = [whole[first : first + count] for count in near for first in (0, 3, 8)]
    square = whole[: 1 << 20].view(torch.bfloat16).view(512, -1)
    tensors += [square, square.T, square[1:], square[:, 3:9], square[0, 0], whole.view(torch.int64)]
    found, wanted = checksums([tensor.cuda() for tensor in tensors]), checksums(tensors)
    assert found == wanted and len(set(wanted)) > 55
    on_gpu = whole.cuda()
    assert checksums([on_gpu[at : at + 999_983] for at in range(9)]) == checksums(
        [whole[at : at + 999_983] for at in range(9)]
    )
    on_gpu[1_234_567] ^= 64
    assert checksums([on_gpu]) != checksums([whole])


def test_a_digest_is_equal_on_both_devices(folder) -> None:
    weights = weights_of(folder)
    for dtype in (torch.bfloat16, torch.float32):
        views = weights.to(dtype, "cuda").views()
        assert digest_of(views) == digest_of({name: view.cpu() for name, view in views.items()})
    before = digest_of(weights.views())
    weights.leaves()[-2].view(-1)[:1].neg_()
    assert digest_of(weights.views()) != before


def test_memory_that_cannot_be_opened_is_named_and_changes_nothing(folder) -> None:
    """CUDA opens no process's memory in that process itself."""
    actor = RolloutActor(folder, config_of())
    before = actor.weights_digest()
    with pytest.raises(SharingError, match="cannot open the other process's memory"):
        actor.load_weights(*share(Sharer(), 3, weights_of(folder)))
    assert (actor.version(), actor.weights_digest()) == (0, before)
    assert actor.generate(PROMPTS, PARAMS)
