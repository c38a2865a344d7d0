"""vLLM with the plug-in beside vLLM itself: parts of ``serve.py`` that need ``--vllm``.

==========  ======================================================================================
``images``  captions of images of 896 x 896 pixels, 1,024 visual tokens
``videos``  captions of videos with 16 frames of 336 x 336 pixels, 1,152 visual tokens; also with
            vLLM's own pruning of videos, EVS; the least and the most of ``--clients`` alone
``tiny``    captions of the images that ``--model`` tiny is trained on
==========  ======================================================================================

``images`` and ``videos`` run `shapes.SMALL_QWEN`, random weights in which vision tower and language
model have the ratio of FLOPs of Qwen2.5-VL-3B. Recipes and EVS keep `SHARE` of the visual tokens.
No server sees an image twice. All answers have ``--max-tokens`` tokens.

A number of clients sends two requests each, at least ``--requests`` in all. The servers run in
turn, see `servers.in_rounds`. vLLM itself runs without any plug-in. All parts are written to one
file, which the same command resumes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import socket
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import harness
import torch
from harness import Row
from PIL import Image
from servers import Loads, Requests, Server, Spec, in_rounds, load, plural, ratio, summary
from shapes import SMALL_QWEN, small_qwen

from vlmfast import VLM
from vlmfast.eval.bench import load_average
from vlmfast.integrations.vllm import export
from vlmfast.scenes.examples import EVAL_SEED_START, image_example

NAMES = ("images", "videos", "tiny")
VLLM = "vllm serve"
VLLM_MODULE = "vllm.entrypoints.cli.main"
SHARE = 0.22
RECIPES = (f"hired:budget={SHARE}", f"divprune:budget={SHARE}")  # with and without attention
EVS = f"{VLLM}, EVS"
PRUNED = ("--video-pruning-rate", f"{1 - SHARE:g}", "--worker-cls", "benchmarks.evs_worker.Worker")
# Four servers wait in memory at a time, and 32 of these prompts fill a tenth of 1 GiB.
MEMORY = {"VLLM_CPU_KVCACHE_SPACE": "1"}
ALONE = {"VLLM_PLUGINS": "", **MEMORY}  # without the plug-in
LEAST = dict.fromkeys((16, 32), 1.3)  # of ``images``, by clients
SIDES, FRAMES = {"images": 896, "videos": 336, "tiny": 128}, 16
SCENES, PER_CLIENT, FIRST = 16, 2, 4


def vllm_name(recipe: str) -> str:
    """The name of a server of vLLM in the tables."""
    return VLLM if recipe == "none" else f"{VLLM}, {recipe}"


def overridden(recipe: str) -> tuple[str, ...]:
    """Options of vLLM for a recipe."""
    if recipe == "none":
        return ()
    return "--hf-overrides", json.dumps({"vlmfast_recipe": recipe})


def vllm_spec(
    args: argparse.Namespace,
    name: str,
    options: Sequence[str],
    exported: Path,
    named: str,
    shown: str,
    **variables: str,
) -> Spec:
    """A server of vLLM.

    Parameters
    ----------
    options : sequence of str
        Further options of ``vllm serve``.
    exported : Path
        The model.
    named : str
        Its name in the API.
    shown : str
        The model, as a user knows it.
    variables : str
        Further environment variables.
    """
    options = ["--dtype", args.dtype, *options]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = ["--host", "127.0.0.1", "--port", str(free.getsockname()[1])]
    about = ["--served-model-name", named, "--max-model-len", "4096"]
    command = ("-m", VLLM_MODULE, "serve", str(exported), *address, *about, *options)
    variables = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", **variables}
    shown = shlex.join([*VLLM.split(), shown, *options])
    return Spec(name, command, shown, False, str(args.vllm), variables, True)


# --- a part --------------------------------------------------------------------------------------


def saved(part: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Save the model of a part; what the results say of it."""
    if part == "tiny":
        export(args.model, folder)
        vlm = VLM.from_pretrained(args.model, device="cpu")
    else:
        made = small_qwen(getattr(torch, args.dtype), SIDES["images"], SIDES["videos"])
        for of in made:
            of.save_pretrained(folder)
        vlm = VLM(*made)
    size = SIDES[part], SIDES[part]
    is_video = part == "videos"
    layout = vlm.video_layout(size, frames=FRAMES) if is_video else vlm.image_layout(size)
    return {"model": args.model if part == "tiny" else SMALL_QWEN, "visual_tokens": len(layout)}


