"""Use of a fine-tuned model: answers, evaluation beside its base, files for other libraries."""

import json
import math

import pytest
import torch

from lightning_unified.callbacks import RunCheckpoint
from lightning_unified.models.causal_lm.sampling import Sampling
from lightning_unified.models.causal_lm.weights import build_language_model
from lightning_unified.models.finetune import __main__ as command
from lightning_unified.models.finetune.data.rows import ExampleRows
from lightning_unified.models.finetune.presets import PRESETS
from lightning_unified.models.finetune.use.answering import Answerer, prompt_of, stop_ids
from lightning_unified.models.finetune.use.evaluation import evaluate, held_out
from lightning_unified.models.finetune.use.export import merged, write_adapters, write_merged
from lightning_unified.models.finetune.use.talk import pieces_of_text
from lightning_unified.models.pretrained.adapters import adapters_off
from tests.support.finetune import TINY, build, chats, conversations, data, fit
from tests.support.grpo.training import grpo
from tests.support.lanes import first_cells

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
GREEDY = Sampling(max_new_tokens=12, temperature=0.0, top_k=0, top_p=1.0)
IDS = torch.arange(20)[None]
LLAMA3_SCALING = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
COUNTS = {"batch_size": 3, "samples": 2, "max_new_tokens": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a base model, conversations, and checkpoints of three trainings."""
    path = tmp_path_factory.mktemp("finetune")
    torch.manual_seed(5)
    build_language_model(TINY).save_pretrained(path / "model")
    for kind, settings in {"lora": {"lora_rank": 2}, "dora": {"lora_rank": 2, "dora": True}, "full": {}}.items():
        module = build(architecture=None, pretrained=str(path / "model"), learning_rate=0.05, **settings)
        keep = RunCheckpoint(path / kind, every_n_steps=4, monitor=None)
        fit(module, data(chats(path)), path, keep, steps=4)
    return path


@pytest.fixture
def load(folder):
    def loaded(kind):
        options = command._parser().parse_args(["merge", "--checkpoint", str(folder / kind / "last.ckpt"), "x"])
        return command._load(options, device="cpu")

    return loaded


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def run(capsys, *arguments):
    code = command.main([str(one) for one in arguments])
    return code, *capsys.readouterr()


@pytest.mark.slow
def test_a_cache_gives_the_answers_of_whole_reads_over_several_turns(load):
    module = load("lora")
    answerer, turns = Answerer(module.policy, stop=stop_ids(module.chat)), []
    for turn in conversations(2)[1][::2]:
        turns.append(turn)
        prompt = prompt_of(module.chat, turns)
        found = list(answerer(prompt, GREEDY))
        expected = list(prompt)
        with torch.no_grad():
            for _ in range(GREEDY.max_new_tokens):
                token = int(module.policy(input_ids=torch.tensor([expected])).logits[0, -1].argmax())
                if token == module.chat.end_id:
                    break
                expected.append(token)
        assert found == expected[len(prompt) :]
        turns.append({"role": "assistant", "content": module.chat.decode(found)})


def test_a_prompt_without_room_for_an_answer_is_refused(load):
    with pytest.raises(ValueError, match="the prompt has 300 tokens; the model reads 1 to 255"):
        next(Answerer(load("full").policy, stop=[])([5] * 300, GREEDY))


def test_text_streams_in_whole_characters(load):
    chat = load("lora").chat
    ids = chat.encode("naïve ☃ x")
    found = list(pieces_of_text(chat, iter(ids)))

    assert "".join(found) == "naïve ☃ x"
    assert len(found) > 3
    assert not any("\ufffd" in piece for piece in found)


@first_cells(1, "kind", ["lora", "dora", "full"])
def test_evaluation_is_the_mean_over_tokens_of_model_and_base(load, folder, kind):
    module = load(kind)
    examples = held_out(module, None)
    found = evaluate(module, examples, **COUNTS)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    rows: ExampleRows = data(chats(folder)).rows[1]
    for name, model in (("model", module.policy), ("base", base)):
        total = 0.0
        for index in range(len(rows)):
            batch = rows.__getitems__([index])
            with torch.no_grad():
                scores = model(input_ids=batch["tokens"]).logits[:, :-1].flatten(0, 1)
            total += float(torch.nn.functional.cross_entropy(scores, batch["labels"][:, 1:].flatten(), reduction="sum"))
        assert found.losses[name] == pytest.approx(total / rows.scored_tokens, rel=1e-5)

    assert found.tokens == rows.scored_tokens
    assert found.perplexities["base"] == math.exp(found.losses["base"])
    assert found.losses["model"] < found.losses["base"]
    assert len(found.samples) == 2
    assert set(found.samples[0].answers) == {"model", "base"}


@first_cells(1, "kind", ["lora", "dora", "full"])
def test_a_merged_folder_is_read_by_transformers_with_the_same_logits(load, tmp_path, kind):
    module = load(kind)
    files = write_merged(module, tmp_path / "out")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    talk = conversations(2)[1]

    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert torch.equal(logits(read), logits(merged(module.policy)))
    assert tokenizer.apply_chat_template(talk, tokenize=False) == module.chat.render(talk, is_prompt=False)
    assert tokenizer.eos_token == module.chat.end


def test_a_merged_folder_is_read_by_mlx_lm(load, tmp_path):
    mlx_lm = pytest.importorskip("mlx_lm")
    import mlx.core as mx

    module = load("lora")
    write_merged(module, tmp_path / "out")
    model, _ = mlx_lm.load(str(tmp_path / "out"))
    found = torch.tensor(model(mx.array(IDS.tolist())).astype(mx.float32).tolist())

    torch.testing.assert_close(found, logits(merged(module.policy)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("preset", "older"),
    [
        ("smollm2_135m", {"rope_theta": 100_000.0}),
        ("llama3_2_1b", {"rope_theta": 500_000.0, "rope_scaling": LLAMA3_SCALING}),
        ("gemma3_1b", {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6}),
    ],
)
def test_a_merged_folder_has_the_names_that_mlx_lm_reads(load, tmp_path, preset, older):
    small = {name: TINY[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")}
    changed = {**PRESETS[preset].architecture, **small, "num_hidden_layers": 6, "head_dim": 8, "intermediate_size": 16}
    module = load("full")
    module.policy = build_language_model(changed)
    write_merged(module, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")

    assert {name: config.get(name) for name in older} == older
    assert read.config.rope_parameters == module.policy.config.rope_parameters
    assert torch.equal(logits(read), logits(module.policy))


def test_a_merged_folder_begins_a_new_training(load, tmp_path):
    module = load("lora")
    write_merged(module, tmp_path / "out")
    again = build(architecture=None, pretrained=str(tmp_path / "out"), lora_rank=2)

    assert torch.equal(logits(again.policy), logits(merged(module.policy)))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_merged_weights_give_the_logits_of_the_adapters(load, kind):
    policy = load(kind).policy.double()

    torch.testing.assert_close(logits(merged(policy)), logits(policy), rtol=1e-9, atol=1e-9)


def test_merging_leaves_the_module_and_its_base_as_they_are(load):
    module = load("lora")
    before = logits(module.policy)
    with adapters_off(module.policy):
        base = logits(module.policy)
    merged(module.policy)

    assert torch.equal(logits(module.policy), before)
    with adapters_off(module.policy):
        assert torch.equal(logits(module.policy), base)


def test_half_precision_is_rounded_once_after_the_sum(load, tmp_path):
    module = load("lora")
    write_merged(module, tmp_path / "out", dtype="bfloat16")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")

    expected = merged(module.policy).to(torch.bfloat16).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in read.state_dict().items())


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_are_read_by_peft_with_the_same_logits(load, folder, tmp_path, kind):
    module = load(kind)
    write_adapters(module, tmp_path / "out")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    read = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())

    torch.testing.assert_close(logits(read), logits(module.policy), rtol=1e-5, atol=1e-6)
    assert config["base_model_name_or_path"] == str(folder / "model")


def test_grpo_goes_on_from_the_adapters(load, folder, tmp_path):
    module = load("lora")
    write_adapters(module, tmp_path / "out")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    policy = peft.PeftModel.from_pretrained(base, tmp_path / "out", is_trainable=True)
    rewarded = grpo(policy)
    trained = [name for name, one in rewarded.policy.named_parameters() if one.requires_grad]

    assert trained
    assert all(".lora_" in name for name in trained)
    torch.testing.assert_close(logits(rewarded.policy), logits(module.policy), rtol=1e-5, atol=1e-6)


def test_the_commands_write_and_evaluate(folder, tmp_path, capsys):
    checkpoint = ("--checkpoint", folder / "lora" / "last.ckpt")
    code, out, _ = run(capsys, "evaluate", *checkpoint, "--device", "cpu", "--json", "--max-new-tokens", 4)
    record = json.loads(out)

    assert code == 0
    assert record["losses"].keys() == {"model", "base"}
    assert "loss" in run(capsys, "evaluate", *checkpoint, "--device", "cpu", "--samples", 1, "--max-new-tokens", 4)[1]
    assert "model.safetensors" in run(capsys, "merge", *checkpoint, tmp_path / "a")[1]
    assert "adapter_model.safetensors" in run(capsys, "export", *checkpoint, tmp_path / "b")[1]
    code, _, error = run(capsys, "merge", *checkpoint, tmp_path / "a")
    assert code == 1
    assert "is not an empty folder" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("evaluate", "--batch-size", "0"), "--batch-size 0: give 1 or more"),
        (("evaluate", "--data", "nothing.jsonl"), "nothing.jsonl does not exist"),
        (("chat", "--temperature", "-1"), "temperature=-1.0"),
        (("merge", "--dtype", "int4", "out"), "dtype='int4' is not offered"),
    ],
)
def test_a_wrong_argument_ends_with_two(folder, capsys, arguments, message):
    code, _, error = run(capsys, *arguments, "--checkpoint", folder / "lora" / "last.ckpt")

    assert code == 2
    assert message in error


def test_all_weights_have_no_adapters_to_export(folder, tmp_path, capsys):
    code, _, error = run(capsys, "export", "--checkpoint", folder / "full" / "last.ckpt", tmp_path / "out")

    assert code == 2
    assert "write it whole: merge" in error


def test_a_person_talks_until_quit(folder, capsys, monkeypatch):
    said, asked = iter(["What is 1 plus 1?", "Sure?", "new", "What is 2 plus 2?", "quit"]), []
    monkeypatch.setattr("builtins.input", lambda _: next(said))

    def recorded(chat, turns):
        asked.append([(turn["role"], turn["content"]) for turn in turns if turn["role"] != "assistant"])
        return prompt_of(chat, turns)

    monkeypatch.setattr("lightning_unified.models.finetune.use.talk.prompt_of", recorded)
    arguments = ("chat", "--device", "cpu", "--temperature", 0, "--max-new-tokens", 6, "--system", "Be short.")
    code, out, _ = run(capsys, *arguments, "--checkpoint", folder / "lora" / "last.ckpt")

    assert code == 0
    assert out.startswith("Type quit to leave, new for a new conversation.\n")
    assert out.endswith("\n")
    brief, first, second = ("system", "Be short."), ("user", "What is 1 plus 1?"), ("user", "What is 2 plus 2?")
    assert asked == [[brief, first], [brief, first, ("user", "Sure?")], [brief, second]]
    assert list(said) == []


def test_data_are_shown_before_training(folder, capsys, monkeypatch, tmp_path):
    write_merged(build_with_chat(folder), tmp_path / "model")
    arguments = ("data", folder / "chats.jsonl", "--pretrained", tmp_path / "model", "--sequence-length", 96)
    code, out, _ = run(capsys, *arguments)

    assert code == 0
    assert "examples to train" in out
    assert "up to" in out
    assert out.rstrip().endswith("</s>⟧")


def build_with_chat(folder):
    options = command._parser().parse_args(["merge", "--checkpoint", str(folder / "full" / "last.ckpt"), "x"])
    return command._load(options, device="cpu")


def test_a_run_ends_with_samples(tmp_path):
    module = build()
    fit(module, data(chats(tmp_path)), tmp_path)
    found = module.write_samples(seed=0)

    assert len(found) == 2
    assert found[0].startswith("asked: What is")
    assert "expected: " in found[0]
