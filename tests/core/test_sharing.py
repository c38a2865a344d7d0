"""Trained weights: folders, hub repositories and model cards."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import save

import vlmfast
from support.documented import check, commands
from support.engine.commands import answers_at_once
from support.fake_hub import FakeHub, running
from support.paths import ROOT
from vlmfast.core import hub as hub_module
from vlmfast.core.recipe import Recipe
from vlmfast.core.registry import stage_class
from vlmfast.core.weights import SHIPPED, StageWeights, load_weights
from vlmfast.errors import ModelError, RecipeError, VLMFastError
from vlmfast.eval.cards import accuracy_tables
from vlmfast.train.stages import command_of

ATP = SHIPPED / "tiny-atp"
FILES = {"stage.json", "model.safetensors", "README.md"}
REPO = "someone/atp-tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that the client uses, with an empty cache."""
    with running() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_token")
        yield server


@pytest.fixture(scope="module")
def weights() -> StageWeights:
    return StageWeights.from_pretrained(ATP)


def files_of(weights: StageWeights, folder: Path) -> dict[str, bytes]:
    weights.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def loaded(source: str | Path, name: str = "atp", **changed: Any) -> torch.nn.Module:
    """The module of weights in ``source``, for the shipped model."""
    about = json.loads((SHIPPED / f"tiny-{name}" / "stage.json").read_text(encoding="utf-8"))
    about |= changed
    sizes = {key: about["config"][key] for key in ("family", "width", "depth", "heads", "patches")}
    stage = stage_class(name)(weights=str(source))
    return load_weights(stage, sizes, about["signature"])


def equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(x[0] == y[0] and torch.equal(x[1], y[1]) for x, y in pairs)


# --- models --------------------------------------------------------------------------------------


def test_models_without_an_owner_are_refused_without_a_request(hub: FakeHub) -> None:
    for name, hint in {"Qwen2.5-VL-3B": "Qwen/Qwen2.5-VL-3B", "any": "owner/any"}.items():
        with pytest.raises(ModelError, match=rf"{name} is neither a folder .*as in {hint}$"):
            vlmfast.VLM.from_pretrained(name)
    assert not hub.requests
    # The control: with an owner it is looked up.
    hub.commit("someone/vlm", {"config.json": b'{"model_type": "bert"}'})
    with pytest.raises(ModelError, match="someone/vlm is a 'bert' model"):
        vlmfast.VLM.from_pretrained("someone/vlm")
    assert hub.requests


def test_a_hub_that_does_not_answer_is_asked_once(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as closing:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = closing.accept()
                    connections.append(peer)
                    peer.close()

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closing.getsockname()[1]}")
        with pytest.raises(ModelError, match=r"nor in the cache, and http.* cannot be reached$"):
            vlmfast.VLM.from_pretrained("someone/vlm")
    assert len(connections) == 1
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE=1 is set"):
        vlmfast.VLM.from_pretrained("someone/vlm")
    with pytest.raises(ModelError, match="local_files_only is set"):
        vlmfast.VLM.from_pretrained("someone/vlm", local_files_only=True)


# --- folders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["atp", "pvc", "elastic", "draft-eagle"])
def test_saved_weights_load_again(name: str, tmp_path: Path) -> None:
    shipped = StageWeights.from_pretrained(SHIPPED / f"tiny-{name}")
    shipped.save_pretrained(tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").iterdir()} == FILES
    again = StageWeights.from_pretrained(tmp_path / "new")
    assert again.state.keys() == shipped.state.keys()
    assert all(torch.equal(again.state[key], shipped.state[key]) for key in shipped.state)
    assert (again.config, again.training) == (shipped.config, shipped.training)
    assert equal(loaded(tmp_path / "new", name), shipped.module())


def test_tables_are_added_to_the_card(weights: StageWeights) -> None:
    table = {"title": "Accuracy", "columns": ["kept %", "accuracy %"], "rows": [[20, 90.5]]}
    assert "| 20 | 90.5 |" in weights.with_measured(table).model_card()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("stage.json", b"{", "cannot be read"),
        ("stage.json", b"[" * 100_000, "cannot be read"),
        ("stage.json", b"[]", "contains no weights of a stage"),
        ("stage.json", b'{"stage": "atp", "config": {}}', "lacks the config or the signature"),
        ("model.safetensors", b"x", r"model\.safetensors cannot be used"),
        ("model.safetensors", None, r"model\.safetensors cannot be used"),
    ],
)
def test_damaged_folders_are_rejected(
    weights: StageWeights, tmp_path: Path, file: str, content: bytes | None, message: str
) -> None:
    weights.save_pretrained(tmp_path)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(RecipeError, match=message) as caught:
        StageWeights.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("measured", [[5], [{"title": "a", "columns": [], "rows": [1]}], [{}]])
