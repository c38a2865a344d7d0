"""Score a table of difficult answers with lmms-eval's own functions.

    make .venv-lmms/.ready
    .venv-lmms/bin/python tests/support/make_lmms_scores.py

writes ``tests/data/lmms_scores.json``, which `test_lmms_scores.py` reads. Guesses are made
comparable by seeding the module's stream with the number of the row.
"""

from __future__ import annotations

import json
import random
from importlib.metadata import version

from support.paths import DATA

FILE = DATA / "lmms_scores.json"

OPTIONS = [
    ["a red car", "a blue bus", "DNA double helix", "none of these"],
    ["A", "B", "AB", "O"],
    ["it's 5", "5", "5.0", "50"],
    ["", "nothing", "no thing", "thing"],
    ["<image 1>", "<image 2>"],
    ["left.", "(right)", "up: B", "down C "],
    [f"thing {i}" for i in range(9)],
    ["Ä", "ä", "İstanbul", "你好"],
    ["yes"],
]
FRAMES = [
    "{x}", "({x})", "{x}.", "{x})", "{x}:", "{x},", " {x}", "{x}\n", "**{x}**", "\\boxed{{{x}}}",
    "[{x}]", "'{x}'", "Answer: {x}", "answer {x}", "The answer is {x}", "The answer is ({x}).",
    "The best answer is: {x}", "Best answer: {x}", "The correct option is {x}!", "Option {x}",
    "I choose {x} because of B", "{x} and {y}", "{x}, {y}", "({x}) or ({y})", "({x}) but {y}.",
    "Both {x} and {y} are possible, but I think {y}", "Not {x}. {y}", "{x}.{y}.", "{x}: {t}",
    "{x}. {t}", "({x}) {t}", "{t}", "It looks like it is {t} to me",
    "I think that it is {t} or {u}", "{t} is not {u}, so it must be the first of them",
    "A person walks. The answer is {x}.",
    "DNA is shown, so {x} is right", "Correct: {x}", "Because of the colour, {x}", "{x}{y}", "{l}",
    "({l})", "the answer is {l}", "?{x}?", "{x}?!", "{x}.,", ",.{x}", "{x};", "Z", "", " ", "...",
    "A dog", "I am not sure what this is about at all", "정답은 {x}", "答案是{x}。",
    "选{x}", "\t{x}\t",
    "{x}'s", "VITAMIN {x}", "{x}1", "1{x}", "Answer:{x}\nExplanation: {y} is wrong", "The answer",
]  # fmt: skip
WORDS = ["A", "B", "C", "D", "(A)", "B.", "C:", "D)", "the", "answer", "is", "so", "5", "not", "\n"]

OPEN_TARGETS = ["3.14", "B", "yes", "1500", "-5", "1/3", "24/7", "Tampa", "['a', 'b']", "$x$", "0"]
OPEN = [
    "x = 3.1415", "x = 3.14", "$1,234.50", "1.5e3 J", "bipolar", "answer B", "5%", "-5", "10^3",
    "0.333", "1/3", "24/7", "the city is Tampa", "So it is 4. The result is 5.", "is 3\nis 4",
    "thus 1,500 therefore 1,50", "a = 3 = b", "it could be 12,345 or 1.2e5", "nan", "inf", "-inf",
    "1_500", "1e999", ".5", "5.", "...", "", " ", "final answer:", "answer :", "= ",
    "the result is -5",
    "It is B", "B", "b", " B ", "yes.", "No", "Yes, it is so ", "3.14159 and 2.71", "3,14", "+5",
    "١٥٠٠", "½", "So so is is 5", "Therefore, the answer is $x$.", "x=0\ny=0.0", "0.004",
    "1500.001",
    "['a', 'b']", "a", "in 24/7 operation", "The final value = 1,500", "1.5E+3", "15e2", "1500 J",
]  # fmt: skip

YES_NO = [
    "yes", "Yes", "YES", "no", "No", "NO", "yes.", "No.", " yes ", "no\n", "Yes, there is.", "not",
    "There is no dog.", "I do not know", "maybe", "", " ", "nothing", "yes no", "No yes", "ja",
    "Yes. No.", "no, yes", "ye s", "yes!", "no?", "'yes'", "Yes,", "0", "true", "y", "n", "Nope",
    "The answer is yes", "The answer is no.", "no.yes",
]  # fmt: skip


