"""Asks for a phone number until it is nothing but digits: `python agent.py --task FILE`."""

import argparse
import json

from openai import OpenAI


def solve(question: str, client: OpenAI) -> str:
    messages = [{"role": "user", "content": question}]
    for _ in range(2):
        answer = client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content or ""
        if text.isdigit():
            break
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "Digits only, please."},
        ]
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", required=True)
    with open(parser.parse_args().task) as file:
        task = json.load(file)
    # The client reads OPENAI_BASE_URL and OPENAI_API_KEY from the environment.
    print(solve(task["question"], OpenAI()))
