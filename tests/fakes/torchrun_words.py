"""What torchrun makes of its command line.

Owns: asking torchrun's own parser. Does not own: the command lines. Invariant: nothing is started.
"""

from collections.abc import Sequence

from torch.distributed.run import parse_args


def program_of(command: Sequence[str]) -> list[str]:
    """The module that each rank of a command with torchrun runs, and its arguments."""
    found = parse_args(list(command[command.index("torch.distributed.run") + 1 :]))
    return [found.training_script, *found.training_script_args]