def responses(draw: random.Random, options: list[str], number: int) -> list[str]:
    letters = [chr(ord("A") + i) for i in range(len(options))]
    found = []
    for frame in draw.sample(FRAMES, k=min(number * 3 // 4, len(FRAMES))):
        x, y = draw.choice(letters), draw.choice(letters)
        t, u = draw.choice(options), draw.choice(options)
        found.append(frame.format(x=x, y=y, l=x.lower(), t=t, u=u))
    while len(found) < number:
        found.append(" ".join(draw.choices(WORDS, k=draw.randint(1, 9))))
    return found


def table() -> list[dict]:
    draw, rows = random.Random(7), []
    for options in OPTIONS:
        for response in responses(draw, options, 24):
            gold = chr(ord("A") + draw.randrange(len(options)))
            rows.append({"task": "mmmu", "kind": "multiple-choice", "options": options})
            rows[-1] |= {"answer": gold, "response": response}
    for number, response in enumerate(OPEN * 2):
        # Each once with a fitting target, if there is one, and once with any target.
        fits = [t for t in OPEN_TARGETS if t.lower().strip("$") in response.lower()]
        answer = draw.choice(fits if fits and number < len(OPEN) else OPEN_TARGETS)
        rows.append({"task": "mmmu", "kind": "open", "options": []})
        rows[-1] |= {"answer": answer, "response": response}
    lettered = [f"{x}. {text}" for x, text in zip("ABCD", OPTIONS[0], strict=True)]
    for response in responses(draw, OPTIONS[0], 118):
        rows.append({"task": "video-mme", "options": lettered})
        rows[-1] |= {"answer": draw.choice("ABCD"), "response": response}
    for response in YES_NO * 2:
        rows.append({"task": "pope", "answer": draw.choice(["yes", "no"]), "response": response})
    return rows


def main() -> None:
    from lmms_eval.tasks.mmmu import utils as mmmu
    from lmms_eval.tasks.pope import utils as pope
    from lmms_eval.tasks.videomme import utils as videomme

    rows = table()
    sums: dict[str, list] = {"mmmu": [], "video-mme": [], "pope": []}
    for number, row in enumerate(rows):
        random.seed(number)
        if row["task"] == "mmmu":
            doc = {
                "id": f"validation_Math_{number}",
                "options": repr(row["options"]),
                "answer": row["answer"],
                "question_type": row["kind"],
            }
            found = mmmu.mmmu_process_results(doc, [row["response"]])["mmmu_acc"]
            (row["parsed"],) = found["parsed_pred"]
            row["score"] = mmmu.evaluate_mmmu([found])[1]["acc"]
        elif row["task"] == "video-mme":
            doc = {"question_id": str(number), "videoID": str(number // 3), "answer": row["answer"]}
            doc |= {"duration": "short", "domain": "Knowledge", "sub_category": "Law"}
            doc["task_type"] = "Counting Problem"
            results = videomme.videomme_process_results(doc, [row["response"]])
            found = results["videomme_perception_score"]
            row["parsed"], row["score"] = found["pred_answer"], found["score"]
        else:
            doc = {"question_id": str(number), "answer": row["answer"]}
            found = pope.pope_process_results(doc, [row["response"]])["pope_accuracy"]
            row["parsed"], row["score"] = found["prediction"], found["score"]
        sums[row["task"]].append(found)
        if isinstance(row["parsed"], list):  # their sets have no order
            row["parsed"] = sorted(map(str, row["parsed"]))
    measures = {
        "mmmu_acc": mmmu.mmmu_aggregate_results(sums["mmmu"]),
        "videomme_perception_score": videomme.videomme_aggregate_results(sums["video-mme"]),
    }
    for name in ("accuracy", "precision", "recall", "f1_score", "yes_ratio"):
        measures[f"pope_{name}"] = getattr(pope, f"pope_aggregate_{name}")(sums["pope"])
    value = {"lmms_eval": version("lmms_eval"), "measures": measures, "rows": rows}
    text = json.dumps(value, ensure_ascii=False, indent=0)
    FILE.write_text(text + "\n", encoding="utf-8")
    print(f"{len(rows)} rows, {sum(row['score'] for row in rows):g} right: {FILE}")


if __name__ == "__main__":
    main()
