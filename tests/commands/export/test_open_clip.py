"""open_clip loads the export, by the line that it prints, and sees the same."""

from pathlib import Path

import open_clip
import pytest
import torch
from small_models import (
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

from pennyclip.base.errors import RequestError
from pennyclip.commands.export import export
from pennyclip.commands.export.open_clip import write
from pennyclip.commands.export.written import Source
from pennyclip.config.keys import ImageTower, Model
from pennyclip.evaluation.encoder import load


def assert_same_in_open_clip(folder: str, path: Path, size: int = 64) -> None:
    encoder, image, text = embeddings(path, size)
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}", context_length=20)
    model.eval()
    normalize = transform.transforms[-1]
    with torch.no_grad():
        assert_same(image, model.encode_image(normalize(images(size) / 255)))
        assert_same(text, model.encode_text(tokenizer(TEXTS)))
    assert model.logit_scale == encoder.model.logit_scale


@pytest.mark.parametrize("activation", ["gelu", "quick_gelu", "gelu_tanh"])
def test_towers_of_clip_shape_get_native_names(tmp_path: Path, activation: str) -> None:
    config = clip_shaped(activation=activation)
    tower = ImageTower(name=config.image.name, image_size=96, activation=activation)
    config = Model(image=tower, text=config.text, embed_dim=EMBED)
    path = checkpoint(tmp_path / "run", config)
    done = export(path, "open_clip", tmp_path / "out")
    assert done.layout == "open_clip, native names"
    assert done.files == (
        "README.md", "export.json", "model.safetensors", "open_clip_config.json"
    )  # fmt: skip
    assert done.load_line == (
        'python -c "import open_clip; model, _, preprocess = '
        f"open_clip.create_model_and_transforms('local-dir:{tmp_path / 'out'}'); model.eval()\""
    )
    # The size is not timm's default: native names need no help with it.
    assert_same_in_open_clip(str(done.path), path, 96)
    _, image, text = embeddings(path, 96)
    assert_loads_back(done.path, config, image, text)


def test_two_tower_names_when_asked_for(tmp_path: Path) -> None:
    config = clip_shaped()
    path = checkpoint(tmp_path / "run", config)
    (folder := tmp_path / "out").mkdir()
    written = write(Source(load(path).model, path), folder, names="two towers")
    assert written.layout == "open_clip, two-tower names"
    assert_same_in_open_clip(str(folder), path)
    _, image, text = embeddings(path)
    assert_loads_back(folder, config, image, text)


@pytest.mark.parametrize(
    ("image", "told"),
    [
        ({"image_size": 96}, "img_size 96"),
        ({"image_size": 64, "activation": "quick_gelu"}, "act_layer quick_gelu"),
        ({"image_size": 64, "pool": "avg", "head": "mlp"}, "global_pool avg"),
    ],
)
def test_what_is_not_timms_default_travels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: dict[str, object], told: str
) -> None:
    tower = ImageTower(name="vit_femto_patch16_64", **image)  # type: ignore[arg-type]
    config = Model(image=tower, text=clip_text(), embed_dim=EMBED)
    path = checkpoint(tmp_path / "run", config)
    done = export(path, "open_clip", tmp_path / "out")
    assert done.layout == "open_clip, two-tower names"
    assert told in done.notes[0]
    assert done.load_line.startswith(f"cd '{tmp_path / 'out'}' && python -c")
    assert "'local-dir:.'" in done.load_line
    _, ours, text = embeddings(path, tower.image_size)
    assert_loads_back(done.path, config, ours, text)
    monkeypatch.chdir(done.path)
    assert_same_in_open_clip(".", path, tower.image_size)


def test_transformers_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = ImageTower(name="vit_femto_patch16_clip_64", image_size=64)
    config = Model(image=image, text=bert(tmp_path / "bert", head="mlp"), embed_dim=EMBED)
    path = checkpoint(tmp_path / "run", config)
    done = export(path, "open_clip", tmp_path / "out")
    assert {"config.json", "tokenizer.json", "meta.json"} <= set(done.files)
    assert "'local-dir:.'" in done.load_line
    torch.testing.assert_close(load(done.path).encode_text(TEXTS), load(path).encode_text(TEXTS))
    monkeypatch.chdir(done.path)
    assert_same_in_open_clip(".", path)


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_own_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    folder = bert(tmp_path / "words").name
    pad = {"pad_id": 0} if family == "siglip" else {}
    text = clip_text(family=family, tokenizer=folder, vocab_size=11, **pad)
    image = ImageTower(name="vit_femto_patch16_clip_64", image_size=64)
    config = Model(image=image, text=text, embed_dim=EMBED)
    path = checkpoint(tmp_path / "run", config)
    done = export(path, "open_clip", tmp_path / "out")
    assert done.layout == "open_clip, two-tower names"
    assert "'local-dir:.'" in done.load_line
    _, ours, words = embeddings(path)
    assert_loads_back(done.path, config, ours, words)
    for inside in (done.path, path):
        monkeypatch.chdir(inside)
        assert_same_in_open_clip(".", path)


def test_another_padding_than_the_tokenizers_is_refused(tmp_path: Path) -> None:
    folder = bert(tmp_path / "words").name
    text = clip_text(family="siglip", tokenizer=folder, vocab_size=11)  # pads with 1, it with 0
    image = ImageTower(name="vit_femto_patch16_64", image_size=64)
    path = checkpoint(tmp_path / "run", Model(image=image, text=text, embed_dim=EMBED))
    with pytest.raises(RequestError, match=r"other tokens than pennyclip.*model\.text\.pad_id"):
        export(path, "open_clip", tmp_path / "out")


def test_native_names_are_refused_with_the_reason(tmp_path: Path) -> None:
    (folder := tmp_path / "out").mkdir()
    cases = {
        "differs from CLIP's ViT in norm_pre": ImageTower(name="vit_femto_patch16_64"),
        "activations differ: image gelu, text quick_gelu": clip_shaped().image,
    }
    for reason, image in cases.items():
        text = clip_text(activation="quick_gelu", layers=1)
        path = checkpoint(tmp_path / image.name, Model(image=image, text=text, embed_dim=EMBED))
        with pytest.raises(RequestError, match=reason):
            write(Source(load(path).model, path), folder, names="native")
