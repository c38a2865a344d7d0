"""Parsing of answers: tables computed with the functions of the original code bases."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.closeness import close
from vlmfast.errors import VLMFastError
from vlmfast.eval.scorers import MODES, drawn_by, mmmu, pope, video_mme, vlmevalkit

OPTIONS = ["a red car", "a blue bus", "DNA double helix", "none of these"]
LETTERED = [f"{x}. {text}" for x, text in zip("ABCD", OPTIONS, strict=True)]
RND = None  # a guess

# response: MMMU official, MMMU lmms-eval, Video-MME official, Video-MME lmms-eval
TABLE = {
    "B": "B B B B",
    "(B)": "B B B B",
    "B.": "B B B B",
    "Answer: B": "B B B B",
    "The answer is B": "B B B B",
    "Option B": "B B B B",
    "B. a blue bus": "- B B B",
    "B: a blue bus": "- - B B",
    "b": "- - _ _",
    "The best answer is: C": "C C C C",
    "The best option is D": "D D D D",
    "Best answer: C": "C C B C",
    "Correct: D": "D D C D",
    "A blue bus": "A A A A",
    "a blue bus": "- - _ _",
    "It looks like it is a blue bus here": "B B _ _",
    "DNA is shown, so C is right": "C C D C",
    "Both A and C are possible, but I choose A": "A A B A",
    "(A) is wrong, (C) is right": "C C A C",
    "Because of the colour, D": "D D B D",
    "C)": "- - C C",
    "**B**": "- - B B",
    "\\boxed{B}": "- - B B",
    "A person walks. The answer is D.": "D D A A",
    "Answer: B, because": "- - B B",
    "B,.": "- - B B",
    "D\n": "- - D D",
    "A and B": "B B A A",
    "I am not sure": "- - _ _",
    "": "- - _ _",
}


@pytest.mark.parametrize("response", TABLE)
def test_choice_letters(response):
    official, lmms, video, video_lmms = (
        {"-": RND, "_": ""}.get(cell, cell) for cell in TABLE[response].split()
    )
    for mode, letter in (("official", official), ("lmms-eval", lmms)):
        parsed = mmmu.parse_choice(response, OPTIONS, mode, guess=random.Random(0))
        assert parsed.found == (letter is not RND)
        assert parsed.answer == (random.Random(0).choice("ABCD") if letter is RND else letter)
    for mode, letter in (("official", video), ("lmms-eval", video_lmms)):
        assert video_mme.parse_choice(response, LETTERED, mode) == (letter, letter != "")


OPEN = [
    ("x = 3.1415", "3.14", True),
    ("$1,234.50", "1234.5", False),
    ("1.5e3 J", "1500", True),
    ("bipolar", "B", False),
    ("answer B", "B", True),
    ("5%", "5", True),
    ("-5", "5", False),
    ("10^3", "1000", False),
    ("0.333", "1/3", False),
    ("the city is Tampa", "['Tampa', 'Florida']", True),
]


@pytest.mark.parametrize(("response", "target", "right"), OPEN)
def test_open_answers(response, target, right):
    parsed, score = mmmu.judge(response, [], target, "open", guess=random.Random(0))
    assert score == right
    assert parsed.found
    # The list is given as text, which lmms-eval does not parse.
    asked = target if not target.startswith("[") else mmmu.answers(target)
    assert mmmu.score_open(mmmu.parse_open(response), asked) == right


def test_list_targets():
    judged = [
        mmmu.judge("Tampa", [], "['Tampa', 'Florida']", "open", mode, guess=random.Random(0))[1]
        for mode in ("official", "lmms-eval")
    ]
    assert judged == [1.0, 0.0]
    letters = ["x", "y", "z"]
    for target, right in (("['B', 'C']", 1.0), ("['A', 'B']", 0.0), ("C", 1.0), ("[C", 0.0)):
        assert mmmu.judge("C", letters, target, "multiple-choice", guess=drawn_by("1"))[1] == right
    assert mmmu.answers("[0, 1)") == "[0, 1)"  # an interval is not a list


def test_open_answers_are_read_line_by_line():
    assert mmmu.parse_open("So it is 4. The result is 5") == [5.0]
    # Sentences are never split, because the text is lower case by then. Lines are.
    assert mmmu.parse_open("the answer is 4\nso it is 5") == [4.0, 5.0]
    assert mmmu.parse_open("x = 4\ny = 5") == [5.0]  # an equation counts in the last line only
    assert mmmu.parse_open("answer :") == ["answer :"]
    assert mmmu.parse_open("") == [""]
    assert mmmu.normalise("B") == [" b", "b "]
    assert mmmu.normalise("1,234.567") == [1234.57]
    # The rest of a thousand counts as a separate number, and so does the part before an exponent.
    numbers = [value for value in mmmu.parse_open("12,345 or 1.2e5") if isinstance(value, float)]
    assert set(numbers) > {12345.0, 345.0, 120000.0}


def test_more_than_four_options():
    nine = [f"option {i}" for i in range(9)]
    assert mmmu.parse_choice("I", nine, guess=drawn_by("x")).answer == "I"
    assert mmmu.parse_choice("(H) or (I)", nine, "lmms-eval", guess=drawn_by("x")).answer == "I"
    assert mmmu.parse_choice("I", OPTIONS, guess=drawn_by("x")).found is False
    with pytest.raises(VLMFastError, match="no options"):
        mmmu.parse_choice("A", [], guess=drawn_by("x"))


def test_guesses_are_deterministic_per_sample():
    def drawn(ids):
        return {i: mmmu.parse_choice("?", OPTIONS, guess=drawn_by(i)).answer for i in ids}

    ids = [f"validation_Art_{i}" for i in range(200)]
    assert drawn(ids) == drawn(ids[::-1])
    counts = [list(drawn(ids).values()).count(x) for x in "ABCD"]
    assert all(30 < count < 70 for count in counts)
    # A single random stream, as in the authors' code, depends on the order.
    stream = random.Random(42)
    first = [mmmu.parse_choice("?", OPTIONS, guess=stream).answer for _ in ids]
    module = random.Random(42)
    assert first == [module.choice(["A", "B", "C", "D"]) for _ in ids]
    assert first[1:] != first[:-1]


def test_vlmevalkit():
    choose = dict(zip("ABCD", OPTIONS, strict=True))
    for response, letter in {
        "B": "B", "(B)": "B", "**B**": "B", "C)": "C", "B. a blue bus": "B", "b": "Z",
        "A blue bus": "A", "a blue bus": "B", "Both A and C": "Z", "Z": "Z", "\\boxed{B}": "B",
        "a blue bus and a red car": "Z", "D because of this and that and more": "Z",
        "Cannot determine the answer B": "Z", "Failed to obtain answer via API. a blue bus": "B",
        "it is a blue bus " + 100 * "x": "Z", "": "Z", "Z a blue bus": "Z",
    }.items():  # fmt: skip
        assert vlmevalkit.match(response, choose) == letter, response
        assert mmmu.parse_choice(response, OPTIONS, "vlmevalkit", guess=drawn_by("")) == (
            letter,
            letter != "Z",
        )
    # A letter counts among the last four words.
    assert vlmevalkit.match("B is my answer", choose) == "B"
    assert vlmevalkit.match("B is my final answer", choose) == "Z"
    # Open questions become a choice between the answer and others.
    for response, right in {"Tampa": 1, "A": 1, "B": 0, "other answers": 0, "Miami": 0}.items():
        parsed, score = mmmu.judge(response, [], "Tampa", "open", "vlmevalkit", guess=drawn_by(""))
        assert score == right and parsed.found == (parsed.answer != "Z"), response


def test_vlmevalkit_on_videos():
    def letter(response, options=LETTERED):
        return video_mme.parse_choice(response, options, "vlmevalkit").answer

    assert letter("The correct answer: D") == "D"
    assert letter("a blue bus") == "B"
    assert letter("nothing") == "Z"
    assert letter("a blue bus", ["a red car", "a blue bus"]) == "Z"  # options without letters
    assert letter("The correct answer") == "Z" != ""
    assert video_mme.parse_choice("The correct answer").answer == ""


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("maybe C) not B here", "C"),
        ("maybe C: not B) here", "C"),
        ("maybe C. not B: here", "C"),
        ("(C) is what the answer is", "C"),  # no letter follows the words
        ("it is B) like DNA", "B"),  # the last letter of a word
        ("it is B) like A", "A"),
        ("As C", "C"),  # the first letter of a word
        ("it is B) 5mA", "B"),
        ("the answer is A or B or (A)", "B"),  # the words count more than brackets
    ],
)
def test_lmms_eval_ranks_the_forms_of_a_letter(response, letter):
    assert video_mme.parse_choice(response, LETTERED, "lmms-eval").answer == letter


def test_official_phrase_list_with_missing_comma():
    """ "Best answer:" is not among the phrases, so its B is the letter."""
    assert video_mme.parse_choice("Best answer: C").answer == "B"
    assert video_mme.parse_choice("Best answer:Best option: C").answer == "C"
    long = "one two three four five six seven eight nine ten eleven"
    assert video_mme.parse_choice(long) == ("", False)
    assert video_mme.parse_choice(long + " D").answer == "D"


@pytest.mark.parametrize(
    ("response", "official", "lmms", "kit"),
    [
        ("Yes", "yes", "yes", "yes"),
        ("yes.", "yes", "yes.", "yes"),
        ("No, there is none.", "no", "no, there is none.", "no"),
        ("There is not. Yes", "no", "there is not. yes", "yes"),
        ("NO", "yes", "no", "no"),
        ("no!", "yes", "no!", "no"),
        ("yes-no", "yes", "yes-no", "unknown"),
        ("I do not know", "no", "i do not know", "unknown"),
        ("nothing", "yes", "nothing", "unknown"),
        (" no\n", "yes", "no", "no"),
        ("", "yes", "", "unknown"),
    ],
)
def test_yes_and_no(response, official, lmms, kit):
    parsed = [pope.parse(response, mode) for mode in MODES]
    assert [one.answer for one in parsed] == [official, lmms, kit]
    assert [one.found for one in parsed] == [
        bool(response),
        lmms in ("yes", "no"),
        kit != "unknown",
    ]


def test_punctuation_between_digits():
    assert pope.parse("1,2 yes,no", "vlmevalkit").answer == "unknown"  # joined: "yesno"
    assert pope.parse("yes,no", "vlmevalkit").answer == "unknown"  # apart: both
    assert pope.parse("1,2 yes,so", "vlmevalkit").answer == "unknown"  # joined: "yesso"
    assert pope.parse("yes,so", "vlmevalkit").answer == "yes"
    assert pope.parse("so, yes,so", "vlmevalkit").answer == "unknown"  # as one is next to a space
    assert pope.parse("yes." * 40, "vlmevalkit").answer == "unknown"  # 32 full stops go


@pytest.mark.parametrize("mode", ["Official", "", "lmms_eval"])
def test_unknown_modes_raise(mode):
    for parse in (
        lambda: mmmu.parse_choice("A", OPTIONS, mode, guess=drawn_by("")),
        lambda: mmmu.judge("A", [], "A", "open", mode, guess=drawn_by("")),
        lambda: video_mme.parse_choice("A", LETTERED, mode),
        lambda: pope.parse("A", mode),
    ):
        with pytest.raises(VLMFastError, match="must be one of official, lmms-eval, vlmevalkit"):
            parse()


@given(st.text(), st.sampled_from(MODES))
def test_any_text_is_parsed(text, mode):
    assert mmmu.parse_choice(text, OPTIONS, mode, guess=drawn_by("")).answer in "ABCDZ"
    assert mmmu.judge(text, [], "4", "open", mode, guess=drawn_by(""))[1] in (0.0, 1.0)
    assert video_mme.parse_choice(text, LETTERED, mode).answer in ("", *"ABCDZ")
    assert isinstance(pope.parse(text, mode).answer, str)


# --- counting ------------------------------------------------------------------------------------


def sample(doc_id, score, *, answered=True, choices=4, target="A", answer="A"):
    return {
        "doc_id": doc_id,
        "score": score,
        "answered": answered,
        "choices": choices,
        "target": target,
        "filtered_resps": [answer],
    }


def test_mmmu_counts_guesses():
    ids = [f"validation_Math_{i}" for i in range(1, 31)] + ["validation_Art_2", "validation_Art_10"]
    samples = [sample(i, float(n % 3 == 0), answered=n % 4 != 0) for n, i in enumerate(ids)]
    found = mmmu.metrics(samples, "official")
    assert found["fallbacks"] == 8
    assert found["mmmu_acc"] == round(11 / 32, 3)
    certain = sum(s["score"] for s in samples if s["answered"])
    assert found["mmmu_acc_expected"] == (certain + 8 / 4) / 32
    stream, right = random.Random(42), certain
    for _ in range(8):
        right += stream.choice("ABCD") == "A"
    assert found["mmmu_acc_stream"] == right / 32
    assert mmmu.metrics(samples[::-1], "official") == found
    lmms = mmmu.metrics(samples, "lmms-eval")
    assert lmms["mmmu_acc"] == round(11 / 32, 5) != found["mmmu_acc"]
    assert lmms["mmmu_acc_stream"] != found["mmmu_acc_stream"]
    assert set(mmmu.metrics(samples, "vlmevalkit")) == {"mmmu_acc", "fallbacks"}


def test_mmmu_guesses_against_a_list_of_targets():
    """The authors' code takes each of its letters, lmms-eval the whole as one text."""
    guess = {mode: random.Random(seed).choice("ABCD") for mode, seed in mmmu.STREAM_SEEDS.items()}
    for mode, right in (("official", 1.0), ("lmms-eval", 0.0)):
        target = str([guess[mode], "none"])
        samples = [sample("validation_Math_1", 0.0, answered=False, target=target)]
        assert mmmu.metrics(samples, mode)["mmmu_acc_stream"] == right
        samples[0]["target"] = guess[mode]
        assert mmmu.metrics(samples, mode)["mmmu_acc_stream"] == 1.0