def test_damaged_tables_are_rejected(
    weights: StageWeights, tmp_path: Path, measured: list[Any]
) -> None:
    weights.save_pretrained(tmp_path)
    file = tmp_path / "stage.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"measured": measured}))
    with pytest.raises(RecipeError, match="measured must contain title, columns and rows"):
        StageWeights.from_pretrained(tmp_path)


def test_weights_that_do_not_fit_their_config_are_rejected(weights: StageWeights) -> None:
    state = {key: torch.zeros(7) for key in weights.state}
    with pytest.raises(RecipeError, match="atp: the weights cannot be used"):
        replace(weights, state=state).module()


# --- hub: download -------------------------------------------------------------------------------


def test_hub_id_loads_as_a_folder(hub: FakeHub, weights: StageWeights, tmp_path: Path) -> None:
    hub.commit(REPO, files_of(weights, tmp_path / "new") | {"notes.txt": b"more"})
    assert equal(loaded(REPO), weights.module())
    assert StageWeights.from_pretrained(REPO).training == weights.training
    fetched = [line for line in hub.requests if line.startswith("GET") and "resolve" in line]
    assert {line.rpartition("/")[2] for line in fetched} == FILES - {"README.md"}


def test_revision_selects_a_commit(hub: FakeHub, weights: StageWeights, tmp_path: Path) -> None:
    first = files_of(weights, tmp_path / "first")
    state = {key: value + 1 for key, value in weights.state.items()}
    second = files_of(replace(weights, state=state), tmp_path / "second")
    commit = hub.commit(REPO, first)
    hub.commit(REPO, first, "v1")
    hub.commit(REPO, second)
    assert not equal(loaded(REPO), weights.module())
    assert equal(loaded(f"{REPO}@v1"), weights.module())
    assert equal(loaded(f"{REPO}@{commit}"), weights.module())


