"""A user's files become rows; bad lines and long examples are named, copies left out."""

import numpy as np
import pytest

from lightning_unified.models.finetune.data.answers import Encoded
from lightning_unified.models.finetune.data.care import describe_lengths, length_histogram, split_examples
from lightning_unified.models.finetune.data.examples import Example, read_examples
from lightning_unified.models.finetune.data.python_docs import python_docs
from lightning_unified.models.finetune.data.rows import ExampleRows, bins_of
from tests.support.finetune import chats, conversations, data, write_rows

GOOD = {"messages": conversations(1)[0]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "messages is .*must be a list of turns"),
        ({"messages": [{"role": "user"}]}, "turn 1 is .*must have role and content"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, r"no turn of the assistant with content \(user\)"),
        ({"mesages": []}, "a row has messages, or prompt.*did you mean messages"),
        ({"prompt": "Hi"}, "a row has messages, or prompt and completion"),
        ({"prompt": " ", "completion": "x"}, "prompt is ' '; it must be a text that is not blank"),
        ({**GOOD, "text": "x"}, ".*this one has messages and text; keep one"),
        ({"conversations": []}, "field 'conversations': rename it to messages"),
        ({**GOOD, "tools": []}, "field 'tools': leave such rows out"),
        ({**GOOD, "group": 3}, "group is 3; it must be text"),
        ([], "a row is an object"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, row, message):
    path = write_rows(tmp_path / "my.jsonl", [GOOD, row])
    with pytest.raises(ValueError, match=rf"my\.jsonl:2: {message}"):
        data(path).setup("fit")


def test_files_that_are_missing_empty_or_of_another_kind_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "table.csv").write_text("a,b")
    (tmp_path / "folder").mkdir()
    for name, error, message in [
        ("nothing.jsonl", FileNotFoundError, "does not exist"),
        ("empty.jsonl", ValueError, "is empty"),
        ("table.csv", ValueError, r"ends in none of \.jsonl, \.txt, \.md"),
        ("folder", FileNotFoundError, "holds no file"),
    ]:
        with pytest.raises(error, match=message):
            read_examples(tmp_path / name)


def test_a_folder_holds_all_three_kinds(tmp_path):
    write_rows(tmp_path / "a.jsonl", [GOOD, {"prompt": "1 + 1 =", "completion": " 2"}, {"text": "Two."}])
    (tmp_path / "b.md").write_text("# Three")
    found = read_examples(tmp_path)

    assert [one.content for one in found][1:] == ["1 + 1 =\n 2", "Two.", "# Three"]
    assert found[0].question == "What is 0 plus 0?"
    assert [one.where.rpartition("/")[2] for one in found] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3", "b.md"]


def test_a_single_text_is_divided_so_that_a_part_is_held_out(tmp_path):
    (tmp_path / "one.txt").write_text("\n\n".join(f"Paragraph {number} of a text." for number in range(40)))
    module = data(str(tmp_path / "one.txt"), packing=True, batch_size=1)
    module.setup("fit")

    assert len(module.held_out) >= 1
    assert not {one.text for one in module.held_out} & {one.text for one in module._prepared.sides.train}


def test_copies_are_left_out_and_one_question_stays_on_one_side():
    asked = [{"role": "user", "content": "Who?"}]
    same = [
        Example(where=f"a:{at}", messages=(*asked, {"role": "assistant", "content": f"I {at}."})) for at in range(4)
    ]
    others = [
        Example(
            where=f"b:{at}", messages=({"role": "user", "content": f"{at}?"}, {"role": "assistant", "content": "No."})
        )
        for at in range(8)
    ]
    found = split_examples([*same, *others, *others], fraction=0.3, seed=1)
    sides = [{one.question for one in side} for side in (found.train, found.validation)]

    assert found.duplicates == 8
    assert not sides[0] & sides[1]
    assert len(found.train) + len(found.validation) == 12


def test_conversations_that_begin_with_an_answer_are_not_of_one_group():
    greeting = [
        Example(where=f"a:{at}", messages=({"role": "assistant", "content": f"Hello {at}."},)) for at in range(6)
    ]

    assert len(split_examples(greeting, fraction=0.5, seed=0).validation) == 3


def test_the_last_answer_of_a_conversation_may_be_followed_by_a_turn():
    turns = tuple(conversations(1)[0])
    thanks = {"role": "user", "content": "Thanks."}

    assert Example(where="a:1", messages=(*turns, thanks)).last_answer == "It is 0."


def test_conversations_of_one_group_cannot_be_parted():
    one = [Example(where=f"a:{at}", group="g", prompt=f"{at}", completion="x") for at in range(3)]
    with pytest.raises(ValueError, match=r"3 conversation\(s\) in 1 group\(s\)"):
        split_examples(one, fraction=0.1, seed=0)


