"""Behaviour of the GSM8K task: what counts as an answer, and what reward functions may do."""

import math
import os
import threading
import time
from decimal import Decimal
from pathlib import Path

import pytest

from recipes.answers import boxed_answer, gold_number, lenient_answer, strict_answer
from recipes.data import load_problems
from recipes.gsm8k import TaskError, boxed_reward, correctness_reward
from recipes.rewards import RewardError, compute_rewards

MINUS = "\u2212"
RIGHT = [
    ("18", "#### 18"),
    ("18", "####18"),
    ("18", "####  18"),
    ("18", "#### $18"),
    ("18", "#### 18."),
    ("18", "#### 18.00"),
    ("18", "#### **18**"),
    ("18", r"#### \boxed{18}"),
    ("18", r"#### $\boxed{18}$"),
    ("18", r"#### \(18\)"),
    ("18", r"#### \$18"),
    ("18", "#### 18%"),
    ("18", r"#### 18\%"),
    ("18", "#### 18 (that is 3 x 6)"),
    ("18", "#### 18 eggs, not 17"),
    ("18", "#### 18\n\nI hope this helps with your 5 other questions."),
    ("18", "##### 18"),
    ("18", "**#### 18**"),
    ("18", "#### +18"),
    ("18", "####\u00a018"),
    ("1800", "#### 1,800"),
    ("1,800", "#### 1800"),
    ("1234567", "#### $1,234,567.00"),
    ("-7", "#### -7"),
    ("-7", f"#### {MINUS}7"),
    ("-7", "#### -$7"),
    ("-7", "#### $-7"),
    ("-7", "#### **-7**"),
    ("0.5", "#### .5"),
    ("0", "#### -0"),
    ("18", "#### 17, or better #### 18"),
    ("10.1", "#### 10.10"),
]
WRONG = [
    ("18", "#### 18 ... #### 17"),
    ("18", "#### 17 #### 18 #### 19"),
    ("18", "#### 18 #### unknown"),
    ("18", "18"),
    ("18", "The answer is 18"),
    ("18", "### 18"),
    ("18", "####"),
    ("18", ""),
    ("18", "####\nno number is no answer, though here is 18"),
    ("7", "#### 7:30"),
    ("30", "#### 7:30"),
    ("-7", "#### 10-7"),
    ("10", "#### 10-7"),
    ("7", "#### 10-7"),
    ("10", f"#### 10{MINUS}7"),
    ("3", "#### 3/4"),
    ("3", "#### 3 1/4"),
    ("3", "#### 3½"),
    ("3", r"#### 3\frac{1}{2}"),
    ("3", "#### 3x6"),
    ("2", "#### 2^4"),
    ("1", "#### 1e3"),
    ("1000", "#### 1e3"),
    ("1", "#### 1,80"),
    ("1", "#### 1,2,3"),
    ("1", "#### 1{,}800"),
    ("1", r"#### 1\,800"),
    ("1", "#### 1.2.3"),
    ("7", "#### -7"),
    ("-7", "#### 7"),
    ("18", "#### 18.01"),
    ("18", "#### 180"),
    ("18", "#### 18.000000000000000000000000000000001"),
    ("9007199254740992", "#### 9007199254740993"),
    ("18", "#### ١٨"),
]
LENIENT = [
    ("#### 18 and 17 are close", "18"),
    ("The answer is 18.", "18"),
    ("He pays $1,800.50 in all", "1800.5"),
    ("first 17, then 18", "18"),
    ("so it is **18**", "18"),
    (r"so it is \boxed{18}", "18"),
    ("it is -7", "-7"),
    (f"it is {MINUS}7 degrees", "-7"),
    ("a loss of -$7", "-7"),
    ("3 * -7", "-7"),
    ("that is 10-7", "7"),
    ("that is 10 -7", "7"),
    ("(3 + 7)-7", "7"),
    ("vitamin B-12", "12"),
    ("18 of them at 7:30", "18"),
    ("#### 7:30", None),
    ("#### ", None),
    ("no idea", None),
    ("", None),
]