def servers_of(part: str, args: argparse.Namespace, folder: Path, shown: str) -> list[Spec]:
    """vLLM itself, its own pruning of videos, and the plug-in with each of `RECIPES`."""
    frames = {"num_frames": FRAMES} if part == "videos" else {}
    largest = {"count": 1, "width": SIDES[part], "height": SIDES[part]} | frames
    kind, other = ("video", "image") if frames else ("image", "video")
    most = ("--limit-mm-per-prompt", json.dumps({kind: largest, other: 0}))
    options = {VLLM: most} | ({EVS: (*most, *PRUNED)} if frames else {})
    found = [vllm_spec(args, *of, folder, part, shown, **ALONE) for of in options.items()]
    for recipe in RECIPES:
        given = (*most, *overridden(recipe))
        found.append(vllm_spec(args, vllm_name(recipe), given, folder, part, shown, **MEMORY))
    return found


def requests_of(part: str) -> Requests:
    """Captions of enlarged scenes, which move in videos."""
    size = SIDES[part], SIDES[part]
    scenes = [image_example(EVAL_SEED_START + number).image for number in range(SCENES)]
    large = [scene.resize(size, Image.Resampling.NEAREST) for scene in scenes]
    return Requests(large, part, FRAMES if part == "videos" else 0, ignore_eos=True)


def measure(part: str, args: argparse.Namespace) -> dict[str, Any]:
    """JSON values of a part."""
    requests, clients = requests_of(part), args.clients
    if part == "videos":
        clients = sorted({clients[0], clients[-1]})

    def bodies(many: int) -> list[bytes]:
        return requests.bodies(max(args.requests, PER_CLIENT * many), args.max_tokens)

    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        about = saved(part, args, scratch / "model")
        running = []
        for spec in servers_of(part, args, scratch / "model", about["model"]):
            log = scratch / f"{len(running)}.log"
            server = stack.enter_context(closing(Server(spec, args.threads, log)))
            load(server.url, requests.bodies(FIRST, args.max_tokens), FIRST)
            server.pause()
            running.append(server)
        found = in_rounds(running, args.rounds, clients, bodies)
        commands = {server.spec.name: server.spec.shown for server in running}
    return about | {
        "servers": commands,
        "kept": kept(found, about["visual_tokens"]),
        "loads": [summary(*key, of) for key, of in found.items()],
        "rows": [row.report() for row in rows(part, found)],
        "load_average": load_average(),
    }


def kept(found: Loads, visual: int) -> dict[str, float]:
    """Visual tokens of a prompt by server: what vLLM counts, less the text of vLLM itself."""
    counts: dict[str, list[int]] = {}
    for (name, _), loads in found.items():
        counts.setdefault(name, []).extend(a.prompt for of in loads for a in of.answers)
    text = statistics.mean(counts[VLLM]) - visual
    return {name: statistics.mean(of) - text for name, of in counts.items()}


def rows(part: str, found: Loads) -> list[Row]:
    """Answers per second over those of vLLM itself."""
    return [
        Row(
            part,
            f"answers per second, `{name}` over `{VLLM}`, {plural(clients)}",
            ratio(loads, found[VLLM, clients]),
            LEAST.get(clients) if part == "images" else None,
            least=True,
        )
        for (name, clients), loads in found.items()
        if name != VLLM
    ]


# --- the command ---------------------------------------------------------------------------------


def version(python: Path) -> str:
    """Of vLLM in an environment."""
    code = "from importlib.metadata import version; print(version('vllm'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Measure the parts that are missing in the result file; the exit code."""
    about = harness.begin("serve.py", argv, argparse.Namespace(device=args.device))
    keys = ("dtype", "threads", "clients", "requests", "rounds", "max_tokens")
    settings = {key: getattr(args, key) for key in keys} | {"vllm": version(args.vllm)}
    path = harness.path_of(args, "serve-vllm", args.device, args.dtype)
    parts = harness.Parts(path, about, settings, args.fresh)
    missing = [name for name in parts.missing(NAMES) if name in args.only]
    left = parts.measure(missing, lambda part: measure(part, args), float("inf"))
    for part, row in parts.rows.items():
        print(f"\n{part}: {row.get('failed', row.get('kept'))}")
        for of in row.get("rows", ()):
            print(f"{of['what']}: {of['median']:.2f} {of['verdict']}")
    return parts.ended(left, any("failed" in row for row in parts.rows.values()))
