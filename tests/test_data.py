"""Behaviour of the data: sources, faulty rows, the hub out of reach, prompts, order, accuracies."""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from recipes import hub
from recipes.accuracy import Accuracy, informative_share, wilson_interval
from recipes.data import DataError, load_problems, prompt_indices
from recipes.gsm8k import TaskError, correctness_reward, encode_prompts, lenient_reward


def test_embedded_problems():
    train, test = load_problems("embedded", "train", 50), load_problems("embedded", "test", 50)
    assert len(train) == len(test) == 50
    assert not set(train.questions) & set(test.questions)
    assert load_problems("embedded", "train", 10).questions == train.questions[:10]
    columns = train.columns([3, 1], repeat=2)
    assert columns["question"] == [train.questions[i] for i in (3, 3, 1, 1)]
    assert correctness_reward(columns["answer"], **columns) == [1.0] * 4


def test_arithmetic_problems():
    train, test = load_problems("arithmetic", "train"), load_problems("arithmetic", "test")
    assert (len(train), len(test)) == (537, 137)
    assert len({*train.questions, *test.questions}) == 674
    assert load_problems("arithmetic", "train", 10).questions == train.questions[:10]
    for problems in (train, test):
        for question, answer in zip(problems.questions, problems.answers, strict=True):
            left, sign, right = question.removeprefix("What is ").removesuffix("?").split()
            a, b = int(left), int(right)
            result = {"+": a + b, "-": a - b, "x": a * b}[sign]
            assert answer == f"{a} {sign} {b} = {result}\n#### {result}" and result >= 0
        assert correctness_reward(list(problems.answers), list(problems.answers)) == [1.0] * len(
            problems
        )


def test_the_lenient_reward_takes_the_last_number():
    said = ["9 + 5 is 14.", "14, or 15", "#### 14 and 3 more", "none"]
    assert lenient_reward(said, ["#### 14"] * 4) == [1.0, 0.0, 1.0, 0.0]
    assert correctness_reward(said, ["#### 14"] * 4) == [0.0, 0.0, 1.0, 0.0]


def write_split(folder: Path, *lines: str) -> str:
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder)


GOOD = json.dumps({"question": "How many?", "answer": "#### 3"})


def test_a_folder_of_jsonl(tmp_path):
    whole = json.dumps({"question": "Und jetzt?", "answer": 4, "more": 1})
    source = write_split(tmp_path, "\ufeff" + GOOD, "", whole)
    problems = load_problems(source, "train")
    assert problems.questions == ("How many?", "Und jetzt?")
    assert problems.answers == ("#### 3", "4")
    assert len(load_problems(source, "train", 1)) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'question'", r"line 3: is no JSON"),
        ("[1, 2]", r"line 3: is no JSON object"),
        ('{"question": "How?"}', r"line 3: has no 'answer'"),
        ('{"answer": "#### 3"}', r"line 3: has no 'question'"),
        ('{"question": " ", "answer": "#### 3"}', r"line 3: has no 'question'"),
        ('{"question": "How?", "answer": null}', r"line 3: has no 'answer'"),
        ('{"question": "How?", "answer": "#### many"}', r"line 3: its answer has no gold number"),
    ],
)
def test_a_faulty_row_is_named_by_file_and_line(tmp_path, line, message):
    source = write_split(tmp_path, GOOD, "", line)
    with pytest.raises(DataError, match=message) as caught:
        load_problems(source, "train")
    assert "train.jsonl" in str(caught.value) and "\n" not in str(caught.value)


def test_faulty_sources(tmp_path):
    source = write_split(tmp_path, "")
    with pytest.raises(DataError, match="the train split is empty"):
        load_problems(source, "train")
    with pytest.raises(DataError, match=r"--data .*cannot read test.jsonl"):
        load_problems(source, "test")
    with pytest.raises(DataError, match="use 1 or more"):
        load_problems(source, "train", 0)
    with pytest.raises(DataError, match="use 'train' or 'test'"):
        load_problems(source, "valid")
    (tmp_path / "train.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(DataError, match="is not UTF-8"):
        load_problems(source, "train")
    for path in (str(tmp_path / "none" / "at" / "all"), "./none", "a/b/c", "~/no-such-folder"):
        with pytest.raises(hub.HubError, match=r"--data .*no such folder"):
            load_problems(path, "train")
    with pytest.raises(hub.HubError, match="is a file"):
        load_problems(str(tmp_path / "train.jsonl"), "train")


OFFLINE_SCRIPT = """
import sys, time
from recipes.data import load_problems
from recipes.hub import HubError, fetch_model
import datasets  # imported before, so that its settings are read already
for load, words in ((load_problems, ["openai/gsm8k", "train"]), (fetch_model, ["Qwen/Qwen3-0.6B"])):
    began = time.monotonic()
    try:
        load(*words)
    except HubError as error:
        print(f"{time.monotonic() - began:.1f}", error)
"""


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://hub.invalid"])
def test_an_unreachable_hub_is_said_within_seconds(tmp_path, endpoint):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE_SCRIPT],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    for line, flag in zip(lines, ("--data openai/gsm8k", "--model Qwen/Qwen3-0.6B"), strict=True):
        assert float(line.split()[0]) < 12
        assert flag in line and "--data FOLDER" in line and "--model FOLDER" in line


