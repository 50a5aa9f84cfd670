"""Complete the last word of a command line in a shell.

    recapp tr                       train
    recapp train tra                trainer=  trainer.devices=  trainer.max_steps=  ...
    recapp train model=             model=dlrm
    recapp train +plan=             +plan=mixed  +plan=row_wise  ...

This file imports no heavy package, because a shell runs it at every press of the tab key.
"""

import shlex
from collections.abc import Iterable

from recapp.run.commands import COMMANDS, EXPERIMENTS, VERBS
from recapp.settings.check_settings import names_of
from recapp.settings.option_files import is_group, named_folders, options

ADDED = "+plan="  # the group without a default option

_SCRIPT = """\
_recapp_complete() {
    local IFS=$'\\n'
    COMPREPLY=($(recapp --complete "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
}
complete -o nospace -F _recapp_complete recapp"""

SHELLS = {
    "bash": _SCRIPT,
    "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{_SCRIPT}",
}


def shell_script(shell: str) -> str:
    """Return the script that a shell evaluates to complete recapp's command lines.

    Args:
        shell: "bash" or "zsh"; for others the result is empty.
    """
    return SHELLS.get(shell, "")


def candidates(line: str, commands: Iterable[str]) -> list[str]:
    """Return the words that the last word of a command line may become.

    Args:
        line: The line up to the cursor, `recapp` included.
        commands: The names of all commands.

    Returns:
        The words, without the part up to their last `=`, which shells treat as a word of its own. A
        complete word ends in a blank, a setting in `=`.
    """
    _, *words = _words(line)
    last = "" if line.endswith(" ") or not words else words.pop()
    if not words:
        return [f"{name} " for name in commands if name.startswith(last)]
    command, *behind = words
    verbs = VERBS.get(command, ())
    if verbs and not set(verbs) & set(behind):
        begun = [f"{verb} " for verb in verbs if verb.startswith(last)]
        return [*begun, *_settings(command, last, line)] if command == "report" else begun
    if command not in commands:
        return []
    return _settings(command, last, line)


def _words(line: str) -> list[str]:
    """Return the words of a line as a shell does; an open quote counts as a letter."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def _settings(command: str, last: str, line: str) -> list[str]:
    folders = named_folders(_words(line))
    name, equals, begun = last.partition("=")
    group = name.lstrip("+")
    if equals:
        known = options(group, folders) if is_group(group, folders) else []
        return [f"{option} " for option in known if option.startswith(begun)]
    experiment = ["experiment="] if command in EXPERIMENTS else []
    names = [ADDED, *experiment, *(f"{name}=" for name in names_of(COMMANDS[command]))]
    return [name for name in names if name.startswith(last)]