def test_lines_of_text_that_training_has_leave_validation(tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(f"The same licence.\nOwn line of {name}.")
    module = data(str(tmp_path), batch_size=1)
    module.setup("fit")

    assert module.held_out[0].text.startswith("Own line")
    assert "1 lines left out of validation" in module.describe_line()


def test_examples_over_the_limit_are_named_dropped_or_cut_off(tmp_path):
    path = chats(tmp_path)
    with pytest.raises(
        ValueError, match=r"examples have more than data\.sequence_length=40 tokens: .*chats\.jsonl:\d \(\d+\)"
    ):
        data(path, sequence_length=40).setup("fit")
    dropped, cut = (data(path, sequence_length=40, too_long=way, batch_size=1) for way in ("drop", "truncate"))

    assert len(dropped.rows[0]) < len(cut.rows[0])
    assert "examples left out, longer than 40 tokens" in dropped.describe_line()
    assert max(cut.rows[0].lengths) == 40


def test_a_long_text_is_divided_and_each_token_scored_once(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(" ".join(f"{name}{number}" for number in range(100)))
    module = data(str(tmp_path), sequence_length=50, batch_size=1)
    rows, text = module.rows[0], module._prepared.sides.train[0].text

    assert len(rows) > 1
    assert rows.scored_tokens == len(module.chat.encode(text))  # the first is not scored, the end token is


def test_lengths_are_described():
    assert length_histogram([3, 16, 17, 33, 64]) == {16: 2, 32: 1, 64: 2}
    assert describe_lengths([10] * 19 + [90]) == "median 10 tokens, 95 % up to 14, longest 90"


def test_packed_rows_hold_every_sequence_once_and_no_more_than_fit():
    lengths = np.random.default_rng(0).integers(1, 60, 200).tolist()
    found = bins_of(lengths, capacity=64)

    assert sorted(index for members in found for index in members) == list(range(200))
    assert max(sum(lengths[index] for index in members) for members in found) <= 64
    assert len(found) <= 1.1 * sum(lengths) / 64 + 1


def test_positions_begin_anew_with_each_packed_sequence_and_with_the_pads():
    sequences = [Encoded(np.arange(3) + 10, np.ones(3, bool)), Encoded(np.arange(4) + 20, np.array([0, 0, 1, 1], bool))]
    batch = ExampleRows(sequences, length=9, packed=True, pad_id=0)[0]

    assert batch["tokens"].tolist() == [20, 21, 22, 23, 10, 11, 12, 0, 0]
    assert batch["positions"].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1]
    assert batch["labels"].tolist() == [-100, -100, 22, 23, -100, 11, 12, -100, -100]


def test_batches_have_rows_of_similar_length(tmp_path):
    module = data(chats(tmp_path, count=60), batch_size=4)
    widths = {batch["tokens"].shape[1] for batch in module.train_dataloader()}

    assert len(widths) > 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"loss_on": "answer"}, r"data\.loss_on='answer'.*did you mean answers"),
        ({"prompts": "plain"}, r"data\.prompts='plain'"),
        ({"too_long": "cut"}, r"data\.too_long='cut'"),
        ({"packing": "yes"}, r"data\.packing='yes'"),
        ({"sequence_length": 1}, r"data\.sequence_length=1"),
    ],
)
def test_a_wrong_setting_is_named(setting, message):
    with pytest.raises(ValueError, match=message):
        data(None, **setting)


def test_a_template_of_ones_own_replaces_the_models(tmp_path):
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.role }}> {{ m.content }}</s>{% endfor %}")
    module = data(chats(tmp_path), template=str(tmp_path / "own.jinja"), loss_on="all")

    assert module.chat.render(conversations(1)[0]).startswith("user> What is 0")
    with pytest.raises(FileNotFoundError, match=r"data\.template="):
        data(chats(tmp_path), template="nothing.jinja").setup("fit")


def test_python_answers_without_a_file():
    found = python_docs()

    assert len(found) > 500
    assert len({one.content for one in found}) == len(found)
    assert {"role": "user", "content": "What does Python's math.sqrt do?"} in [one.messages[0] for one in found]


@pytest.mark.parametrize("form", ["messages", "text"])
def test_a_copy_of_the_data_in_another_folder_has_the_same_split(tmp_path, form):
    rows = [{"messages": turns} if form == "messages" else {"text": turns[0]["content"]} for turns in conversations(20)]
    found = []
    for folder in ("a", "a copy"):
        (tmp_path / folder).mkdir()
        split = data(write_rows(tmp_path / folder / f"{folder}.jsonl", rows)).rows
        found.append([one.checksum for one in split])

    assert found[0] == found[1]


def test_functions_of_other_libraries_are_no_part_of_python(monkeypatch):
    before = python_docs()

    def shout(self):
        """Log in capital letters, as no logger of Python does."""

    shout.__module__ = "loud.logging"
    monkeypatch.setattr("logging.Logger.shout", shout, raising=False)

    assert python_docs() == before
