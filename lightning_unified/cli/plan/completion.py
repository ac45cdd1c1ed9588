"""Tab completion of `python -m lightning_unified plan` in bash.

It is added to existing completion of `python`.
"""

import io
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from unittest.mock import patch

from lightning_unified.cli.plan.arguments import FLAGS
from lightning_unified.cli.train import train
from lightning_unified.errors import ConfigurationError

__all__ = ["complete"]

_CALL = "lightning_unified plan"
_INSTALL = """\
_lightning_unified_before=$(complete -p python 2> /dev/null | sed -n 's/.* -F \\([^ ]*\\) .*/\\1/p')
_lightning_unified_plan()
{
    local words=($COMP_LINE) word=""
    if [ "${words[*]:1:3}" = "-m lightning_unified plan" ]; then
        case "$COMP_LINE" in *" ") ;; *) word="${words[${#words[@]}-1]}" ;; esac
        local choices=$(COMP_LINE="$COMP_LINE" "${words[0]}" -m lightning_unified plan --shell-completion query=bash)
        COMPREPLY=($(compgen -o nospace -o default -W "$choices" -- "$word"))
    elif [ -n "$_lightning_unified_before" ] && [ "$_lightning_unified_before" != _lightning_unified_plan ]; then
        "$_lightning_unified_before" "$@"
    fi
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _lightning_unified_plan python
"""
_UNINSTALL = """\
unset -f _lightning_unified_plan
if [ -n "$_lightning_unified_before" ]; then complete -o nospace -o default -F "$_lightning_unified_before" python; else complete -r python; fi
"""


def complete(asked: str, *, config_path: str) -> int:
    """Print the answer to a shell's request, and return the exit code.

    Args:
        asked: `install=bash`, `uninstall=bash` or `query=bash`; a query reads the current line from `COMP_LINE`.
        config_path: The configuration: a folder or `pkg://package.name`.

    Raises:
        ConfigurationError: If the request is another one.
    """
    command, _, shell = asked.partition("=")
    if shell != "bash" or command not in {"install", "uninstall", "query"}:
        raise ConfigurationError(
            f"--shell-completion {asked}: plan completes in bash; write install=bash, uninstall=bash or query=bash."
        )
    if command == "query":
        sys.stdout.write(" ".join(_choices(os.environ.get("COMP_LINE", ""), config_path)) + "\n")
    else:
        sys.stdout.write(_INSTALL if command == "install" else _UNINSTALL)
    return 0


def _choices(line: str, config_path: str) -> Sequence[str]:
    """Return the completions of the last word of `line`: flags of `plan`, or Hydra's for an override."""
    rest = line.partition(_CALL)[2]
    last = "" if rest.endswith(" ") else rest.rpartition(" ")[2]
    if last.startswith("-"):
        return [flag for flag in FLAGS if flag.startswith(last)]
    overrides = [word for word in rest.split() if "=" in word and not word.startswith("-")]
    words = ["python", "plan.py", *(word for word in overrides if word != last), last]
    found = io.StringIO()
    with patch.dict(os.environ, COMP_LINE=" ".join(words)), redirect_stdout(found):
        train(["--shell-completion", "query=bash"], config_path=config_path)
    return found.getvalue().split()
