"""Behaviour of sharing weights between processes, as far as a CPU goes, and of who copies what."""

from __future__ import annotations

import pickle

import pytest
import torch
from toy_models import toy_folder

from recipes.command_line import parse
from recipes.models import local_folder
from recipes.runtime import start
from recipes.settings import EMBEDDED
from rollout import LoraConfig
from shared_ops.model import weights as weights_module
from shared_ops.model.adapters import Adapters
from shared_ops.model.config import ModelConfig
from shared_ops.model.sharing import Opener, Sharer, SharingError, describe, gpu_of, rebuild
from shared_ops.model.weights import Weights, load_folder
from tests.test_recipe import SMALL


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def weights(request, tmp_path_factory) -> Weights:
    folder = toy_folder(tmp_path_factory.mktemp("models") / request.param, request.param)
    return load_folder(folder, ModelConfig.from_folder(folder), torch.bfloat16, "cpu")


def test_tensors_are_described_by_each_storage_once_and_come_back_as_aliases(weights):
    tensors = weights.views()
    storages, views = describe(tensors)
    assert len(storages) == len(weights.leaves()) < len(tensors)
    back = rebuild(storages, pickle.loads(pickle.dumps(views)))
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype
        assert back[name].data_ptr() == tensor.data_ptr()


def test_adapters_and_odd_views_come_back(weights):
    adapters = Adapters(weights.config, LoraConfig(rank=3), torch.float32, "cpu").views()
    base = torch.arange(60.0).view(6, 10)
    odd = {"columns": base[:, 3:7], "turned": base.T, "one": base[2, 5], "every other": base[::2]}
    for tensors in (adapters, odd, {**odd, "halves": base.bfloat16()[1:]}):
        back = rebuild(*describe(tensors))
        for name, tensor in tensors.items():
            assert torch.equal(back[name], tensor) and back[name].stride() == tensor.stride()
    assert len(describe(odd)[0]) == 1


def test_what_is_on_no_gpu_is_not_shared(weights):
    assert gpu_of(torch.device("cpu")) == ""
    for tensors in (weights.views(), {}):
        with pytest.raises(SharingError, match=r"^the weights are on (cpu|no device) and not on"):
            Sharer().share(tensors)
    Opener().close()


def test_in_one_process_nothing_is_copied_and_each_side_takes_one_digest(monkeypatch):
    taken, real = [], weights_module.checksums
    with start(parse(SMALL), local_folder(EMBEDDED, None)) as sides:
        own = {leaf.data_ptr() for leaf in sides.trainer.trainer._held.weights.leaves()}
        lent = sides.trainer.lend()[1].values()
        assert {each.untyped_storage().data_ptr() for each in lent} == own
        published = sides.trainer.publish()[1].values()
        assert not {each.untyped_storage().data_ptr() for each in published} & own
        monkeypatch.setattr(
            weights_module, "checksums", lambda given: taken.append(len(given)) or real(given)
        )
        sides.sync_weights()
        assert taken == [len(lent)] * 2
        assert sides.rollout.weights_digest() == sides.trainer.weights_digest()
