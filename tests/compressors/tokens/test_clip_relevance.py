"""clip-relevance: relevance by hand, the determinant by brute force, and whole runs."""

from __future__ import annotations

import builtins

import pytest
import torch
from torch.nn.functional import cosine_similarity, interpolate

from support.closeness import apart, close
from support.helpers_layout import REQUEST, make_image, prompt
from support.tiny_models import build_llava, build_llava_next
from support.tiny_models import make_image as photo
from vlmfast import VLM, RecipeError
from vlmfast.compressors import clip as open_clip_models
from vlmfast.compressors.tokens.clip_relevance import ClipRelevance
from vlmfast.core.contexts import EncodeRequest
from vlmfast.core.layout import VisualTokens
from vlmfast.core.statistics import VisionStats
from vlmfast.kernels.diversity import cosine, dpp

QUESTION = "what is the red thing ?"


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> dict[str, tuple[str, str]]:
    pytest.importorskip("open_clip", reason="OpenCLIP (open_clip_torch) is not installed")
    from support import tiny_clip

    folder = tmp_path_factory.mktemp("clip")
    return {kind: tiny_clip.build(folder, kind) for kind in tiny_clip.VISION}


@pytest.fixture(params=["vit", "resnet"])
def judge(request, weights) -> open_clip_models.Clip:
    return open_clip_models.load("test", *weights[request.param])


def asked(*images, question: str = QUESTION) -> EncodeRequest:
    return EncodeRequest(question, torch.zeros(3, 8), depth=4, images=images)


def num_terms(judge: open_clip_models.Clip) -> int:
    """Terms of the judge's features: the sums of all its layers."""
    return sum(w[0].numel() for w in judge.model.parameters() if w.dim() > 1)


# --- the judge -----------------------------------------------------------------------------------


@pytest.mark.cases(1)
def test_texts_and_images_equal_open_clip(judge) -> None:
    import open_clip

    tokens = open_clip.get_tokenizer("vlmfast-test-vit")([QUESTION])
    with torch.no_grad():
        text = judge.model.encode_text(tokens, normalize=True)[0]
        pixels = torch.stack([judge.prepare(photo(seed=i)) for i in range(20)])
        seen = judge.model.encode_image(pixels, normalize=True)
    close(judge.text(QUESTION), text, terms=num_terms(judge))
    close(judge.images([photo(seed=i) for i in range(20)]), seen, terms=num_terms(judge))


@torch.no_grad()
def test_patch_features_by_hand(weights) -> None:
    judge = open_clip_models.load("test", *weights["vit"])
    visual, text, seen = judge.model.visual, judge.text(QUESTION), []
    hook = visual.transformer.register_forward_hook(lambda module, args, out: seen.append(out))
    visual(judge.prepare(photo(70, 40))[None])
    hook.remove()
    patches = visual.ln_post(seen[0])[0, 1:] @ visual.proj
    expected = -cosine_similarity(patches, text[None]).view(4, 4)
    found = judge.relevance(photo(70, 40), text)
    close(found, expected, terms=num_terms(judge), scale=1)  # cosines
    # Nothing is cropped: a change at the edge of a wide image has an effect.
    changed = photo(70, 40)
    changed.paste((255, 0, 0), (0, 0, 6, 40))
    apart(judge.relevance(changed, text), found, terms=num_terms(judge), scale=1)


def test_windows_without_patches(weights, monkeypatch) -> None:
    judge, image = open_clip_models.load("test", *weights["resnet"]), photo(80, 40)
    text = judge.text(QUESTION)
    shown, embed = [], open_clip_models.Clip.images
    monkeypatch.setattr(
        open_clip_models.Clip,
        "images",
        lambda self, given: shown.extend(given) or embed(self, given),
    )
    found = judge.relevance(image, text)
    assert not judge.dense
    assert found.shape == (4, 4)
    corner = judge.images([image.crop((0, 0, 40, 20)), image.crop((40, 20, 80, 40))]) @ text
    close(found[[0, 3], [0, 3]], corner, terms=num_terms(judge), scale=1)
    # The second of four centres is at 3/8: its window begins at 1/8.
    assert shown[2 * 4 + 1].tobytes() == image.crop((10, 15, 50, 35)).tobytes()
    assert shown[2 * 4 + 1].tobytes() != image.crop((10, 10, 50, 30)).tobytes()
    window = judge.images([image.crop((10, 15, 50, 35))]) @ text
    close(found[2, 1], window[0], terms=num_terms(judge), scale=1)
    assert judge.relevance(photo(1, 1), text).isfinite().all()


def test_maps_are_sampled_at_box_centres() -> None:
    values = torch.arange(16.0).view(4, 4)
    tokens, _ = make_image((0, 0), (4, 4))
    close(open_clip_models.at_boxes(values, tokens.layout.box), values.flatten(), terms=4)
    tokens, _ = make_image((0, 0), (8, 8))
    wide = interpolate(values[None, None], scale_factor=2, mode="bilinear")
    close(open_clip_models.at_boxes(values, tokens.layout.box), wide.flatten(), terms=4)


# --- the choice ----------------------------------------------------------------------------------


def test_duplicates_are_ranked_by_relevance() -> None:
    """Once every direction is covered, duplicates follow by relevance, not by index."""
    features = torch.eye(2)[[0, 0, 1, 1, 0]]
    relevance = torch.tensor([0.5, 1.0, 0.9, 0.0, 0.8])
    chosen = dpp(open_clip_models.conditional(cosine(features), relevance), 4).tolist()
    assert chosen == [1, 2, 4, 0]