def test_existing_folder_comes_before_the_hub(
    hub: FakeHub, weights: StageWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    weights.save_pretrained(REPO)
    assert equal(loaded(REPO), weights.module())
    assert not hub.requests


def test_offline_mode_uses_the_cache(
    hub: FakeHub, weights: StageWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.commit(REPO, files_of(weights, tmp_path / "new"))
    loaded(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(hub.requests)
    assert equal(loaded(REPO), weights.module())
    with pytest.raises(RecipeError, match=r"someone/other .* not in the cache.*HF_HUB_OFFLINE=1"):
        loaded("someone/other")
    assert len(hub.requests) == before


def broken(hub: FakeHub, files: dict[str, bytes], what: str) -> None:
    """Put a repository on the hub that lacks something."""
    if what == "gated":
        hub.gated.add(REPO)
    elif what == "no stage.json":
        hub.commit(REPO, {"model.safetensors": files["model.safetensors"]})
    elif what == "pickle":
        hub.commit(REPO, {"stage.json": files["stage.json"], "pytorch_model.bin": b"x"})
    elif what == "other stage":
        about = json.loads(files["stage.json"]) | {"stage": "pvc"}
        hub.commit(REPO, files | {"stage.json": json.dumps(about).encode()})
    elif what == "revision":
        hub.commit(REPO, files)


@pytest.mark.parametrize(
    ("what", "source", "message"),
    [
        ("missing", REPO, "is neither a local folder nor a repository on http.*hf auth login"),
        ("revision", f"{REPO}@v9", f"{REPO} has no revision 'v9'"),
        ("gated", REPO, "is a gated repository; request access"),
        ("no stage.json", REPO, r"lacks stage\.json"),
        ("pickle", REPO, r"lacks model\.safetensors; no other format is downloaded"),
        ("other stage", REPO, "contains no weights of atp"),
    ],
)
def test_broken_repositories_are_rejected(
    hub: FakeHub, weights: StageWeights, tmp_path: Path, what: str, source: str, message: str
) -> None:
    broken(hub, files_of(weights, tmp_path / "new"), what)
    with pytest.raises(RecipeError, match=message) as caught:
        loaded(source)
    assert str(caught.value).startswith("atp: ")
    assert source.partition("@")[0] in str(caught.value)
    assert "pytorch_model" not in " ".join(hub.requests)


def test_weights_of_another_model_are_rejected(
    hub: FakeHub, weights: StageWeights, tmp_path: Path
) -> None:
    hub.commit(REPO, files_of(weights, tmp_path / "new"))
    other = [-value for value in weights.signature]
    with pytest.raises(RecipeError, match=f"weights in {REPO} were trained for another model"):
        loaded(REPO, signature=other)


def test_unreachable_hub_is_named(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RecipeError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        loaded(REPO)


@pytest.mark.parametrize(
    ("text", "is_id"),
    [
        ("owner/name", True),
        ("owner/na.me_1@refs/pr/1", True),
        ("name", False),
        ("./owner/name", False),
        ("../name", False),
        ("/owner/name", False),
        ("owner/name/weights", False),
        ("owner/name@", False),
        ("owner/..", False),
        ("C:\\owner\\name", False),
    ],
)
def test_hub_ids_are_recognized(text: str, is_id: bool) -> None:
    assert hub_module.is_hub_id(text) == is_id


def test_a_name_that_no_system_takes_is_no_folder() -> None:
    assert hub_module.is_hub_id("a/" + 300 * "b")
    with pytest.raises(vlmfast.VLMFastError):
        StageWeights.from_pretrained(300 * "b")


def test_published_drafter_loads_from_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    shipped = loaded(SHIPPED / "tiny-draft-eagle", "draft-eagle")
    config = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"head_dim": 64, "intermediate_size": 512, "vocab_size": 512, "bias": True}
    names = ("layer.", "fc.")
    state = {k: v for k, v in shipped.state_dict().items() if k.startswith(names)}
    config["bias"] = "fc.bias" in state
    state = {key.replace("layer.", "layers.0."): value for key, value in state.items()}
    files = {"config.json": json.dumps(config).encode(), "model.safetensors": save(state)}
    hub.commit("authors/eagle", files)
    module = loaded("authors/eagle", "draft-eagle")
    assert torch.equal(module.fc.weight, shipped.fc.weight)


# --- who may name weights ------------------------------------------------------------------------


def test_requests_to_a_server_cannot_name_hub_ids(hub: FakeHub, tiny: vlmfast.VLM) -> None:
    pytest.importorskip("fastapi")
    from vlmfast.serve.config import ServerConfig
    from vlmfast.serve.errors import RequestError
    from vlmfast.serve.query import Recipes

    recipes = Recipes(tiny, ServerConfig())
    name = next(iter(recipes.by_model))
    for recipe in (f"atp:weights={REPO}", f"draft-eagle:weights={REPO}@main"):
        with pytest.raises(RequestError, match="weights cannot be set by a request"):
            recipes.of(argparse.Namespace(model=name, recipe=recipe))
    assert recipes.of(argparse.Namespace(model=name, recipe="atp:0.5"))
    assert not hub.requests


@pytest.mark.parametrize(
    "form", ["draft-self:view={}", "draft-self:view={}+", "hired+draft-self:{}"]
)
def test_recipes_of_strangers_open_no_file(
    form: str, tiny: vlmfast.VLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a server and of the demo; the file exists, and the owner of the model may name it."""
    pytest.importorskip("fastapi")
    from vlmfast.demos.talk import Desk
    from vlmfast.serve.config import ServerConfig
    from vlmfast.serve.errors import RequestError
    from vlmfast.serve.query import Recipes

    file = tmp_path / "view.yaml"
    Recipe.parse("snapkv:0.5").save(file)
    own = f"draft-self:view={file}"
    asked, recipes = form.format(file), Recipes(tiny, ServerConfig())
    desk, opened = Desk(tiny, "tiny", recipe=own), []
    monkeypatch.setattr(Recipe, "load", lambda path: opened.append(path))
    with pytest.raises(RequestError, match="cannot name a recipe file"):
        recipes.of(argparse.Namespace(model=next(iter(recipes.by_model)), recipe=asked))
    other = Desk(tiny, "tiny")
    with pytest.raises(RecipeError, match="cannot name a recipe file"):
        other.recipe(asked)
    assert not opened
    monkeypatch.undo()
    assert desk.recipe(own) == Recipe.parse(own)


# --- cards ---------------------------------------------------------------------------------------


@pytest.fixture
def described() -> Callable[..., StageWeights]:
    def build(stage: str = "draft-eagle", **training: Any) -> StageWeights:
        table = {"title": "Accepted tokens per round", "columns": ["steps", "all"]}
        table |= {"rows": [[100, 2.18], [200, None]], "note": "Held-out prompts."}
        config = {"family": "llava_next", "width": 256, "kind": "eagle3"}
        return StageWeights(stage, config, [0.25], training, {}, (table,), "apache-2.0")

    return build


def test_card_contains_model_training_and_measurements(described: Any) -> None:
    weights = described(model="owner/model", command="vlmfast train drafter --steps 200", lr=1e-4)
    text = weights.model_card()
    card = ModelCard(text)
    assert card.data.base_model == "owner/model"
    assert card.data.license == "apache-2.0"
    assert card.data.library_name == "vlmfast"
    assert "speculative-decoding" in card.data.tags
    for part in (
        "# draft-eagle for owner/model",
        'VLM.from_pretrained("owner/model")',
        'recipe="draft-eagle:kind=eagle3,weights=FOLDER"',
        "| fingerprint | `0.25` |",
        "```\nvlmfast train drafter --steps 200\n```",
        "| lr | 0.0001 |",
        "**Accepted tokens per round**",
        "| steps | all |\n| --- | --- |\n| 100 | 2.18 |\n| 200 | – |",
        "Held-out prompts.",
    ):
        assert part in text


def test_card_without_measurements_has_no_numbers(described: Any) -> None:
    text = replace(described(model="tiny"), measured=(), license=None).model_card()
    assert "Measured" not in text
    assert "License" not in text
    data = ModelCard(text).data
    assert data.base_model is None  # tiny is no repository
    assert data.license is None


def test_example_of_a_card_is_a_valid_recipe(described: Any) -> None:
    line = next(part for part in described().model_card().splitlines() if "recipe=" in part)
    recipe = vlmfast.Recipe.parse(line.split('"')[1])
    assert (recipe[0].kind, recipe[0].weights) == ("eagle3", "FOLDER")


# --- cards of the shipped weights ----------------------------------------------------------------


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """``tools/cards.py``."""
    spec = importlib.util.spec_from_file_location("cards", ROOT / "tools" / "cards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not (ROOT / "tools").is_dir(), reason="not part of this distribution")
@pytest.mark.parametrize("name", ["atp", "pvc", "elastic", "draft-eagle"])
def test_shipped_cards_are_up_to_date(tool: ModuleType, name: str, tmp_path: Path) -> None:
    folder = SHIPPED / f"tiny-{name}"
    tool.save(name, tmp_path)
    wanted = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for file in FILES:
        assert (folder / file).read_bytes() == wanted[file], f"run python tools/cards.py: {file}"
    card = wanted["README.md"].decode()
    page = "speculation.md" if name == "draft-eagle" else "models.md"
    documented = (ROOT / "docs" / page).read_text(encoding="utf-8").replace("\\\n  ", "")
    assert tool.shipped(name).training["command"] in documented
    (command,) = (c for c in commands("card", card) if c.text.startswith("vlmfast train"))
    check(command)


def test_shipped_model_has_its_card() -> None:
    assert ModelCard.load(SHIPPED / "tiny" / "README.md").data.license == "apache-2.0"


# --- measurements of cards -----------------------------------------------------------------------


def report(tmp_path: Path, *recipes: str) -> Path:
    runs = {}
    for number, recipe in enumerate(recipes):
        values = {"recipe": recipe, "control": None, "kept": 1 - number / 10, "loyalty": 0.9}
        values |= {"accuracy_image": 0.9 - number / 100, "accuracy_image_ci": [0.85, 0.95]}
        runs[recipe] = values | {"accuracy_video": None, "accuracy_video_ci": None}
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"tasks": {"shapes": {"recipes": runs}}}), encoding="utf-8")
    return path


def test_accuracy_table_contains_the_runs_of_the_stage(tmp_path: Path) -> None:
    weights = "weights=/home/me/runs"
    path = report(tmp_path, "none", f"atp:0.5,{weights}", f"atp:0.3,{weights}+kivi", "hired:0.2")
    (table,) = accuracy_tables(path, "atp", "Measured here.")
    assert table["rows"] == [
        ["`none`", "100.0", "90.0 [85.0, 95.0]", None, "100.0"],
        ["`atp:0.5`", "90.0", "89.0 [85.0, 95.0]", None, "90.0"],
    ]
    assert len(table["columns"]) == len(table["rows"][0])
    assert table["note"] == "Measured here."


@pytest.mark.parametrize(
    ("recipes", "message"),
    [
        (("none", "hired:0.2"), "contains no run of atp alone"),
        (("atp:weights=a", "atp:weights=b"), "runs of atp with several weights"),
    ],
)
def test_unusable_reports_are_rejected(
    tmp_path: Path, recipes: tuple[str, ...], message: str
) -> None:
    with pytest.raises(VLMFastError, match=message):
        accuracy_tables(report(tmp_path, *recipes), "atp")
    for text in ("{", "[]", '{"tasks": {"shapes": {}}}'):
        (tmp_path / "report.json").write_text(text)
        with pytest.raises(VLMFastError, match="cannot be read"):
            accuracy_tables(tmp_path / "report.json", "atp")


def test_recorded_command_has_no_local_paths(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    for flag, default in {"--model": "tiny", "--data": None, "--out": "runs", "--lr": 0.1}.items():
        parser.add_argument(flag, default=default, type=type(default) if default else str)
    parser.add_argument("--gate-from", type=float, nargs=2, default=(1.0, 2.0))
    parser.add_argument("--text", action="store_true")
    data = tmp_path / "my data.json"
    data.touch()
    flags = ["--data", str(data), "--out", str(tmp_path), "--lr", "0.5", "--text"]
    args = parser.parse_args([*flags, "--gate-from", "3", "4"])
    command = command_of(["vlmfast", "train", "x"], args, parser)
    assert command == "vlmfast train x --data 'my data.json' --lr 0.5 --gate-from 3.0 4.0 --text"
    args = parser.parse_args(["--model", str(tmp_path)])
    assert command_of(["x"], args, parser) == f"x --model {tmp_path.name}"


def test_trained_drafter_has_its_measured_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tqdm")
    from vlmfast.train.drafters import DrafterTrainer, add_arguments

    answers_at_once(monkeypatch, 2)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = "--samples 2 --held-out 1 --batch 1 --answer-tokens 4 --eval-every 1 --ttt 1"
    flags = [*flags.split(), "--units", "8", "--dtype", "float32", "--steps", "2"]
    flags += ["--out", str(tmp_path)]
    DrafterTrainer(parser.parse_args([*flags, "--stop-after", "1"])).train()
    trainer = DrafterTrainer(parser.parse_args(flags))
    trainer.train()
    weights = StageWeights.from_pretrained(tmp_path / "weights")
    (table,) = weights.measured
    assert table["columns"] == ["steps", "samples", "all"]
    assert [row[0] for row in table["rows"]] == [1, 2]  # also from before the interruption
    assert table["rows"][-1][-1] == round(trainer.measured["all"], 4)
    assert weights.training["model"] == "tiny"
    assert str(tmp_path) not in weights.model_card()
    (command,) = (
        c for c in commands("card", weights.model_card()) if c.text.startswith("vlmfast train")
    )
    assert "--units 8" in command.text
    check(command)
