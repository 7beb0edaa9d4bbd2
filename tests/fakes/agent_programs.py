"""Agents of other projects, unmodified: `python agent_programs.py NAME BASE_URL API_KEY`.

Each asks one question and has one tool, `calculator`; it prints what it answers.
"""

import asyncio
import json
import os
import sys

QUESTION = "What is 12 * 7?"


async def openai_agents(mode: str, base_url: str, api_key: str) -> str:
    """openai-agents over responses or chat completions, streamed or not."""
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def calculator(expression: str) -> str:
        """Computes."""
        return "84"

    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    kind = agents.OpenAIChatCompletionsModel if "chat" in mode else agents.OpenAIResponsesModel
    agent = agents.Agent(
        name="agent",
        instructions="Be short.",
        tools=[calculator],
        model=kind(model="policy", openai_client=client),
    )
    if "stream" not in mode:
        return (await agents.Runner.run(agent, QUESTION)).final_output
    result = agents.Runner.run_streamed(agent, QUESTION)
    async for _ in result.stream_events():
        pass
    return result.final_output


async def pydantic_ai(mode: str, base_url: str, api_key: str) -> str:
    """pydantic-ai over chat completions, responses or messages, streamed or not."""
    from pydantic_ai import Agent

    if "messages" in mode:
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        provider = AnthropicProvider(api_key=api_key, base_url=base_url)
        agent = Agent(AnthropicModel("policy", provider=provider), instructions="Be short.")
    else:
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        kind = OpenAIResponsesModel if "responses" in mode else OpenAIChatModel
        model = kind("policy", provider=OpenAIProvider(base_url=base_url, api_key=api_key))
        agent = Agent(model, instructions="Be short.")

    @agent.tool_plain
    def calculator(expression: str) -> str:
        """Computes."""
        return "84"

    async def watch(_, events) -> None:
        async for _ in events:
            pass

    handler = watch if "stream" in mode else None
    return (await agent.run(QUESTION, event_stream_handler=handler)).output


async def smolagents(mode: str, base_url: str, api_key: str) -> str:
    """smolagents' ToolCallingAgent, which retells its history as user messages."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def calculator(expression: str) -> str:
        """Computes.

        Args:
            expression: what to compute
        """
        return "84"

    model = OpenAIServerModel("policy", api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent(tools=[calculator], model=model, max_steps=3, verbosity_level=0)
    return str(await asyncio.to_thread(agent.run, QUESTION))


async def langgraph(mode: str, base_url: str, api_key: str) -> str:
    """langgraph's tool loop over langchain-openai, chat completions or responses."""
    from langchain_core.messages import ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph

    @tool
    def calculator(expression: str) -> str:
        """Computes."""
        return "84"

    model = ChatOpenAI(
        model="policy",
        base_url=base_url,
        api_key=api_key,
        use_responses_api="responses" in mode,
        streaming="stream" in mode,
    ).bind_tools([calculator])

    async def speak(state) -> dict:
        return {"messages": [await model.ainvoke(state["messages"])]}

    async def act(state) -> dict:
        calls = state["messages"][-1].tool_calls
        return {"messages": [ToolMessage("84", tool_call_id=call["id"]) for call in calls]}

    graph = StateGraph(MessagesState)
    graph.add_node("speak", speak)
    graph.add_node("act", act)
    graph.add_edge(START, "speak")
    graph.add_conditional_edges(
        "speak", lambda state: "act" if state["messages"][-1].tool_calls else END
    )
    graph.add_edge("act", "speak")
    state = await graph.compile().ainvoke({"messages": [("user", QUESTION)]})
    return state["messages"][-1].text


async def mini_swe_agent(mode: str, base_url: str, api_key: str) -> str:
    """mini-swe-agent with its own configuration, prompts and bash tool; a shell in this folder."""
    os.environ |= {"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1"}
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import get_config_from_spec
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    config = get_config_from_spec("mini.yaml")
    for name in ("mode", "confirm_exit", "whitelist_actions"):
        config["agent"].pop(name, None)
    config["agent"] |= {"step_limit": 4, "cost_limit": 0.0}
    config["model"].pop("model_name", None)
    where = {"api_base": base_url, "api_key": api_key}
    config["model"]["model_kwargs"] = {**config["model"].get("model_kwargs", {}), **where}
    agent = DefaultAgent(
        LitellmModel(model_name="openai/policy", **config["model"]),
        LocalEnvironment(**config.get("environment", {})),
        **config["agent"],
    )
    left = await asyncio.to_thread(agent.run, QUESTION)
    return f"{left['exit_status']} {left['submission']}"


