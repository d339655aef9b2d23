"""Weights: folders in every layout load, what does not fit is refused, digests see everything."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_models import CLASSES, ENTRIES, VOCABULARY, toy_folder

from shared_ops.model import weights as weights_module
from shared_ops.model.config import ConfigError, ModelConfig
from shared_ops.model.vocabulary import vocab_limit
from shared_ops.model.weights import (
    HEAD,
    Weights,
    WeightsError,
    digest_of,
    load_folder,
    make_manifest,
    save_folder,
)


def load(folder: Path) -> Weights:
    return load_folder(folder, ModelConfig.from_folder(folder), torch.float32, "cpu")


@pytest.fixture(params=CLASSES)
def folder(request, tmp_path) -> Path:
    return toy_folder(tmp_path / "model", request.param)


@pytest.fixture
def llama(tmp_path) -> Path:
    return toy_folder(tmp_path / "model", "llama")


def rewrite(folder: Path, change) -> Path:
    """Let `change` edit the folder's tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


def test_views_hold_the_files_tensors(folder):
    views, stored = load(folder).views(), load_file(folder / "model.safetensors")
    assert views.keys() == stored.keys()
    assert all(torch.equal(view, stored[name]) for name, view in views.items())


def test_leaves_cover_the_views_once(folder):
    weights = load(folder)
    assert len(weights.leaves()) == len(set(weights.leaf_names())) == len(weights.named_leaves())
    pointers = {leaf.untyped_storage().data_ptr() for leaf in weights.leaves()}
    assert len(pointers) == len(weights.leaves())
    views = weights.views()
    assert {view.untyped_storage().data_ptr() for view in views.values()} == pointers
    counts = [sum(x.numel() for x in xs) for xs in (weights.leaves(), views.values())]
    assert counts[0] == counts[1] > 0
    weights.leaves()[1].zero_()
    assert not weights.views()["model.layers.0.input_layernorm.weight"].any()


def test_a_sharded_folder_is_the_same_model(folder, tmp_path):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert digest_of(load(tmp_path / "sharded").views()) == digest_of(load(folder).views())


def test_a_tied_folder_may_list_its_head(llama):
    wanted = digest_of(load(llama).views())
    rewrite(llama, lambda x: x.update({HEAD: x["model.embed_tokens.weight"].clone()}))
    weights = load(llama)
    assert digest_of(weights.views()) == wanted
    assert weights.head_VD is weights.embed_VD


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
MISFITS = {
    "missing": (lambda x: x.pop(Q_PROJ), f"missing .*{Q_PROJ}"),
    "unknown": (lambda x: x.update(extra=torch.zeros(2)), "unknown .*extra"),
    "shape": (lambda x: x.update({Q_PROJ: torch.zeros(3, 64)}), rf"{Q_PROJ} has shape \(3, 64\)"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_tensors_that_do_not_fit_are_named(llama, kind):
    change, message = MISFITS[kind]
    with pytest.raises(WeightsError, match=message) as refusal:
        load(rewrite(llama, change))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("kind", MISFITS)
def test_copy_from_changes_everything_or_nothing(folder, kind):
    weights = load(folder)
    before = digest_of(weights.views())
    tensors = {name: view + 1 for name, view in weights.views().items()}
    MISFITS[kind][0](tensors)
    with pytest.raises(WeightsError):
        weights.copy_from(tensors)
    assert digest_of(weights.views()) == before
    good = {name: view + 1 for name, view in weights.views().items()}
    pointers = [leaf.data_ptr() for leaf in weights.leaves()]
    weights.copy_from(good)
    assert digest_of(weights.views()) == digest_of(good) != before
    assert [leaf.data_ptr() for leaf in weights.leaves()] == pointers


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def _sharded(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)


BROKEN_FOLDERS = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"no model\.safetensors"),
    "truncated": (lambda f: _truncate(f / "model.safetensors"), "cannot read the weights"),
    "a pointer file": (
        lambda f: (f / "model.safetensors").write_text("version https://git-lfs"),
        "cannot read the weights",
    ),
    "broken index": (lambda f: _sharded(f, "{"), r"index\.json"),
    "index without map": (lambda f: _sharded(f, "{}"), "weight_map"),
    "missing shard": (
        lambda f: _sharded(f, json.dumps({"weight_map": {HEAD: "gone.safetensors"}})),
        r"lacks the weight file .*gone\.safetensors",
    ),
}


