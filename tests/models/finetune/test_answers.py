"""Which tokens are scored: templates with marks, templates without, and no template."""

import numpy as np
import pytest

from lightning_unified.data.tokenizer import train_tokenizer
from lightning_unified.models.finetune.data.answers import AnswerMask
from lightning_unified.models.finetune.data.examples import Example
from lightning_unified.models.pretrained.chat import PLAIN_TEMPLATE, ChatTokenizer

TURNS = (
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is 1 plus 1?"},
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes, 2."},
)
MARKED = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }}</s>{% endgeneration %}{% else %}{{ message['content'] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
# as templates of models that think: all but the last answer lose their thought
SHORTENED = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{% if message['role'] == 'assistant' and loop.last %}think {% endif %}"
    "{{ message['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
LINES = PLAIN_TEMPLATE.replace("</s>{% endfor %}", "</s>\n{% endfor %}")


@pytest.fixture(scope="module")
def backend():
    return train_tokenizer([" ".join(turn["content"] for turn in TURNS)], vocab_size=300)


@pytest.fixture
def mask(backend):
    def make(template, *, loss_on="answers", prompts="auto"):
        return AnswerMask(ChatTokenizer(backend, template=template, end="</s>"), loss_on=loss_on, prompts=prompts)

    return make


def scored(mask, example):
    """Return the scored tokens as text, special tokens included, with a bar between runs."""
    found = mask(example)
    runs = np.split(np.flatnonzero(found.scored), np.flatnonzero(np.diff(np.flatnonzero(found.scored)) > 1) + 1)
    return "|".join(mask._chat.decode(found.ids[run].tolist(), skip_special_tokens=False) for run in runs)


def talk(turns=TURNS):
    return Example(where="my.jsonl:3", messages=turns)


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED, LINES], ids=["prefixes", "marks", "lines"])
@pytest.mark.parametrize(
    ("loss_on", "expected"), [("answers", "It is 2.</s>|Yes, 2.</s>"), ("last", "Yes, 2.</s>")], ids=["answers", "last"]
)
def test_answers_are_scored_to_the_end_of_their_turns(mask, template, loss_on, expected):
    assert scored(mask(template, loss_on=loss_on), talk()) == expected


def test_marks_and_prefixes_give_the_same_tokens(mask):
    marked, plain = mask(MARKED)(talk()), mask(PLAIN_TEMPLATE)(talk())

    assert marked.ids.tolist() == plain.ids.tolist()
    assert marked.scored.tolist() == plain.scored.tolist()


def test_marked_answers_are_those_of_transformers(backend, mask):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=MARKED)
    expected = theirs.apply_chat_template(list(TURNS), return_assistant_tokens_mask=True, return_dict=True)
    found = mask(MARKED)(talk())

    assert found.ids.tolist() == list(expected["input_ids"])
    assert found.scored.astype(int).tolist() == list(expected["assistant_masks"])


def test_a_whole_conversation_can_be_scored(mask):
    assert mask(PLAIN_TEMPLATE, loss_on="all")(talk()).scored.all()


def test_a_template_that_shortens_earlier_turns_is_refused_with_two_ways_out(mask):
    with pytest.raises(
        ValueError, match=r"my\.jsonl:3: the answer in turn 3 cannot be found.*loss_on=last.*data\.template"
    ):
        mask(SHORTENED)(talk())
    assert scored(mask(SHORTENED, loss_on="last"), talk()) == "think Yes, 2.</s>"


def test_a_model_without_a_template_refuses_conversations(mask):
    with pytest.raises(ValueError, match=r"my\.jsonl:3: this model has no chat template.*data\.template=FILE"):
        mask("")(talk())
    with pytest.raises(ValueError, match="prompts=chat needs a chat template"):
        mask("", prompts="chat")


def test_a_completion_follows_its_prompt_as_text_or_as_turns(mask):
    example = Example(where="a:1", prompt="1 plus 1 is ", completion="2.")
    text = mask("")(example)

    assert scored(mask(""), example) == "2.</s>"
    assert scored(mask(PLAIN_TEMPLATE), example) == "2.</s>"
    assert text.ids.tolist() == [*mask("")._chat.encode("1 plus 1 is "), *mask("")._chat.encode("2."), text.ids[-1]]
    assert mask(PLAIN_TEMPLATE, prompts="text")(example).ids.tolist() == text.ids.tolist()


def test_names_of_special_tokens_in_a_plain_text_stay_text(mask):
    found = mask("")(Example(where="a", text="It is </s> 2."))

    assert found.scored.all()
    assert found.ids.tolist().count(mask("")._chat.end_id) == 1


def test_the_beginning_token_of_a_model_opens_its_texts(backend):
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    own = Tokenizer.from_str(backend.to_str())
    own.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", own.token_to_id("<s>"))])
    find = AnswerMask(ChatTokenizer(own, template="", end="</s>"), loss_on="answers", prompts="auto")
    found = find(Example(where="a", text="It is 2."))

    assert found.ids[0] == own.token_to_id("<s>")
    assert found.ids[-1] == own.token_to_id("</s>")
