"""mini-swe-agent on a task of this example, with its own prompts: mini_swe_agent.py TASK_FILE.

Runs where mini-swe-agent is installed, and imports nothing of outloop. It works in `repository`
below the episode's folder; verifier.py scores what it leaves there.
"""

import json
import os
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

os.environ |= {"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1"}
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it is asked for over the network
os.environ["OPENAI_API_BASE"] = os.environ["OPENAI_BASE_URL"]  # litellm's name for it

from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(os.environ["OUTLOOP_EPISODE_DIR"]) / "repository"
    git = ["git", "-c", "safe.directory=*", "-C", task["repository"], "archive", task["revision"]]
    archive = subprocess.run(git, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as packed:
        packed.extractall(folder, filter="data")
    config = get_config_from_spec("mini.yaml")
    for name in ("mode", "confirm_exit", "whitelist_actions"):
        config["agent"].pop(name, None)
    config["agent"] |= {"step_limit": task["max_turns"], "cost_limit": 0.0}
    config["model"].pop("model_name", None)
    agent = DefaultAgent(
        LitellmModel(model_name="openai/policy", **config["model"]),
        LocalEnvironment(**config.get("environment", {}) | {"cwd": str(folder)}),
        **config["agent"],
    )
    left = agent.run(task["issue"])
    print(left["exit_status"], left["submission"])


if __name__ == "__main__":
    main()
