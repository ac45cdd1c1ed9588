"""Conversations as ids: the same as from transformers, and again from a checkpoint."""

import copy
import pickle

import pytest

from lightning_unified.data.tokenizer import train_tokenizer
from lightning_unified.models.pretrained.chat import ChatTokenizer

TEMPLATE = (
    "{% for message in messages %}\n{{ '<s>' + message['role'] + '\n' + message['content'] + '</s>' }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
ASKED = [{"role": "system", "content": "Guess a word."}, {"role": "user", "content": "crane: c1 gray <s>"}]


@pytest.fixture(scope="module")
def backend():
    return train_tokenizer(["guess a word", "crane: c1 gray"], vocab_size=300)


@pytest.fixture
def chat(backend):
    return ChatTokenizer(backend, template=TEMPLATE, end="</s>")


def test_a_conversation_is_what_transformers_makes_of_it(backend, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", chat_template=TEMPLATE
    )
    theirs.save_pretrained(tmp_path)
    own = ChatTokenizer.from_folder(tmp_path)

    assert own.prompt(ASKED) == list(theirs.apply_chat_template(ASKED, add_generation_prompt=True)["input_ids"])
    assert (own.end, own.pad) == ("</s>", "<pad>")


def test_it_ends_where_the_answer_begins(chat):
    assert chat.render(ASKED).endswith("</s>\n<s>assistant\n")


def test_special_tokens_are_left_out_of_the_text(chat):
    assert chat.decode([*chat.encode("crane"), chat.end_id]) == "crane"


@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)), lambda one: ChatTokenizer.from_dict(one.to_dict())],
)
def test_it_is_plain_data(chat, again):
    assert again(chat) == chat
    assert again(chat).prompt(ASKED) == chat.prompt(ASKED)


def test_without_template_or_end_it_is_refused(backend):
    with pytest.raises(ValueError, match="no chat template"):
        ChatTokenizer(backend, template="", end="</s>")
    with pytest.raises(ValueError, match="'<end>' is no token"):
        ChatTokenizer(backend, template=TEMPLATE, end="<end>")
