"""Normalise tweets as BERTweet's tokenizer does: @USER, HTTPURL, emoji as words.

The results are those of transformers.
"""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["normalize_tweet"]


def normalize_tweet(text: str) -> str:
    """Return a tweet with `@USER`, `HTTPURL`, emoji as words, and clitics split off.

    `@USER` stands for names, `HTTPURL` for links.

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