@pytest.mark.parametrize("diversity", [True, False])
def test_kept_tokens_follow_relevance_and_diversity(judge, monkeypatch, diversity) -> None:
    monkeypatch.setattr(open_clip_models, "load", lambda *names: judge)
    tokens, stats = prompt({"tiles": (2, 2), "size": (90, 60)}, {"tiles": (0, 0)})
    images = photo(60, 90, seed=1), photo(60, 60, seed=2)
    stage = ClipRelevance(0.3, diversity=diversity)
    kept = stage.reduce(tokens, stats, asked(*images))
    assert bool(kept.layout.patches.all())
    text = judge.text(QUESTION)
    for item, image in enumerate(images):
        mine = tokens.layout.item == item
        places = (mine & tokens.layout.patches).nonzero()[:, 0]
        r = open_clip_models.at_boxes(judge.relevance(image, text), tokens.layout.box[places])
        k = round(0.3 * int(mine.sum()))
        if diversity:
            chosen = dpp(open_clip_models.conditional(cosine(tokens.features[places]), r), k)
        else:
            chosen = r.argsort(descending=True, stable=True)[:k]
        ours = kept.layout.order[kept.layout.item == item]
        assert torch.equal(ours, tokens.layout.order[places[chosen]].sort().values)
    # Controls: another question, another image.
    assert not torch.equal(
        stage.reduce(tokens, stats, asked(*images, question="why ?")).layout.order,
        kept.layout.order,
    )
    assert not torch.equal(
        stage.reduce(tokens, stats, asked(*images[::-1])).layout.order, kept.layout.order
    )


@pytest.mark.parametrize("build", [build_llava, build_llava_next])
def test_clip_relevance_in_the_engine(weights, build) -> None:
    vlm, (model, pretrained) = VLM(*build()), weights["vit"]
    recipe = f"clip-relevance:0.3,model={model},pretrained={pretrained}"
    for media in (
        {"images": photo()},
        {"images": [photo(seed=1), photo(120, 40, seed=2)]},
        {"video": [photo(seed=i) for i in range(3)], "num_frames": 3},
    ):
        stats = vlm.ask(QUESTION, **media, recipe=recipe, max_new_tokens=2).stats
        assert stats.equivalent_tokens == pytest.approx(0.3 * stats.visual_tokens_in, rel=0.05)
    with vlm.session(images=photo(), recipe=recipe) as session:
        first = session.ask(QUESTION, max_new_tokens=6)
        assert session.reuses == "features"
    alone = vlm.ask(QUESTION, photo(), recipe=recipe, max_new_tokens=6)
    assert first.token_ids == alone.token_ids


# --- errors --------------------------------------------------------------------------------------


def test_missing_open_clip_raises(monkeypatch) -> None:
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "open_clip":
            raise ImportError("No module named 'open_clip'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    tokens, stats = prompt({"tiles": (0, 0)})
    with pytest.raises(RecipeError, match=r"clip-relevance needs OpenCLIP.*pip install open_clip"):
        ClipRelevance(0.3, model="not-yet-asked").reduce(tokens, stats, asked(photo()))


def test_unloadable_models_are_refused(weights, tmp_path) -> None:
    model, pretrained = weights["vit"]
    (tmp_path / "empty.pt").write_bytes(b"")
    for words, message in (
        (("unheard-of", pretrained), r"cannot load model=unheard-of"),
        ((model, str(tmp_path / "none.pt")), r"cannot load .* with pretrained=.*none\.pt"),
        ((model, str(tmp_path / "empty.pt")), r"cannot load .* with pretrained=.*empty\.pt"),
        ((model, weights["resnet"][1]), r"cannot load .*resnet\.pt"),
        ((model, ""), r"pretrained is empty"),
    ):
        with pytest.raises(RecipeError, match=message):
            open_clip_models.load("clip-relevance", *words)


def test_missing_images_are_refused() -> None:
    tokens, stats = prompt({"tiles": (0, 0)})
    with pytest.raises(RecipeError, match=r"clip-relevance needs the images"):
        ClipRelevance(0.3).reduce(tokens, stats, REQUEST)


def test_the_default_model_is_that_of_the_paper() -> None:
    """CLIP ViT-L/14 at 336 pixels with OpenAI's weights, for every method that asks for it."""
    shared = open_clip_models.model_param(), open_clip_models.pretrained_param()
    names = [field.default for field in shared]
    assert names == ["ViT-L-14-336-quickgelu", "openai"]
    assert [ClipRelevance().model, ClipRelevance().pretrained] == names


def test_deeper_features_use_the_same_indices(judge, monkeypatch) -> None:
    monkeypatch.setattr(open_clip_models, "load", lambda *names: judge)
    tokens, geometry = make_image((0, 0), (4, 4))
    tokens = VisualTokens(tokens.features, tokens.layout, (2 * tokens.features,))
    kept = ClipRelevance(0.3).reduce(tokens, VisionStats((geometry,), {}), asked(photo()))
    assert torch.equal(kept.extra[0], 2 * kept.features)


@pytest.mark.parametrize(
    ("model", "pretrained"), [("ViT-B-32", "laion2b_s34b_b79k"), ("hf-hub:own/clip", "")]
)
def test_unreachable_hub_fails_at_once(model, pretrained, monkeypatch, tmp_path) -> None:
    """One request, where the client would try for a minute; none where it is told to be offline."""
    from huggingface_hub import constants

    requests: list[str] = []

    class Session:
        def head(self, url: str, timeout: float) -> None:
            requests.append(url)
            raise OSError("no route")

    monkeypatch.setattr("huggingface_hub.utils.get_session", Session)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(RecipeError, match="not in the cache, and the Hub cannot be reached"):
        open_clip_models.load("clip-relevance", model, pretrained)
    assert requests == [constants.ENDPOINT]
