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


def test_without_template_it_renders_nothing_and_without_end_it_is_refused(backend):
    with pytest.raises(ValueError, match="no chat template"):
        ChatTokenizer(backend, template="", end="</s>").render(ASKED)
    with pytest.raises(ValueError, match="'<end>' is no token"):
        ChatTokenizer(backend, template=TEMPLATE, end="<end>")


def test_an_invalid_template_is_refused_by_its_line(backend):
    with pytest.raises(ValueError, match="invalid in line 2"):
        ChatTokenizer(backend, template="a\n{% for %}", end="</s>")


def test_a_template_may_refuse_a_conversation(backend):
    chat = ChatTokenizer(backend, template="{{ raise_exception('two users in a row') }}", end="</s>")
    with pytest.raises(ValueError, match="refuses the conversation: two users in a row"):
        chat.render(ASKED)


def test_templates_know_the_special_tokens_of_the_folder(backend, tmp_path):
    transformers = pytest.importorskip("transformers")
    template = "{{ bos_token }}{% for message in messages %}{{ message | tojson }}{{ eos_token }}{% endfor %}"
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template
    )
    theirs.save_pretrained(tmp_path)
    expected = theirs.apply_chat_template(ASKED, tokenize=False)

    assert ChatTokenizer.from_folder(tmp_path).render(ASKED) == expected
    assert expected.startswith("<s>{")


MARKED = (
    "{% for message in messages %}<s>{{ message['role'] }}: {% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}</s>{% endgeneration %}{% else %}{{ message['content'] }}</s>{% endif %}{% endfor %}"
)


def test_marked_answers_have_the_places_that_transformers_finds(backend):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=MARKED)
    talk = [*ASKED, {"role": "assistant", "content": "slate"}, ASKED[1], {"role": "assistant", "content": "a word"}]
    chat = ChatTokenizer(backend, template=MARKED, end="</s>")
    text, places = chat.answers_of(talk)

    assert text == theirs.apply_chat_template(talk, tokenize=False)
    assert [text[begin:end] for begin, end in places] == ["slate</s>", "a word</s>"]
    assert chat.marks_answers


def test_the_characters_of_marks_are_refused_in_messages(chat):
    with pytest.raises(ValueError, match=r"U\+E000"):
        chat.render([{"role": "user", "content": "a\ue000b"}])
