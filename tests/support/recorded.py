"""Recorded answers: requests through the whole public API, and the library's answer to each.

`cases` makes seeded requests for every entry point (``ask``, ``stream``, ``chat``, ``ask_many``,
sessions, ``attach``, videos read block by block, ``compare``) over pairs of methods and families,
samplers and drafters. `answers` runs one on a random-weight model in float64.
`tools/record_answers.py` writes them to `FILE`, and `test_answers.py` compares.

Where two logits or scores are nearly equal, another processor may choose the other one. `record`
finds such cases by running each request again with weights that differ by a fraction `NOISE`:
values that change then are not compared, nor any that follow them.
"""

from __future__ import annotations

import base64
import copy
import functools
import itertools
import json
import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image

import vlmfast
from support import tiny_families
from support.paths import DATA
from vlmfast import VLM, Request, VLMFastError
from vlmfast.core.registry import stage_names

FILE = DATA / "answers" / "answers.jsonl"
NOISE = 1e-6  # of each weight
RUNS = 2  # number of such repetitions
QUICK = 200  # requests that every run of the tests replays
FAMILIES = [*sorted(tiny_families.FIRST), "tiny"]
FIELDS = ("tokens", "kept", "kv_bytes", "drafts", "prompt")

# --- requests ------------------------------------------------------------------------------------

# The defaults of cache methods are for longer prompts than these.
METHODS = {
    "cake": ["cake:0.8", "cake:0.6,window=0.1"],
    "catp": ["catp:0.3"],
    "dart": ["dart", "dart:budget=0.6"],
    "divprune": ["divprune:0.3", "divprune:0.5,positions=compact"],
    "downsample": ["downsample:0.5"],
    "fastkv": ["fastkv:0.8,tsp=0.6", "fastkv:0.6,tsp=0.5,window=0.1"],
    "fastv": ["fastv", "fastv:0.3,positions=compact"],
    "flashvid": ["flashvid:0.4"],
    "grid": ["grid:0.3", "grid:0.5,positions=compact"],
    "h2o": ["h2o:0.5", "h2o:0.3"],
    "hired": ["hired:0.3", "hired:0.4,positions=compact", "hired:budget=0.5"],
    "kivi": ["kivi:2,residual=32", "kivi:4,residual=16,group=16"],
    "lookm": ["lookm:0.9", "lookm:0.8,recent=0.1"],
    "mmtok": ["mmtok:0.3"],
    "mustdrop": ["mustdrop", "mustdrop:budget=0.4"],
    "prumerge": ["prumerge"],
    "prumerge-plus": ["prumerge-plus"],
    "pyramiddrop": ["pyramiddrop:0.5", "pyramiddrop:budget=0.6,positions=compact"],
    "pyramidkv": ["pyramidkv:0.4,window=0.1"],
    "quickprefill": ["quickprefill:0.5"],
    "random": ["random:0.3", "random:0.5,positions=compact"],
    "scope": ["scope:0.3"],
    "snapkv": ["snapkv:0.4,window=0.1", "snapkv:0.8"],
    "sparsevlm": ["sparsevlm:budget=0.6", "sparsevlm"],
    "streamingllm": ["streamingllm:0.4", "streamingllm:0.6"],
    "tome": ["tome:budget=0.5", "tome:budget=0.7,proportional_attention=true"],
    "visionzip": ["visionzip:0.3", "visionzip:budget=0.5"],
    "vlcache": ["vlcache:0.4"],
    "zipcache": ["zipcache:0.4", "zipcache"],
    "zipvl": ["zipvl"],
}
DRAFTERS = ["draft-ngram", "draft-recycle", "draft-layerskip", "draft-ngram+draft-recycle"]
STACKS = [
    "none",
    "balanced",
    "fast",
    "hired:0.5+lookm:0.9,recent=0.1",
    "divprune:0.3+snapkv:0.6,window=0.1",
    "divprune:0.5+pyramiddrop:0.5+kivi:4,residual=16,group=16",
    "random:0.5+h2o:0.5+draft-ngram",
    "fastv+streamingllm:0.5+draft-recycle",
    "grid:0.5+kivi:2,residual=32+draft-ngram",
    "pyramiddrop:0.5+zipcache:0.5",
    "snapkv:0.6,window=0.1+draft-layerskip",
    "tome:budget=0.6+lookm:0.9,recent=0.1",
]
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.4},
    "ngram": {"no_repeat_ngram_size": 2},
    "plain": {"do_sample": True, "top_k": 0},
    "temperature": {"do_sample": True, "temperature": 0.6},
    "top-k": {"do_sample": True, "top_k": 4},
    "top-p": {"do_sample": True, "top_p": 0.7, "top_k": 0},
    "min-p": {"do_sample": True, "min_p": 0.2, "top_k": 0, "temperature": 1.3},
    "typical": {"do_sample": True, "typical_p": 0.6, "top_k": 0},
    "all": {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
    },
}
WAYS = ("ask", "ask_many", "session", "ask", "attach", "ask_many", "stream", "session", "chat")
QUESTIONS = ("what is here ?", "and what is left of it ?", "how many ?", "why , then , is it so ?")
SIZES = ((60, 44), (30, 70), (90, 33), (64, 64), (48, 48))
VIDEOS = (
    "llava_next_video",
    "llava_onevision",
    "qwen2_5_vl",
    "qwen3_vl",
    "internvl",
    "smolvlm",
    "tiny",
)
BLOCKWISE = ("llava", "llava_next", "tiny")


