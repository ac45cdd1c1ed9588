"""Decode a user's text file: its byte-order mark, else the encoding that the user names."""

import codecs
from pathlib import Path

__all__ = ["decoded"]

_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_ARCHIVE = b"PK\x03\x04"


def decoded(file: str | Path, *, encoding: str, key: str) -> str:
    r"""Return the text of a file, without its byte-order mark and with \n for every end of line.

    Args:
        file: The file.
        encoding: Its encoding if there is no byte-order mark.
        key: How a user sets the encoding, for messages.

    Raises:
        ValueError: If the file is no text in that encoding.
    """
    content = Path(file).read_bytes()
    if content.startswith(_ARCHIVE):
        raise ValueError(f"{file} is a zip archive, such as an Excel workbook, and no text; export it as CSV in UTF-8.")
    marked = next((name for mark, name in _MARKS if content.startswith(mark)), encoding)
    try:
        text = content.decode(marked)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{file}:{line}: not {marked} at byte {error.start}; save the file as UTF-8, or name its encoding, as in {key}cp1252."
        ) from error
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise ValueError(
            f"{file}:{line}: a NUL character, which no text has; save the file as UTF-8, or name its encoding, as in {key}utf-16."
        )
    return text.replace("\r\n", "\n").replace("\r", "\n")