def test_samples_are_sorted_by_id():
    ids = ["validation_Art_10", "validation_Math_1", "validation_Art_2", "validation_Art_Theory_1"]
    assert sorted(ids, key=mmmu.place) == [ids[2], ids[0], ids[3], ids[1]]
    assert mmmu.subject_of("test_Art_Theory_12") == "Art_Theory"
    with pytest.raises(VLMFastError, match="id 'Art' is not of the form"):
        mmmu.subject_of("Art")


def test_disciplines():
    assert len(mmmu.SUBJECTS) == 30
    assert [len(subjects) for subjects in mmmu.DISCIPLINES.values()] == [4, 5, 5, 5, 4, 7]


def test_video_mme_denominators():
    samples = [sample(str(i), float(i < 2), answered=i < 3) for i in range(4)]
    official, lmms = (video_mme.metrics(samples, mode) for mode in ("official", "lmms-eval"))
    close(official["videomme_perception_score"], 200 / 3, terms=3)
    assert lmms["videomme_perception_score"] == 50
    for found in (official, lmms):
        assert found["score_over_all"] == 50
        close(found["score_over_answered"], 200 / 3, terms=3)
        assert found["unanswered"] == 1


def test_pope_counts():
    pairs = [("yes", "yes")] * 3 + [("yes", "no")] * 1 + [("no", "yes")] * 2 + [("no", "no")] * 4
    samples = [
        sample(str(i), float(a == t), target=t, answer=a, choices=None)
        for i, (a, t) in enumerate(pairs)
    ]
    found = pope.metrics(samples, "official")
    assert found["pope_accuracy"] == 0.7
    assert found["pope_precision"] == 0.75
    assert found["pope_recall"] == 0.6
    close(found["pope_f1_score"], 2 / 3, terms=4)
    assert found["pope_yes_ratio"] == 0.4
    assert pope.metrics(samples, "lmms-eval")["pope_yes_ratio"] == 0.5  # of the targets
    # As many hits as misses.
    halves = [sample(a, float(a == "yes"), target="yes", answer=a) for a in ("yes", "no")]
    assert pope.metrics(halves, "official")["pope_recall"] == 0.5
    nothing = pope.metrics([sample("1", 0.0, answer="no", target="no")], "official")
    assert nothing["pope_precision"] == nothing["pope_recall"] == nothing["pope_f1_score"] == 0.0
