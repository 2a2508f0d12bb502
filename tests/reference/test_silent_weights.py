"""Weights whose tensors fit by shape, and would still start another or no model."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_towers import EMBED, LENGTH, VOCABULARY, WIDTH, config, native
from torch import Tensor
from transformers import CLIPConfig, CLIPModel

from pennyclip.base.errors import RequestError
from pennyclip.config.keys import ClipText
from pennyclip.weights.build import build
from pennyclip.weights.inspection import inspect_weights
from pennyclip.weights.read import read_state
from pennyclip.weights.table import summary

TOWER = "vit_pico_patch16_clip_64"


def save(path: Path, **changed: Tensor) -> Path:
    torch.save(native().state_dict() | changed, path)
    return path


def test_the_heads_of_a_transformers_folder_are_not_overruled(tmp_path: Path) -> None:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 2}
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "num_attention_heads": 4}
    vision = {"image_size": 64, "patch_size": 16, "num_attention_heads": 1}
    tree = CLIPConfig(text_config=sizes | text, vision_config=sizes | vision, projection_dim=EMBED)
    CLIPModel(tree).save_pretrained(tmp_path)
    model = config(tmp_path, TOWER)
    with pytest.raises(RequestError, match=r"model\.text\.heads = 1 contradicts .* have 4\."):
        build(model, seed=0)
    assert isinstance(model.text, ClipText)
    build(replace(model, text=replace(model.text, heads=4)), seed=0)


def test_openai_files_have_heads_of_64_channels(tmp_path: Path) -> None:
    path = save(tmp_path / "w.pt", input_resolution=torch.tensor(64))
    model = config(path, TOWER)
    assert isinstance(model.text, ClipText)
    with pytest.raises(RequestError, match=r"heads = 2 contradicts .* have 1\."):
        build(replace(model, text=replace(model.text, heads=2)), seed=0)


def test_an_activation_that_was_guessed_is_noted(tmp_path: Path) -> None:
    path = save(tmp_path / "w.pt")
    _, matches = build(config(path, TOWER), seed=0)
    for part, match in zip(("image", "text"), matches, strict=True):
        assert "gelu is taken" in summary(match)
        assert f"model.{part}.activation sets it" in summary(match)
    assert "OpenAI's CLIPs have quick_gelu" in inspect_weights(str(path), "clip-text")[0]
    _, (match,) = build(config(path, TOWER, both=False, activation="gelu"), seed=0)
    assert match.note is None


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda v: torch.full_like(v, torch.nan), "numbers are not finite"),
        (lambda v: (v * 100).to(torch.int8), "of type int8, not floating point"),
    ],
)
def test_tensors_that_are_no_weights_are_refused(tmp_path: Path, spoil, reason: str) -> None:  # type: ignore[no-untyped-def]
    key = "visual.transformer.resblocks.0.mlp.c_fc.weight"
    path = save(tmp_path / "w.pt", **{key: spoil(native().state_dict()[key])})
    with pytest.raises(RequestError, match=f"hold 1 tensors(.|\n)*{key}: .*{reason}"):
        build(config(path, TOWER), seed=0)


def test_weights_of_zeros_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "w.pt", **{k: v * 0 for k, v in native().state_dict().items()})
    with pytest.raises(RequestError, match=r"every matrix .* is zero"):
        build(config(path, TOWER), seed=0)


def test_a_pickled_object_is_named_without_torchs_advice(tmp_path: Path) -> None:
    held = {"model": native().state_dict(), "args": argparse.Namespace(lr=1)}
    torch.save(held, tmp_path / "w.pth")
    with pytest.raises(
        RequestError, match=r"class argparse\.Namespace.*state_dict alone"
    ) as caught:
        read_state(tmp_path / "w.pth")
    assert "weights_only" not in str(caught.value)
    assert "http" not in str(caught.value)


@pytest.mark.parametrize("places", ["[]", '"a"', '{"a": 1}'])
def test_an_index_that_maps_nothing_is_refused(tmp_path: Path, places: str) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(f'{{"weight_map": {places}}}')
    with pytest.raises(RequestError, match="expected weight_map to map each key"):
        read_state(index)