def test_a_hub_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "_ask", lambda seconds: time.sleep(20) or True)
    began = time.monotonic()
    assert not hub.hub_reachable(0.2)
    assert time.monotonic() - began < 5


class PlainTokenizer:
    """Characters as tokens, 1 in front; a chat template is a prefix and a suffix."""

    bos_token_id = 1

    def __init__(self, template=None):
        self.chat_template = template

    def __call__(self, text):
        return {"input_ids": [1, *map(ord, text)]}

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt, **options):
        assert tokenize and add_generation_prompt and not options.pop("return_dict")
        (message,) = messages
        return self.chat_template(message["content"], **options)


def test_prompts_without_a_chat_template_say_so_once():
    said = []
    prompts = encode_prompts(PlainTokenizer(), ["How many?", "Why?"], "Think.", say=said.append)
    texts = ["".join(map(chr, prompt[1:])) for prompt in prompts]
    assert texts[0] == "Think.\n\nQuestion: How many?\nAnswer:"
    assert len(said) == 1 and "no chat template" in said[0]
    assert all(prompt.count(1) == 1 for prompt in prompts)


def test_prompts_through_a_chat_template():
    def template(text, thinking=True):
        return [1, 50 + thinking, *map(ord, text)]

    tokenizer, said = PlainTokenizer(template), []
    prompts = encode_prompts(tokenizer, ["Q?"], "Think.", said.append, thinking=False)
    assert prompts == [[1, 50, *map(ord, "Q?\n\nThink.")]] and not said
    assert encode_prompts(tokenizer, ["Q?"]) == [[1, 51, *map(ord, "Q?")]]


def test_faulty_chat_templates_are_refused():
    for template, message in (
        (lambda text: [1, 1, 5], "two BOS tokens"),
        (lambda text: [], "no tokens"),
        (lambda text: [][1], "chat template fails"),
    ):
        with pytest.raises(TaskError, match=message):
            encode_prompts(PlainTokenizer(template), ["Q?"])


def test_the_embedded_tokenizer_makes_one_bos():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[1] / "recipes" / "tiny_model")
    question = load_problems("embedded", "test", 1).questions[0]
    (prompt,) = encode_prompts(tokenizer, [question])
    assert prompt.count(tokenizer.bos_token_id) == 1
    assert question in tokenizer.decode(prompt)


@pytest.mark.parametrize(("size", "each"), [(7, 3), (5, 5), (4, 9), (1, 2), (1000, 16)])
def test_every_epoch_asks_every_row_once(size, each):
    steps = 3 * size
    order = [row for step in range(steps) for row in prompt_indices(11, step, each, size)]
    assert len(order) == steps * each
    for first in range(0, len(order) - size + 1, size):
        assert Counter(order[first : first + size]) == Counter(range(size))


def test_the_order_is_a_function_of_its_arguments():
    expected = {step: prompt_indices(3, step, 4, 30) for step in range(40)}
    for step in random.Random(0).sample(range(40), 40):
        assert prompt_indices(3, step, 4, 30) == expected[step]
    assert prompt_indices(4, 0, 30, 30) != prompt_indices(3, 0, 30, 30)
    assert prompt_indices(3, 1, 30, 30) != prompt_indices(3, 0, 30, 30)
    # Pinned: a run that is resumed by a later version must go on in the same order.
    assert prompt_indices(0, 0, 8, 10) == PINNED
    with pytest.raises(DataError, match="step: got -1"):
        prompt_indices(0, -1, 1, 1)
    with pytest.raises(DataError, match="prompts per step: got 0"):
        prompt_indices(0, 0, 0, 1)


PINNED = [3, 4, 2, 6, 0, 8, 7, 9]


def test_interval_and_informative_share():
    low, high = wilson_interval(660, 1319)
    assert abs((high - low) / 2 - 0.027) < 2e-4
    assert wilson_interval(0, 10)[0] == 0 and wilson_interval(10, 10)[1] == 1
    assert wilson_interval(0, 0) == (0.0, 1.0)
    low, high = wilson_interval(1, 20)  # Newcombe (1998), table I: 0.0089 to 0.2361
    assert abs(low - 0.0089) < 1e-4 and abs(high - 0.2361) < 1e-4
    with pytest.raises(ValueError, match="got 3 of 2"):
        wilson_interval(3, 2)
    assert informative_share(0.5, 8) == 1 - 2 * 0.5**8
    assert abs(informative_share(0.004, 8) - 0.032) < 1e-3
    assert informative_share(0.0, 8) == informative_share(1.0, 8) == 0.0
    assert Accuracy(575, 1319).interval == wilson_interval(575, 1319)
    assert str(Accuracy(575, 1319)) == "43.6% (40.9 to 46.3, n = 1,319)"