@pytest.mark.parametrize(("gold", "completion"), RIGHT)
def test_right_answer(gold, completion):
    working = "There are 3 rows of 6, and 5 - 2 = 3.\n"
    for text in (completion, working + completion):
        assert correctness_reward([text], [gold]) == [1.0]
        assert correctness_reward([text], [f"3 x 6 = <<3*6=18>>\n#### {gold}"]) == [1.0]
        assert correctness_reward([text], [gold], strict=False) == [1.0]


@pytest.mark.parametrize(("gold", "completion"), WRONG)
def test_wrong_answer(gold, completion):
    assert correctness_reward([completion], [gold]) == [0.0]


@pytest.mark.parametrize("completion", ["#### 7:30", "10-7", "#### 10-7", "#### 18 ... #### 17"])
@pytest.mark.parametrize("gold", ["18", "-7", "30"])
def test_leniency_does_not_take_parts_of_other_things(gold, completion):
    assert correctness_reward([completion], [gold], strict=False) == [0.0]


@pytest.mark.parametrize(("text", "value"), LENIENT)
def test_lenient_answer(text, value):
    assert lenient_answer(text) == (None if value is None else Decimal(value))


@pytest.mark.parametrize("length", [1, 100, 100_000])
@pytest.mark.parametrize("tail", [" 7", "\n9", "x", " -", "=", ", 5", " $"])
def test_text_after_the_answer_changes_nothing(tail, length):
    assert strict_answer("6 + 12\n#### 18" + " and so on" + tail * length) == 18
    assert strict_answer("#### -1,800.50\n" + tail * length) == Decimal("-1800.5")


def test_boxed_form():
    assert boxed_answer(r"so \boxed{17} or \boxed{ 1,800 }.") == 1800
    assert boxed_answer(r"\boxed{\text{-7}}") == -7
    assert boxed_answer("#### 18") is None
    assert boxed_answer(r"\boxed{\frac{1}{2}}") is None
    completions = [r"\boxed{18}", r"\boxed{18} no, \boxed{17}", "18"]
    assert boxed_reward(completions, ["#### 18"] * 3, question=["?"] * 3) == [1.0, 0.0, 0.0]


HOSTILE = ["1", "#", "####", "$", "-", "#### -", "1,", "1,1", "1.", "1:", "####$", " ", "\\boxed{"]
HOSTILE += ["#### 1", "**", "\\", "#### 1,234,", "1e", "-$", "$-", "\n", "####\n", "a1-", "12345 -"]


