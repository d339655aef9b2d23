"""Behaviour of the embedded task, its tokenizer, its tiny model and the script that made them."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from recipes.tiny_tokenizer import build_tokenizer
from recipes.warmstart import NO_LOSS, Phase, demonstration, encode, warm_start
from recipes.wordproblems import TEMPLATES, problem, tempting_answers

MODEL = Path(__file__).parents[1] / "recipes" / "tiny_model"
MANY = 3000
STEP = re.compile(r"\w+: (\d+) ([-+*/]) (\d+) = (\d+)")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def prompt_ids(tokenizer, question: str) -> list[int]:
    user = {"role": "user", "content": question}
    return tokenizer.apply_chat_template([user], add_generation_prompt=True, return_dict=False)


def final_number(answer: str) -> int:
    last_line = answer.splitlines()[-1]
    assert last_line.startswith("#### ")
    return int(last_line.removeprefix("#### "))


def worked_steps(answer: str) -> list[tuple[int, str, int, int]]:
    matches = [STEP.fullmatch(line) for line in answer.splitlines()[:-1]]
    return [(int(m[1]), m[2], int(m[3]), int(m[4])) for m in matches if m]


def holds(left: int, operation: str, right: int, result: int) -> bool:
    if operation == "/":
        return right * result == left
    return {"+": left + right, "-": left - right, "*": left * right}[operation] == result


def test_a_problem_depends_on_split_and_index_alone():
    backwards = [problem("train", index) for index in reversed(range(50))]
    assert backwards[::-1] == [problem("train", index) for index in range(50)]
    assert problem("train", 7) != problem("test", 7)
    first = problem("train", 0)
    assert first["question"].startswith("A book has 22 pages. Hugo reads 3 pages a day for 2 days.")
    assert first["answer"] == "Read: 3 * 2 = 6\nRemain: 22 - 6 = 16\n#### 16"


@pytest.mark.parametrize(
    ("split", "index", "named"), [("valid", 0, "split"), ("test", -1, "index")]
)
def test_bad_input_is_named(split, index, named):
    with pytest.raises(ValueError, match=f"^{named}: .*use"):
        problem(split, index)


def numbers_in_place(question: str) -> tuple[str, ...]:
    """The numbers with the words of the template around them, without names, things and places."""
    words = re.findall(r"\d+|[a-z]+", question)
    template_words = {
        w for t in TEMPLATES for w in re.findall(r"[a-z]+", re.sub(r"\{\w+\}", "", t.question))
    }
    return tuple(word for word in words if word.isdigit() or word in template_words)


def test_train_and_test_share_no_question_and_no_numbers_of_a_template():
    train = {problem("train", index)["question"] for index in range(5 * MANY)}
    test = {problem("test", index)["question"] for index in range(MANY)}
    assert len(train) > 4.5 * MANY and len(test) > 0.95 * MANY
    assert not train & test
    assert not set(map(numbers_in_place, train)) & set(map(numbers_in_place, test))


def test_every_template_comes_up_in_both_splits_with_one_to_three_steps():
    for split in ("train", "test"):
        shapes = {re.sub(r"\d+", "", problem(split, index)["answer"]) for index in range(500)}
        assert len(shapes) == len(TEMPLATES) >= 10
        assert {shape.count("\n") for shape in shapes} == {1, 2, 3}


@pytest.mark.parametrize("split", ["train", "test"])
def test_gold_answers_are_right_and_use_the_numbers_of_the_question(split):
    for index in range(MANY):
        item = problem(split, index)
        steps = worked_steps(item["answer"])
        assert len(steps) == item["answer"].count("\n") > 0
        assert all(holds(*step) for step in steps)
        assert final_number(item["answer"]) == steps[-1][3]
        known = {int(number) for number in re.findall(r"\d+", item["question"])}
        for left, _, right, result in steps:
            assert {left, right} <= known
            known.add(result)


def test_tempting_answers_are_wrong_in_method_not_in_arithmetic():
    for index in range(MANY):
        gold = problem("train", index)["answer"]
        answers = tempting_answers("train", index)
        assert answers and len(set(answers)) == len(answers)
        for answer in answers:
            assert all(holds(*step) for step in worked_steps(answer))
            assert final_number(answer) != final_number(gold)
            assert final_number(answer) == worked_steps(answer)[-1][3]


def test_the_share_of_tempting_demonstrations_is_the_one_asked_for():
    phase = Phase("mixed", steps=1, learning_rate=1e-3, tempting_share=0.65)
    right = [demonstration(i, phase, 0)[1] == problem("train", i)["answer"] for i in range(2000)]
    assert 0.31 < sum(right) / 2000 < 0.39


def test_tokenizer_round_trips_every_problem_in_short_sequences(tokenizer):
    lengths = []
    for index in range(MANY):
        item = problem("test", index)
        for text in (item["question"], item["answer"], *tempting_answers("test", index)):
            assert tokenizer.decode(tokenizer.encode(text)) == text
        lengths.append(
            (len(prompt_ids(tokenizer, item["question"])), len(tokenizer.encode(item["answer"])))
        )
    assert max(prompt for prompt, _ in lengths) <= 60
    assert max(answer for _, answer in lengths) <= 45


@pytest.mark.parametrize(
    "text",
    ["", " ", "\n\n  x", "Zoë paid ¥12,345 \t", "東京 🙂 ½", "e\u0301\u200d\x00", "#### -7.50%"],
)
def test_tokenizer_encodes_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_single_tokens(tokenizer):
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("#### 1804"))
    assert [piece.removeprefix("Ġ") for piece in pieces] == ["####", "1", "8", "0", "4"]


def test_chat_template_begins_once_and_matches_its_own_text(tokenizer):
    messages = [{"role": "user", "content": "How many?"}]
    ids = prompt_ids(tokenizer, "How many?")
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    assert tokenizer.encode(text) == ids
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3


def test_loss_falls_on_the_answer_and_its_end_alone(tokenizer):
    items = [problem("train", index) for index in range(8)]
    pairs = [(item["question"], item["answer"]) for item in items]
    token_ids, labels = encode(tokenizer, pairs)
    for row, label, (question, answer) in zip(token_ids, labels, pairs, strict=True):
        start = len(prompt_ids(tokenizer, question))
        learned = label[label != NO_LOSS].tolist()
        assert tokenizer.decode(learned[:-1]) == answer and learned[-1] == tokenizer.eos_token_id
        assert label[:start].eq(NO_LOSS).all()
        assert torch.equal(row[start : start + len(learned)], label[start : start + len(learned)])


def test_the_committed_tokenizer_is_the_one_that_the_script_builds(tokenizer):
    assert build_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_model_folder_is_small_and_loads(tokenizer):
    assert (MODEL / "model.safetensors").stat().st_size <= 4 * 2**20
    model = LlamaForCausalLM.from_pretrained(MODEL)
    config, parameters = model.config, list(model.parameters())
    assert config.vocab_size == len(tokenizer) and config.max_position_embeddings >= 512
    assert 0.8e6 <= sum(p.numel() for p in parameters) <= 1.2e6
    assert {p.dtype for p in parameters} == {torch.float32}
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


@torch.no_grad()
def greedy_answer(model, tokenizer, question: str) -> str:
    token_ids = prompt_ids(tokenizer, question)
    start = len(token_ids)
    while len(token_ids) < start + 64 and token_ids[-1] != tokenizer.eos_token_id:
        token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
    return tokenizer.decode(token_ids[start:], skip_special_tokens=True)


def test_model_knows_the_answer_form_and_some_of_the_answers(tokenizer):
    model = LlamaForCausalLM.from_pretrained(MODEL).eval()
    items = [problem("test", index) for index in range(30)]
    answers = [greedy_answer(model, tokenizer, item["question"]) for item in items]
    right = [
        final_number(a) == final_number(i["answer"]) for a, i in zip(answers, items, strict=True)
    ]
    assert 0.4 < sum(right) / len(right) < 1.0


def test_warm_start_is_reproducible_and_depends_on_its_seed(tmp_path):
    phases = (
        Phase("right", steps=3, learning_rate=1e-3, batch=8),
        Phase("tempting", steps=2, learning_rate=1e-3, tempting_share=0.5, batch=8),
    )
    threads = torch.get_num_threads()
    try:
        digests = [
            warm_start(tmp_path / name, phases, seed)
            for name, seed in (("a", 0), ("b", 0), ("c", 1))
        ]
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    assert digests[0] == digests[1] != digests[2]
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        path.name for path in MODEL.iterdir()
    }
