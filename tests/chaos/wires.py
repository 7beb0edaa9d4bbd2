"""Bad wires between the parts of a run: cut, slow, and losing answers.

Owns: a process that forwards what goes from one address to another, and when it does so badly.
Does not own: who uses which address (forked). Invariant: what happens is drawn from a seed; after
the last of NUM_FAULTS faults the wires are good, so that the run can end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

NUM_FAULTS = 8
DELAY_S = 0.05
Address = Path | tuple[str, int]
"""A Unix socket, or host and port."""


@dataclass
class Wire:
    """From one address to another."""

    here: Address
    there: Address
    writers: set[asyncio.StreamWriter] = field(default_factory=set)
    delay_s: float = 0.0
    loses_answers: bool = False

    async def listen(self) -> None:
        """Forward from now on."""
        if isinstance(self.here, Path):
            await asyncio.start_unix_server(self._forward, self.here)
        else:
            await asyncio.start_server(self._forward, *self.here)

    def cut(self) -> None:
        """Break every connection; new ones are welcome."""
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, commands = await self._connect()
        except OSError:
            writer.transport.abort()
            return
        self.writers |= {writer, commands}
        ways = (self._copy(reader, commands, False), self._copy(answers, writer, True))
        await asyncio.gather(*ways)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self.there, Path):
            return await asyncio.open_unix_connection(self.there)
        return await asyncio.open_connection(*self.there)

    async def _copy(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, is_answer: bool
    ) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if is_answer and self.loses_answers:
                    self.loses_answers = False
                    self.cut()
                    return
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                target.write(data)
                await target.drain()
        self.writers.discard(target)
        with suppress(OSError):
            target.close()


async def _fault(wire: Wire, kind: str) -> None:
    if kind == "cut":
        wire.cut()
    elif kind == "lost answer":
        wire.loses_answers = True
    else:
        wire.delay_s = DELAY_S
        await asyncio.sleep(10 * DELAY_S)
        wire.delay_s = 0.0


def forward(wires: dict[str, Wire], seed: int, tell: Callable[[str], None]) -> int:
    """Be the wires until killed; `tell` gets a line for each fault."""
    choices = random.Random(seed)

    async def run() -> None:
        for wire in wires.values():
            await wire.listen()
        for _ in range(NUM_FAULTS):
            await asyncio.sleep(choices.uniform(0.1, 1.0))
            name = choices.choice(list(wires))
            kind = choices.choice(["cut", "lost answer", "slow"])
            tell(f"{name} wire: {kind}")
            await _fault(wires[name], kind)
        await asyncio.Event().wait()

    asyncio.run(run())
    return 0