@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("start", ["#### ", r"\boxed{-"])
def test_a_megabyte_is_read_in_linear_time(start, piece):
    text = start + piece * (1_000_000 // len(piece))
    began = time.process_time()
    for read in (strict_answer, lenient_answer, boxed_answer):
        read(text)
    assert time.process_time() - began < 3


def test_gold_number():
    assert gold_number("one\n#### 1,800") == 1800
    assert gold_number(" -7 ") == -7
    assert gold_number("$18.00") == 18
    assert gold_number("the answer is 18") is None
    assert gold_number("18 or 19") is None
    assert gold_number("18 ####") is None
    with pytest.raises(TaskError, match="row 1 has no gold number"):
        correctness_reward(["#### 1", "#### 2"], ["1", "many"])
    with pytest.raises(TaskError, match="1 rows for 2 completions"):
        correctness_reward(["#### 1", "#### 2"], ["1"])


def gsm8k_folder() -> Path:
    """The real data, where there is a copy; it is never a part of this project."""
    beside = Path(__file__).parents[2] / "shared" / "data" / "gsm8k"
    folder = Path(os.environ.get("GSM8K_DIR") or beside)
    if not (folder / "train.jsonl").is_file():
        pytest.skip("no GSM8K: set GSM8K_DIR to a folder with train.jsonl and test.jsonl")
    return folder


def test_every_gold_answer_scores_one_against_itself():
    folder, scored = gsm8k_folder(), 0
    for split, size in (("train", 7473), ("test", 1319)):
        problems = load_problems(str(folder), split)
        answers = list(problems.answers)
        bare = [answer.split("####")[1].strip() for answer in answers]
        assert correctness_reward(answers, answers) == [1.0] * size
        assert correctness_reward(answers, bare, strict=False) == [1.0] * size
        without = [answer.replace("####", "") for answer in answers]
        assert correctness_reward(without, answers) == [0.0] * size
        assert correctness_reward(without, answers, strict=False) == [1.0] * size
        scored += size
    assert scored == 8792


def length_reward(completions, **columns):
    return [float(len(text)) for text in completions]


def sparse(completions, question, **columns):
    return [None if text == "b" else 1 for text in completions]


def test_rewards_are_summed_with_their_weights_and_none_stays_none():
    columns = {"question": ["q"] * 3}
    rewards = compute_rewards([length_reward, sparse], [0.5, 2.0], ["aaaa", "b", ""], columns)
    assert rewards.totals == [4.0, None, 2.0]
    assert rewards.by_function == {"length_reward": [4.0, 1.0, 0.0], "sparse": [1.0, None, 1.0]}
    assert rewards.means() == {"rewards/length_reward/mean": 5 / 3, "rewards/sparse/mean": 1.0}


def raising(completions, **columns):
    raise KeyError("no such\ncolumn")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completions, **c: [1.0], r"returned 1 rewards for 2 completions"),
        (lambda completions, **c: [1.0] * 3, r"returned 3 rewards for 2 completions"),
        (lambda completions, **c: [1.0, math.nan], r"returned nan for completion 1"),
        (lambda completions, **c: [-math.inf, 1.0], r"returned -inf for completion 0"),
        (lambda completions, **c: ["1", "2"], r"returned '1' for completion 0"),
        (lambda completions, **c: None, r"returned NoneType"),
        (lambda completions, **c: "ab", r"returned str"),
        (raising, r"'raising' raised KeyError: .*no such.*column"),
        (sparse, r"'sparse' raised TypeError: .*question"),
    ],
)
def test_a_faulty_reward_function_is_named_in_one_line(function, message):
    with pytest.raises(RewardError, match=message) as caught:
        compute_rewards([length_reward, function], [1.0, 1.0], ["a", "b"], {})
    assert "\n" not in str(caught.value) and function.__name__ in str(caught.value)


def test_the_cause_of_a_reward_error_is_chained():
    with pytest.raises(RewardError) as caught:
        compute_rewards([raising], [1.0], ["a"], {})
    assert isinstance(caught.value.__cause__, KeyError)


def test_reward_arguments_are_checked():
    with pytest.raises(RewardError, match="got 1 for 2 functions"):
        compute_rewards([sparse, length_reward], [1.0], ["a"], {})
    with pytest.raises(RewardError, match="'question': has 1 rows for 2 completions"):
        compute_rewards([sparse], [1.0], ["a", "b"], {"question": ["q"]})
    with pytest.raises(RewardError, match="got nan"):
        compute_rewards([sparse], [math.nan], ["a"], {})
    with pytest.raises(RewardError, match="weighted sum is inf"):
        compute_rewards([length_reward], [1e308], ["a" * 100], {})
    two = compute_rewards([length_reward, length_reward], [1, 1], ["ab"], {})
    assert two.totals == [4.0] and list(two.by_function) == ["length_reward", "length_reward#2"]


def test_rewards_work_off_the_main_thread():
    results = []

    def work():
        rewards = compute_rewards([correctness_reward], [1.0], ["#### 18"], {"answer": ["18"]})
        results.append(rewards.totals)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [[1.0]]
