"""Talk with a fine-tuned model in the terminal."""

import sys
from collections.abc import Iterator

import torch

from lightning_unified.models.causal_lm.sampling import Sampling
from lightning_unified.models.finetune.module import Finetune
from lightning_unified.models.finetune.use.answering import Answerer, prompt_of, stop_ids
from lightning_unified.models.pretrained.chat import ChatTokenizer

__all__ = ["pieces_of_text", "talk"]

_QUIT = {"quit", "exit"}


def talk(module: Finetune, *, sampling: Sampling, system: str | None, seed: int | None) -> None:
    """Answer typed lines until `quit`, `exit` or the end of input; `new` begins a conversation.

    A model without a chat template continues each text by itself.
    """
    chat = module.chat
    device = next(module.policy.parameters()).device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    answerer = Answerer(module.policy, stop=stop_ids(chat), generator=generator)
    opening = [{"role": "system", "content": system}] if system else []
    turns = list(opening)
    print("Type quit to leave" + (", new for a new conversation." if chat.template else "."))
    while True:
        said = input("> ").strip()
        if said.lower() in _QUIT:
            return
        if said.lower() == "new" or not said:
            turns = list(opening)
            continue
        turns.append({"role": "user", "content": said})
        answer = ""
        try:
            for piece in pieces_of_text(chat, answerer(prompt_of(chat, turns), sampling)):
                answer += piece
                print(piece, end="", flush=True)
        except ValueError as error:  # a conversation that has become too long
            print(error, file=sys.stderr)
            turns = list(opening)
            continue
        print()
        turns.append({"role": "assistant", "content": answer})


def pieces_of_text(chat: ChatTokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """Yield the text of tokens as it grows; a character of several tokens comes whole."""
    ids: list[int] = []
    shown = ""
    for token in tokens:
        ids.append(token)
        text = chat.decode(ids)
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    if text := chat.decode(ids)[len(shown) :]:
        yield text
