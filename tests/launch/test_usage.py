"""CPU time of parts, their own processes included."""

import os
import signal
import subprocess
import sys

from outloop.engine.launch.cpu_usage import CpuUsage

# Burns CPU in a child that ends and in one that stays, and hardly any itself.
PART = """
import subprocess, sys

burn = "import time\\nwhile time.process_time() < 0.5: pass\\n"
subprocess.run([sys.executable, "-S", "-c", burn], check=True)
stays = subprocess.Popen(
    [sys.executable, "-S", "-c", burn + "print('burnt', flush=True)\\ninput()"],
    stdin=subprocess.PIPE,
)
stays.wait()
"""


def test_a_part_counts_with_its_processes() -> None:
    """Those that have ended and those that run: workers of a runner do most of its work."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", PART],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as part:
        assert part.stdout is not None
        assert part.stdout.readline() == b"burnt\n"
        usage = CpuUsage()
        usage.sample({"runner-0": part.pid})
        assert usage.totals()["runner-0"] >= 0.9
        os.killpg(part.pid, signal.SIGKILL)
