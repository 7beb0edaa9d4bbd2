"""An agent of another project as a program, and a witness of what it says to its model.

`python third_party.py WITNESS_DIR AGENT QUESTION`, with OPENAI_BASE_URL and OPENAI_API_KEY in the
environment as for any agent. The agents are what their projects' first pages show. The witness is a
plain proxy in this process between the agent and that URL; it appends every exchange to
WITNESS_DIR/EPISODE.jsonl and changes nothing.
"""

import asyncio
import http.server
import json
import os
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def openai_agents(question: str) -> str:
    """Its default: the responses API, address and key from the environment."""
    import agents

    agents.set_tracing_disabled(True)
    agent = agents.Agent(
        name="adder", instructions="Be short.", model="policy", tools=[agents.function_tool(add)]
    )
    return asyncio.run(agents.Runner.run(agent, question, max_turns=3)).final_output


def smolagents(question: str) -> str:
    """ToolCallingAgent, which retells its history as user messages."""
    import smolagents as sm

    model = sm.OpenAIServerModel(
        "policy",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
    )
    agent = sm.ToolCallingAgent(tools=[sm.tool(add)], model=model, max_steps=2, verbosity_level=0)
    return str(agent.run(question))


def mini_swe_agent(question: str) -> str:
    """Its own default configuration, prompts and bash tool; a shell in this folder."""
    os.environ |= {"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1"}
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import get_config_from_spec
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    config = get_config_from_spec("mini.yaml")
    for name in ("mode", "confirm_exit", "whitelist_actions"):
        config["agent"].pop(name, None)
    config["agent"] |= {"step_limit": 2, "cost_limit": 0.0}
    config["model"].pop("model_name", None)
    agent = DefaultAgent(
        LitellmModel(model_name="openai/policy", **config["model"]),
        LocalEnvironment(**config.get("environment", {})),
        **config["agent"],
    )
    left = agent.run(question)
    return f"{left['exit_status']} {left['submission']}"


AGENTS = {
    "openai-agents": openai_agents,
    "smolagents": smolagents,
    "mini-swe-agent": mini_swe_agent,
}


def start_witness(base_url: str, log: Path) -> str:
    """A proxy to `base_url`; its own base URL."""

    class Witness(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            passed_on = {k: v for k, v in self.headers.items() if k.lower() not in _OWN_HEADERS}
            request = urllib.request.Request(
                base_url + self.path.removeprefix("/v1"), body, passed_on, method="POST"
            )
            try:
                with urllib.request.urlopen(request, timeout=120) as answer:
                    status, data, kind = answer.status, answer.read(), answer.headers
            except urllib.error.HTTPError as error:
                status, data, kind = error.code, error.read(), error.headers
            seen = {"path": self.path, "status": status, "request": json.loads(body)}
            with log.open("a") as file:
                file.write(json.dumps(seen | {"response": json.loads(data)}) + "\n")
            self.send_response(status)
            for name in ("content-type", "x-should-retry"):
                if name in kind:
                    self.send_header(name, kind[name])
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Witness)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/v1"


_OWN_HEADERS = {"host", "content-length", "connection", "accept-encoding"}


def main() -> None:
    folder, name, question = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    log = folder / f"{os.environ['OUTLOOP_EPISODE_ID']}.jsonl"
    os.environ["OPENAI_BASE_URL"] = start_witness(os.environ["OPENAI_BASE_URL"], log)
    # litellm's name for the same.
    os.environ["OPENAI_API_BASE"] = os.environ["OPENAI_BASE_URL"]
    answer = AGENTS[name](question)
    with log.open("a") as file:
        file.write(json.dumps({"printed": answer.strip()}) + "\n")
    print(answer)


if __name__ == "__main__":
    main()
