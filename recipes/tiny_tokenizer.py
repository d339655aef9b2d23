"""The tokenizer of the tiny model: whole words of the word problems, digits one by one, bytes else.

A text is cut into words (with the space before them), single digits, marks and white space. A piece
in the vocabulary is one token; any other is spelled in bytes, so every text encodes and decodes to
itself. It is byte-level BPE without a merge, which `transformers` loads from tokenizer.json.
"""

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recipes.wordproblems import problem, tempting_answers

BOS, USER, ASSISTANT, EOS, PAD = SPECIALS = (
    "<|begin|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|pad|>",
)
PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s"
PROBLEMS_READ = 4000

# Only an assistant's turn ends with EOS: it is what the model must learn to emit.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}{{ '<|user|>' + message.content }}"
    "{% elif message.role == 'assistant' %}"
    "{{ '<|assistant|>' + message.content + eos_token }}"
    "{% else %}{{ raise_exception('the roles of this chat template are user and assistant') }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer, always the same one. It adds no BOS itself: the chat template does, once."""
    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(), merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Writes tokenizer.json and tokenizer_config.json, chat template inside, and returns it."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    return tokenizer


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    cut = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([cut, spell])


def _vocabulary() -> dict[str, int]:
    """Specials, the 256 bytes, then every longer piece that the problems use, in sorted order."""
    cutter, words = _pre_tokenizer(), set()
    for index in range(PROBLEMS_READ):
        item = problem("train", index)
        for text in (item["question"], item["answer"], *tempting_answers("train", index)):
            words.update(piece for piece, _ in cutter.pre_tokenize_str(text))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIALS, *alphabet, *sorted(words - set(alphabet))]
    return {token: number for number, token in enumerate(tokens)}