def make_image(seed: int, width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


# Families that leave out crops, and frames.
CROPS = ("llava_next", "llava_next_video", "llava_onevision", "internvl", "idefics3", "smolvlm")
VIEWS = ("crops:0.5", "crops:0.3+hired:0.5", "static-frames:0+crops:0.5+divprune:0.5")


def cases() -> Iterator[dict[str, Any]]:
    """Every case, in an order that depends only on this file."""
    words: list[tuple[str, str, int]] = []
    for family in FAMILIES:
        for name in sorted(stage_names()):
            for recipe in METHODS.get(name, ()):
                words.append((family, recipe, 2))
        words += [(family, recipe, 2) for recipe in STACKS]
        words += [(family, recipe, 3) for recipe in DRAFTERS]
        if family == "tiny":
            words += [(family, name, 4) for name in ("atp", "elastic", "pvc", "draft-eagle")]
        if family in BLOCKWISE:
            words += [(family, r, -3) for r in ("none", "random:0.5", "quickprefill", "divprune")]
        words.append((family, "divprune:0.4", -1))  # compare
    words += [(family, recipe, 2) for family in (*CROPS, "tiny") for recipe in VIEWS]
    number = 0
    ways, samplers = itertools.cycle(WAYS), itertools.cycle(SAMPLERS)
    for family, recipe, count in words:
        for _ in range(abs(count)):
            number += 1
            way = next(ways)
            if count == -3:
                way = "long"
            elif count == -1:
                way = "compare"
            yield _case(number, family, recipe, way, next(samplers))


def _case(number: int, family: str, recipe: str, way: str, sampler: str) -> dict[str, Any]:
    rng = random.Random(number)
    case: dict[str, Any] = {"n": number, "family": family, "way": way, "recipe": recipe}
    case |= {"sampler": sampler, "new": rng.randint(3, 9)}
    if "do_sample" in SAMPLERS[sampler] and rng.random() < 0.5:
        case["seed"] = rng.randint(0, 1000)
    if "draft-" in recipe:
        case["new"] += 8
        if rng.random() < 0.2:
            case["strict"] = True
    count = {"ask_many": 4, "session": 3, "attach": rng.randint(1, 2), "chat": 1}.get(way, 1)
    requests = []
    for index in range(count):
        media: list[list[Any]] = []
        if way == "long" or (family in VIDEOS and way != "attach" and rng.random() < 0.3):
            frames = rng.randint(6, 9) if way == "long" else rng.randint(2, 4)
            media.append(["video", frames, 40, 40, rng.randint(0, 10**6)])
        elif index == 0 or way != "ask_many" or rng.random() < 0.9:
            for _ in range(1 if family == "tiny" else rng.choice((1, 1, 2))):
                media.append(["image", *rng.choice(SIZES), rng.randint(0, 10**6)])
        requests.append({"question": rng.choice(QUESTIONS), "media": media})
    if way == "session":
        case["media"] = requests[0]["media"]
        case["history"] = rng.random() < 0.7
        requests = [{"question": of["question"]} for of in requests]
    if way == "ask_many":
        case["batch"] = rng.choice((2, 3, 4))
        names = list(SAMPLERS)
        for index, request in enumerate(requests):
            request["new"] = rng.randint(1, 9)
            if index and rng.random() < 0.4:
                request["recipe"] = rng.choice(["none", "random:0.4", "h2o:0.5"])
            if index and rng.random() < 0.5:
                request["sampler"] = rng.choice(names)
    if way == "long":
        case["cap"] = rng.choice((300, 420, 700)) if family != "tiny" else 900
    case["requests"] = requests
    return case


# --- running -------------------------------------------------------------------------------------


@functools.cache
def model(family: str) -> tuple[Any, Any]:
    """Random weights (the shipped ones for ``tiny``) and processor, float64."""
    if family == "tiny":
        shipped = VLM.from_pretrained("tiny", device="cpu")
        return shipped.model.double(), shipped.processor
    built, processor = tiny_families.builders()[family]()
    return built.double(), processor


@functools.lru_cache(maxsize=RUNS)
def perturbed(family: str, seed: int) -> tuple[Any, Any]:
    """The same with weights that differ by about `NOISE` of each."""
    network, processor = model(family)
    network = copy.deepcopy(network)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in network.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.mul_(1 + NOISE * noise)
    return network, processor


def _media(media: list[list[Any]]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for kind, *of in media:
        if kind == "video":
            frames, width, height, seed = of
            given["video"] = [make_image(seed + at, width, height) for at in range(frames)]
            given["num_frames"] = frames
        else:
            width, height, seed = of
            given.setdefault("images", []).append(make_image(seed, width, height))
    return given


def _generation(case: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    sampler = request.get("sampler", case["sampler"])
    given = {"max_new_tokens": request.get("new", case["new"]), **SAMPLERS[sampler]}
    if "seed" in case and "do_sample" in given:
        given["seed"] = case["seed"]
    if "strict" in case:
        given["strict"] = True
    return given


def answers(
    case: dict[str, Any], of: tuple[Any, Any] | None = None, *, cached: bool = True
) -> list[dict[str, Any]]:
    """The library's answers to a case: one record for each of its requests.

    ``cached``: whether the prefix cache is on.
    """
    vlm = VLM(*(model(case["family"]) if of is None else of))
    vlm.prefix_cache.limit *= cached
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case["n"])
        return [_record(case, answer) for answer in _ask(vlm, case)]


def _ask(vlm: VLM, case: dict[str, Any]) -> list[Any]:
    way, recipe, requests = case["way"], case["recipe"], case["requests"]
    first = requests[0]
    generation = _generation(case, first)
    if way == "session":
        history = case["history"]
        with vlm.session(**_media(case["media"]), recipe=recipe, history=history) as session:
            return [session.ask(of["question"], **generation) for of in requests]
    question, media = first["question"], _media(first["media"])
    if way == "ask":
        return [vlm.ask(question, **media, recipe=recipe, **generation)]
    if way == "stream":
        *pieces, answer = vlm.stream(question, **media, recipe=recipe, **generation)
        assert "".join(pieces).strip() == answer.text
        return [answer]
    if way == "long":
        cap = case["cap"]
        return [
            vlm.ask(
                question, **media, recipe=recipe, max_kv_tokens=cap, progress=False, **generation
            )
        ]
    if way == "compare":
        shown = vlm.compare(question, **media, recipes=[recipe], **generation)
        return [of.answer for of in shown]
    if way == "chat":
        content = [{"type": "text", "text": question}]
        images = [{"type": "image", "image": of} for of in media.get("images", ())]
        if "video" in media:
            images.append({"type": "video", **media})
        messages = [
            {"role": "user", "content": [*images, *content]},
            {"role": "assistant", "content": [{"type": "text", "text": "a ring"}]},
            {"role": "user", "content": [{"type": "text", "text": "sure ?"}]},
        ]
        return [vlm.chat(messages, recipe=recipe, **generation)]
    if way == "ask_many":
        several = [
            Request(
                of["question"],
                **_media(of["media"]),
                recipe=of.get("recipe", recipe),
                generation=_generation(case, of),
            )
            for of in requests
        ]
        return vlm.ask_many(several, batch_size=case["batch"])
    return _attached(vlm, case)


def _attached(vlm: VLM, case: dict[str, Any]) -> list[Any]:
    processor, rows = vlm.adapter.processor, []
    texts = []
    for of in case["requests"]:
        images = _media(of["media"]).get("images", [])
        content = [*[{"type": "image"}] * len(images), {"type": "text", "text": of["question"]}]
        turn = {"role": "user", "content": content}
        texts.append(processor.apply_chat_template([turn], add_generation_prompt=True))
        rows.append(images)
    nested = vlm.adapter.nested or vlm.adapter.config.model_type == "llava_onevision"
    images = rows if nested else [one for row in rows for one in row]
    tensors = processor(text=texts, images=images, padding=True, return_tensors="pt")
    generation = _generation(case, case["requests"][0])
    with vlmfast.attach(vlm.model, vlm.processor, case["recipe"]) as attached:
        vlm.model.generate(**tensors, **generation)
    return attached.answers


def _record(case: dict[str, Any], answer: Any) -> dict[str, Any]:
    stats, trace = answer.stats, answer.trace
    kept = ""
    if trace.depth is not None:  # how many layers each visual token entered
        packed = zlib.compress(bytes(trace.depth.to(torch.uint8).tolist()), 9)
        kept = base64.b64encode(packed).decode()
    found = {
        "tokens": answer.token_ids,
        "kept": kept,
        "kv_bytes": stats.kv_bytes,
        "prompt": [stats.prompt_tokens, stats.prompt_reused, stats.prompt_fed],
    }
    if stats.rounds:
        found["drafts"] = [stats.rounds, stats.drafted, stats.accepted, stats.redecoded]
    return found


# --- recording and comparing ---------------------------------------------------------------------


def record(case: dict[str, Any]) -> dict[str, Any] | None:
    """A line of the file, or ``None`` where the recipe does not run on the model."""
    try:
        found = answers(case)
    except (VLMFastError, ImportError):
        return None
    for run in range(RUNS):
        moved = answers(case, perturbed(case["family"], run))
        for before, after in zip(found, moved, strict=True):
            mark(before, after)
    return {"case": case, "answers": found}


def mark(answer: dict[str, Any], moved: dict[str, Any]) -> None:
    """Note in ``answer`` what rounding may change: ``stable`` tokens, ``ties`` of fields."""
    stable = _common(answer["tokens"], moved["tokens"])
    if stable < max(len(answer["tokens"]), len(moved["tokens"])):
        answer["stable"] = min(stable, answer.get("stable", stable))
    ties = {name for name in FIELDS[1:] if answer.get(name) != moved.get(name)}
    ties |= set(answer.get("ties", ()))
    if ties:
        answer["ties"] = sorted(ties)
    if "kept" in ties:  # the answer read other visual tokens, even if these runs agree in it
        answer["stable"] = 0


def _common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def differences(line: dict[str, Any], got: list[dict[str, Any]]) -> tuple[list[str], int]:
    """Differences from a recorded line, and how many answers were compared only in part."""
    wrong: list[str] = []
    ties = 0
    for index, (want, have) in enumerate(zip(line["answers"], got, strict=True)):
        if "stable" in want or "ties" in want:
            ties += 1
        stable = want.get("stable", None)
        whole = stable is None
        names = [name for name in FIELDS[1:] if name not in want.get("ties", ())]
        names = [name for name in names if whole or name != "drafts"]
        if want["tokens"][:stable] != have["tokens"][:stable]:
            wrong.append(f"answer {index}: tokens {have['tokens']}, recorded {want['tokens']}")
        wrong += [
            f"answer {index}: {name} {have.get(name)}, recorded {want.get(name)}"
            for name in names
            if have.get(name) != want.get(name)
        ]
        if not whole and line["case"]["way"] in ("session", "ask_many", "attach"):
            break  # the next ones depend on the tie
    return wrong, ties


def read() -> list[dict[str, Any]]:
    """All recorded lines; the first line of the file names their origin."""
    _, *lines = FILE.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def stratified(lines: list[dict[str, Any]]) -> None:
    """Mark about `QUICK` requests as ``quick``: first those that add the most new features."""
    left, seen, chosen = list(lines), set(), 0
    while left and chosen < QUICK:
        gains = [len(_strata(line) - seen) / len(line["answers"]) for line in left]
        best = max(range(len(left)), key=lambda at: (gains[at], -left[at]["case"]["n"]))
        line = left.pop(best)
        line["quick"] = True
        seen |= _strata(line)
        chosen += len(line["answers"])
        if not gains[best]:
            seen.clear()


def _strata(line: dict[str, Any]) -> set[tuple[str, ...]]:
    case = line["case"]
    media = {kind for of in case["requests"] for kind, *_ in of.get("media", case.get("media", []))}
    names = [word.partition(":")[0] for word in case["recipe"].split("+")]
    found = {("way", case["family"], case["way"]), ("sampler", case["sampler"], case["way"])}
    found |= {("method", name, case["way"]) for name in names}
    found |= {("media", case["family"], kind) for kind in media}
    return found | {("seed", case["sampler"], str("seed" in case))}