async def dspy_react(mode: str, base_url: str, api_key: str) -> str:
    """DSPy's ReAct, whose calls are conversations of one request each."""
    import dspy

    def calculator(expression: str) -> str:
        """Computes."""
        return "84"

    where = {"api_base": base_url, "api_key": api_key}
    dspy.configure(lm=dspy.LM("openai/policy", cache=False, **where))
    agent = dspy.ReAct("question -> answer", tools=[calculator], max_iters=3)
    return (await agent.acall(question=QUESTION)).answer


async def anthropic_runner(mode: str, base_url: str, api_key: str) -> str:
    """Anthropic's tool runner, which threads its conversations."""
    import anthropic

    @anthropic.beta_async_tool
    async def calculator(expression: str) -> str:
        """Computes.

        Args:
            expression: what to compute
        """
        return "84"

    client = anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
    runner = client.beta.messages.tool_runner(
        model="policy",
        max_tokens=256,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[calculator],
    )
    message = await runner.until_done()
    return "".join(block.text for block in message.content if block.type == "text")


async def litellm(mode: str, base_url: str, api_key: str) -> str:
    """A tool loop over LiteLLM, in OpenAI's or Anthropic's dialect."""
    import litellm as client

    function = {
        "name": "calculator",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    }
    messages: list = [{"role": "user", "content": QUESTION}]
    while True:
        answer = await client.acompletion(
            model=f"{mode}/policy",
            messages=messages,
            tools=[{"type": "function", "function": function}],
            **where_litellm_asks(mode, base_url, api_key),
        )
        message = answer.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            return message.content
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": "84"}
            for call in message.tool_calls
        ]


def where_litellm_asks(mode: str, base_url: str, api_key: str) -> dict:
    """The address as LiteLLM wants it for a dialect."""
    url = base_url if mode == "openai" else base_url.removesuffix("/v1")
    return {"api_base": url, "api_key": api_key, "num_retries": 0}


async def refusals(mode: str, base_url: str, api_key: str) -> str:
    """The names of the exceptions in which clients put a refused question; `mode` is how long it
    is, in words."""
    import anthropic
    import litellm as client
    import openai
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    question = "word " * int(mode)
    messages: list = [{"role": "user", "content": question}]
    root = base_url.removesuffix("/v1")
    openai_client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    anthropic_client = anthropic.AsyncAnthropic(base_url=root, api_key=api_key)
    chat = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key)
    claude = ChatAnthropic(model="policy", base_url=root, api_key=api_key, max_tokens=64)
    asked = {
        "openai": openai_client.chat.completions.create(model="policy", messages=messages),
        "anthropic": anthropic_client.messages.create(
            model="policy", max_tokens=64, messages=messages
        ),
        "langchain-openai": chat.ainvoke(question),
        "langchain-anthropic": claude.ainvoke(question),
    }
    for dialect in ("openai", "anthropic"):
        asked[f"litellm-{dialect}"] = client.acompletion(
            model=f"{dialect}/policy",
            messages=messages,
            **where_litellm_asks(dialect, base_url, api_key),
        )
    found = {}
    for name, question_asked in asked.items():
        try:
            await question_asked
        except Exception as error:  # noqa: BLE001 - its kind is what is asked for
            found[name] = [kind.__name__ for kind in type(error).__mro__]
    return json.dumps(found)


AGENTS = {
    "anthropic-runner": anthropic_runner,
    "dspy": dspy_react,
    "litellm": litellm,
    "refusals": refusals,
    "mini-swe-agent": mini_swe_agent,
    "openai-agents": openai_agents,
    "pydantic-ai": pydantic_ai,
    "smolagents": smolagents,
    "langgraph": langgraph,
}

if __name__ == "__main__":
    os.environ |= {"OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    name, _, mode = sys.argv[1].partition(":")
    print(asyncio.run(AGENTS[name](mode, *sys.argv[2:])))
