"""The tool `bash` over a real sandbox: one shell for all of a policy's commands."""

import json

import pytest

from outloop.envs.adapters.bash_tool import answer_call, open_shell
from outloop.envs.sandbox.api import Limits
from outloop.envs.sandbox.bubblewrap import BubblewrapSandbox

LIMITS = Limits(wall_s=20, memory_bytes=256 * 2**20, max_processes=16)


@pytest.mark.medium
async def test_commands_are_inputs_of_one_shell() -> None:
    """State is kept; one that is too slow is ended, which its answer says with what is left; what
    is no command is answered too."""
    sandbox = BubblewrapSandbox(LIMITS)
    async with sandbox.session() as session, open_shell(session, LIMITS) as shell:

        async def call(command: object, wall_s: float = 20) -> str:
            arguments = json.dumps({"command": command})
            return await answer_call(shell, "bash", arguments, wall_s)

        assert await call("mkdir sub && cd sub && export a=1") == ""
        assert await call('echo "$a $PWD"; false') == "1 /work/sub\n\n[exit code 1]"
        assert await call("touch file; sleep 30", wall_s=1.0) == (
            "\n[ended by wall_time]\n"
            "[the shell was started again: what it held is gone; files are kept]"
        )
        assert await call('echo "[$a] $PWD"; ls sub') == "[] /work\nfile\n"
        assert "the only tool is bash" in await call(7)
        assert "the only tool is bash" in await answer_call(shell, "bash", "{", 20)
    await sandbox.close()
