"""The most valuable measurements of a GPU first: ``python benchmarks/gpu_first.py``.

Runs `STEPS` in their order, each in a process of its own with a time limit, and ends before
``--minutes`` are over. Each script writes its own result file row by row, so a step that is ended
keeps what it has measured. ``benchmarks/results/gpu_first-DEVICE.json`` lists what ran, after every
step; the same command goes on with the others and then with those that did not end well. The exit
code is 3 if steps are left, and 1 if a step failed or did not finish all of its parts.

Triton's compiler would take most of the first minutes. ``python -m vlmfast.kernels.compile`` fills
``TRITON_CACHE_DIR`` on any machine with the GPU machine's versions of Python and Triton; set the
variable to a copy of that folder. ``--dry`` runs the steps at small sizes on a CPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch
from harness import ROOT

SPARE = 5.0  # seconds less than which no step is started


@dataclass(frozen=True)
class Step:
    """A command.

    Parameters
    ----------
    seconds : float
        It is ended after this time.
    words, dry : str
        Arguments of Python on a GPU, and of a dry run; without these it is left out there.
    """

    name: str
    seconds: float
    words: str
    dry: str = ""


_SMALL = ("--model tiny-shape --device cpu --no-hf --no-static --recipe none --new-tokens 3"
          " --repeats 1 --fresh")  # fmt: skip
STEPS = (
    Step("first token", 220, "benchmarks/ttft.py --minutes 3.4 --repeats 5",
         "benchmarks/ttft.py --dry --repeats 1 --fresh --out {folder}/ttft.json"),
    Step("batches", 110, "benchmarks/end_to_end.py --model llava-next-7b --batches 16,32 --no-hf"
         " --no-static --recipe none --recipe hired:0.2 --repeats 2 --minutes 1.7",
         f"benchmarks/end_to_end.py {_SMALL} --batches 1,2 --out {{folder}}/batches.json"),
    Step("static cache", 80, "benchmarks/end_to_end.py --model llava-next-7b --batches 1"
         " --recipe none --repeats 2 --minutes 1.2",
         f"benchmarks/end_to_end.py {_SMALL} --batches 1 --out {{folder}}/static.json"),
    Step("speculation", 95, "benchmarks/speculation.py --shape llava-1.5-7b --rates 0.6,0.8"
         " --pairs 2 --minutes 1.5",
         "benchmarks/speculation.py --shape tiny-shape --rates 0.6 --pairs 1 --fresh"
         " --device cpu --out {folder}/speculation.json"),
    Step("serve", 80, "benchmarks/gpu_hour.py serve",
         "benchmarks/gpu_hour.py serve --dry --out {folder}/hour.json"),
    Step("4-bit decode", 55,
         "benchmarks/kernels.py --kernel decode_mixed --shapes B --minutes 0.8"),
    Step("guard bands", 65, "-m pytest -q -x -p no:cacheprovider tests/kernels/test_guard_bands.py",
         "-m pytest -q -x -p no:cacheprovider tests/kernels/test_guard_bands.py -k swiglu"),
    Step("bfloat16", 50, "benchmarks/gpu_hour.py bfloat16",
         "benchmarks/gpu_hour.py bfloat16 --dry --out {folder}/hour.json"),
    Step("kernels never timed", 30, "benchmarks/kernels.py --missing --minutes 0.4"),
)  # fmt: skip


def run(step: Step, seconds: float, dry: bool, folder: Path) -> dict[str, Any]:
    """What a step printed last.

    Raises
    ------
    RuntimeError
        For another exit code than 0. It is 124 if the step was ended.
    """
    words = step.dry.format(folder=folder) if dry else step.words
    paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    own = {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    log = folder / f"{step.name.replace(' ', '-')}.log"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, *words.split()],
            cwd=ROOT, env={**os.environ, **own}, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its own processes too
            process.wait()
            code = 124
    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
    if code:
        print("\n".join(f"    {line}" for line in last), flush=True)
        raise RuntimeError(f"python {words}: exit code {code}, see {log.name}")
    return {"command": f"python {words}", "last": last}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = harness.parser(__doc__, fresh=False, out=None)
    add, names = parser.add_argument, [step.name for step in STEPS]
    add("--minutes", type=float, default=12.0, help="time limit of all steps (%(default)s)")
    add("--only", action="append", choices=names, help="run this step; may be repeated")
    add("--dry", action="store_true", help="use small sizes on a CPU to check the steps")
    args = parser.parse_args(argv)
    args.device = "cpu" if args.dry else "cuda"
    return args


def main(argv: list[str]) -> int:
    args, start = parse(argv), time.perf_counter()
    if not args.dry and not torch.cuda.is_available():
        print("no CUDA device found; --dry runs small sizes on a CPU", file=sys.stderr)
        return 2
    about = harness.begin("gpu_first.py", argv, args)
    out = harness.path_of(args, "gpu_first", about["device"])
    parts = harness.Parts(out, about, {"dry": args.dry}, args.fresh)
    folder = (args.out.parent if args.out else ROOT / "runs") / "gpu_first"
    folder.mkdir(parents=True, exist_ok=True)
    steps = {step.name: step for step in STEPS if step.dry or not args.dry}
    end = start + 60 * args.minutes

    def measure(name: str) -> dict[str, Any]:
        step = steps[name]
        return run(step, min(step.seconds, end - time.perf_counter()), args.dry, folder)

    wanted = [name for name in steps if name in (args.only or steps)]
    left = parts.measure(parts.missing(wanted), measure, end - SPARE, margin=0)
    return parts.ended(left, sum("failed" in row for row in parts.rows.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
