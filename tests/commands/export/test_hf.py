"""transformers loads the export offline, processor and tokenizer too, and sees the same."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import (
    CONTEXT,
    EMBED,
    TEXTS,
    assert_loads_back,
    assert_same,
    bert,
    checkpoint,
    clip_shaped,
    clip_text,
    embeddings,
    images,
)
from transformers import (
    CLIPModel,
    CLIPProcessor,
    CLIPTokenizer,
    VisionTextDualEncoderModel,
    VisionTextDualEncoderProcessor,
)

from pennyclip.base.errors import RequestError
from pennyclip.commands.export import export, hf
from pennyclip.commands.export.hf import write
from pennyclip.commands.export.tokenizer import write_clip_tokenizer
from pennyclip.commands.export.vit import Unlike
from pennyclip.config.file import load_recipe, recipe_names
from pennyclip.config.keys import ClipText, ImageTower, Model
from pennyclip.data.text import ClipTokenizer
from pennyclip.model.image import ImageTower as Tower
from pennyclip.weights.build import build
from pennyclip.weights.read import read_weights
from pennyclip.weights.statements import read_statements

CLIP_IMAGE = ImageTower(name="vit_femto_patch16_clip_64", image_size=64)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def assert_same_in_transformers(kind: type, processor: type, folder: Path, path: Path) -> None:
    encoder, image, text = embeddings(path)
    model, read = kind.from_pretrained(folder).eval(), processor.from_pretrained(folder)
    pictures = [picture.permute(1, 2, 0).numpy() for picture in images()]
    inputs = read(
        text=TEXTS, images=pictures, return_tensors="pt", padding=True, truncation=True,
    )  # fmt: skip
    assert inputs["input_ids"].shape[1] == CONTEXT  # the longest was cut, not refused
    with torch.no_grad():
        output = model(**inputs)
    assert_same(image, output.image_embeds)
    assert_same(text, output.text_embeds)
    expected = encoder.model.logit_scale.exp() * text @ image.T
    torch.testing.assert_close(output.logits_per_text, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("activation", ["gelu", "quick_gelu"])
def test_clip_model(tmp_path: Path, activation: str) -> None:
    image = ImageTower(name=CLIP_IMAGE.name, image_size=64, activation=activation)
    config = Model(image=image, text=clip_text(activation=activation), embed_dim=EMBED)
    path = checkpoint(tmp_path / "run", config)
    done = export(path, "hf", tmp_path / "out")
    assert done.layout == "transformers CLIPModel"
    assert {
        "config.json", "model.safetensors", "preprocessor_config.json", "vocab.json", "merges.txt",
        "tokenizer_config.json", "README.md",
    } <= set(done.files)  # fmt: skip
    written = json.loads((done.path / "config.json").read_text())
    assert written["vision_config"]["hidden_act"] == activation
    assert_same_in_transformers(CLIPModel, CLIPProcessor, done.path, path)
    _, ours, text = embeddings(path)
    assert_loads_back(done.path, config, ours, text)


def test_plain_vit_and_clip_text_make_a_dual_encoder(tmp_path: Path) -> None:
    image = ImageTower(name="vit_femto_patch16_64", image_size=64)
    config = Model(image=image, text=clip_text(), embed_dim=EMBED)
    path = checkpoint(tmp_path / "run", config)
    done = export(path, "hf", tmp_path / "out")
    assert done.layout == "transformers VisionTextDualEncoderModel"
    kinds = (VisionTextDualEncoderModel, VisionTextDualEncoderProcessor)
    assert_same_in_transformers(*kinds, done.path, path)
    _, ours, words = embeddings(path)
    assert_loads_back(done.path, config, ours, words)


@pytest.mark.parametrize("name", [CLIP_IMAGE.name, "vit_femto_patch16_64"])
def test_bert_makes_a_dual_encoder(tmp_path: Path, name: str) -> None:
    text = bert(tmp_path / "bert", pool="cls")
    image = ImageTower(name=name, image_size=64)
    config = Model(image=image, text=text, embed_dim=EMBED)
    path = checkpoint(tmp_path / "run", config)
    done = export(path, "hf", tmp_path / "out")
    assert "tanh" in done.notes[0]
    kinds = (VisionTextDualEncoderModel, VisionTextDualEncoderProcessor)
    assert_same_in_transformers(*kinds, done.path, path)
    _, ours, words = embeddings(path)
    assert_loads_back(done.path, config, ours, words)


def test_a_dual_encoder_says_how_it_is_used(tmp_path: Path) -> None:
    image = ImageTower(name="vit_femto_patch16_64", image_size=64, activation="quick_gelu")
    text = bert(tmp_path / "bert", pool="cls")
    path = checkpoint(tmp_path / "run", Model(image=image, text=text, embed_dim=EMBED))
    folder = export(path, "hf", tmp_path / "out").path
    said = read_statements(read_weights(folder))
    assert (said.image_activation, said.image_pool, said.text_pool) == (
        "quick_gelu",
        "token",
        "cls",
    )
    assert said.mean == pytest.approx((0.4, 0.5, 0.6))
    assert said.trained.startswith("CLIP")
    # A pooler that does more than pass on is no part of any tower here.
    file = folder / "model.safetensors"
    state = load_file(file)
    state["text_model.pooler.dense.weight"][0, 1] = 0.5
    save_file(state, file)
    start = replace(text, weights=str(folder))
    with pytest.raises(RequestError, match=r"text_model\.pooler\.dense\.weight: the tower has no"):
        build(Model(image=image, text=start, embed_dim=EMBED), seed=0)


@pytest.mark.parametrize(
    ("image", "text", "reason"),
    [
        ({"name": "test_efficientnet", "image_size": 64}, {}, r"EfficientNet\) is not a plain ViT"),
        ({"pool": "avg"}, {}, "differs from CLIP's ViT in fc_norm.bias"),
        ({"head": "mlp"}, {}, "head is 'mlp'"),
        ({"head_bias": True}, {}, "linear one with bias"),
        ({}, {"family": "siglip"}, "SigLIP's text tower"),
        ({}, {"tokenizer": "bert"}, "a text tower with own tokens"),
        ({}, {"pool": "mean"}, "pools by 'mean'"),
        ({}, {"pool": "cls", "head": "mlp"}, "text head is 'mlp'"),
    ],
)
def test_other_towers_are_refused_with_the_reason(
    tmp_path: Path, image: dict[str, object], text: dict[str, object], reason: str
) -> None:
    tower = ImageTower(**{"name": CLIP_IMAGE.name, "image_size": 64} | image)  # type: ignore[arg-type]
    is_bert = "pool" in text
    if "tokenizer" in text:
        text = {"tokenizer": bert(tmp_path / "words").name, "vocab_size": 11}
    other = bert(tmp_path / "bert", **text) if is_bert else clip_text(layers=1, **text)
    path = checkpoint(tmp_path / "run", Model(image=tower, text=other, embed_dim=EMBED))
    with pytest.raises(RequestError, match=f"no model like this one.*{reason}"):
        export(path, "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_that_differs_is_not_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path / "run", clip_shaped())
    monkeypatch.setitem(hf.ACTIVATIONS, "gelu", "quick_gelu")
    with pytest.raises(RuntimeError, match="gives other embeddings"):
        export(path, "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert write is hf.write


def test_the_tokenizer_gives_our_ids(tmp_path: Path) -> None:
    write_clip_tokenizer(tmp_path)
    theirs, ours = CLIPTokenizer.from_pretrained(tmp_path), ClipTokenizer()
    texts = ["", "!", "Two dogs' tails, 1,024 of them", "naïve façade – 東京 🦊", "it's a lamb..."]
    for text in texts:
        assert theirs(text)["input_ids"] == ours.encode(text)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    assert sorted(vocabulary.values()) == list(range(49408))
    assert vocabulary["<|endoftext|>"] == 49407


@pytest.mark.parametrize("recipe", recipe_names())
def test_the_table_of_recipes_says_which_transformers_has(recipe: str) -> None:
    """`docs/choose-a-recipe.md`, by the towers alone: nothing is loaded."""
    page = Path(__file__).resolve().parents[3] / "docs/choose-a-recipe.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    said = next(line for line in lines if line.startswith(f"| `{recipe}` |"))
    model = load_recipe(recipe).model
    with torch.device("meta"):
        tower = Tower(replace(model.image, weights=None), model.embed_dim)
    fits = isinstance(model.text, ClipText) or (
        model.text.pool == "cls" and model.text.head == "linear"
    )
    try:
        hf._image(tower, model.embed_dim)
    except Unlike:
        fits = False
    assert ("transformers |" in said) == fits
