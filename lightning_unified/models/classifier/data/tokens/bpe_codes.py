"""Build a `tokenizers.Tokenizer` from `vocab.txt` and `bpe.codes`.

BERTweet and PhoBERT store their tokenizers so. transformers has only slow ones of this kind. A word is divided by the merges of
`bpe.codes`; a piece that does not end its word is written with `@@` in `vocab.txt`. A piece that `vocab.txt` lacks is unknown. The
merges need such pieces nevertheless, so here they have ids from that of the token `BEYOND` on, and `TextEncoder` replaces those by the
id of `<unk>`.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors

__all__ = ["BEYOND", "CODES", "TWEETS", "VOCABULARY", "load_bpe_codes", "write_bpe_codes"]

CODES, VOCABULARY = "bpe.codes", "vocab.txt"
BEYOND = "<beyond the vocabulary>"
TWEETS = "<normalized tweets>"
"""Name of a token beyond the vocabulary.

It says that texts are normalised as BERTweet's tokenizer does before they are encoded.
"""

_FIRST = ("<s>", "<pad>", "</s>", "<unk>")  # ids 0 to 3, before those of the file
_END = "</w>"


def load_bpe_codes(folder: Path) -> Tokenizer:
    """Load the tokenizer of a folder with `vocab.txt` and `bpe.codes`.

    Raises:
        ValueError: If a line of the files has another form.
    """
    ids = _vocabulary(folder / VOCABULARY)
    merges = _merges(folder / CODES)
    pieces = {_piece(token): number for token, number in ids.items() if token not in _FIRST}
    known = {**{token: ids[token] for token in _FIRST}, **pieces}
    mask = max(ids.values()) + 1
    known |= {"<mask>": mask, BEYOND: mask + 1}
    if _normalizes_tweets(folder):
        known[TWEETS] = mask + 2
    for left, right in merges:
        for piece in (left, right, left + right):
            known.setdefault(piece, len(known) + mask)  # above every id so far
    tokenizer = Tokenizer(models.BPE(known, merges, unk_token=_FIRST[3], end_of_word_suffix=_END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\S+\n?"), behavior="removed", invert=True)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*_FIRST, "<mask>")])
    ends = [("<s>", ids["<s>"]), ("</s>", ids["</s>"])]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return tokenizer


def write_bpe_codes(tokenizer: Tokenizer, folder: Path, *, max_length: int) -> None:
    """Write a tokenizer of `load_bpe_codes` as files for transformers and `load_bpe_codes`."""
    ids = tokenizer.get_vocab()
    mask = ids["<mask>"]
    own = sorted((number, piece) for piece, number in ids.items() if len(_FIRST) <= number < mask)
    tokens = [piece.removesuffix(_END) if piece.endswith(_END) else f"{piece}@@" for _, piece in own]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    (folder / VOCABULARY).write_text("".join(f"{token} 1\n" for token in tokens), encoding="utf-8")
    (folder / CODES).write_text("".join(f"{left} {right} 1\n" for left, right in merges), encoding="utf-8")
    config = {"tokenizer_class": "BertweetTokenizer", "normalization": TWEETS in ids, "model_max_length": max_length}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _vocabulary(file: Path) -> dict[str, int]:
    """Return the ids of the file's tokens: their order, after the first four."""
    ids = {token: number for number, token in enumerate(_FIRST)}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        token, space, _ = line.strip().rpartition(" ")
        if not space:
            raise ValueError(
                f"{file}:{number}: {line!r} is not a token, a space and a count; give the encoder's own file."
            )
        ids[token] = len(ids)
    return ids


def _merges(file: Path) -> list[tuple[str, str]]:
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        parts = line.split()
        if len(parts) != 3:
            raise ValueError(f"{file}:{number}: {line!r} is not two pieces and a count; give the encoder's own file.")
        found.append((parts[0], parts[1]))
    return found


def _piece(token: str) -> str:
    """Return a token of the file as the merges write it.

    `ab@@` becomes `ab`; `ab`, which ends its word, becomes `ab</w>`.
    """
    return token[:-2] if token.endswith("@@") and len(token) > 2 else token + _END


def _normalizes_tweets(folder: Path) -> bool:
    """Return whether `tokenizer_config.json` asks for the normalisation of tweets."""
    file = folder / "tokenizer_config.json"
    return file.is_file() and bool(json.loads(file.read_text(encoding="utf-8")).get("normalization"))
