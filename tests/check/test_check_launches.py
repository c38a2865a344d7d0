"""``vlmfast check --launches``: what is counted, and where."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from support import tiny_models
from support.engine.kernels import LOOP, READ_FOR_ALL, ROWS_OF_LAYERS
from support.engine.prompts import sampler_of
from vlmfast import VLM
from vlmfast.check.devices import READS, Watch, pretended
from vlmfast.check.launches import Cost, count, counted_kernels, runs
from vlmfast.cli.commands import main
from vlmfast.kernels import col_stats, select

pytest.importorskip("triton")

SIZE = (64, 64)


@pytest.fixture
def watch() -> Iterator[Watch]:
    with pretended(kernels=True) as watch, counted_kernels(watch), torch.no_grad():
        yield watch


def filled(x: torch.Tensor, mask: torch.Tensor) -> None:
    x[mask] = 0.0


def written(x: torch.Tensor, mask: torch.Tensor) -> None:
    x[mask] = x[mask] + 1


@pytest.mark.parametrize(
    ("run", "counts"),
    [
        (lambda x, mask: x + 1, {"launches": 1}),
        (lambda x, mask: x[:2].T.reshape(8)[None], {"launches": 1}),  # of the copy in `reshape`
        (lambda x, mask: x.unflatten(1, (2, 2)).transpose(0, 1)[0], {}),
        (lambda x, mask: torch.empty_like(x), {}),
        (lambda x, mask: x.sum().item(), {"launches": 1, "item": 1}),
        (lambda x, mask: bool(mask.any()), {"launches": 1, "item": 1}),
        (lambda x, mask: int(x[0, 0]), {"item": 1}),
        (lambda x, mask: x.tolist(), {"copy to host": 1}),
        (lambda x, mask: x.cpu(), {"copy to host": 1}),
        (lambda x, mask: x.to("cuda"), {}),
        (lambda x, mask: x.to(torch.float16), {"launches": 1}),
        (lambda x, mask: torch.tensor([1, 2], device="cuda"), {"copy to device": 1}),
        (lambda x, mask: torch.arange(4, device="cuda"), {"launches": 1}),
        (lambda x, mask: x[torch.tensor([0, 1])], {"launches": 1, "copy to device": 1}),
        (lambda x, mask: x[[0, 1]], {"launches": 1, "copy to device": 1}),
        (lambda x, mask: x[mask], {"launches": 1, "mask as index": 1}),
        (lambda x, mask: mask.nonzero(), {"launches": 1, "nonzero": 1}),
        (filled, {"launches": 1}),  # PyTorch fills without reading the mask
        (written, {"launches": 3, "mask as index": 2}),
        (lambda x, mask: torch.equal(x, x), {"launches": 1, "equal": 1}),
        (lambda x, mask: x.unique(), {"launches": 1, "shape": 1}),
        (lambda x, mask: torch.isin(x, x), {"launches": 1, "shape": 1}),
        (lambda x, mask: torch.isin(x, x[0, :1]), {"launches": 1}),
        (lambda x, mask: torch.cuda.synchronize(), {"synchronize": 1}),
        (lambda x, mask: functional.linear(x, x, x[0]), {"launches": 1}),
        (
            lambda x, mask: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
            {"launches": 1, "attention": 1},
        ),
        (lambda x, mask: torch.zeros(3).tolist(), {}),  # on the host
    ],
)
def test_operations(watch: Watch, run: Callable[..., Any], counts: dict[str, int]) -> None:
    x = torch.arange(16.0).reshape(4, 4).to("cuda")
    mask = (torch.arange(4) > 1).to("cuda")
    watch.counts.clear()
    run(x, mask)
    assert dict(watch.counts) == counts


def test_kernels_are_counted_as_on_a_gpu_and_give_the_values_of_their_references(
    watch: Watch,
) -> None:
    scores = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0]).to("cuda")
    watch.counts.clear()
    assert select.top_k(scores, 2).tolist() == [2, 4]
    assert dict(watch.counts) == {"launches": 1, "copy to host": 1}
    query, key = (torch.randn(2, 32, 16).to("cuda") for _ in range(2))
    watch.counts.clear()
    stats = col_stats.col_stats(query, key, want=("sum",))
    launches = watch.counts["launches"]
    assert 0 < launches < 10
    assert stats["sum"].sum().item() == pytest.approx(2 * 32, rel=1e-4)


@pytest.mark.parametrize(
    ("given", "reads"),
    [({"eos_token_id": [3, 4]}, False), ({"eos_token_id": 3, "min_new_tokens": 2}, True)],
)
def test_the_settings_of_an_answer_are_prepared_on_the_host(
    watch: Watch, given: dict[str, Any], reads: bool
) -> None:
    model, _ = tiny_models.build_llava(layers=1)
    model.to("cuda")
    ids = torch.arange(5, 9)[None].to("cuda")
    watch.counts.clear()
    sampler = sampler_of(model, ids, {"max_new_tokens": 3, **given})
    assert (set(watch.counts) & set(READS) != set()) == reads
    sampler.tokens = [3]
    assert sampler.is_done()
    scores = torch.zeros(1, 32).to("cuda")
    shut = sampler.processors(ids, scores)[0, 3].item()
    assert shut == (-torch.inf if reads else 0.0)


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    """A request, and the same where a hook reads a value after the second layer."""
    found = {}
    with pretended(kernels=True) as watch, counted_kernels(watch):
        model, processor = tiny_models.build_llava(layers=3)
        model.to("cuda")
        for name in ("plain", "again", "read"):
            vlm = VLM(model, processor, decoding="eager")
            if name == "read":
                layer = vlm.adapter.decoder.layers[1]
                layer.register_forward_hook(lambda module, args, out: out.sum().item() and None)
            found[name] = count(vlm, "snapkv:0.5", watch, SIZE)
    return found


def test_the_same_request_has_the_same_counts(counted: dict[str, Any]) -> None:
    assert counted["plain"] == counted["again"]


def test_a_read_is_found_in_its_layer(counted: dict[str, Any]) -> None:
    plain, read = counted["plain"], counted["read"]
    assert read.blocks == plain.blocks and len(read.layers) == 3
    before, after = plain.layers[1], read.layers[1]
    assert after.launches == before.launches + 1
    assert Counter(after.reads) - Counter(before.reads) == {"item": 1}
    assert [read.layers[i] for i in (0, 2)] == [plain.layers[i] for i in (0, 2)]
    assert sum(plain.places.values()) == plain.first_token.total_reads
    assert LOOP not in "".join(plain.places)


def test_nothing_is_read_layer_by_layer(counted: dict[str, Any]) -> None:
    plain = counted["plain"]
    assert not any(cost.reads for cost in (*plain.blocks, *plain.layers))
    own = [place for place in plain.places if place.startswith("vlmfast.")]
    assert sum(plain.places[place] for place in own) <= 8


# Reads of this package before the first token: the ids of the prompt, their copy to the device, the
# pixels and weights that identify an image's features, the first token, and what a method adds.
SHARED = 5
MORE = {
    "none": 0, "crops:0.5": 3, "tome": 2, "mustdrop": 4, "flashvid": 0, "catp": 3, "sparsevlm": 2,
    "prumerge-plus": 2, "hired": 3, "random": 2, "visionzip": 2, "prumerge": 1, "mmtok": 1,
    "dart": 2, "downsample": 1, "grid": 1, "scope": 0, "divprune": 0, "fastv": 0, "pyramiddrop": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def crops() -> Iterator[tuple[Any, Any, Watch]]:
    with pretended(kernels=True) as watch, counted_kernels(watch):
        model, processor = tiny_models.build_llava_next(layers=4)
        model.to("cuda")
        yield model, processor, watch


@pytest.fixture(scope="module")
def plain_crops(crops: tuple[Any, Any, Watch]) -> Any:
    """Counts without a method."""
    model, processor, watch = crops
    return count(VLM(model, processor, decoding="eager"), "none", watch, SIZE)


@pytest.mark.cases(4)
@pytest.mark.parametrize("recipe", MORE)
def test_reads_of_a_method(crops: tuple[Any, Any, Watch], recipe: str) -> None:
    model, processor, watch = crops
    found = count(VLM(model, processor, decoding="eager"), recipe, watch, SIZE)
    own = {place: n for place, n in found.places.items() if place.startswith("vlmfast.")}
    assert sum(own.values()) == SHARED + MORE[recipe], own


def test_parts_belong_to_the_request(counted: dict[str, Any]) -> None:
    plain = counted["plain"]
    *blocks, last = plain.blocks
    assert all(cost.attention == 1 for cost in (*blocks, *plain.layers))
    assert last == Cost(0, 0, {}), "LLaVA takes the features before the last block"
    parts = [*blocks, *plain.layers]
    assert sum(cost.launches for cost in parts) < plain.first_token.launches
    assert plain.step.launches > 0


# What a method reads before the first token in addition to `none`, by function, in 4 layers.
READ = {
    "zipcache": {ROWS_OF_LAYERS: 1, "kernels.quantize_kv.fits": 1},
    "kivi": {"kernels.quantize_kv.fits": 1},
    "cake": {"compressors.layered.read": 1},
    "vlcache": {"compressors.layered.read": 1},
    "snapkv": {},
    "h2o": {},
    "zipvl": {
        "compressors.prefill.zipvl.important": 4,
        "compressors.prefill.zipvl._probes": 1,
        "kernels.quantize_kv.fits": 1,
    },
    "draft-self:confidence=0": {},
    "draft-self:view=fastv,confidence=0": {},
    "draft-layerskip:confidence=0,depth=2": {},
    "draft-ngram": {},
    "draft-recycle": {},
}
# The most copies to the host in a round: each token that is drafted by the model, each that is
# emitted, and what the model ranked high. A tree is copied to the device, and which nodes move.
ROUND = {"draft-self": 4 + 5, "draft-layerskip": 2 + 3, "draft-ngram": 11, "draft-recycle": 1 + 7}


@pytest.mark.cases(2)
@pytest.mark.parametrize("recipe", READ)
def test_reads_of_the_decoders_methods(
    crops: tuple[Any, Any, Watch], plain_crops: Any, recipe: str
) -> None:
    model, processor, watch = crops
    found = count(VLM(model, processor, decoding="eager"), recipe, watch, SIZE)
    added = Counter(found.places) - Counter(plain_crops.places)
    own = {place.split(":")[0].removeprefix("vlmfast."): n for place, n in added.items()}
    assert {place: n for place, n in own.items() if place not in READ_FOR_ALL} == READ[recipe]
    name, step = recipe.split(":")[0], Counter(found.step.reads)
    if name not in ROUND:
        assert step == {"copy to host": 1}
    else:
        assert 0 < step["copy to device"] <= 2 and 1 <= step["copy to host"] <= ROUND[name]
        assert step.keys() == {"copy to device", "copy to host"}


def test_equal_parts_stand_in_one_entry() -> None:
    one, two = Cost(1, 1, {}), Cost(2, 1, {"item": 1})
    assert runs([one, one, two, one]) == [
        {"from": 0, "to": 1, "launches": 1, "attention": 1, "reads": {}},
        {"from": 2, "to": 2, "launches": 2, "attention": 1, "reads": {"item": 1}},
        {"from": 3, "to": 3, "launches": 1, "attention": 1, "reads": {}},
    ]


@pytest.mark.slow
def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own, where Triton compiles nothing."""
    argv = ["check", "--launches", "--image-size", "64x64", "--recipe", "none", "--json"]
    assert main(argv) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["image"] == [64, 64] and document["checkpoint"] == "tiny"
    (request,) = document["requests"]
    assert request["recipe"] == "none"
    assert sum(part["to"] - part["from"] + 1 for part in request["layers"]) == 6
    assert main(argv[:-1]) == 0
    assert "a layer of prefill" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--recipe", "none"], "--recipe and --image-size belong to --launches"),
        (["--image-size", "8x8"], "--recipe and --image-size belong to --launches"),
        (["--launches", "--quick"], "--quick and --device cannot be combined"),
        (["--launches", "--recipe", "hire"], "unknown method 'hire'"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], given: list[str], message: str) -> None:
    assert main(["check", *given]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("size", ["672", "672x", "x672", "0x8", "6.5x8", "-1x8"])
def test_wrong_sizes(capsys: pytest.CaptureFixture[str], size: str) -> None:
    with pytest.raises(SystemExit):
        main(["check", "--launches", f"--image-size={size}"])
    assert "WIDTHxHEIGHT, such as 672x672, is allowed" in capsys.readouterr().err