@pytest.mark.parametrize("kind", BROKEN_FOLDERS)
def test_a_broken_folder_is_one_line(llama, kind):
    damage, message = BROKEN_FOLDERS[kind]
    damage(llama)
    with pytest.raises(ConfigError, match=message) as refusal:
        load(llama)
    assert "\n" not in str(refusal.value)


def test_the_digest_sees_names_shapes_dtypes_and_bytes():
    x = torch.arange(6.0)
    tensors = {"a": x, "b": x + 1}
    variants = [
        tensors,
        {"a": x, "c": x + 1},
        {"a": x.view(2, 3), "b": x + 1},
        {"a": x.view(torch.int32), "b": x + 1},
        {"a": x + 1, "b": x},
        {"a": torch.where(x == 0, -0.0, x), "b": x + 1},
    ]
    assert len({digest_of(variant) for variant in variants}) == len(variants)
    assert digest_of(dict(reversed(tensors.items()))) == digest_of(tensors)
    strided = {"a": torch.stack((x, x), 1)[:, 0], "b": x + 1}
    assert digest_of(strided) == digest_of(tensors)
    assert digest_of({"a": x.bfloat16()}) != digest_of({"a": x.half()})


def test_a_manifest_describes_its_tensors_and_travels(folder):
    views = load(folder).views()
    manifest = make_manifest(3, views)
    assert manifest.version == 3
    assert manifest.names == tuple(sorted(views))
    assert manifest.shapes == tuple(tuple(views[name].shape) for name in manifest.names)
    assert set(manifest.dtypes) == {"float32"}
    assert manifest.digest == digest_of(views)
    assert pickle.loads(pickle.dumps(manifest)) == manifest


def test_a_copy_shares_nothing(folder):
    weights = load(folder)
    before = digest_of(weights.views())
    copy = weights.to(torch.bfloat16, "cpu")
    wanted = digest_of({name: view.bfloat16() for name, view in weights.views().items()})
    assert digest_of(copy.views()) == wanted
    for leaf in copy.leaves():
        leaf.zero_()
    assert digest_of(weights.views()) == before
    assert (copy.head_VD is copy.embed_VD) == weights.config.tie_embeddings


def test_a_saved_folder_holds_text_files_and_its_dtype(llama, tmp_path):
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    (llama / "optimizer.bin").write_text("not ours")
    weights = load_folder_ignoring_index(llama).to(torch.bfloat16, "cpu")
    saved = tmp_path / "deep" / "saved"
    save_folder(saved, weights, llama)
    names = {path.name for path in saved.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not names & {"optimizer.bin", "model.safetensors.index.json"}
    assert json.loads((saved / "config.json").read_text())["dtype"] == "bfloat16"
    config = ModelConfig.from_folder(saved)
    again = load_folder(saved, config, torch.bfloat16, "cpu")
    assert digest_of(again.views()) == digest_of(weights.views())


def load_folder_ignoring_index(folder: Path) -> Weights:
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    index.unlink()
    weights = load(folder)
    index.write_text(text)
    return weights


def test_a_save_that_fails_leaves_the_old_folder(llama, tmp_path, monkeypatch):
    weights, saved = load(llama), tmp_path / "saved"
    save_folder(saved, weights, llama)
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    listing = sorted(tmp_path.iterdir())

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(weights_module, "save_file", full_disk)
        with pytest.raises(OSError, match="No space left"):
            save_folder(saved, weights, llama)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    weights.leaves()[0].zero_()
    save_folder(saved, weights, saved)
    assert digest_of(load(saved).views()) == digest_of(weights.views())
    assert sorted(tmp_path.iterdir()) == listing


def test_the_vocabulary_ends_where_the_tokenizer_does(llama):
    config = ModelConfig.from_folder(llama)
    assert vocab_limit(llama, config) == ENTRIES < VOCABULARY
    (llama / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        vocab_limit(llama, config)
    (llama / "tokenizer.json").unlink()
    assert vocab_limit(llama, config) == VOCABULARY
    (llama / "vocab.json").write_text(json.dumps({"a": 0, "b": 7}))
    assert vocab_limit(llama, config) == 8
    added = {"added_tokens_decoder": {"9": {"content": "<end>"}}}
    (llama / "tokenizer_config.json").write_text(json.dumps(added))
    (llama / "vocab.json").write_text(json.dumps({"a": 0, "b": 6}))
    assert vocab_limit(llama, config) == 10
