"""Containers, wrappers, references: where tensors come from."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from pennyclip.base.errors import RequestError
from pennyclip.weights.packages import locate
from pennyclip.weights.read import read_state, read_weights

TENSORS = {"a.weight": torch.ones(2), "b": torch.zeros(1)}


@pytest.mark.parametrize(
    "wrapped",
    [
        TENSORS,
        {"state_dict": TENSORS, "epoch": 3},
        {"model": {"module": TENSORS}, "optimizer": {"lr": 0.1}},
        {"state_dict": {f"module.{key}": value for key, value in TENSORS.items()}},
        {"model": {f"_orig_mod.{key}": value for key, value in TENSORS.items()}},
    ],
)
def test_wrappers_and_prefixes_come_off(tmp_path: Path, wrapped: dict[str, object]) -> None:
    torch.save(wrapped, tmp_path / "w.pt")
    assert sorted(read_state(tmp_path / "w.pt")) == ["a.weight", "b"]


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "ran",))  # type: ignore[return-value]

    torch.save({"state_dict": TENSORS, "trap": Trap()}, tmp_path / "w.pt")
    with pytest.raises(RequestError, match="tensors only"):
        read_state(tmp_path / "w.pt")
    assert not (tmp_path / "ran").exists()


def test_a_folder_is_searched_for_the_safest_container(tmp_path: Path) -> None:
    torch.save({"old": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert list(read_weights(tmp_path).state) == ["old"]
    save_file(TENSORS, tmp_path / "model.safetensors")
    file = read_weights(tmp_path)
    assert sorted(file.state) == ["a.weight", "b"]
    assert file.name == f"{tmp_path.name}/model.safetensors"


def test_a_file_with_a_models_usual_name_is_described_by_its_folder(tmp_path: Path) -> None:
    for name in ("model.safetensors", "other.safetensors"):
        save_file(TENSORS, tmp_path / name)
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    assert read_weights(tmp_path / "model.safetensors").json("config.json")["model_type"] == "clip"
    assert read_weights(tmp_path / "other.safetensors").json("config.json") == {}


def test_a_folder_without_weights_names_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(RequestError, match=r"found checkpoints\. Of a run's folder"):
        read_weights(tmp_path)


def test_an_index_whose_shards_lack_a_key_is_refused(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model-00001-of-00001.safetensors")
    places = dict.fromkeys([*TENSORS, "c"], "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(RequestError, match="lack 1 of them: c"):
        read_weights(tmp_path)


def test_hub_names_fetch_one_set_of_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    save_file(TENSORS, tmp_path / "model.safetensors")
    asked = {}

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        asked[name] = allow_patterns
        return str(tmp_path)

    held = ["config.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5"]
    siblings = [SimpleNamespace(rfilename=file) for file in held]
    monkeypatch.setattr(hub, "model_info", lambda name: SimpleNamespace(siblings=siblings))
    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    assert locate("hub:org/name") == tmp_path
    assert "model.safetensors" in asked["org/name"]
    assert "pytorch_model.bin" not in asked["org/name"]


def test_a_hub_out_of_reach_is_a_request_error(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(hub, "model_info", unreachable)
    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    with pytest.raises(RequestError, match=r"hub:org/name .*no route to host.*folder"):
        locate("hub:org/name")
    with pytest.raises(RequestError, match=r"set --model\.text\.name to the path of a folder"):
        locate("hub:org/name", "model.text.name")


def test_a_path_without_anything_is_refused() -> None:
    with pytest.raises(RequestError, match=r"no weights at .*nowhere"):
        locate("nowhere.pt")
