"""Normalisation of tweets as BERTweet's tokenizer in transformers does it: @USER, HTTPURL, emoji as words."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["normalize_tweet"]


def normalize_tweet(text: str) -> str:
    """Return a tweet with `@USER` for names and `HTTPURL` for links, emoji as words, and clitics apart.

    Raises:
        RuntimeError: If the package emoji or transformers is missing.
    """
    return _normalizer()(text)


@functools.cache
def _normalizer() -> Callable[[str], str]:
    try:
        import emoji  # noqa: F401  # pyright: ignore[reportMissingImports] - transformers leaves emoji as they are without it
        from transformers import BertweetTokenizer
    except ImportError as error:
        raise RuntimeError(
            "this encoder's tokenizer writes emoji as words, which needs the packages emoji and transformers; run: pip install emoji "
            "transformers"
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("vocab.txt", "bpe.codes")]
        for file in files:
            file.touch()
        return BertweetTokenizer(*map(str, files), normalization=True).normalizeTweet
